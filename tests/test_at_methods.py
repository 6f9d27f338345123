"""Every training method with everything that fastai offers: losses by hand, costs counted, weights to the bit, nothing
left behind (R17-R21, R24; F08, F10)."""

import copy, warnings
from functools import partial
import pytest, torch, torch.nn.functional as F
from fastai.optimizer import SGD
from torch import nn
from fastai.vision.all import (
    BCEWithLogitsLossFlat,
    Callback,
    CancelBatchException,
    CancelFitException,
    CancelTrainException,
    ChannelsLast,
    CrossEntropyLossFlat,
    CutMix,
    DataLoaders,
    DiceLoss,
    GradientAccumulation,
    GradientClip,
    LabelSmoothingCrossEntropyFlat,
    MixUp,
    OptimWrapper,
    accuracy,
    set_seed,
    noop,
)
from fastai.callback.schedule import *
from fastai.callback.training import *
from robust_nbdev.core import *
from robust_nbdev.vit import *
from robust_nbdev.attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.adv_train import replayed
from robust_nbdev.adv_train import hush_attn
from robust_nbdev.afat import AFAT
from robust_nbdev.datasets import fashion_mnist
from robust_nbdev.evaluate import *
from robust_nbdev.test_utils import *

PGD2 = PGD(0.1, steps=2)
METHODS = dict(
    at=lambda: [AdvTrain(PGD2)],
    some=lambda: [AdvTrain(PGD2, clean_images=0.5)],
    half=lambda: [AdvTrain(PGD2, clean_loss=0.5)],
    rs=lambda: [AdvTrain(FGSM_RS(0.1))],
    n=lambda: [AdvTrain(NFGSM(0.1))],
    mo=lambda: [AdvTrain(ARDPRM(0.1, steps=2), ard=warmup(1, pct=0.5), prm=warmup(1, pct=0.5))],
    free=lambda: [FreeAT(FGSM(0.1), replay=2)],
    alp=lambda: [ALP(PGD2)],
    trades=lambda: [TRADES(PGD2, eps=warmup(0.1, pct=0.5))],
    mart=lambda: [MART(PGD2)],
    gat=lambda: [GAT(BernoulliFGSM(0.1))],
    awp=lambda: [AWP(0.01), AdvTrain(PGD2)],
    trades_awp=lambda: [TRADES(PGD2), AWP(0.01)],
    all=lambda: [MART(PGD2), AWP(0.01), EMA(0.9), CatchOverfit(gap=2)],
)
PAIRS = dict(trades=TRADES(PGD2), mart=MART(PGD2))


def small_dls(n=32, bs=16):
    return synth_dls(n, bs=bs)


def learner(cbs=None, model=None, **kw):
    l = synth_learner(cbs=cbs, dls=kw.pop('dls', None) or small_dls(), **kw)
    if model is not None:
        l.model = model
    return l


def noisy_vit():
    return tiny_vit(num_classes=4, proj_drop_rate=0.2, attn_drop_rate=0.2, drop_path_rate=0.3)


def weights(l):
    return [p.detach().clone() for p in l.model.parameters()]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(o, p) for o, p in zip(a, b))


def close(a, b, rtol=1e-5):
    return all((o - p).norm() <= rtol * p.norm() + 1e-7 for o, p in zip(a, b))


def plain(x):
    return x.as_subclass(torch.Tensor)


def flat(ps):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in ps])


def check_clean(l, lf, flags=None):
    "What every fit must leave: the loss, modes, flags, hooks, scopes; and callbacks without tensors"
    assert (
        l.loss_func is lf
        and getattr(lf, 'reduction', 'mean') == 'mean'
        and not torch.is_autocast_enabled('cpu')
        and torch.is_grad_enabled()
    )
    assert all(h == (0, 0, 0) for h in state_of(l.model)[2])
    assert [p.requires_grad for p in l.model.parameters()] == (flags or [True] * len(list(l.model.parameters())))
    assert all(p.isfinite().all() for p in l.model.parameters())
    for c in l.cbs:
        if isinstance(c, AdvCallback):
            assert not any(
                isinstance(v, (torch.Tensor, nn.Module)) for k, v in c.__getstate__().items() if k != 'learn'
            ), c


# --- what is written and what is refused
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'cb,words',
    [
        (TRADES(PGD2, eps=warmup(0.1)), 'TRADES(PGD(0.1, steps=2), beta=6, eps=warmup(0.1, pct=0.1))'),
        (CatchOverfit(then=PGD2), 'CatchOverfit(PGD(8/255, steps=5), gap=0.2, then=PGD(0.1, steps=2))'),
        (AdvTrain(PGD2, alpha=2 / 255), 'AdvTrain(PGD(0.1, steps=2), alpha=2/255)'),
    ],
)
def test_repr(cb, words):
    assert repr(cb) == words


@pytest.mark.parametrize(
    'make,error,words',
    [
        (lambda: TRADES(FGSM(0.1)), ValueError, 'compares with the clean output'),
        (lambda: AdvTrain(PGD2, clean_images=2), ValueError, 'clean_images is a share'),
        (lambda: AdvTrain(PGD2, clean_loss=switch(1.5, 0.5)), ValueError, 'clean_loss is a share'),
        (lambda: FreeAT(FGSM(0.1), replay=0), ValueError, 'whole number'),
        (lambda: AWP(switch(-0.005, 0.5)), ValueError, 'gamma must be a number >= 0'),
        (lambda: MART(PGD2, beta=None), ValueError, 'beta must be a number >= 0'),
        (lambda: EMA(999), ValueError, 'decay is a share'),
        (lambda: SaveRun(every=0), ValueError, 'every must be a whole number >= 1'),
        (lambda: CatchOverfit(n=0), ValueError, 'n must be a whole number >= 1'),
        (lambda: ARDPRM(0.1, ard=2.0), ValueError, 'ard is a share'),
        (lambda: warmup(0.1, epochs=0), ValueError, 'epochs'),
        (lambda: warmup(0.2, pct=1.1), ValueError, 'between 0 and 1'),
        (lambda: warmup(-0.2), ValueError, '>= 0'),
        (lambda: switch(1, pct=2), ValueError, 'between 0 and 1'),
        (lambda: FreeAT(APGD(0.1)), TypeError, 'FreeAT maximises'),
        (lambda: FreeAT(FGSM(0.1, loss=margin)), TypeError, 'FreeAT maximises'),
        (lambda: TRADES(0.1), TypeError, 'expected an attack'),
        (lambda: CatchOverfit(then=3), TypeError, 'expected an attack'),
        (lambda: AdvTrain(PGD(0.1), foo=1), TypeError, 'foo'),
        (lambda: AdvTrain(lambda m, x, y, seed=0: x, alpha=1.0), TypeError, 'alpha= needs an attack'),
    ],
)
def test_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


# --- losses and gradients by hand
# -----------------------------------------------------------------------------------------------


def trained_loss(cb):
    "The training loss of an epoch in which the weights stand still"
    learn = synth_learner(cbs=cb)
    learn.fit(1, 0.0, wd=0.0)
    return learn.recorder.values[-1][0]


class Terms(AdvTrain):
    "Twice the loss of the adversarial images, by a term"

    def __init__(self, attack):
        super().__init__(attack)

    def terms(self, z, z_adv):
        return z_adv, self.whole_loss(z_adv)


class JointTerms(Terms):
    joint = True


class OwnPred(Terms):
    def after_pred(self):
        self.learn.pred, self.extra = self.terms(None, self.pred)


def test_terms_that_nothing_would_add_are_refused():
    with pytest.raises(TypeError, match='where joint = True stands in the class'):
        synth_learner(cbs=Terms(PGD(0.1))).fit(1)
    synth_learner(cbs=OwnPred(PGD(0.1, steps=1))).fit(1)


def test_a_joint_method_stays_one_behind_the_init_of_its_base():
    assert trained_loss(JointTerms(PGD(0.1, steps=2))) == pytest.approx(2 * trained_loss(AdvTrain(PGD(0.1, steps=2))))


class Grab(Callback):
    "The first step: the model, the joint batch, labels, loss; then stop"

    order = 9

    def before_fit(self):
        self.m = None

    def before_batch(self):
        if self.m is None:
            self.m, self.x, self.y = (
                copy.deepcopy(self.model),
                self.learn.x.as_subclass(torch.Tensor).clone(),
                self.learn.y.as_subclass(torch.Tensor).clone(),
            )

    def before_step(self):
        self.g, self.value = flat(self.model.parameters()), self.learn.loss.item()
        raise CancelFitException()


def kl_each(z_adv, z):
    return F.kl_div(z_adv.log_softmax(1), z.softmax(1), reduction='none').sum(1)


def mart_each(z, z_adv, y):
    p, q = z.softmax(1), z_adv.softmax(1)
    wrong = q.scatter(1, y[:, None], 0).amax(1)
    return -(1.0001 - wrong).log() + 5 * kl_each(z_adv, z) * (1.0000001 - p.gather(1, y[:, None])[:, 0])


BY_HAND = dict(
    trades=lambda z, z_adv, y: F.cross_entropy(z, y) + 6 * kl_each(z_adv, z).mean(),
    mart=lambda z, z_adv, y: F.cross_entropy(z_adv, y) + mart_each(z, z_adv, y).mean(),
)


@pytest.mark.parametrize('k', BY_HAND)
def test_loss_and_gradient_by_hand(k):
    "As the authors write it: two forwards, no shared code; and the attack is the one stated"
    l = learner([PAIRS[k], Grab()])
    seed = torch.initial_seed() % 2**62
    l.fit(1, 1e-3)
    g = l.grab
    x, x_adv = g.x.chunk(2)
    m = g.m
    attack = {'trades': PGD2.but(loss=kl), 'mart': PGD2}[k]
    assert (
        torch.equal(attack(m, x, None if k == 'trades' else g.y, seed=seed), x_adv)
        and 0.05 < (x_adv - x).abs().max() <= 0.1 + 1e-6
    )
    m.zero_grad()
    v = BY_HAND[k](m(x), m(x_adv), g.y)
    v.backward()
    assert g.value == pytest.approx(v.item(), abs=1e-5) and torch.allclose(g.g, flat(m.parameters()), atol=1e-6)


class Trained(Callback):
    "What the first joint batch was trained on, its gradient to the model's output, and both by hand"

    order = AdvTrain.order + 0.1

    def __init__(self, objective):
        self.objective, self.got = objective, None

    def after_loss(self):
        if not self.training or self.got:
            return
        z, L = self.look.z, lambda o: self.learn.loss_func(o, *self.yb)
        want = self.objective(L, *z.chunk(2), plain(self.y))
        grads = [torch.autograd.grad(v, z, retain_graph=True)[0] for v in (self.learn.loss_grad, want)]
        self.got = self.learn.loss.item(), want.item(), *grads


class Look(Callback):
    order = AdvTrain.order - 0.1

    def after_pred(self):
        self.z = self.learn.pred


# method -> its callback, L of which output, and what is added per image; `left_out` images count in what needs no label
OBJECTIVES = dict(
    half=(lambda: AdvTrain(PGD2, clean_loss=0.3), lambda L, z, a: 0.3 * L(z) + 0.7 * L(a), lambda z, a, y: 0 * z[:, 0]),
    alp=(lambda: ALP(PGD2), lambda L, z, a: L(a), lambda z, a, y: (z - a).pow(2).mean(1) / 2),
    trades=(lambda: TRADES(PGD2), lambda L, z, a: L(z), lambda z, a, y: 6 * kl_each(a, z)),
    gat=(
        lambda: GAT(BernoulliFGSM(0.1)),
        lambda L, z, a: L(z),
        lambda z, a, y: 10 * (z.softmax(1) - a.softmax(1)).pow(2).sum(1),
    ),
    mart=(lambda: MART(PGD2), lambda L, z, a: L(a), mart_each),
)
few = torch.tensor([1.0, 2.0, 3.0, 0.5])
LOSSES = dict(
    plain={},
    weights=dict(weight=few),
    summed=dict(reduction='sum'),
    weights_summed=dict(weight=few, reduction='sum'),
    a_class_without_weight=dict(weight=torch.tensor([1.0, 0, 2, 3])),
    ignored=dict(ignore_index=2),
    all=dict(weight=few, ignore_index=3, label_smoothing=0.1, reduction='sum'),
)


@pytest.mark.parametrize(
    'method,loss,mix',
    [
        *zip(OBJECTIVES, ['all'] * 4, [None] * 4),
        ('mart', 'weights_summed', None),
        ('mart', 'ignored', None),
        ('half', 'a_class_without_weight', None),
        ('alp', 'plain', None),
        ('half', 'summed', CutMix),
        ('trades', 'plain', MixUp),
        ('gat', 'weights', MixUp),
    ],
)
def test_the_learners_own_loss_is_in_the_objective(method, loss, mix):
    "Its value, and its gradient to the output"
    make, whole, each = OBJECTIVES[method]
    kw = LOSSES[loss]

    def objective(L, z, a, y):
        kept = torch.ones_like(y, dtype=torch.bool)
        if method == 'mart':
            kept = (y != kw.get('ignore_index', -100)) & (kw['weight'][y] > 0 if 'weight' in kw else True)
        v = each(z, a, y)[kept]
        return whole(L, z, a) + (v.sum() if kw.get('reduction') == 'sum' else v.mean())

    cbs = [make(), *([mix(1.0)] if mix else []), Look(), t := Trained(objective)]
    l = learner(cbs, loss_func=CrossEntropyLossFlat(**kw))
    l.fit(1, 0.0)
    value, want, g, want_g = t.got
    assert value == pytest.approx(want, rel=1e-5) and torch.allclose(g, want_g, atol=1e-5 * want_g.abs().max())


def test_fastais_label_smoothing():
    loss = LabelSmoothingCrossEntropyFlat()
    l = learner(METHODS['all'](), loss_func=loss)
    l.fit(1, 1e-3)
    check_clean(l, loss)


def test_mart_needs_a_cross_entropy():
    class Hot(Callback):
        order = -5

        def before_batch(self):
            self.learn.yb = (F.one_hot(plain(self.y), 4).float(),)

    with pytest.raises(ValueError, match='cross-entropy'):
        learner([MART(PGD2), Hot()], loss_func=BCEWithLogitsLossFlat()).fit(1)


# --- costs
# ------------------------------------------------------------------------------------------------------------------------  # noqa: E501

K = 3
COSTS = dict(
    trades=(TRADES(PGD(0.1, steps=K)), K + 1 + 2, K),
    rs=(AdvTrain(FGSM_RS(0.1)), 2, 1),
    mart=(MART(PGD(0.1, steps=K)), K + 2, K),
    gat=(GAT(BernoulliFGSM(0.1)), 1 + 0.5 + 2, 1),
    half=(AdvTrain(PGD(0.1, steps=K), clean_loss=0.5), K + 2, K),
    free=(FreeAT(FGSM(0.1), replay=4), 4, 4),
    mo=(AdvTrain(ARDPRM(0.1, steps=K, ard=0.5, prm=0.5)), K + 1, K),
    eps0=(AdvTrain(PGD(0, steps=K)), 1, 0),
)


@pytest.mark.parametrize('k,awp', [(k, i % 2 == 0) for i, k in enumerate(COSTS)])
def test_passes_per_image(k, awp):
    cb, fwd, bwd = COSTS[k]
    m = Counted(tiny_vit(num_classes=4))
    got = []

    class Stop(Callback):
        def before_validate(self):
            got.append((m.forwards / 32, m.backwards / 32))
            raise CancelFitException()

    learner([cb, Stop()] + [AWP(0.01)] * awp, model=m).fit(1, 1e-3)
    more = {'free': 4}.get(k, 1 + cb.joint) if awp else 0
    assert got[0] == (fwd + more, bwd), got


@pytest.mark.parametrize(
    'cb',
    [
        AdvTrain(PGD2, clean_images=1.0),
        AdvTrain(PGD2, clean_images=0.5, eps=0),
        AdvTrain(APGD(0, steps=3)),
        AdvTrain(NFGSM(0.1), eps=lambda pct: 0.0),
        AWP(switch(0.0, pct=0.5)),
    ],
    ids=['all clean', 'eps 0', 'apgd', 'nfgsm', 'awp'],
)
def test_nothing_to_do_is_plain_training_exactly(cb):
    ws = []
    for cbs in ([], [cb]):
        l = learner([MixUp(0.5), *cbs], model=noisy_vit())
        l.fit(2, 1e-3)
        ws.append(weights(l))
    assert same(*ws)


# --- together with fastai
# -------------------------------------------------------------------------------------------------------------


def checkpointed():
    m = tiny_vit(num_classes=4)
    m.model.set_grad_checkpointing(True)
    return m


# name -> keywords of `learner`
COMPOSITIONS = dict(
    cutmix=lambda: dict(cbs=[CutMix(1.0)]),
    fp16=lambda: dict(cbs=[HalfPrecision(torch.float16)]),
    channels_last=lambda: dict(cbs=[ChannelsLast()]),
    everything=lambda: dict(
        cbs=[HalfPrecision(torch.float16), GradientAccumulation(16), MixUp(0.4), GradientClip(1.0)],
        dls=small_dls(bs=8),
        model=noisy_vit(),
    ),
    checkpointing=lambda: dict(model=checkpointed()),
    compile=lambda: dict(model=torch.compile(tiny_vit(num_classes=4), backend='eager')),
)
TOGETHER = [(k, 'everything') for k in ('mo', 'free', 'gat', 'trades_awp', 'all')] + [
    ('some', 'cutmix'),
    ('awp', 'fp16'),
]


@pytest.mark.parametrize('method,comp', TOGETHER)
@pytest.mark.filterwarnings('ignore:.*lr_scheduler')
def test_one_epoch_of(method, comp):
    kw = COMPOSITIONS[comp]()
    cbs = kw.pop('cbs', [])
    l = learner([*METHODS[method](), *cbs], **kw)
    lf, w = l.loss_func, weights(l)
    l.fit(1, 1e-3)
    check_clean(l, lf)
    assert not same(w, weights(l)) and l.recorder.values[0][0] < 15


@pytest.mark.parametrize(
    'method,how',
    [
        ('trades_awp', 'checkpointing'),
        ('mo', 'checkpointing'),
        ('free', 'compile'),
        ('mart', 'channels_last'),
    ],
)
def test_what_must_not_matter_does_not(method, how):
    "The same weights as without it; by SGD, since Adam makes a step of the rounding of a gradient that is nearly zero"
    ref = learner(METHODS[method](), opt_func=SGD)
    start = weights(ref)
    ref.fit(1, 0.05)
    kw = COMPOSITIONS[how]()
    l = learner([*METHODS[method](), *kw.pop('cbs', [])], opt_func=SGD, **kw)
    l.fit(1, 0.05)
    assert close(weights(l), weights(ref), 1e-4) and not close(start, weights(ref), 1e-2)


@pytest.mark.parametrize('method', ['free', 'all'])
def test_freezing_and_discriminative_rates(method):
    l = learner(METHODS[method](), splitter=vit_splitter, train_bn=False)
    lf = l.loss_func
    l.freeze()
    flags, w = [p.requires_grad for p in l.model.parameters()], weights(l)
    l.fit(1, 1e-2)
    check_clean(l, lf, flags)
    assert [not torch.equal(a, b) for a, b in zip(w, weights(l))] == flags and any(flags) and not all(flags)
    l.unfreeze()
    w = weights(l)
    l.fit_adv(1, slice(1e-5, 1e-3))
    check_clean(l, lf)
    d = [(a - b).abs().mean().item() for a, b in zip(w, weights(l))]
    assert max(d[-2:]) > 3 * max(d[:-2]) > 0  # the head is last


def test_accumulated_gradients_with_awp():
    "Equal to the mean over the small batches"
    got = []
    for cbs in ([Stop4(), GradientAccumulation(32)], [GetGrads()]):
        dls = synth_dls(32, bs=8)
        dls.train = dls.train.new(shuffle=False)
        l = learner([TRADES(PGD2), AWP(0.01), *cbs], dls=dls)
        l.fit(1, 0.0)
        got.append(l.stop4.g if len(cbs) > 1 else torch.stack(l.get_grads.grads).mean(0))
    assert torch.allclose(*got, atol=1e-5 * got[1].abs().max()) and got[1].abs().max() > 0


class Stop4(Callback):
    order = GradientAccumulation.order + 1

    def before_step(self):
        self.g = flat(self.model.parameters())
        raise CancelFitException()


def test_callbacks_in_any_order_give_the_same_weights():
    ref = None
    for perm in [(0, 1, 2, 3), (1, 3, 2, 0), (3, 2, 0, 1)]:
        cbs = [METHODS['all'](), [MixUp(0.4)], [GradientClip(1.0)], [GradientAccumulation(16)]]
        l = learner([c for i in perm for c in (cbs[i] if sum(perm[:1]) % 2 else cbs[i][::-1])], dls=small_dls(bs=8))
        l.fit(1, 1e-3)
        ref = ref or weights(l)
        assert same(weights(l), ref)


@pytest.mark.parametrize('method,dtype', [('free', torch.bfloat16), ('trades_awp', torch.float16)])
def test_half_precision_with_accumulation_and_clip_logs_the_same_loss(method, dtype):
    "R20: the loss in the table, and the gradient that is clipped, are of the scale of float32"
    vals, norms = [], []
    for amp in ([], [HalfPrecision(dtype)]):
        l = learner(
            [*METHODS[method](), GradientAccumulation(16), GradientClip(1e9), *amp, (n := Norms())], dls=small_dls(bs=8)
        )
        l.fit(1, 1e-4)
        vals.append(l.recorder.values[0][0])
        norms.append(n.seen)
    assert vals[1] == pytest.approx(vals[0], rel=0.03) and norms[1] == pytest.approx(norms[0], rel=0.2)


class Norms(Callback):
    order = GradientClip.order + 1

    def before_fit(self):
        self.seen = []

    def before_step(self):
        self.seen.append(flat(self.model.parameters()).norm().item())


def test_overflow_skips_the_step_and_nothing_else():
    l = learner([TRADES(PGD2), AWP(0.01), EMA(0.9), HalfPrecision(torch.float16, scale=2.0**60)])
    w = weights(l)
    l.fit(1, 1e-2)
    assert (
        same(w, weights(l))
        and l.ema.n == 0
        and all(torch.equal(a, b) for a, b in zip(l.ema.avg.module.parameters(), w))
    )


def test_lr_find_leaves_weights_and_average(tmp_path):
    l = learner([TRADES(PGD2), AWP(0.01), EMA(0.9)], path=tmp_path)
    l.fit(1, 1e-3)
    w, avg = weights(l), [p.clone() for p in l.ema.avg.parameters()]
    l.lr_find(num_it=6, show_plot=False)
    assert same(w, weights(l)) and all(torch.equal(a, b) for a, b in zip(avg, l.ema.avg.parameters()))
    l.fit(1, 1e-3)


def test_metrics_on_training_batches():
    l = learner(TRADES(PGD2), metrics=accuracy)
    l.recorder.train_metrics = True
    l.fit(1, 1e-3)
    assert 0 <= l.recorder.values[0][1] <= 1


# --- files and interrupts
# ----------------------------------------------------------------------------------------------------------------


def test_exports_hold_no_more_than_the_model_and_train_on(tmp_path):
    from fastai.learner import load_learner

    sizes = {}
    for k in ('none', 'free', 'gat', 'all'):
        l = learner(
            METHODS.get(k, list)(), dls=fashion_mnist(32, 20, bs=16), model=tiny_vit(num_classes=10), path=tmp_path
        )
        l.fit(1, 1e-3)
        l.export('x.pkl')
        sizes[k] = (tmp_path / 'x.pkl').stat().st_size
    assert max(v - sizes['none'] for v in sizes.values()) < 4000, sizes
    n = load_learner(tmp_path / 'x.pkl')
    assert same(weights(n), weights(l))
    n.dls, n.logger = l.dls, noop
    n.fit(1, 1e-3)
    check_clean(n, n.loss_func)


class Stop(Callback):
    order = 20

    def __init__(self, err, event):
        self.err, self.armed = err, True
        setattr(self, event, self.fire)

    def fire(self):
        if self.armed and self.training and self.train_iter == 1:
            self.armed = False
            raise self.err('stop')


CANCELS = (CancelFitException, CancelBatchException, CancelTrainException)


@pytest.mark.parametrize(
    'method,err,event',
    [
        ('at', KeyboardInterrupt, 'before_batch'),
        ('half', KeyboardInterrupt, 'after_pred'),
        ('mart', CancelTrainException, 'after_loss'),
        ('gat', CancelFitException, 'after_loss'),
        ('free', CancelBatchException, 'before_backward'),
        ('trades_awp', KeyboardInterrupt, 'after_backward'),
        ('all', CancelBatchException, 'after_loss'),
        ('all', CancelFitException, 'before_step'),
    ],
    ids=lambda o: getattr(o, '__name__', o),
)
def test_interrupted_and_fitted_again(method, err, event):
    "The next fit is as from a fresh Learner with the same weights"
    l = learner([*METHODS[method](), Stop(err, event)], model=noisy_vit())
    lf = l.loss_func
    if err in CANCELS:
        l.fit(1, 1e-3)
    else:
        with pytest.raises(err):
            l.fit(1, 1e-3)
    check_clean(l, lf)
    w = copy.deepcopy(l.model.state_dict())
    ref = learner(METHODS[method](), model=noisy_vit())
    ref.model.load_state_dict(w)
    for o in (l, ref):
        o.opt, o.epochs_lived = None, Epochs()
        set_seed(3, True)
        o.dls.train.rng.seed(3)
        o.model.zero_grad()
        o.fit(1, 1e-3)
    assert same(weights(l), weights(ref))


# --- AWP
# ---------------------------------------------------------------------------------------------------------------------------------  # noqa: E501


@pytest.mark.parametrize(
    'method,amp',
    [('free', None), ('mart', torch.bfloat16), ('gat', torch.float16)],
)
def test_awp_leaves_weights_to_the_bit(method, amp):
    "With a learning rate of zero, at the end of every batch"
    l = learner(
        [*METHODS[method](), AWP(0.1), GradientAccumulation(16), MixUp(0.4)] + ([HalfPrecision(amp)] if amp else []),
        dls=small_dls(bs=8),
    )
    w = weights(l)
    ok = []
    l.add_cb(
        Callback(
            after_backward=lambda self: ok.append(same(w, weights(l))),
            before_step=lambda self: ok.append(same(w, weights(l))),
        )
    )
    l.fit(1, 0.0, wd=0.0)
    assert len(ok) >= 8 and all(ok) and same(w, weights(l))


def test_awp_gradient_by_hand():
    """The authors' steps with a copy of the model: ascend, move each weight matrix by gamma*|w| along the difference,
    take the gradient there"""
    loss = BY_HAND['trades']
    l = learner([PAIRS['trades'], AWP(0.02), Grab()])
    l.fit(1, 1e-3)
    g = l.grab
    x, x_adv = g.x.chunk(2)
    m = g.m
    proxy = copy.deepcopy(m)
    opt = torch.optim.SGD(proxy.parameters(), lr=0.01)
    opt.zero_grad()
    (-loss(proxy(x), proxy(x_adv), g.y)).backward()
    opt.step()
    moved = 0
    with torch.no_grad():
        for (n, p), q in zip(m.named_parameters(), proxy.parameters()):
            d = q - p
            if p.ndim > 1 and 'weight' in n:
                p.add_(0.02 * p.norm() / (d.norm() + 1e-20) * d)
                moved += 1
    m.zero_grad()
    loss(m(x), m(x_adv), g.y).backward()
    want = flat(m.parameters())
    assert moved == 1 + 4 * 2 + 1 and (g.g - want).norm() < 2e-3 * want.norm()


def test_awp_leaves_batchnorm_and_frozen_weights():
    m = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 13 * 13, 4))
    m[0].requires_grad_(False)
    w = m[0].weight.clone()
    l = learner([AdvTrain(PGD2), AWP(0.1)], model=m)
    ref = copy.deepcopy(m)
    l.fit(1, 0.0, wd=0.0)
    assert m[1].num_batches_tracked.item() == 2 and torch.equal(w, m[0].weight)
    r = learner([AdvTrain(PGD2)], model=ref)
    r.fit(1, 0.0, wd=0.0)
    assert torch.equal(ref[1].running_mean, m[1].running_mean)


def test_awp_without_a_matrix_to_move():
    "Only the class token trains"
    gs = []
    for cbs in ([], [AWP(0.1)]):
        m = tiny_vit(num_classes=4)
        m.requires_grad_(False)
        m.model.cls_token.requires_grad_(True)
        l = learner([TRADES(PGD2), *cbs, Grab()], model=m, train_bn=False)
        l.fit(1, 1e-3)
        gs.append(l.grab.g)
    assert torch.allclose(*gs) and gs[0].any()


# --- attacks for training
# -----------------------------------------------------------------------------------------------------------------

X, Y = [plain(o) for o in synth_dls().train.one_batch()]


def test_prm_clears_a_share_of_the_patches():
    "Before each step: with alpha=0 what is left is the start, less the masked patches of two draws"
    m = tiny_vit(num_classes=4)
    a = ARDPRM(0.1, steps=1, alpha=0.0, prm=0.25)
    x = X * 0.2 + 0.4
    d = (a(m, x, Y) - x).unfold(2, 7, 7).unfold(3, 7, 7).abs().amax((1, 4, 5)).flatten(1)
    assert ((d > 0).sum(1) == 4).all()  # a quarter of 16
    assert len({tuple(r) for r in (d > 0).int().tolist()}) > 1


@pytest.mark.parametrize(
    'name,kw',
    [
        ('cait_xxs24_224', dict(img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2)),
        (
            'swin_tiny_patch4_window7_224',
            dict(img_size=32, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(1, 2)),
        ),
    ],
)
def test_ard_on_other_families(name, kw):
    import timm

    m = timm.create_model(name, num_classes=4, **kw).eval()
    x, y = torch.rand(3, 3, 32, 32), torch.tensor([0, 1, 2])
    a = ARDPRM(0.1, steps=2, ard=0.5, prm=0.5)
    was = state_of(m)
    out = a(m, x, y)
    assert (out - x).abs().max() > 0.01 and state_of(m) == was
    assert torch.equal(ARDPRM(0.1, steps=2, ard=1.0, prm=1.0)(m, x, y), PGD(0.1, steps=2)(m, x, y))


def test_ard_is_the_gradient_without_the_silent_branches():
    "By hand: detach the attention of block 1 for image 0, of block 0 for image 1"
    m = tiny_vit(num_classes=4)
    x = X[:2].clone().requires_grad_()
    keep = torch.tensor([[1, 0], [0, 1]])
    with hush_attn(m, keep):
        z = m(x)
    (g,) = torch.autograd.grad(F.cross_entropy(z, Y[:2], reduction='sum'), x)
    for i, b in ((0, 1), (1, 0)):
        h = m.model.blocks[b].attn.register_forward_hook(lambda mod, a, o: o.detach())
        xi = X[i : i + 1].clone().requires_grad_()
        (gi,) = torch.autograd.grad(F.cross_entropy(m(xi), Y[i : i + 1]), xi)
        h.remove()
        assert torch.allclose(g[i], gi[0], atol=1e-6) and gi.abs().max() > 0
    assert torch.allclose(z, m(X[:2]))


def test_hush_attn_goes_away_when_something_fails():
    m = tiny_vit(num_classes=4)
    with pytest.raises(RuntimeError, match='boom'):
        with hush_attn(m, torch.ones(2, 2)):
            raise RuntimeError('boom')
    assert all(h == (0, 0, 0) for h in state_of(m)[2])
    with pytest.raises(TypeError, match='not a supported transformer'):
        ARDPRM(0.1, ard=0.5)(nn.Sequential(nn.Flatten(), nn.Linear(784, 4)), X, Y)


# --- GAT, FreeAT
# --------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_gat_alternates_per_optimiser_step():
    seen = []
    cb = GAT(BernoulliFGSM(0.1))
    look = Callback(before_batch=lambda self: seen.append(cb.inner.__name__) if self.training else None)
    l = learner([cb, look, GradientAccumulation(16)], dls=small_dls(64, bs=8))
    l.fit(1, 1e-3)
    l.fit(1, 1e-3)
    assert seen == ['learn_loss', 'learn_loss', 'guided', 'guided'] * 4


def test_gat_guides_the_second_attack():
    "By hand, on a frozen model: one step of eps from the noise along the gradient of loss + beta*||p-p0||^2"
    xs = []

    class Look(Callback):
        order = 5

        def before_batch(self):
            if self.training:
                xs.append((plain(self.x).chunk(2), plain(self.y)))

    l = learner([GAT(BernoulliFGSM(0.1), beta=3.0), Look()])
    seed = torch.initial_seed() % 2**62
    m = l.model
    l.fit(1, 0.0, wd=0.0)
    for i, ((x, x_adv), y) in enumerate(xs):
        a = BernoulliFGSM(0.1)
        z0 = m(x).detach()
        s = a.but(alpha=0.0)(m, x, y, seed=seed).requires_grad_()
        z = m(s)
        (g,) = torch.autograd.grad(
            (F.cross_entropy(z, y, reduction='none') + i * 3.0 * (z.softmax(1) - z0.softmax(1)).pow(2).sum(1)).sum(), s
        )
        assert torch.allclose(a.ball.project(x, s.detach() - x + 0.1 * g.sign()) + x, x_adv, atol=1e-6)


def test_free_at_by_hand():
    """A linear model, two replays: train on x, move x by eps*sign of the same gradient, train on that; the move is
    carried to the next batch"""
    seen = []

    class Look(Callback):
        order = 5

        def before_batch(self):
            if self.training:
                seen.append((plain(self.x).detach().clone(), copy.deepcopy(self.model), plain(self.y)))

    l = learner(
        [KeepClean(), FreeAT(FGSM(0.1), replay=2), Look()], model=nn.Sequential(nn.Flatten(), nn.Linear(784, 4))
    )
    l.fit(1, 1e-3)
    xs, d = l.keep_clean.seen, torch.zeros(16, 1, 28, 28)
    assert len(seen) == 4 and torch.equal(xs[0], xs[1]) and not torch.equal(xs[1], xs[2])
    for (x_adv, m, y), x in zip(seen, xs):
        d = Linf(0.1).project(x, d)
        assert torch.allclose(x_adv, x + d, atol=1e-6)
        p = x_adv.clone().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(m(p), y), p)
        d = Linf(0.1).project(x, x_adv - x + 0.1 * g.sign())


class KeepClean(Callback):
    order = AdvTrain.order - 0.5

    def before_fit(self):
        self.seen = []

    def before_batch(self):
        if self.training:
            self.seen.append(plain(self.x).clone())


def test_a_batch_that_comes_again_is_as_it_was():
    "CutMix writes into its images"
    dl = replayed(synth_dls().train.new(shuffle=False), 2)
    for i, (x, y) in enumerate(dl):
        if i % 2:
            assert torch.equal(x, first[0]) and torch.equal(y, first[1]) and type(x) is type(first[0])
        first = x.clone(), y.clone()
        x.fill_(0)


def test_free_at_counts_progress_right():
    pcts = []
    l = learner(
        [
            FreeAT(FGSM(0.1), replay=3, eps=warmup(0.1, pct=0.5)),
            Callback(before_batch=lambda self: pcts.append(self.pct_train) if self.training else None),
        ]
    )
    l.fit_one_cycle(2, 1e-3)
    assert len(pcts) == 2 * 2 * 3 and pcts == pytest.approx([i / 12 for i in range(12)]) and len(l.recorder.lrs) == 12
    l.validate()
    l.fit(1, 1e-3)


def test_free_at_with_a_shorter_last_batch():
    dls = synth_dls(40, bs=16)
    dls.train = dls.train.new(drop_last=False)
    l = learner(FreeAT(FGSM(0.1), replay=2), dls=dls)
    l.fit(2, 1e-3)
    check_clean(l, l.loss_func)


# --- catastrophic overfitting (R18)
# ----------------------------------------------------------------------------------------------------------

WEAK = PGD(0.1, steps=0, rand=False)


def linear():
    set_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4))


def watched(catch, attack=WEAK, **kw):
    return synth_learner(model=linear(), cbs=[AdvTrain(attack, **kw), catch], lr=3e-3)


def test_catch_stops():
    l = watched(c := CatchOverfit(then='stop'))
    with pytest.warns(UserWarning, match='epoch 0'):
        l.fit(5)
    assert len(c.df) == 1 and len(l.recorder.values) == 0


@pytest.mark.parametrize(
    'attack,kw',
    [
        (FGSM_RS(0.1), {}),
        (WEAK, dict(eps=0)),
        (PGD(0.1, steps=3), dict(eps=warmup(0.3, pct=1.0))),
    ],
)
def test_catch_is_silent_without_reason(attack, kw):
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        l = watched(CatchOverfit(), attack, **kw)
        l.add_cb(MixUp(0.4))
        l.fit(3)


@pytest.mark.parametrize('cbs', [[], [AdvTrain(lambda model, x, y, seed=0: x)]])
def test_catch_needs_an_attack_with_eps(cbs):
    with pytest.raises(TypeError, match='none here that has an eps'):
        learner([CatchOverfit(), *cbs]).fit(1)


def test_catch_sees_unmixed_images_and_labels():
    got = []
    l = synth_learner(
        model=linear(),
        cbs=[
            AdvTrain(PGD2),
            c := CatchOverfit(gap=2),
            CutMix(1.0),
            Callback(after_loss=lambda self: got.append(c.batch)),
        ],
    )
    xs = [plain(o[0]) for o in l.dls.train_ds]
    l.fit(1)
    x, y = got[0]
    assert all(any(torch.equal(plain(o), p) for p in xs) for o in x) and y.dtype == torch.long


def test_catch_scales_the_step_of_the_strong_attack():
    used = []

    class Spy(PGD):
        def start(self, obj, x, seed):
            used.append((self.eps, self.step_at(torch.tensor([0]))))
            return super().start(obj, x, seed)

    l = watched(CatchOverfit(Spy(0.2, steps=2, alpha=0.1), gap=2), PGD(0.1, steps=1))
    l.fit(1)
    assert used and all(o == pytest.approx((0.1, 0.05)) for o in used)
    with pytest.raises(ValueError, match='another norm'):
        watched(CatchOverfit(PGD(0.2, alpha=0.1, norm='L2'), gap=2), PGD(0.1)).fit(1)


def test_catch_counts_what_was_right_before():
    "An attack that repairs every image does not make the model better"

    class Repair(PGD):
        slack = 1.0  # it may leave its ball

        def __call__(self, model, x, y=None, seed=0, **kw):
            return learn.cheat(x, y)

    learn = watched(c := CatchOverfit(gap=2), Repair(0.1))
    learn.cheat = lambda x, y: x if y is None else sorted_images(learn, y)

    def sorted_images(l, y):
        return torch.stack([first_of[int(o)] for o in y])

    first_of = {int(y): plain(x) for x, y in learn.dls.train_ds}
    nn.init.zeros_(learn.model[1].weight)
    learn.fit(1, 0.0)
    assert c.df.weak[0] <= 0.5


def test_catch_keeps_two_classes_of_sorted_images():
    dls = synth_dls(64)
    items = sorted(dls.train_ds, key=lambda o: int(o[1]))
    dls = DataLoaders.from_dsets(items, items[:16], bs=8, device='cpu')
    dls.loaders[0] = dls.train.new(shuffle=False)
    got = []
    l = synth_learner(
        model=linear(),
        dls=dls,
        cbs=[
            AdvTrain(PGD2),
            c := CatchOverfit(gap=2),
            Callback(after_batch=lambda self: got.append(c.batch[1]) if self.training else None),
        ],
    )
    l.dls.c = 4
    l.fit(1)
    assert len(got[0].unique()) == 1 and len(got[-1].unique()) == 2


class OneHot(Callback):
    "Labels as rows of numbers; `more`: the next class is right too"

    order = CatchOverfit.order - 1

    def __init__(self, more=0.0):
        self.more = more

    def before_batch(self):
        y = F.one_hot(plain(self.y), 4).float()
        self.learn.yb = (y + self.more * y.roll(1, 1),)


def test_catch_takes_one_hot_labels_for_their_class():
    "The same table as with class numbers"
    tables = []
    for cbs in ([], [OneHot()]):
        l = watched(c := CatchOverfit(gap=2), PGD2)
        l.loss_func = F.cross_entropy
        l.fit(1, cbs=cbs)
        tables.append(c.df)
    assert tables[0].equals(tables[1]) and 0 < tables[0].weak[0]


def test_catch_refuses_several_classes_per_image():
    l = watched(CatchOverfit(gap=2), PGD2)
    l.loss_func = F.binary_cross_entropy_with_logits
    with pytest.raises(ValueError, match='one class per image'):
        l.fit(1, cbs=OneHot(1.0))


# --- averages, checkpoints (R19)
# ---------------------------------------------------------------------------------------------------------------


def test_ema_by_hand():
    ws = []
    l = learner([AdvTrain(PGD2), EMA(0.8, use_warmup=False)])
    w0 = weights(l)
    l.add_cb(Callback(after_step=lambda self: ws.append(weights(l))))
    l.fit(2, 1e-2)
    avg = ws[0]  # timm copies the first
    for w in ws[1:]:
        avg = [0.8 * a + 0.2 * b for a, b in zip(avg, w)]
    assert close(list(l.ema.avg.module.parameters()), avg) and not close(avg, w0, 1e-3)


def test_a_later_start_without_an_average_is_said():
    with pytest.warns(UserWarning, match='no average to go on with'):
        learner([AdvTrain(PGD2), EMA(0.9)]).fit(3, 1e-3, start_epoch=2)


def test_loss_of_the_average():
    from fastai.learner import AvgLoss

    l = learner([EMA(0.9)], metrics=[OnAverage(AvgLoss())])
    l.fit(2, 1e-2)
    own, avg = l.validate()
    with l.ema.averaged():
        assert l.validate()[0] == pytest.approx(avg, rel=1e-4)
    assert own != pytest.approx(avg, rel=1e-4)


# --- models that change their input
# -----------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    "Normalises its input where it stands, and is then a linear model"

    def __init__(self, inplace):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.inplace = nn.Sequential(nn.Flatten(), nn.Linear(784, 4)), inplace

    def forward(self, x):
        return self.net(x.sub_(0.5).div_(0.5) if self.inplace else (x - 0.5) / 0.5)


@pytest.mark.parametrize('method', ['free', 'all'])
def test_a_model_that_changes_its_input_trains_as_one_that_does_not(method):
    ends = []
    for inplace in (False, True):
        l = learner(
            [*METHODS[method](), EMA(0.9)] if method != 'all' else METHODS[method](),
            model=InPlace(inplace),
            metrics=[OnAverage(accuracy)],
        )
        l.fit(2, 1e-2)
        ends.append((weights(l), list(l.recorder.values[-1][2:])))
    assert close(*[w for w, _ in ends], 1e-4) and ends[0][1] == pytest.approx(ends[1][1])


def test_averaged_weights_inside_and_own_after():
    l = learner([TRADES(PGD2), EMA(0.9)])
    l.fit(2, 1e-2)
    w = weights(l)
    with l.ema.averaged():
        assert same(weights(l), list(l.ema.avg.module.parameters())) and not same(w, weights(l))
    assert same(w, weights(l))
    with pytest.raises(RuntimeError, match='boom'):
        with l.ema.averaged():
            raise RuntimeError('boom')
    assert same(w, weights(l))
    with pytest.raises(ValueError, match='fit first'):
        with learner(EMA()).ema.averaged():
            pass


def test_save_ema_saves_the_average(tmp_path):
    l = learner([AdvTrain(PGD2), EMA(0.9)], metrics=[OnAverage(accuracy)], path=tmp_path)
    l.fit(2, 1e-2, cbs=SaveEMA(monitor='ema_accuracy', at_end=True, fname='avg'))
    w = weights(l)
    l.load('avg')
    assert same(weights(l), list(l.ema.avg.module.parameters())) and not same(w, weights(l))


# --- fit_adv
# ------------------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_fit_adv_overridden():
    norms = Norms()
    l = learner([AdvTrain(PGD2), GradientClip(0.1)])
    l.fit_adv(1, 1e-3, wd=0.3, pct_start=0.5, cbs=norms, no_decay=False)
    assert (
        max(norms.seen) <= 0.1001
        and l.opt.hypers[0]['wd'] == 0.3
        and all(
            'do_wd' not in l.opt.state[p] or l.opt.state[p]['do_wd']
            for n, p in l.model.named_parameters()
            if 'cls_token' in n
        )
    )
    l = learner(AdvTrain(PGD2))
    l.fit_adv(1, cbs=[GradientClip(0.1), n := Norms()])
    assert max(n.seen) <= 0.1001  # not clipped twice
    l = learner(AdvTrain(PGD2))
    l.fit_adv(1, clip=None, cbs=(n := Norms()))
    assert len(n.seen) == 2 and not hasattr(l, 'gradient_clip')


def test_fit_adv_with_a_torch_optimiser():
    l = learner(AdvTrain(PGD2), opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
    with pytest.raises(TypeError, match='NoDecay needs a fastai optimiser'):
        l.fit_adv(1, 1e-3)
    l.fit_adv(1, 1e-3, no_decay=False)


# --- losses that sum without saying so, or say so and do not
# -----------------------------------------------------------------------


class Sums(nn.Module):
    def forward(self, z, y):
        return F.cross_entropy(z, y, reduction='sum')


SUMS = dict(
    partial=partial(F.cross_entropy, reduction='sum'),
    function=lambda z, y: F.cross_entropy(z, y, reduction='sum'),
    module=Sums(),
)


@pytest.mark.parametrize(
    'make,loss',
    [
        (lambda: TRADES(PGD(0.1, steps=2)), 'partial'),
        (lambda: MART(PGD(0.1, steps=2, loss=ce)), 'module'),
        (lambda: AFAT(lam=1.0, select='random'), 'function'),
    ],
)
def test_a_sum_is_recognised_by_its_numbers(make, loss):
    gs = []
    for f in (CrossEntropyLossFlat(reduction='sum'), SUMS[loss]):
        l = learner([make(), Grab()], loss_func=f, model=tiny_vit(num_classes=4))
        l.fit(1)
        gs.append(l.grab.g)
    assert torch.allclose(*gs, rtol=1e-4, atol=1e-5)


def test_what_is_a_sum():
    "Over images, whatever is written on it; what it leaves out, weighs or cannot double changes nothing"
    torch.manual_seed(0)
    z, y, pixels, mask = torch.randn(8, 4), torch.arange(8) % 4, torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    per_batch = torch.ones(8)
    assert all(is_summed(f, pixels, (mask,)) for f in SUMS.values())
    assert not is_summed(lambda z, y: (F.cross_entropy(z, y, reduction='none') * per_batch).mean(), z, (y,))
    for kw in (dict(), dict(weight=few), dict(ignore_index=2)):
        assert not is_summed(CrossEntropyLossFlat(**kw), z, (y,)) and is_summed(
            CrossEntropyLossFlat(reduction='sum', **kw), z, (y,)
        )
    # its value is 0
    assert is_summed(nn.CrossEntropyLoss(reduction='sum', ignore_index=0), z, (0 * y,))
    assert not is_summed(DiceLoss(), pixels, (mask,)) and not is_summed(CrossEntropyLossFlat(axis=1), pixels, (mask,))
    was = z.clone()
    assert is_summed(lambda z, y: F.cross_entropy(z.mul_(2), y, reduction='sum'), z, (y,)) and z.equal(was)


def test_a_guided_attack_weighs_a_sum_without_reduction_as_one_with():
    seen = []
    for loss in (CrossEntropyLossFlat(reduction='sum'), partial(F.cross_entropy, reduction='sum')):
        learn = synth_learner(cbs=GAT(PGD(0.1, steps=2)), loss_func=loss)
        see = Callback(after_pred=lambda self: found.append(self.xb[0].clone()) if self.training else None)
        found, see.order = [], 99
        learn.fit(1, 1e-4, cbs=see)
        seen.append(torch.cat(found))
    assert (seen[0] - seen[1]).abs().max() < 1e-4


def test_an_average_of_a_model_with_a_forward_of_its_own_is_noticed():
    model = tiny_vit(num_classes=4)
    forward = model.forward
    model.forward = lambda x: 2 * forward(x)
    with pytest.warns(UserWarning, match='forward of its own'):
        synth_learner(model=model, cbs=EMA(0.9)).fit(1)
