"The light recipe for XCiT: sizes, stem surgery, presets, training, ablations, analyses"

import types, warnings
import pytest, timm, torch
import numpy as np
from torch import nn, Tensor
from torch.nn import functional as F
from fastai.vision.all import *
from fastai.callback.all import *
from timm.models.xcit import Xcit
from robust_nbdev.core import *
from robust_nbdev.vit import *
from robust_nbdev.datasets import *
from robust_nbdev.attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.adv_train import replayed
from robust_nbdev.evaluate import *
from robust_nbdev.test_utils import *
from robust_nbdev import xcit_recipe as xc
from robust_nbdev.xcit_recipe import *
from robust_nbdev.datasets import RunSettings
from robust_nbdev.experiments import profile_for, trials_of

for _n in [o for o in globals() if o.startswith('test')]:
    del globals()[_n]  # fastcore's, which pytest would collect

warnings.filterwarnings('ignore', category=FutureWarning)


def tiny_xcit(classes=4, seed=0, patch=8, **kw):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        m = Xcit(
            **{
                **dict(
                    img_size=32,
                    patch_size=8,
                    in_chans=1,
                    num_classes=classes,
                    embed_dim=16,
                    depth=1,
                    num_heads=2,
                    tokens_norm=True,
                ),
                **kw,
            }
        )
    return xcit_stem(m, patch).eval()


fast = xcit_recipe('n12', eps=0.1).but(
    lr=2e-3, lr_rule='none', jitter=0.0, scale=(1, 1), ratio=(1, 1), flip=0.0, best='last', steps=1
)


def quiet(learn):
    learn.logger = noop
    if hasattr(learn, 'progress'):
        learn.remove_cb(ProgressCallback)
    return learn


def learner(r=fast, model=None, dls=None, seed=0, n=64, **kw):
    set_seed(seed, reproducible=True)
    return quiet(r.learner(dls or synth_dls(n), model=model or tiny_xcit(), **kw))


# ---------------------------------------------------------------- stem
def test_only_the_first_convolutions_change_their_stride():
    m = timm.create_model('xcit_nano_12_p16_224', embed_dim=32, depth=1)
    strides = lambda p: [c.stride[0] for c in xcit_stem(m, p).patch_embed.modules() if isinstance(c, nn.Conv2d)]
    assert [strides(p) for p in (16, 8, 4)] == [[2, 2, 2, 2], [1, 2, 2, 2], [1, 1, 2, 2]]


def test_stem_inside_wrappers_and_with_the_library():
    m = Normalized(tiny_xcit(), mean=0.5, std=0.5)
    x = torch.rand(3, 1, 28, 28)
    xcit_stem(m, 4)
    assert patch_grid(m, x) == (7, 7) and block_outputs(m, x)[0].shape[1] == 49
    assert (PGD(0.1, steps=2)(m, x, torch.tensor([0, 1, 2])) - x).abs().max() <= 0.1 + 1e-6


# ---------------------------------------------------------------- presets: the table of the facts, copied
DEIT = dict(mixup=0.8, cutmix=1.0, randaug='rand-m9-mstd0.5-inc1', erase=0.25)
NONE = dict(mixup=0.0, cutmix=0.0, randaug='', erase=0.0)
CIFAR_STATS = dict(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
PRE = dict(
    method='adv',
    eps=4 / 255,
    steps=1,
    alpha=1.5 * 4 / 255,
    eps_warmup=10,
    lr=5e-4,
    lr_bs=512,
    bs=512,
    epochs=100,
    cooldown=10,
    wd=0.5,
    smoothing=0.1,
    drop_path=0.05,
    mean=None,
    std=None,
    scale=(0.08, 1.0),
    ratio=(3 / 4, 4 / 3),
    flip=0.5,
    jitter=0.4,
    **NONE,
)
FT = dict(
    method='trades',
    beta=6.0,
    eps=8 / 255,
    steps=10,
    alpha=1.2 / 255,
    eps_warmup=0,
    wd=0.5,
    drop_path=0.05,
    smoothing=0.0,
    epochs=20,
    cooldown=2,
    warmup=5,
    warmup_lr=1e-6,
    min_lr=5e-6,
    bs=1024,
    patch=4,
    **CIFAR_STATS,
)
HI = dict(
    method='adv',
    eps=8 / 255,
    steps=1,
    alpha=12 / 255,
    lr=5e-5,
    min_lr=5e-6,
    epochs=20,
    cooldown=10,
    warmup=5,
    wd=0.5,
    eps_warmup=0,
    jitter=0.4,
    scale=(0.08, 1.0),
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    **NONE,
)
T, C = dict(warmup=5, warmup_lr=5e-6, min_lr=5e-5), dict(warmup=10, warmup_lr=1e-6, min_lr=1e-5)
SMALL = dict(jitter=0.0, scale=(0.8, 1.2), ratio=(0.95, 1.05))
TABLE = [  # arguments of xcit_recipe, expected values
    (dict(size='s12', values='thesis'), {**PRE, **T}),
    (dict(size='s12', values='config'), {**PRE, **C}),
    (dict(size='n12', values='config'), {**PRE, **C, 'drop_path': 0.0}),
    (dict(size='l12', values='config'), {**PRE, **C, 'steps': 2, 'alpha': 3 / 255}),
    (dict(size='s12', eps=8 / 255, values='config'), {**PRE, **C, 'eps': 8 / 255, 'steps': 2, 'alpha': 6 / 255}),
    (
        dict(task='ablation', values='config'),
        {**PRE, **C, **DEIT, 'size': 'n12', 'wd': 0.05, 'eps_warmup': 0, 'drop_path': 0.0},
    ),
    (dict(task='cifar10', values='thesis'), {**FT, **SMALL, **NONE, 'lr': 2e-4, 'peak': 2e-4}),
    (
        dict(task='cifar10', values='config'),
        {
            **FT,
            **NONE,
            'jitter': 0.25,
            'pad': 4,
            'rotate': 2.0,
            'scale': (1.0, 1.0),
            'ratio': (1.0, 1.0),
            'lr': 2e-4,
            'peak': 2.83e-4,
        },
    ),
    (dict(task='cifar10_scratch', values='thesis'), {**FT, **SMALL, **NONE, 'epochs': 300}),
    (dict(task='cifar10_scratch', values='config'), {**FT, **SMALL, **NONE, 'epochs': 100, 'erase': 0.2}),
    (dict(task='cifar10_extra', values='thesis'), {**FT, **SMALL, 'epochs': 300, 'extra': 0.5}),
    (dict(task='highres', values='config'), HI),
    (dict(task='highres_clean', values='config'), {**HI, **DEIT, 'method': 'clean', 'wd': 0.05}),
]


@pytest.mark.parametrize('args,want', TABLE, ids=[' '.join(map(str, a.values())) for a, _ in TABLE])
def test_presets_have_the_published_values(args, want):
    r = xcit_recipe(**args)
    got = {**asdict(r), 'alpha': r.attack.alpha, 'peak': r.peak_lr()}
    for k, v in want.items():
        assert got[k] == (pytest.approx(v, rel=2e-3) if isinstance(v, float) else v), k


@pytest.mark.parametrize(
    'kw,msg',
    [
        (dict(method='mart'), 'method'),
        (dict(eps=4), '255'),
        (dict(wd=-1), 'wd'),
        (dict(epochs=0, cooldown=0), 'epochs'),
        (dict(eps=L2(0.5)), 'Linf'),
        (dict(flip=2), 'flip'),
        (dict(held=2), 'held'),
    ],
)
def test_bad_settings_say_so(kw, msg):
    with pytest.raises(ValueError, match=msg):
        xcit_recipe('s12').but(**kw)


# ---------------------------------------------------------------- schedules and the attack
class Rates(Callback):
    "The learning rate in each epoch"

    order = 80

    def before_fit(self):
        self.lrs = []

    def after_epoch(self):
        self.lrs.append(self.opt.hypers[0]['lr'])


def test_eps_may_warm_up_in_every_step():
    g = xcit_recipe('s12', eps=4 / 255).but(by_epoch=False).eps_schedule
    assert g(5.5 / 110) == pytest.approx(2.2 / 255)


ADDED = dict(
    learner=dict(more=[GradientAccumulation(32)]),
    default=dict(later=[GradientAccumulation]),  # 32
    more_images=dict(more=[GradientAccumulation(33)]),
)


@pytest.mark.parametrize('k', ADDED)
def test_accumulated_batches_are_one_step(k):
    "Batches of 8 that make 32 train at the learning rate of 32, as they should at that of 40"
    r = fast.but(
        method='clean', smoothing=0.0, lr_rule='linear', bs=32, lr_bs=32, epochs=2, cooldown=0, warmup=0, eps_warmup=0
    )

    def rates(bs, more=(), later=()):
        learn = learner(r, nn.Sequential(nn.Flatten(), nn.Linear(784, 4)), synth_dls(64, bs=bs))
        learn.add_cbs(more)
        learn.fit_recipe(cbs=[look := Rates(), *later])
        return look.lrs

    times = 40 / 32 if k == 'more_images' else 1
    assert rates(8, **ADDED[k]) == pytest.approx([times * o for o in rates(32)])
    if k == 'learner':
        assert rates(8) == pytest.approx([o / 4 for o in rates(32)])
        assert rates(32, [GradientAccumulation(8)]) == pytest.approx(rates(32))


class Watch(Callback):
    order = AdvTrain.order + 1

    def before_fit(self):
        self.eps, self.alpha, self.moved, self.lr = [], [], [], []

    def before_batch(self):
        if not self.training:
            return
        a = self.adv_train.scheduled()
        self.eps.append(a.eps)
        self.alpha.append(a.alpha)
        self.lr.append(self.opt.hypers[-1]['lr'])
        self.moved.append((self.x - self.kept.x).abs().max().item())


class Kept(Callback):
    order = AdvTrain.order - 0.1

    def before_batch(self):
        self.x = self.learn.x.clone()


def test_epoch_0_is_clean_and_the_step_is_not_rescaled():
    learn = learner(n=32)
    r = fast.but(epochs=4, cooldown=0, eps_warmup=2, warmup=0)
    seen = {}

    class Get(Callback):
        order = 80

        def after_fit(self):
            seen.update(eps=self.watch.eps, alpha=self.watch.alpha, moved=self.watch.moved)

    learn.fit_recipe(r, cbs=[Watch(), Kept(), Get()])
    eps = np.array(seen['eps']).reshape(4, -1)
    assert np.allclose(eps, np.array([0, 0.05, 0.1, 0.1])[:, None]) and np.allclose(seen['alpha'], 0.15)
    moved = np.array(seen['moved']).reshape(4, -1)
    assert moved[0].max() == 0 and np.allclose(moved[1:], eps[1:], atol=1e-5)


def test_labels_are_smoothed_for_the_weights_alone():
    seen = {}

    class Get(Callback):
        order = 51

        def after_loss(self):
            if self.training and 'loss' not in seen:
                seen.update(
                    loss=self.loss.item(),
                    z=self.pred.detach().clone(),
                    y=self.y.clone(),
                    attack=self.adv_train.current(),
                )

    learn = learner()
    learn.fit_recipe(fast, epochs=1, cbs=Get())
    z, y = seen['z'].as_subclass(Tensor), seen['y'].as_subclass(Tensor)
    p = torch.full_like(z, 0.1 / 4).scatter(1, y[:, None], 0.9 + 0.1 / 4)
    assert (
        seen['loss'] == pytest.approx(-(p * z.log_softmax(1)).sum(1).mean().item(), rel=1e-5)
        and seen['attack'].loss is ce
    )


@pytest.mark.parametrize('steps,bn_clean,want', [(1, True, (3, 1)), (2, False, (3, 2))])
def test_cost_of_a_step_is_the_minimum(steps, bn_clean, want):
    m = Counted(tiny_xcit())
    learn = learner(model=m)
    learn.dls.loaders[1] = learn.dls.train

    class Stop(Callback):
        def before_validate(self):
            self.learn.got = m.forwards / 64, m.backwards / 64
            raise CancelFitException()

    learn.fit_recipe(fast.but(eps_warmup=0, steps=steps, bn_clean=bn_clean), epochs=1, cbs=Stop())
    assert learn.got == want


def test_batchnorm_sees_the_clean_images_only_if_asked():
    def stats(bn_clean):
        learn = learner(n=32)
        learn.fit_recipe(fast.but(eps_warmup=0, bn_clean=bn_clean), epochs=1)
        return next(o for o in learn.model.modules() if isinstance(o, nn.BatchNorm2d)).num_batches_tracked.item()

    assert (stats(True), stats(False)) == (4, 2)


# ---------------------------------------------------------------- augmentation
x8 = torch.rand(8, 3, 28, 28)


@pytest.mark.parametrize('kw', [DEIT, dict(pad=4, rotate=2.0, jitter=0.25)])
def test_augmented_images_stay_in_range(kw):
    seen = []

    class Get(Callback):
        order = -0.5

        def before_batch(self):
            seen.append(self.x.clone())

    r = fast.but(**{**dict(scale=(0.08, 1.0)), **kw, 'mixup': 0.0, 'cutmix': 0.0})
    learner(r, n=32).fit_recipe(r, epochs=1, cbs=Get())
    assert type(seen[0]).__name__ == 'TensorImageBW' and all(0 <= o.min() and o.max() <= 1 for o in seen)


def test_each_image_gets_its_own_draw():
    x = x8[:1].expand(8, -1, -1, -1)
    set_seed(0)
    for f in (
        lambda o: warp(o, xcit_recipe()),
        lambda o: color_jitter(o, 0.4),
        lambda o: rand_augment(o, DEIT['randaug']),
    ):
        seen = f(x)
        assert len({o.sum().item() for o in seen}) > 4 and 0 <= seen.min() and seen.max() <= 1


def test_jitter_rests_while_randaugment_is_on(monkeypatch):
    monkeypatch.setattr(xc, 'color_jitter', lambda *a: (_ for _ in ()).throw(AssertionError('jitter')))
    learner(n=16).fit_recipe(fast.but(jitter=0.4, randaug=DEIT['randaug']), epochs=1)
    with pytest.raises(AssertionError, match='jitter'):
        learner(n=16).fit_recipe(fast.but(jitter=0.4), epochs=1)


def test_validation_images_are_not_augmented():
    learn = learner(fast.but(scale=(0.08, 0.2)))
    x0 = torch.cat([b[0] for b in learn.dls.valid])
    seen = []

    class Get(Callback):
        order = 40

        def before_batch(self):
            if not self.training:
                seen.append(self.x.clone())

    learn.fit_recipe(fast.but(scale=(0.08, 0.2), jitter=0.4, erase=1.0), epochs=1, cbs=Get())
    assert torch.equal(torch.cat(seen), x0)


def test_a_repeated_batch_is_first_trained_on_as_it_is():
    seen = []

    class Get(Callback):
        order, run_valid = MixUp.order + 0.5, False

        def before_batch(self):
            seen.append(self.x.as_subclass(Tensor).clone())

    learn = learner(dls=synth_dls(64))
    own = torch.cat([b[0].as_subclass(Tensor) for b in learn.dls.train.new(shuffle=False, drop_last=False)])
    learn.fit_recipe(fast.but(repeats=3, erase=1.0), epochs=2, cbs=Get())
    assert len(seen) == 2 * 3 * (64 // learn.dls.bs)
    for first_one, *others in zip(seen[::3], seen[1::3], seen[2::3]):
        is_own = (first_one[:, None] == own).flatten(2).all(2)
        assert (is_own.sum(1) == 1).all() and is_own.sum() == is_own.any(0).sum()
        assert all(not torch.equal(o, first_one) for o in others) and not torch.equal(*others)
    assert not torch.equal(seen[0], seen[len(seen) // 2])  # the order of the second epoch is another one


def test_a_repeated_loader_still_crops_and_normalises_where_it_did(monkeypatch):
    own, cropped = warp, []
    monkeypatch.setattr(xc, 'warp', lambda x, r, crop=True: cropped.append(crop) or own(x, r, crop))
    dls = synth_dls(32)
    dls.train.after_item = Pipeline([RandomResizedCrop(28)])
    synth_learner(cbs=[RepeatBatches(2), Augment(fast)], dls=dls).fit(1)
    assert cropped and not any(cropped)
    assert replayed(dls.train, 2).after_batch is dls.train.after_batch


def test_two_ways_to_repeat_a_batch_are_refused():
    with pytest.raises(ValueError, match='FreeAT and RepeatBatches'):
        synth_learner(cbs=[RepeatBatches(2), FreeAT(FGSM(0.1), replay=2)]).fit(1)
    with pytest.raises(ValueError, match='>= 2'):
        RepeatBatches(1)


def test_mix_or_cut_does_both():
    kinds = set()

    class Get(Callback):
        order = 0.5

        def before_batch(self):
            kinds.add(self.mix_or_cut.lam.numel())

    learn = learner()
    lf = learn.loss_func
    learn.fit_recipe(fast.but(method='clean', mixup=0.8, cutmix=1.0), epochs=4, cbs=Get())
    assert kinds == {16, 1} and learn.loss_func is lf


LOSSES = dict(
    ignored=CrossEntropyLossFlat(ignore_index=0),
    torch_weights=nn.CrossEntropyLoss(torch.ones(4)),
    function=lambda z, y: F.cross_entropy(z, y),
)


@pytest.mark.parametrize('kind', LOSSES)
def test_a_loss_that_the_recipe_would_drop_is_refused(kind):
    learn = synth_learner(loss_func=LOSSES[kind])
    with pytest.raises(ValueError, match='plain cross-entropy'):
        learn.fit_recipe(fast, epochs=1)


# ---------------------------------------------------------------- held-out images and the best epoch
def fashion(**kw):
    return fashion_mnist(n_train=64, n_valid=32, bs=16, device='cpu', **kw)


def test_best_epoch_is_the_one_that_is_best_under_the_training_attack():
    learn = learner(fast.but(best='valid'))
    states, accs = [], []

    class Get(Callback):
        order = 70

        def after_epoch(self):
            states.append({k: v.clone() for k, v in self.model.state_dict().items()})

    learn.fit_recipe(fast.but(best='valid', held=0.25, lr=2e-2), epochs=5, cbs=Get())
    best = learn.best_epoch.accuracy.idxmax()
    assert len(learn.best_epoch) == 5 and all(
        torch.equal(v, states[best][k]) for k, v in learn.model.state_dict().items()
    )
    x, y = [torch.cat(o) for o in zip(*hold_out(learn.dls, 0.25)[1])]
    attack = fast.but(best='valid', held=0.25).attack
    acc = (predict(learn.model, attack(learn.model, x, y, seed=0)) == y).float().mean().item()
    assert acc == pytest.approx(learn.best_epoch.accuracy[best], abs=1e-6)


def test_no_held_out_image_is_trained_on():
    dls = synth_dls()
    held = {o.sum().item() for b in hold_out(dls)[1] for o in b[0]}
    seen = set()

    class Get(Callback):
        order = -5

        def before_batch(self):
            if self.training:
                seen.update(o.sum().item() for o in self.x)

    learn = learner(fast.but(best='valid'), dls=dls)
    for _ in range(2):
        learn.fit_recipe(fast.but(best='valid'), epochs=2, cbs=Get())
    assert len(held) == 6 and not held & seen and len(learn.dls.train.dataset) == 64


# ---------------------------------------------------------------- the Learner
def test_an_interrupt_leaves_the_learner_usable():
    learn = learner(fast.but(mixup=0.8, best='valid'))
    lf, train = learn.loss_func, learn.dls.train

    class Stop(Callback):
        order = 30

        def after_step(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn.fit_recipe(fast.but(mixup=0.8, best='valid'), epochs=2, cbs=Stop())
    assert learn.loss_func is lf and learn.dls.train is train
    learn.remove_cb(Stop)
    learn.fit_recipe(fast, epochs=1)


@pytest.mark.parametrize(
    'cbs,kw',
    [
        (lambda: [MixedPrecision(amp_mode=AMPMode.BF16)], dict(method='trades', mixup=0.0)),
        (lambda: [EMA(0.9), AWP(0.005), GradientAccumulation(32)], dict(mixup=0.8, cutmix=1.0)),
    ],
)
def test_composes_with_the_other_callbacks(cbs, kw):
    learn = learner(n=32)
    w0 = learn.model.head.weight.detach().clone()
    learn.fit_recipe(fast.but(eps=0.05, **kw), epochs=1, cbs=cbs())
    assert not torch.equal(w0, learn.model.head.weight) and all(
        torch.isfinite(p).all() for p in learn.model.parameters()
    )
    assert all(torch.isfinite(torch.tensor(v, dtype=torch.float)).all() for v in learn.recorder.values)


def test_looking_does_not_touch_the_rows():
    keep, effect = KeepBest(PGD(0.1, steps=1), None), AttackEffect(0.1, steps=(1,), many=2, n=8)
    learn = synth_learner(cbs=[keep, effect])
    learn.fit(2, 1e-3)
    rows = list(keep.rows), list(effect.rows)
    w = state_of(learn.model)[-1]
    learn.validate()
    learn.get_preds()
    learn.lr_find(show_plot=False, num_it=6)
    assert (keep.rows, effect.rows) == rows and len(rows[0]) == 2 and state_of(learn.model)[-1] == w
    learn.fit(1, 1e-3)
    assert len(keep.rows) == 1


def test_lr_find_after_an_interrupt_does_not_bring_old_weights_back():
    class Stop(Callback):
        order = 70

        def after_epoch(self):
            if self.epoch == 1:
                raise KeyboardInterrupt

    learn, stop = synth_learner(cbs=KeepBest(None, None)), Stop()
    with pytest.raises(KeyboardInterrupt):
        learn.fit(3, 1e-2, cbs=stop)
    learn.remove_cb(stop)
    nn.init.ones_(learn.model.model.head.weight)
    learn.lr_find(show_plot=False, num_it=4)
    assert (learn.model.model.head.weight == 1).all()


def test_freeze_is_kept():
    learn = learner(n=32, splitter=vit_splitter, train_bn=False)
    learn.freeze()
    w = learn.model.blocks[0].mlp.fc1.weight.detach().clone()
    h = learn.model.head.weight.detach().clone()
    learn.fit_recipe(fast, epochs=1)
    assert torch.equal(w, learn.model.blocks[0].mlp.fc1.weight) and not torch.equal(h, learn.model.head.weight)


def test_two_mixers_are_refused():
    with pytest.raises(ValueError, match='mixes images'):
        learner().fit_recipe(fast.but(mixup=0.8, cutmix=1.0), epochs=1, cbs=MixUp())


def test_two_schedules_are_refused_and_weight_decay_is_spared_once():
    from fastai.callback.schedule import ParamScheduler, SchedNo

    with pytest.raises(ValueError, match='schedule of the learning rate'):
        learner().fit_recipe(fast, epochs=1, cbs=ParamScheduler({'lr': SchedNo(1, 1)}))

    class Count(Callback):
        def before_train(self):
            self.n = sum(isinstance(c, NoDecay) for c in self.learn.cbs)

    learn = learner()
    learn.add_cbs([NoDecay(), count := Count()])
    learn.fit_recipe(fast.but(best='last'), epochs=1)
    assert count.n == 1


def test_the_best_epoch_counts_images_that_were_right_before():
    "An attack that repairs every image finds a model that is wrong on half of them half right"
    dls = synth_dls(16)
    y = torch.cat([b[1] for b in dls.valid]).as_subclass(Tensor)

    class Says(nn.Module):
        def forward(self, x):
            return F.one_hot((x.flatten(1).mean(1) > 2).long(), 4).float()  # always class 0

    right = xc._right(Says(), lambda m, x, y, seed=0: x, eval_batches(dls.valid))

    class Reads(nn.Module):
        def forward(self, x):
            return F.one_hot((4 * x.flatten(1)[:, 0]).long().clamp(0, 3), 4).float()

    def repair(model, x, y, seed=0):
        return torch.full_like(x, 0) + (y.view(-1, 1, 1, 1) + 0.5) / 4

    before = (predict(Reads(), torch.cat([b[0] for b in dls.valid]).as_subclass(Tensor)) == y).float().mean().item()
    assert (
        right == pytest.approx((y == 0).float().mean().item())
        and xc._right(Reads(), repair, eval_batches(dls.valid)) == pytest.approx(before)
        and before < 1
    )


def test_only_images_that_are_right_are_attacked():
    m = Counted(tiny_vit(num_classes=4))
    dls = synth_dls(64)
    batches = list(eval_batches(dls.valid))
    ok = xc._right(m, None, batches)
    n = m.forwards
    k = round(ok * n)
    m.forwards = m.backwards = 0
    xc._right(m, PGD(0.1, steps=2), batches)
    assert (n, 0 < k < n, m.backwards) == (16, True, 2 * k) and m.forwards <= n + 4 * k


def test_the_best_epoch_of_a_fit_that_starts_later():
    "The rows of an earlier fit do not count"
    learn, worst = synth_learner(cbs=KeepBest(None, None)), {}
    learn.fit(2, 1e-2)
    learn.keep_best.rows[0]['accuracy'] = 2.0
    learn.fit(4, 1e-3, start_epoch=2)
    assert [o['epoch'] for o in learn.keep_best.rows] == [2, 3] and learn.keep_best.best is None


class Killed(Exception):
    pass


class KillAfter(Callback):
    order = 90

    def __init__(self, n):
        self.n = n

    def after_epoch(self):
        if self.epoch == self.n:
            raise Killed('after an epoch')


def test_the_best_epoch_outlives_a_kill(tmp_path, monkeypatch):
    "The first epoch is the best, before and after the kill"
    r, accs = fast.but(best='test', cooldown=0, warmup=0, eps_warmup=0), iter([0.9, 0.5, 0.1, 0.9, 0.5, 0.1])
    monkeypatch.setattr(xc, '_right', lambda *a: next(accs))

    def new(at):
        learn = learner(r, n=32)
        learn.path = tmp_path / at
        learn.add_cbs([keep := KeepBest(None, None), SaveRun()])
        return learn, keep

    def train(learn, start=0, cbs=None):
        learn.fit_recipe(r, epochs=3, start_epoch=start, cbs=cbs)

    learn, keep = new('a')
    train(learn)
    want = state_of(learn.model)
    with pytest.raises(Killed):
        train(new('b')[0], cbs=KillAfter(1))
    learn, keep = new('b')
    assert learn.resume() == 2
    train(learn, 2)
    assert [o['accuracy'] for o in keep.rows] == [0.9, 0.5, 0.1] and state_of(learn.model) == want


def test_the_best_epoch_refuses_data_whose_classes_have_other_numbers():
    dls, other = fashion(), fashion()
    valid = other.valid
    names = list(dls.vocab)

    class Turned(GetAttr):
        _default = 'dl'

        def __init__(self, dl):
            self.dl, self.vocab = dl, names[::-1]

    with pytest.raises(ValueError, match='of the Learner, but class'):
        synth_learner(dls=dls, model=tiny_xcit(10), cbs=KeepBest(None, Turned(valid))).fit(1)
    synth_learner(dls=dls, model=tiny_xcit(10), cbs=KeepBest(None, valid)).fit(1)


def test_same_seed_same_weights():
    def w(seed):
        learn = learner(seed=seed)
        learn.fit_recipe(fast.but(mixup=0.8, scale=(0.3, 1.0), randaug=DEIT['randaug']), epochs=1)
        return learn.model.head.weight.detach()

    a, b, c = w(0), w(0), w(1)
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_normalised_data_is_refused():
    dls = fashion()
    dls.train.after_batch.add(Normalize.from_stats([0.5], [0.5], cuda=False))
    with pytest.raises(ValueError, match='Normalize'):
        learner(dls=dls, model=tiny_xcit(classes=10)).fit_recipe(fast, epochs=1)


def test_transformers_of_timm_get_patches_for_the_size():
    x = torch.rand(2, 1, 32, 32)
    model = lambda name, side: xcit_recipe(name, eps=4 / 255).but(drop_path=0.0).model(side, 5, 1).eval()
    vit, swin = 'vit_tiny_patch16_224', 'swin_tiny_patch4_window7_224'
    m = model(vit, 32)
    assert m(x).shape == (2, 5) and in_chans(m) == 1 and patch_grid(m, x) == (8, 8)
    # never larger than its own
    assert all(model(swin, side).patch_embed.patch_size == (4, 4) for side in (32, 224))


def test_a_resnet_trains_by_the_recipe():
    r = fast.but(size='resnet18')
    learn = quiet(r.learner(synth_dls(8, bs=4)))
    learn.dls.c = 4
    w = learn.model.fc.weight.detach().clone()
    learn.fit_recipe(epochs=1)
    assert not torch.equal(w, learn.model.fc.weight)


# ---------------------------------------------------------------- generated images
def items(n, v):
    return [(TensorImageBW(torch.full((1, 4, 4), v)), TensorCategory(i % 2)) for i in range(n)]


def loader(n, v, bs=8):
    return DataLoaders.from_dsets(items(n, v), items(4, v), bs=bs, device='cpu').train


def test_blend_fills_each_batch_from_both():
    b = Blend(loader(32, 0.1), loader(6, 0.9))
    bs = list(b)
    assert (
        len(b) == len(bs) == 8
        and all((o[0][:, 0, 0, 0] < 0.5).tolist() == [True] * 4 + [False] * 4 and len(o[1]) == 8 for o in bs)
        and b.bs == 8
    )
    assert [len(first(Blend(loader(32, 0.1), loader(8, 0.9), share))[0]) for share in (0.25, 0.75)] == [8, 8]
    with pytest.raises(ValueError, match='share'):
        Blend(loader(32, 0.1), loader(8, 0.9), 1.0)
    with pytest.raises(ValueError, match='do not fill'):
        Blend(loader(32, 0.1), loader(2, 0.9))


def test_blend_refuses_images_whose_numbers_mean_other_classes():
    real, made = synth_dls(32), synth_dls(32)
    real.train.vocab, made.train.vocab = ['ant', 'cat'], ['ant', 'bee', 'cat']
    with pytest.raises(ValueError, match='other classes'):
        Blend(real.train, made.train)


def test_blend_trains_and_holds_out_real_images_only():
    dls = synth_dls()
    made = synth_dls(seed=5)
    dls2 = DataLoaders(Blend(dls.train, made.train), dls.valid)
    dls2.vocab, dls2.c = dls.vocab, 4
    train, held = hold_out(dls2)
    assert isinstance(train, type(dls.train)) and len(held.dataset) == 6 and len(first(train)[0]) == 16
    learner(dls=dls2).fit_recipe(fast.but(best='valid'), epochs=1)


# ---------------------------------------------------------------- the experiments
tiny_plan = RunSettings(profile_for('xcit', 'smoke') | dict(n_train=64, n_valid=32, seeds=1))


def a_run(**changes):
    return next(t for t in trials_of('xcit.table4', tiny_plan)).key | changes


@pytest.fixture
def weights_here(tmp_path, monkeypatch):
    "Trained weights go to a folder of the test"
    monkeypatch.setattr(xc, '_weights', lambda how: tmp_path / f'{hash(str(how))}.safetensors')
    return tmp_path


def test_a_row_does_not_depend_on_what_was_drawn_before(weights_here):
    "Nor on whether the weights were found or trained"
    torch.rand(3)
    a = train_and_attack(**a_run())
    (kept,) = weights_here.iterdir()
    found = train_and_attack(**a_run())
    kept.unlink()
    set_seed(7)
    for b in (found, train_and_attack(**a_run())):
        assert a.numbers == b.numbers and a.images == b.images
        assert all((a.verdicts[k] == b.verdicts[k]).all() for k in a.verdicts)


def test_the_same_weights_serve_another_attack():
    assert xc._weights(a_run()) == xc._weights(a_run(attack='autoattack', n=500)) and xc._weights(
        a_run()
    ) != xc._weights(a_run(seed=1))


class ByHeart(nn.Module):
    "Right on the images that it knows, of the first class on all others"

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x.flatten(1), y

    def forward(self, x):
        far, i = (x.flatten(1)[:, None] - self.x).abs().amax(2).min(1)
        return F.one_hot(torch.where(far < 1e-6, self.y[i], 0), 10).float()


def test_known_images_are_told_from_new_ones(monkeypatch):
    how = a_run(n_train=64, n=32)
    dls = images_for(how)
    x, y = [torch.cat(o).as_subclass(Tensor) for o in zip(*dls.train.new(shuffle=False, drop_last=False))]
    monkeypatch.setattr(xc, 'trained', lambda how, dls: ByHeart(x, y))
    found = known_and_new(**how).numbers
    assert found['train'] == 100 and found['clean'] < 50


class Moved(nn.Module):
    "Right on images that were changed, wrong on those that were not: it reads the attack"

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def forward(self, x):
        found = (x.flatten(1)[:, None] - self.x.flatten(1)).abs().amax(2).argmin(1)
        moved = (x - self.x[found]).flatten(1).abs().amax(1) > 1e-4
        z = F.one_hot(self.y[found], 2).float()
        return torch.where(moved[:, None], z, 1 - z) + 0 * x.flatten(1).sum(1, keepdim=True)


def test_label_leaking_shows_as_a_leak_above_zero():
    x, y = torch.rand(8, 1, 4, 4), torch.arange(8) % 2
    found = attacked(Moved(x, y), types.SimpleNamespace(valid=(x, y), device='cpu'), a_run(eps=0.01))
    assert found.numbers['clean'] == 0 and found.numbers['leak'] == 100


# ---------------------------------------------------------------- analyses
lin = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))
torch.manual_seed(0)
lin[1].weight.data = torch.sign(torch.randn(3, 16))


def test_attack_effect_counts_what_is_missed():
    learn = learner(n=32)
    cb = AttackEffect(0.1, steps=(1, 2), many=10, n=16, every=2)
    learn.fit_recipe(fast, epochs=3, cbs=cb)
    assert cb.df.epoch.tolist() == [1, 1, 2, 2] and (cb.df.missed < 0.5).all() and cb.df.steps.tolist() == [1, 2, 1, 2]
    r = cb.rows[-1]
    x, y = [torch.cat(o)[:16].as_subclass(Tensor) for o in zip(*learn.dls.valid)]
    loss = lambda k: ce(learn.model(PGD(0.1, steps=k, alpha=0.15 / k)(learn.model.eval(), x, y)), y).mean().item()
    assert r['missed'] == pytest.approx((loss(10) - loss(2)) / loss(10), abs=1e-4)


def test_analyses_leave_the_images_alone():
    "Of a model that normalises its input where it stands"

    class InPlace(nn.Module):
        def forward(self, x):
            return lin(x.sub_(0.5).div_(0.5))

    x = torch.rand(4, 1, 4, 4)
    was, y = x.clone(), torch.tensor([0, 1, 2, 0])
    topk(InPlace(), x, y)
    assert torch.equal(x, was)


# ---------------------------------------------------------------- paper scale
def test_another_optimiser_comes_back_and_missing_generated_images_are_named():
    dls = fashion_mnist(n_train=64, n_valid=32, bs=32, batch_tfms=None)
    learn = Learner(dls, tiny_xcit(10), opt_func=SGD)
    r = xcit_recipe('n12', eps=0.1).but(best='last', by_epoch=False, extra=0.5)
    with learn.no_bar(), learn.no_logging(), pytest.warns(UserWarning, match='generated images'):
        learn.fit_recipe(r, epochs=1)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-3)
    assert type(learn.opt) is Optimizer


def test_topk_reads_soft_labels_as_reports_do():
    "By their largest class; columns of [B,1] labels are no soft labels"
    x = torch.eye(4)[:, :, None, None]
    model = nn.Flatten()
    soft = torch.tensor([[0.9, 0.1, 0, 0], [0.1, 0.9, 0, 0], [0, 0, 0.2, 0.8], [0, 0, 0.2, 0.8]])
    assert topk(model, x, soft) == topk(model, x, soft.argmax(1)[:, None]) == 0.75
