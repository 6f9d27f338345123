"""Speed, verdicts and memory of the attacks beside other packages, as ratios from one process; see README.md beside
this file"""

import importlib, json, logging, platform, subprocess, sys, time, traceback, warnings
from collections import Counter
from importlib.metadata import version, PackageNotFoundError
from statistics import median
from unittest.mock import patch as mock
import timm
from fastcore.script import call_parse, store_true
from fastai.vision.all import *
from robust_nbdev.all import *
from robust_nbdev.cli import demo_settings, demo_train


def sync():
    torch.cuda.is_available() and torch.cuda.synchronize()


class Bench:
    "What all sections share: device, clock, model, and where results go"

    def __init__(self, device, out, name='results', **kw):
        self.device, self.name, self.cuda, self.t0, self.rows = (
            device,
            name,
            torch.device(device).type == 'cuda',
            time.time(),
            [],
        )
        for k, v in kw.items():
            setattr(self, k, v)
        self.out = Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = (self.out / f'{name}.txt').open('w')
        if not self.cuda:
            torch.set_num_threads(1)

    def say(self, s=''):
        print(s, flush=True)
        print(s, file=self.log, flush=True)

    def now(self):
        "CPU seconds of this process on one thread, which other processes hardly touch; on a GPU, seconds"
        sync()
        return time.perf_counter() if self.cuda else time.process_time()

    def clock(self, f):
        t = self.now()
        r = f()
        return self.now() - t, r

    def race(self, title, fs, rounds=None):
        "Each in turn, there and back; ratios to the first one"
        self.say(f'\n{title}')
        secs = {}
        for k, f in fs.items():
            try:
                f()
                secs[k] = []
            except Exception as e:
                self.say(f'  {k:42} failed: {type(e).__name__}: {e}')
        for i in range(rounds or self.rounds):
            for k in list(secs)[:: 1 if i % 2 == 0 else -1]:
                secs[k].append(self.clock(fs[k])[0])
        base = next(iter(secs.values()))
        for k, s in secs.items():
            self.row(title, k, median(a / b for a, b in zip(s, base)), best=min(s) / min(base))
        return secs

    def row(self, title, name, ratio, **kw):
        self.rows.append(dict(section=title, name=name, ratio=round(ratio, 4), **kw))
        self.say(
            f'  {name:46}{ratio:8.3f}  '
            + '  '.join(f'{k} {v:.3f}' if isinstance(v, float) else f'{k} {v}' for k, v in kw.items())
        )

    def save(self):
        (self.out / f'{self.name}.json').write_text(
            json.dumps(dict(where=where(self.device), rows=self.rows), indent=1)
        )

    def run(self, sections, only):
        "Those asked for, as long as there is time"
        for k in only.split(',') if only else sections:
            if time.time() - self.t0 > 60 * self.minutes:
                self.say(f'\n{k}: left out, out of time')
                continue
            try:
                sections[k](self)
            except Exception:
                self.say(f'\n{k} failed\n{traceback.format_exc()}')
            self.save()
            self.say(f'[{k} done after {time.time() - self.t0:.0f} s]')

    @property
    def trained(self):
        """(model, images, labels, eps): a small ViT trained with PGD-2 on the images that come with the library, kept
        in `out`"""
        path = Path(self.model or self.out / 'robust.pt')
        if not path.exists():
            s = demo_settings('laptop', None, None, None, self.device)
            dls = profile_dls(s)
            m = demo_train(
                dls, s.epochs, s.seed, AdvTrain(PGD(s.eps, steps=2), eps=warmup(s.eps, pct=0.3)), bar=False
            ).model
            torch.save(
                dict(
                    model=m,
                    x=torch.cat([b[0].as_subclass(Tensor).cpu() for b in dls.valid]),
                    y=torch.cat([b[1].as_subclass(Tensor).cpu() for b in dls.valid]),
                    eps=s.eps,
                ),
                path,
            )
        d = torch.load(path, map_location=self.device, weights_only=False)
        return d['model'].eval(), d['x'][: self.n], d['y'][: self.n], d.get('eps', 0.1)


def where(device):
    def v(p):
        try:
            return version(p)
        except PackageNotFoundError:
            return 'missing'

    card = torch.cuda.get_device_name() if torch.device(device).type == 'cuda' else f'{platform.machine()}, 1 thread'
    return dict(
        device=card,
        python=platform.python_version(),
        **{
            p: v(p)
            for p in ('torch', 'timm', 'pyautoattack', 'torchattacks', 'foolbox', 'adversarial-robustness-toolbox')
        },
    )


def bare(model, x, y, k):
    "The lower bound: k forwards and k backwards to the input, weights frozen, nothing else"
    with attack_mode(model):
        for _ in range(k):
            z = x.detach().requires_grad_()
            torch.autograd.grad(F.cross_entropy(model(z), y, reduction='sum'), z)


def naive(model, x, y, k, eps):
    "The loop of many tutorials: `.backward()`, which also fills the gradients of the weights"
    z = x + torch.empty_like(x).uniform_(-eps, eps)
    for _ in range(k):
        z = z.detach().requires_grad_()
        F.cross_entropy(model(z), y).backward()
        z = (x + (z.detach() + 2.5 * eps / k * z.grad.sign() - x).clamp(-eps, eps)).clamp(0, 1)
    model.zero_grad()
    return z


def _torchattacks(model, x, y, k, eps):
    a = importlib.import_module('torchattacks').PGD(model, eps=eps, alpha=2.5 * eps / k, steps=k)
    return lambda: a(x, y)


def _foolbox(model, x, y, k, eps):
    fb = importlib.import_module('foolbox')
    a, m = (
        fb.attacks.LinfPGD(abs_stepsize=2.5 * eps / k, steps=k),
        fb.PyTorchModel(model, bounds=(0, 1), device=x.device),
    )
    return lambda: a.run(m, x, fb.criteria.Misclassification(y), epsilon=eps)


def _art(model, x, y, k, eps):
    est, evasion = [importlib.import_module(f'art.{o}') for o in ('estimators.classification', 'attacks.evasion')]
    with torch.no_grad():
        c = model(x[:1]).shape[1]
    m = est.PyTorchClassifier(
        model,
        nn.CrossEntropyLoss(),
        tuple(x.shape[1:]),
        c,
        clip_values=(0, 1),
        device_type='gpu' if x.is_cuda else 'cpu',
    )
    a = evasion.ProjectedGradientDescentPyTorch(
        m, eps=eps, eps_step=2.5 * eps / k, max_iter=k, num_random_init=1, batch_size=len(x), verbose=False
    )
    xn, yn = x.cpu().numpy(), y.cpu().numpy()
    return lambda: a.generate(xn, yn)


def peers(b, *args):
    "Those that are installed"
    for name, f in {'torchattacks': _torchattacks, 'foolbox': _foolbox, 'ART': _art}.items():
        try:
            yield name, f(*args)
        except Exception as e:
            b.say(f'  {name} left out: {type(e).__name__}: {e}')


def speed_model(b):
    "Random weights, which cost what trained ones cost: DeiT-S at 224 pixels on a GPU, else a ViT-Tiny at 32"
    m = (
        timm.create_model('deit_small_patch16_224')
        if b.cuda
        else timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, num_classes=10)
    )
    m = Normalized(m).to(b.device).eval()
    x = torch.rand(b.batch, 3, *[224 if b.cuda else 32] * 2, device=b.device)
    return m, x, torch.randint(0, 10, (b.batch,), device=b.device)


def pgd(b):
    m, x, y = speed_model(b)
    eps = 8 / 255
    for k in (10, 20):
        fs = {
            f'{k} forwards, {k} backwards (the bound)': lambda: bare(m, x, y, k),
            'ours': lambda: PGD(eps, steps=k)(m, x, y),
            'loop with .backward()': lambda: naive(m, x, y, k, eps),
        }
        b.race(f'PGD-{k}, float32, seconds / bound', {**fs, **dict(peers(b, m, x, y, k, eps))})


def fast(b):
    if not (b.cuda or b.fast):
        return b.say('\nFast: left out on a CPU (--fast runs it)')
    (m, x, y), eps = speed_model(b), 8 / 255
    f = Fast(m)
    t, _ = b.clock(lambda: PGD(eps, steps=2)(f, x, y))
    b.say(f'\nFast: compiled in {t:.0f} seconds')
    b.race(
        'PGD-10, seconds / ours in float32',
        {
            'ours, float32': lambda: PGD(eps)(m, x, y),
            'ours, Fast (bfloat16, compiled)': lambda: PGD(eps)(f, x, y),
            **dict(peers(b, m, x, y, 10, eps)),
        },
    )
    m, x, y, eps = b.trained
    f = Fast(m)
    title = 'images left, judged in float32: attack on Fast(model) / attack on the model'
    b.say(f'\n{title}')
    for a in (PGD(eps, steps=20), APGD(eps, steps=50)):
        ok, fok = [predict(m, a(o, x, y)) == y for o in (m, f)]
        b.row(
            title,
            repr(a),
            int(fok.sum()) / max(int(ok.sum()), 1),
            float32=int(ok.sum()),
            Fast=int(fok.sum()),
            both=int((ok & fok).sum()),
            n=len(y),
        )


def _package(m, x, eps, names=None, queries=5000):
    aa = importlib.import_module('pyautoattack').AutoAttack(
        m, eps=eps, seed=0, device=x.device, **(dict(version='custom', attacks=names) if names else {})
    )
    aa.apgd.n_restarts, aa.square.n_queries = 1, queries
    return aa


def package_run(aa, x, y, bs, now=time.perf_counter):
    "(adversarial images, {member: seconds}), timed by the package's own log"
    log, ticks, trace = logging.getLogger('auto-attack'), [], sys.gettrace()
    ear = logging.Handler()
    ear.emit = lambda r: ticks.append((r.getMessage(), now()))
    log.addHandler(ear)
    level, spread = log.level, log.propagate
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        adv = aa.run_standard_evaluation(x, y, batch_size=bs)[0]
    finally:
        log.removeHandler(ear)
        log.setLevel(level)
        log.propagate = spread
        sys.settrace(trace)
    marks = [(s[8:], t) for s, t in ticks if s.startswith('running ')] + [('', now())]
    return adv, {a: t1 - t0 for (a, t0), (_, t1) in zip(marks, marks[1:])}


def apgd(b):
    m, x, y, eps = b.trained
    a = APGD(eps)
    theirs = importlib.import_module('pyautoattack.autopgd_base').APGDAttack(
        m, n_iter=100, n_restarts=1, eps=eps, norm='Linf', seed=0, loss='ce', device=x.device
    )
    right = predict(m, x) == y
    xr, yr = x[right], y[right]
    b.race(
        f'APGD-CE 100 on {len(yr)} images, seconds / package',
        {'pyautoattack': lambda: theirs.perturb(xr, yr), 'ours': lambda: a(m, xr, yr)},
        3,
    )
    left = [int((predict(m, o) == yr).sum()) for o in (theirs.perturb(xr, yr), a(m, xr, yr))]
    b.say(f'  images left: package {left[0]}, ours {left[1]}')
    b.race(
        'robust_report([APGD]) / run_standard_evaluation(apgd-ce)',
        {
            'pyautoattack': lambda: package_run(_package(m, x, eps, ['apgd-ce']), x, y, b.bs),
            'ours': lambda: robust_report(m, (x, y), [a], bs=b.bs),
        },
        3,
    )


def autoattack(b):
    """The whole ensemble, in turn on one part of the images after the other, so that a noisy machine is equally noisy
    to all"""
    m, x, y, eps = b.trained
    ours = (
        AutoAttack(eps)
        if b.queries == 5000
        else AutoAttack(eps, attacks=('apgd-ce', 'apgd-t', 'fab-t', Square(eps, queries=b.queries)))
    )

    def package(x, y):
        adv, secs = package_run(_package(m, x, eps, queries=b.queries), x, y, b.bs, b.now)
        return predict(m, adv) == y, secs

    def report(x, y, quick=False):
        # members by the same clock
        with mock('time.time', b.now):
            rep = robust_report(m, (x, y), [ours], bs=b.bs, fast=quick)
        return torch.as_tensor(rep.verdicts[repr(ours)] > 0, device=y.device), dict(
            zip(('apgd-ce', 'apgd-t', 'fab-t', 'square'), [p['seconds'] for p in rep.rows[-1]['parts']])
        )

    fs = {
        'pyautoattack': package,
        'ours': report,
        **({'ours, fast=True': partial(report, quick=True)} if b.cuda or b.fast else {}),
    }
    # compiles
    if b.cuda:
        [robust_report(m, (x, y), [APGD(eps, steps=5), Square(eps, queries=5)], bs=b.bs, fast=q) for q in (False, True)]
    oks, total, members = {k: [] for k in fs}, Counter(), {k: Counter() for k in fs}
    for i, (xc, yc) in enumerate(zip(x.chunk(b.parts), y.chunk(b.parts))):
        for k in list(fs)[:: 1 if i % 2 == 0 else -1]:
            t, (ok, secs) = b.clock(lambda: fs[k](xc, yc))
            oks[k].append(ok)
            total[k] += t
            members[k].update(secs)
    title = f'AutoAttack, {b.queries} queries, n={len(y)} in {b.parts} parts, batches of {b.bs}'
    b.say(f'\n{title}: seconds / package')
    oks = {k: torch.cat(o) for k, o in oks.items()}
    theirs = oks['pyautoattack']
    for k, ok in oks.items():
        b.row(title, k, total[k] / total['pyautoattack'], left=int(ok.sum()), both=int((ok & theirs).sum()))
        for o, s in members[k].items():
            b.row(title, f'  {k}: {o}', s / members['pyautoattack'][o], share=s / total[k])


def memory(b):
    ks = (2, 200)
    if b.cuda:
        m, x, y = speed_model(b)
        x, y = x[:8], y[:8]

        def peak(k):
            PGD(steps=2)(m, x, y)
            sync()
            torch.cuda.reset_peak_memory_stats()
            PGD(steps=k)(m, x, y)
            sync()
            return torch.cuda.max_memory_allocated()

    else:
        code = (
            "import resource,sys,timm,torch; from robust_nbdev.all import *; torch.set_num_threads(1);"
            " m=Normalized(timm.create_model('vit_tiny_patch16_224',img_size=32,patch_size=8));"
            " PGD(steps=int(sys.argv[1]))(m,torch.rand(8,3,32,32),torch.zeros(8).long());"
            " print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        peak = lambda k: int(
            subprocess.run(
                [sys.executable, '-c', code, str(k)], capture_output=True, text=True, check=True
            ).stdout.split()[-1]
        )
    b.say()
    lo, hi = map(peak, ks)
    b.row('peak memory', 'PGD-200 / PGD-2', hi / lo)


sections = dict(pgd=pgd, memory=memory, apgd=apgd, autoattack=autoattack, fast=fast)


@call_parse
def main(  # noqa: PLR0913
    device: str = 'cpu',  # cpu or cuda
    only: str = '',  # Sections, with commas between: pgd, memory, apgd, autoattack, fast (default: all)
    out: str = 'bench_out',  # Folder for results.txt, results.json and the trained model
    model: str = '',  # A file robust.pt that an earlier run left in its folder (default: train one)
    n: int = 100,  # Images for APGD and AutoAttack
    bs: int = 250,  # Batch size of evaluations, ours and the package's
    parts: int = 4,  # Parts of the images on which AutoAttack is raced in turn
    batch: int = 16,  # Batch size of the PGD races
    rounds: int = 3,  # Rounds of a race
    queries: int = 5000,  # Of Square in AutoAttack
    fast: store_true = False,  # Measure bfloat16 and torch.compile on a CPU too
    minutes: float = 60,  # Begin no section after this time
):
    "Race the attacks of robust_nbdev against other packages on this machine"
    warnings.simplefilter('ignore')
    set_seed(0)
    b = Bench(
        device,
        out,
        model=model,
        n=n,
        bs=bs,
        parts=parts,
        batch=batch,
        rounds=rounds,
        queries=queries,
        fast=fast,
        minutes=minutes,
    )
    b.say(' '.join(['python', *sys.argv]))
    b.say(where(device))
    b.run(sections, only)
