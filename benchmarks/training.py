"""Speed and memory of training steps and evaluation, each against its count of forwards F, and against the same methods
as public loops write them; see README.md beside this file"""

import sys, time, warnings
from statistics import median
import timm
from fastai.callback.fp16 import *
from fastcore.script import call_parse, store_true
from fastai.vision.all import *
from robust_nbdev.all import *
from attacks import Bench, where


def methods(eps):
    "name -> (count in F, callbacks); a step of plain training is 3 F"
    p2, p10 = PGD(eps, steps=2), PGD(eps, steps=10)
    return {
        'plain': (3, lambda: []),
        'AT, PGD-2': (7, lambda: [AdvTrain(p2)]),
        'AT, PGD-10': (23, lambda: [AdvTrain(p10)]),
        'FGSM-RS': (5, lambda: [AdvTrain(FGSM_RS(eps))]),
        'FreeAT': (3, lambda: [FreeAT(FGSM(eps), replay=2)]),
        'TRADES-2': (11, lambda: [TRADES(p2)]),
        'TRADES-10': (27, lambda: [TRADES(p10)]),
        'MART-10': (26, lambda: [MART(p10)]),
        'GAT': (8.5, lambda: [GAT(BernoulliFGSM(eps))]),
        'AWP + AT, PGD-2': (10, lambda: [AdvTrain(p2), AWP(0.005)]),
        'AWP + TRADES-2': (17, lambda: [TRADES(p2), AWP(0.005)]),
    }


# --- the methods as the public loops write them: modes switched by hand, `.backward()` in the attack, the clean output
# computed again in each step


def walk(x, z, g, eps, alpha):
    return (x + (z.detach() + alpha * g.sign() - x).clamp(-eps, eps)).clamp(0, 1)


def climb_ce(model, x, y, eps, k, alpha=None):
    """The attack of the loops of fast and plain adversarial training: `.backward()`, so that the gradients of the
    weights are computed too"""
    z = (x + torch.empty_like(x).uniform_(-eps, eps)).clamp(0, 1)
    for _ in range(k):
        z = z.detach().requires_grad_()
        F.cross_entropy(model(z), y).backward()
        z = walk(x, z, z.grad, eps, alpha or 2.5 * eps / k)
    return z.detach()


def kl_sum(z_adv, z):
    return F.kl_div(z_adv.log_softmax(1), z.softmax(1), reduction='sum')


def loop_at(model, opt, x, y, eps, k, alpha=None):  # noqa: PLR0913
    model.eval()
    z = climb_ce(model, x, y, eps, k, alpha)
    model.train()
    opt.zero_grad()
    F.cross_entropy(model(z), y).backward()
    opt.step()
    opt.zero_grad()


def loop_trades(model, opt, x, y, eps, k, beta=6.0):  # noqa: PLR0913
    model.eval()
    z = x + 0.001 * torch.randn_like(x)
    for _ in range(k):
        z = z.detach().requires_grad_()
        (g,) = torch.autograd.grad(kl_sum(model(z), model(x)), [z])
        z = walk(x, z, g, eps, 2.5 * eps / k)
    model.train()
    opt.zero_grad()
    (F.cross_entropy(model(x), y) + beta / len(x) * kl_sum(model(z), model(x))).backward()
    opt.step()
    opt.zero_grad()


def loop_mart(model, opt, x, y, eps, k, beta=5.0):  # noqa: PLR0913
    model.eval()
    z = x + 0.001 * torch.randn_like(x)
    for _ in range(k):
        z = z.detach().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(model(z), y), [z])
        z = walk(x, z, g, eps, 2.5 * eps / k)
    model.train()
    opt.zero_grad()
    c, a = model(x), model(z)
    p, q = c.softmax(1), a.softmax(1)
    top = q.argsort(1)[:, -2:]
    wrong = torch.where(top[:, -1] == y, top[:, -2], top[:, -1])
    robust = (
        F.kl_div((q + 1e-12).log(), p, reduction='none').sum(1) * (1.0000001 - p.gather(1, y[:, None])[:, 0])
    ).mean()
    (F.cross_entropy(a, y) + F.nll_loss((1.0001 - q + 1e-12).log(), wrong) + beta * robust).backward()
    opt.step()
    opt.zero_grad()


LOOPS = {
    'FGSM-RS': (6, lambda *a: loop_at(*a, k=1, alpha=1.25 * a[-1])),
    'AT, PGD-2': (9, partial(loop_at, k=2)),
    'AT, PGD-10': (33, partial(loop_at, k=10)),
    'TRADES-2': (15, partial(loop_trades, k=2)),
    'TRADES-10': (39, partial(loop_trades, k=10)),
    'MART-10': (26, partial(loop_mart, k=10)),
}

# --- how steps are timed


class Times(Callback):
    "Seconds of each training step, from the batch to the step of the optimiser"

    order, b = -100, None

    def before_fit(self):
        self.all = []

    def before_batch(self):
        self.t = self.b.now()

    def before_validate(self):
        raise CancelFitException()


class Stop(Callback):
    order = 200

    def after_batch(self):
        self.times.all.append(self.times.b.now() - self.times.t)


def model_of(b):
    "Random weights, which cost what trained ones cost: DeiT-S at 224 pixels on a GPU, else a ViT-Tiny at 32"
    m = (
        timm.create_model('deit_small_patch16_224', num_classes=10)
        if b.cuda
        else timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, num_classes=10)
    )
    return Normalized(m).to(b.device)


def data_of(b, steps):
    g = torch.Generator().manual_seed(0)
    n, size = b.batch * steps, 224 if b.cuda else 32
    items = list(zip(torch.rand(n, 3, size, size, generator=g), torch.randint(0, 10, (n,), generator=g)))
    return DataLoaders(
        DataLoader(items, bs=b.batch, device=torch.device(b.device)),
        DataLoader(items[:1], bs=1, device=torch.device(b.device)),
        device=torch.device(b.device),
    )


def learner(b, cbs, how='', steps=None):
    "A Learner of its own model, and what makes it run one epoch: the seconds of its steps"
    set_seed(0)
    m = model_of(b)
    t = Times()
    t.b = b
    if 'compile' in how:
        m = torch.compile(m, dynamic=False)
    l = Learner(
        data_of(b, steps or b.steps),
        m,
        loss_func=CrossEntropyLossFlat(),
        cbs=[*cbs, GradientClip(1.0), t, Stop()] + ([ChannelsLast()] if 'channels-last' in how else []),
    )
    if 'bf16' in how:
        l.to_bf16()
    if 'fp16' in how:
        l.to_fp16()

    def run():
        with l.no_bar(), l.no_logging():
            l.fit(1, 1e-4)
        return l.times.all

    return l, run


def evaluation(b, how='', k=20):
    "PGD on a batch and its verdict, 2k+1 F, in the precision of the training"
    m = model_of(b).eval()
    x, y = next(iter(data_of(b, 1).train))
    a = PGD(4 / 255, steps=k)
    if 'compile' in how:
        m = torch.compile(m, dynamic=False)
    if 'channels-last' in how:
        m = m.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    half = {'bf16': torch.bfloat16, 'fp16': torch.float16}.get(how.split(',')[0])

    def run():
        with torch.autocast(torch.device(b.device).type, dtype=half, enabled=half is not None):
            return [b.clock(lambda: predict(m, a(m, x, y)))[0]]

    return run


def loop(b, f, eps):
    "A public loop, with the same model, batches and optimiser"
    l, _ = learner(b, [])
    l.create_opt()
    m = l.model.train()
    batches = list(l.dls.train)
    return lambda: [b.clock(lambda: f(m, l.opt, x, y, eps))[0] for x, y in batches]


def race(b, title, runs, counts):
    "Each in turn, there and back; median seconds of a step over those of the first, beside the counts"
    b.say(f'\n{title}')
    secs, peak = {}, {}
    for k, f in runs.items():
        try:
            if b.cuda:
                torch.cuda.reset_peak_memory_stats()
            f()
            secs[k] = []
            peak[k] = torch.cuda.max_memory_allocated() / 2**30 if b.cuda else None
        except Exception as e:
            b.say(f'  {k:42} failed: {type(e).__name__}: {str(e)[:200]}')
    for i in range(b.rounds):
        for k in list(secs)[:: 1 if i % 2 == 0 else -1]:
            secs[k].append(median(runs[k]()))
    if not secs:
        return
    base, n = next(iter(secs)), b.batch
    for k, s in secs.items():
        r, c = median(a / o for a, o in zip(s, secs[base])), counts[k] / counts[base]
        b.row(
            title,
            k,
            r,
            count=round(c, 3),
            over=round(r / c, 3),
            per_s=n / median(s),
            **({'GiB': peak[k]} if b.cuda else {}),
        )


# --- sections


def steps(b):
    "Every method: seconds of a step over those of plain training, beside the count"
    ms = methods(4 / 255)
    race(
        b,
        f'Training steps, float32, batch {b.batch}: seconds / plain',
        {k: learner(b, f())[1] for k, (_, f) in ms.items()},
        {k: c for k, (c, _) in ms.items()},
    )


def loops(b):
    "The callbacks beside the public loops"
    ms = methods(4 / 255)
    runs, counts = {}, {}
    for k, (c, f) in LOOPS.items():
        runs[f'{k}: ours'], counts[f'{k}: ours'] = learner(b, ms[k][1]())[1], ms[k][0]
        runs[f'{k}: loop'], counts[f'{k}: loop'] = loop(b, f, 4 / 255), c
    race(
        b,
        f'The same methods as public loops, float32, batch {b.batch}: seconds / plain',
        {'plain': learner(b, [])[1], **runs},
        {'plain': 3, **counts},
    )


def precision(b):
    "bf16, fp16, compiled, channels-last"
    if not (b.cuda or b.fast):
        return b.say('\nprecision: left out on a CPU (--fast runs it)')
    ms = methods(4 / 255)
    names = ['plain', 'AT, PGD-2', 'TRADES-10']
    for how in ('float32', 'bf16', 'fp16', 'bf16, channels-last', 'bf16, compile'):
        if time.time() - b.t0 > 60 * b.minutes:
            b.say(f'\n{how}: left out, out of time')
            continue
        runs = {k: learner(b, ms[k][1](), how)[1] for k in names}
        race(
            b,
            f'{how}, batch {b.batch}: seconds / plain in this precision',
            {**runs, 'evaluation, PGD-20': evaluation(b, how)},
            {**{k: ms[k][0] for k in names}, 'evaluation, PGD-20': 41},
        )
        b.save()


sections = dict(steps=steps, loops=loops, precision=precision)


@call_parse
def main(  # noqa: PLR0913
    device: str = 'cpu',  # cpu or cuda
    only: str = '',  # Sections, with commas between: steps, loops, precision (default: all)
    out: str = 'bench_out',  # Folder for training.txt and training.json
    batch: int = 16,  # Batch size
    steps: int = 4,  # Steps of a round, an even number (GAT has two kinds)
    rounds: int = 3,  # Rounds of a race
    fast: store_true = False,  # Measure the precisions on a CPU too
    minutes: float = 60,  # Begin nothing new after this time
):
    "Time training steps and evaluation against their counts on this machine"
    warnings.simplefilter('ignore')
    set_seed(0)
    b = Bench(device, out, 'training', batch=batch, steps=steps, rounds=rounds, fast=fast, minutes=minutes)
    b.say(' '.join(['python', *sys.argv]))
    b.say(where(device))
    b.run(sections, only)
