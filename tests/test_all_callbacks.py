"""Every callback of the package, found by itself: a second copy is refused, several fits draw what one fit draws, and
class
weights that are equal change nothing."""

import pytest, torch
from fastcore.docments import docments
from fastai.vision.all import Callback, CrossEntropyLossFlat, MixUp, SaveModelCallback, SGD
from robust_nbdev.all import *
from robust_nbdev.adv_train import NearPGD, NFGSM, SaveEMA
from robust_nbdev.tora import tora_splitter
from robust_nbdev.vit import token_splitter
from robust_nbdev.xcit_recipe import AttackEffect, Augment, KeepBest, MixOrCut, RepeatBatches
from package import everything
from robust_nbdev.test_utils import *

# fastcore's, which pytest would collect
for _n in [o for o in globals() if o.startswith('test')]:
    del globals()[_n]

PGD2, plain = PGD(0.1, steps=2), torch.full((4,), 10.0)


def of_package(kind):
    "All public subclasses of a class that the package defines"
    return {
        k: v
        for k, v in vars(everything).items()
        if isinstance(v, type)
        and issubclass(v, kind)
        and v.__module__.startswith('robust_nbdev.')
        and not v.__module__.endswith('test_utils')
        and not k.startswith('_')
    }


ALL = {k: v for k, v in of_package(Callback).items() if v is not AdvCallback}

# How to make one; a new callback needs an entry here, and must refuse a second copy
augment = xcit_recipe('n12', eps=0.1).but(scale=(0.5, 1.0), jitter=0.4)
MAKE = dict(
    AdvTrain=lambda: AdvTrain(PGD2),
    ALP=lambda: ALP(PGD2),
    TRADES=lambda: TRADES(PGD2),
    MART=lambda: MART(PGD2),
    GAT=lambda: GAT(BernoulliFGSM(0.1)),
    FreeAT=lambda: FreeAT(FGSM(0.1), replay=2),
    CatchOverfit=lambda: CatchOverfit(gap=2),
    AWP=lambda: AWP(0.01),
    EMA=lambda: EMA(0.9),
    SaveEMA=lambda: SaveEMA(monitor='valid_loss', fname='ema'),
    SaveRun=lambda: SaveRun(),
    Augment=lambda: Augment(augment),
    RepeatBatches=lambda: RepeatBatches(2),
    MixOrCut=lambda: MixOrCut(),
    CleanPass=lambda: CleanPass(),
    KeepBest=lambda: KeepBest(FGSM(0.1), None),
    AttackEffect=lambda: AttackEffect(0.1, steps=(1,), many=2, n=8),
    AdvValid=lambda: AdvValid(FGSM(0.1)),
    CorruptValid=lambda: CorruptValid('gaussian_noise', 3),
    NoDecay=lambda: NoDecay(),
    StepCost=lambda: StepCost(),
    RobustTokens=lambda: RobustTokens(PGD2.but(loss=feat_cos)),
    TORA=lambda: TORA(PGD2),
    AFAT=lambda: AFAT(occlude=0.25, lam=0.1),
    AASTrain=lambda: AASTrain(period=1),
)
# what a callback cannot do without
WATCHED = dict(CatchOverfit=[lambda: AdvTrain(PGD2)], SaveEMA=[lambda: EMA(0.9)])


def tora_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return tora_vit(tiny_vit(num_classes=4), d=2)


def token_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return add_tokens(tiny_vit(num_classes=4), 2, 'cls_patch')


MODELS = dict(TORA=tora_model, RobustTokens=token_model)


def learner(name, cbs=(), tmp=None, **kw):
    "A Learner on which this callback can work; the order of the images is fixed"
    dls = synth_dls(16, bs=8)
    dls.loaders[0] = dls.train.new(shuffle=False)
    if name == 'RobustTokens':
        kw = {**dict(loss_func=FeatCos(), splitter=token_splitter, train_bn=False), **kw}
    if name == 'TORA':
        kw = {**dict(splitter=tora_splitter, train_bn=False), **kw}
    model = MODELS.get(name, lambda: tiny_vit(num_classes=4))()
    l = synth_learner(dls=dls, model=model, cbs=list(cbs), opt_func=SGD, path=tmp, **kw)
    if name in MODELS:
        l.freeze()
    return l


def test_every_callback_is_in_the_table():
    assert set(MAKE) == set(ALL), f'a callback without an entry: {set(MAKE) ^ set(ALL)}'


# fastai's SaveModelCallback is for fits alone
RUNS = {k: 'fit' if i % 2 or k == 'SaveEMA' else 'validate' for i, k in enumerate(ALL)}


@pytest.mark.parametrize('name', [k for k in ALL if k != 'NoDecay'])
def test_a_second_copy_is_refused(name, tmp_path):
    "And the Learner works again when one of the two is removed"
    two = [MAKE[name]() for _ in range(2)]
    l = learner(name, [*[f() for f in WATCHED.get(name, [])], *two], tmp_path)
    go = (lambda: l.fit(1, 0.0)) if RUNS[name] == 'fit' else l.validate
    with pytest.raises(ValueError, match='two |same file'):
        go()
    l.remove_cb(two[1])
    l.fit(1, 0.0)


@pytest.mark.parametrize('a,b,run', [('AdvTrain', 'TRADES', 'fit'), ('FreeAT', 'AdvTrain', 'validate')])
def test_two_of_a_family_are_refused(a, b, run):
    l = learner(a, [MAKE[a](), MAKE[b]()])
    with pytest.raises(ValueError, match=r'two AdvTrain callbacks, .*remove_cb\((AdvTrain|TRADES)\)'):
        l.fit(1, 0.0) if run == 'fit' else l.validate()


def test_two_mixers_are_refused():
    with pytest.raises(ValueError, match='two MixHandler'):
        learner('MixOrCut', [MixUp(), MixOrCut()]).fit(1, 0.0)


def test_files_of_two_savers_are_their_own(tmp_path):
    "Another file is another matter"
    l = learner('SaveEMA', [EMA(0.9), SaveEMA(fname='a'), SaveEMA(fname='b')], tmp_path)
    l.fit(1, 0.0)
    with pytest.raises(ValueError, match='same file'):
        l.fit(1, 0.0, cbs=SaveModelCallback(fname='a'))
    assert {f.stem for f in (tmp_path / 'models').iterdir()} == {'a', 'b'}


# --- several fits are one fit
# ---------------------------------------------------------------------------------------------------


class Look(Callback):
    "The images that the model is trained on, and its loss, in each epoch"

    order = 100

    def __init__(self):
        self.x, self.losses = [], []

    def before_batch(self):
        if self.training:
            self.x.append(self.learn.x.as_subclass(torch.Tensor).detach().clone())

    def after_loss(self):
        if self.training:
            self.losses.append(self.learn.loss.item())


def trained(name, fits, cbs=None, tmp=None, **kw):
    "What the model sees in fits of these many epochs, with weights that stand still"
    own = cbs() if cbs else [*[f() for f in WATCHED.get(name, [])], MAKE[name]()]
    l = learner(name, [*own, look := Look()], tmp)
    for n in fits:
        l.fit(n, 0.0, wd=0.0, **kw)
    return look


DRAWS = {
    k: None
    for k in ALL
    if k not in ('AdvValid', 'CorruptValid', 'NoDecay', 'SaveEMA', 'SaveRun', 'KeepBest', 'AttackEffect', 'CleanPass')
}
VARIANTS = dict(
    some_clean=lambda: [AdvTrain(PGD2, clean_images=0.5)],
    noise=lambda: [AdvTrain(NFGSM(0.1))],
    trades_awp=lambda: [TRADES(PGD2), AWP(0.01)],
    drops=lambda: [AdvTrain(ARDPRM(0.1, steps=2, ard=0.5, prm=0.5))],
    near=lambda: [TRADES(NearPGD(0.1, steps=1))],
    fgsm_rs=lambda: [AdvTrain(FGSM_RS(0.1))],
)
CASES = {**DRAWS, **VARIANTS}


# what draws from torch's own numbers, or not at all; and AFAT and AASTrain, whose draws depend on what they have
# trained
LIVES = [k for k in CASES if k not in ('Augment', 'MixOrCut', 'AWP', 'EMA', 'CatchOverfit', 'AFAT', 'AASTrain')]


@pytest.mark.parametrize('name', CASES)
def test_two_fits_and_a_resumed_one_draw_what_one_fit_draws(name, tmp_path):
    a, b = [trained(name, fits, CASES[name], tmp_path) for fits in ([2], [1, 1])]
    assert len(a.x) == len(b.x) and all(torch.equal(u, v) for u, v in zip(a.x, b.x)) and a.losses == b.losses
    if name in LIVES:
        resumed = trained(name, [2], CASES[name], tmp_path, start_epoch=1)
        assert len(resumed.x) == len(a.x) // 2
        assert all(torch.equal(u, v) for u, v in zip(a.x[len(resumed.x) :], resumed.x))


def test_every_image_is_attacked_in_some_epoch():
    "With half of the images clean in each of several fits"
    l = learner('AdvTrain', [AdvTrain(PGD(0.1, steps=1), clean_images=0.5), look := Look()])
    clean = torch.stack([o[0].as_subclass(torch.Tensor) for o in l.dls.train_ds])
    for _ in range(8):
        l.fit(1, 0.0)
    moved = (torch.stack(look.x).view(8, *clean.shape) - clean).abs().flatten(2).amax(2) > 0
    assert moved.any(0).all() and 0.3 < moved.float().mean() < 0.7


def test_the_epochs_of_a_fit_differ():
    look = trained('AdvTrain', [1, 1])
    assert not torch.equal(look.x[0], look.x[2])


# --- equal weights of the classes
# ------------------------------------------------------------------------------------------------------


# tokens are trained on features
@pytest.mark.parametrize('name', [k for k in of_package(AdvTrain) if k != 'RobustTokens'] + ['AFAT', 'AWP'])
def test_equal_class_weights_change_nothing(name):
    "The same trained loss and the same weights afterwards"
    ends = []
    for weight in (None, plain):
        cbs = [AdvTrain(PGD2)] if name == 'AWP' else []
        l = learner(name, [*cbs, MAKE[name](), look := Look()], loss_func=CrossEntropyLossFlat(weight=weight))
        if name == 'TORA':
            l.tora.phase = 'gate'
        l.fit(1, 1e-2)
        ends.append((look.losses, torch.cat([p.detach().flatten() for p in l.model.parameters()])))
    (a, v), (b, w) = ends
    assert a == pytest.approx(b, rel=1e-4) and torch.allclose(v, w, atol=1e-5)


def scheduled(cls):
    "Parameters of a callback that may follow a schedule, by their docments; `eps` is checked with the attack"
    return [
        k for k, v in docments(cls.__init__).items() if v and 'schedule' in v and k not in ('eps', 'fields', 'return')
    ]


SCHEDULED = [(k, w) for k, v in ALL.items() for w in scheduled(v)]


def test_every_number_that_follows_a_schedule_has_its_check():
    assert not [(k, w) for k, w in SCHEDULED if w not in ALL[k].weights]


@pytest.mark.parametrize('name,weight', [(k, w) for k, v in ALL.items() for w in getattr(v, 'weights', {})])
def test_a_schedule_is_checked_at_each_step(name, weight, tmp_path):
    "This one begins and ends at 0, and is negative between"
    cb = MAKE[name]()
    setattr(cb, weight, lambda pct: -12 * pct * (1 - pct))
    l = learner(name, [*[f() for f in WATCHED.get(name, [])], cb], tmp_path)
    with pytest.raises(ValueError, match=f'{weight} (must be a number >= 0|is a share, between 0 and 1), got -'):
        l.fit(1, 1e-3)


@pytest.mark.parametrize('name,weight', SCHEDULED)
def test_a_schedule_that_ends_outside_is_refused_at_once(name, weight):
    cls, given = ALL[name], dict(AWP=[], AFAT=[], RobustTokens=[PGD2.but(loss=feat_cos)]).get(name, [PGD2])
    with pytest.raises(ValueError, match=weight):
        cls(*given, **{weight: lambda pct: -pct})


def test_a_second_copy_of_no_decay_adds_nothing():
    weights = []
    for copies in (1, 2):
        l = learner('NoDecay', [NoDecay() for _ in range(copies)], wd=0.1)
        l.fit(1, 0.1)
        weights.append([p.clone() for p in l.model.parameters()])
    assert all(map(torch.equal, *weights))
