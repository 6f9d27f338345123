"The light recipe for XCiT: sizes, stem surgery, presets, training, ablations, analyses"

import json, os, re, signal, subprocess, sys, textwrap, time, types, warnings
from pathlib import Path
import pytest, timm, torch
import numpy as np
from torch import nn, Tensor
from torch.nn import functional as F
from fastai.vision.all import *
from fastai.callback.all import *
from timm.models.xcit import Xcit
from timm.scheduler import CosineLRScheduler
from robust_nbdev.core import *
from robust_nbdev.vit import *
from robust_nbdev.datasets import *
from robust_nbdev.attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.evaluate import *
from robust_nbdev.test_utils import *
from robust_nbdev import xcit_recipe as xc
from robust_nbdev.xcit_recipe import *
from robust_nbdev.datasets import RunSettings
from robust_nbdev.experiments import profile_for, trials_of

for _n in [o for o in globals() if o.startswith('test')]:
    del globals()[_n]  # fastcore's, which pytest would collect

ROOT = Path(__file__).resolve().parents[1]
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


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    'size,width,heads,params,flops',
    [
        ('n12', 128, 4, 3.05, None),
        ('s12', 384, 8, 26.25, 4.82),
        ('m12', 512, 8, 46, 8.54),
        ('l12', 768, 16, 104, 18.97),
    ],
)
def test_sizes_have_the_published_parameters_and_flops(size, width, heads, params, flops):
    with torch.device('meta'):
        m, x = timm.create_model(XCITS[size]).eval(), torch.empty(1, 3, 224, 224)
    assert (
        m.embed_dim == width
        and len(m.blocks) == 12
        and m.blocks[0].attn.num_heads == heads
        and len(m.cls_attn_blocks) == 2
    )
    assert abs(n_params(m) / params - 1) < 0.01
    if flops:
        assert abs(multiply_adds(m, x) / 1e9 / flops - 1) < 0.01


def test_cait_s12_of_the_thesis():
    with torch.device('meta'):
        m = timm.create_model('cait_s12_224').eval()
    assert abs(n_params(m) / 25.61 - 1) < 0.01 and len(m.blocks) == 12
    assert abs(multiply_adds(m, torch.empty(1, 3, 224, 224, device='meta')) / 4.76e9 - 1) < 0.01


@pytest.mark.parametrize('name', ['xcit_medium_12_p16_224', 'xcit_large_12_p16_224', 'cait_s12_224'])
def test_registered_models_behave_like_timms(name):
    with torch.device('meta'):
        m = timm.create_model(name, num_classes=7, in_chans=1)
    assert (
        m.get_classifier().out_features == 7 and in_chans(m) == 1 and 'mean' in m.pretrained_cfg and timm.is_model(name)
    )
    with pytest.raises(Exception, match='[Nn]o pretrained|pretrained'):
        timm.create_model(name, pretrained=True)


# ---------------------------------------------------------------- stem
def grid_of(m, x):
    return m.patch_embed(x)[1]


@pytest.mark.parametrize('patch', [4, 8, 16])
@pytest.mark.parametrize('side', [32, 64, 48])
def test_stem_surgery_gives_the_right_grid(patch, side):
    m = timm.create_model('xcit_nano_12_p16_224', num_classes=3, embed_dim=32, depth=1).eval()
    x = torch.rand(2, 3, side, side)
    w = {k: v.clone() for k, v in m.state_dict().items()}
    assert xcit_stem(m, patch) is m
    assert grid_of(m, x) == patch_grid(m, x) == (side // patch, side // patch)
    assert (
        m(x).shape == (2, 3)
        and m.patch_embed.num_patches == (224 // patch) ** 2
        and {o['reduction'] for o in m.feature_info} == {patch}
    )
    assert all(torch.equal(v, w[k]) for k, v in m.state_dict().items())


def test_stem_surgery_can_be_undone_and_leaves_the_model_as_it_was():
    m = timm.create_model('xcit_nano_12_p16_224', num_classes=3, embed_dim=32, depth=1).eval()
    x = torch.rand(1, 3, 64, 64)
    z = m(x)
    assert not torch.allclose(xcit_stem(m, 4)(x), z)
    assert torch.equal(xcit_stem(m, 16)(x), z)


def test_only_the_first_convolutions_change_their_stride():
    m = timm.create_model('xcit_nano_12_p16_224', embed_dim=32, depth=1)
    strides = lambda p: [c.stride[0] for c in xcit_stem(m, p).patch_embed.modules() if isinstance(c, nn.Conv2d)]
    assert [strides(p) for p in (16, 8, 4)] == [[2, 2, 2, 2], [1, 2, 2, 2], [1, 1, 2, 2]]


@pytest.mark.parametrize('patch', [3, 7, 32, 0, -4, '8', None])
def test_wrong_patch_size_is_an_error(patch):
    m = tiny_xcit()
    with pytest.raises(ValueError, match='convolutions, so patches'):
        xcit_stem(m, patch)
    assert grid_of(m, torch.rand(1, 1, 32, 32)) == (4, 4)


def test_a_stem_for_8_pixels_cannot_make_16():
    with pytest.raises(ValueError, match='got 16'):
        xcit_stem(tiny_xcit(), 16)


def test_stem_of_other_models_is_refused():
    with pytest.raises(TypeError, match='VisionTransformer'):
        xcit_stem(tiny_vit(), 4)


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
    (dict(size='n12', values='thesis'), {**PRE, **T, 'drop_path': 0.0}),
    (dict(size='n12', values='config'), {**PRE, **C, 'drop_path': 0.0}),
    (dict(size='m12', values='thesis'), {**PRE, **T}),
    (dict(size='m12', values='config'), {**PRE, **C}),
    (dict(size='l12', values='thesis'), {**PRE, **T}),
    (dict(size='l12', values='config'), {**PRE, **C, 'steps': 2, 'alpha': 3 / 255}),
    (dict(size='s12', eps=8 / 255, values='thesis'), {**PRE, **T, 'eps': 8 / 255, 'steps': 2, 'alpha': 6 / 255}),
    (dict(size='s12', eps=8 / 255, values='config'), {**PRE, **C, 'eps': 8 / 255, 'steps': 2, 'alpha': 6 / 255}),
    (
        dict(task='ablation', values='thesis'),
        {**PRE, **T, **DEIT, 'size': 'n12', 'wd': 0.05, 'eps_warmup': 0, 'drop_path': 0.0},
    ),
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
    (dict(task='cifar10_extra', values='config'), {**FT, **SMALL, 'epochs': 300, 'extra': 0.5}),
    (dict(task='highres', values='thesis'), HI),
    (dict(task='highres', values='config'), HI),
    (dict(task='highres_clean', values='thesis'), {**HI, **DEIT, 'method': 'clean', 'wd': 0.05}),
    (dict(task='highres_clean', values='config'), {**HI, **DEIT, 'method': 'clean', 'wd': 0.05}),
]


@pytest.mark.parametrize('args,want', TABLE, ids=[' '.join(map(str, a.values())) for a, _ in TABLE])
def test_presets_have_the_published_values(args, want):
    r = xcit_recipe(**args)
    got = {**asdict(r), 'alpha': r.attack.alpha, 'peak': r.peak_lr()}
    for k, v in want.items():
        assert got[k] == (pytest.approx(v, rel=2e-3) if isinstance(v, float) else v), k


def test_linear_rule_of_the_learning_rate():
    r = xcit_recipe('s12')
    assert (
        r.peak_lr(512) == pytest.approx(5e-4)
        and r.peak_lr(16384) == pytest.approx(1.6e-2)
        and r.peak_lr(8192) == pytest.approx(8e-3)
    )
    assert r.but(lr_rule='sqrt').peak_lr(2048) == pytest.approx(1e-3) and r.but(lr_rule='none').peak_lr(64) == 5e-4


def test_recipe_is_a_value():
    r = xcit_recipe('s12', eps=4 / 255)
    r2 = r.but(eps=8 / 255, steps=2)
    assert (
        hash(r.but(mean=[0.5], std=[0.5]))
        and r.but(mean=[0.5]).mean == (0.5,)
        and r == xcit_recipe('s12', eps=4 / 255)
        and r != r2
        and r.eps == 4 / 255
        and r2.attack.alpha == pytest.approx(6 / 255)
    )
    assert (
        '\n' not in repr(r)
        and all(o in repr(r) for o in ('s12', 'PGD(4/255, steps=1, alpha=6/255)', 'wd 0.5', '100+10', '0.0005'))
        and repr(r2) != repr(r)
    )
    with pytest.raises(Exception):
        r.eps = 1


@pytest.mark.parametrize(
    'kw,msg',
    [
        (dict(method='mart'), 'method'),
        (dict(best='train'), 'best'),
        (dict(lr_rule='x'), 'lr_rule'),
        (dict(eps=4), '255'),
        (dict(wd=-1), 'wd'),
        (dict(epochs=0, cooldown=0), 'epochs'),
        (dict(jitter=-0.1), 'jitter'),
        (dict(eps=L2(0.5)), 'Linf'),
        (dict(smoothing=1.5), 'smoothing'),
        (dict(flip=2), 'flip'),
        (dict(erase=-1), 'erase'),
        (dict(held=2), 'held'),
    ],
)
def test_bad_settings_say_so(kw, msg):
    with pytest.raises(ValueError, match=msg):
        xcit_recipe('s12').but(**kw)


@pytest.mark.parametrize('kw,msg', [(dict(task='imagenet21k'), 'task'), (dict(values='paper'), 'values')])
def test_bad_presets_say_so(kw, msg):
    with pytest.raises(ValueError, match=msg):
        xcit_recipe(**kw)


# ---------------------------------------------------------------- schedules and the attack
@pytest.mark.parametrize('values', ['thesis', 'config'])
def test_learning_rate_is_timms_schedule(values):
    r = xcit_recipe('s12', values=values)
    ref = CosineLRScheduler(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=5e-4),
        t_initial=100,
        lr_min=r.min_lr,
        warmup_t=r.warmup,
        warmup_lr_init=r.warmup_lr,
    )
    f = RecipeLR(r, r.peak_lr())
    for e in range(110):
        want = ref._get_lr(e)[0] if e < 100 else r.min_lr
        assert f(e / 110) == pytest.approx(want) and f((e + 0.999) / 110) == pytest.approx(want)


@pytest.mark.parametrize('rule,k', [('linear', 1 / 64), ('sqrt', 1 / 8), ('none', 1.0)])
def test_the_whole_schedule_follows_the_batch_size(rule, k):
    "So the cosine falls at any batch size"
    r = xcit_recipe('s12').but(lr_rule=rule)
    big, small = [[RecipeLR(r, r.peak_lr(bs))(e / 110) for e in range(110)] for bs in (512, 8)]
    assert small == pytest.approx([k * o for o in big]) and small[10] == max(small) > small[50] > small[-1]


class Rates(Callback):
    "The learning rate in each epoch"

    order = 80

    def before_fit(self):
        self.lrs = []

    def after_epoch(self):
        self.lrs.append(self.opt.hypers[0]['lr'])


def rates(bs, cbs=(), later=(), n=64):
    r = xcit_recipe('n12', eps=0.1).but(
        jitter=0.0,
        scale=(1, 1),
        ratio=(1, 1),
        flip=0.0,
        best='last',
        bs=32,
        lr_bs=32,
        epochs=3,
        cooldown=1,
        warmup=0,
        eps_warmup=0,
    )
    learn = learner(r, dls=synth_dls(n, bs=bs))
    learn.add_cbs(cbs)
    learn.fit_recipe(cbs=[look := Rates(), *later])
    return look.lrs


@pytest.mark.parametrize('where', ['learner', 'fit', 'class'])
def test_accumulated_batches_are_one_step(where):
    "Batches of 8 that make 32 train at the learning rate of 32, as they should at that of 40"
    acc = dict(
        learner=([GradientAccumulation(32)], ()),
        fit=((), [GradientAccumulation(32)]),
        **{'class': ((), [GradientAccumulation])},
    )[where]  # the class's default is 32
    assert rates(8, *acc) == pytest.approx(rates(32)) and rates(8) == pytest.approx([o / 4 for o in rates(32)])
    assert rates(8, [GradientAccumulation(33)]) == pytest.approx([o * 40 / 32 for o in rates(32)])
    assert rates(32, [GradientAccumulation(8)]) == pytest.approx(rates(32))


def test_eps_warms_up_once_per_epoch_from_zero():
    f = xcit_recipe('s12', eps=4 / 255).eps_schedule
    for e in range(110):
        assert f((e + 0.5) / 110) == pytest.approx(4 / 255 * min(1, e / 10))
    g = xcit_recipe('s12').but(by_epoch=False).eps_schedule
    assert g(5.5 / 110) == pytest.approx(2.2 / 255)


def test_in_epochs_keeps_proportions():
    r = xcit_recipe('s12').in_epochs(11)
    assert (r.total, r.epochs, r.cooldown, r.warmup, r.eps_warmup) == (
        11,
        pytest.approx(10),
        pytest.approx(1),
        pytest.approx(1),
        pytest.approx(1),
    ) and r.wd == 0.5


def test_attack_climbs_the_plain_label_and_the_mixed_one():
    r = xcit_recipe('s12')
    assert r.attack.loss is ce and r.but(mixup=0.8).attack.loss is None and r.but(method='trades').attack.loss is None


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


@pytest.mark.parametrize(
    'steps,bn_clean,want', [(1, True, (3, 1)), (1, False, (2, 1)), (2, True, (4, 2)), (2, False, (3, 2))]
)
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
        learn = learner()
        learn.fit_recipe(fast.but(eps_warmup=0, bn_clean=bn_clean), epochs=1)
        return next(o for o in learn.model.modules() if isinstance(o, nn.BatchNorm2d)).num_batches_tracked.item()

    assert (stats(True), stats(False)) == (8, 4)


def test_clean_pass_skips_models_without_batchnorm():
    m = Counted(tiny_vit(num_classes=4))
    learn = learner(model=m)
    learn.dls.loaders[1] = learn.dls.train

    class Stop(Callback):
        def before_validate(self):
            self.learn.got = m.forwards / 64
            raise CancelFitException()

    learn.fit_recipe(fast.but(eps_warmup=0), epochs=1, cbs=Stop())
    assert learn.got == 2


@pytest.mark.parametrize('method', ['adv', 'trades', 'clean'])
def test_three_objectives_learn(method):
    learn = learner(metrics=accuracy)
    learn.fit_recipe(fast.but(method=method, eps=0.05, lr=5e-3, smoothing=0.0), epochs=3)
    assert learn.recorder.values[-1][0] < learn.recorder.values[0][0]


# ---------------------------------------------------------------- augmentation
x8 = torch.rand(8, 3, 28, 28)


@pytest.mark.parametrize(
    'kw', [{}, DEIT, SMALL, dict(pad=4, rotate=2.0, jitter=0.25), dict(randaug=DEIT['randaug']), dict(erase=1.0)]
)
@pytest.mark.parametrize('chans', [1, 3])
def test_augmented_images_stay_in_range(kw, chans):
    seen = []

    class Get(Callback):
        order = -0.5

        def before_batch(self):
            seen.append(self.x.clone())

    if chans == 3:
        x = xc.warp(x8, xcit_recipe().but(**kw))
        assert x.shape == x8.shape and 0 <= x.min() and x.max() <= 1
        return
    learn = learner(fast.but(**{**dict(scale=(0.08, 1.0)), **kw}))
    learn.fit_recipe(fast.but(**{**dict(scale=(0.08, 1.0)), **kw, 'mixup': 0.0, 'cutmix': 0.0}), epochs=1, cbs=Get())
    assert type(seen[0]).__name__ == 'TensorImageBW' and all(0 <= o.min() and o.max() <= 1 for o in seen)


def test_warp_can_do_nothing_mirror_and_shift():
    r = xcit_recipe().but(scale=(1, 1), ratio=(1, 1), flip=0.0)
    assert torch.allclose(warp(x8, r), x8, atol=1e-5) and torch.allclose(
        warp(x8, r.but(flip=1.0)), x8.flip(-1), atol=1e-5
    )
    y = warp(x8, r.but(pad=3))
    torch.manual_seed(0)
    shifts = [
        (dy, dx)
        for dy in range(-3, 4)
        for dx in range(-3, 4)
        if torch.allclose(torch.roll(x8[0], (dy, dx), (1, 2))[:, 3:-3, 3:-3], y[0][:, 3:-3, 3:-3], atol=1e-4)
    ]
    assert len(shifts) == 1
    assert torch.allclose(warp(x8, r.but(scale=(0.08, 0.1)), crop=False), x8, atol=1e-5)


def test_each_image_gets_its_own_draw():
    x = x8[:1].expand(8, -1, -1, -1)
    set_seed(0)
    for f in (
        lambda o: warp(o, xcit_recipe()),
        lambda o: color_jitter(o, 0.4),
        lambda o: rand_augment(o, DEIT['randaug']),
    ):
        assert len({o.sum().item() for o in f(x)}) > 4


def test_jitter_rests_while_randaugment_is_on(monkeypatch):
    monkeypatch.setattr(xc, 'color_jitter', lambda *a: (_ for _ in ()).throw(AssertionError('jitter')))
    learner().fit_recipe(fast.but(jitter=0.4, randaug=DEIT['randaug']), epochs=1)
    with pytest.raises(AssertionError, match='jitter'):
        learner().fit_recipe(fast.but(jitter=0.4), epochs=1)


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


def test_mix_or_cut_does_both():
    kinds = set()

    class Get(Callback):
        order = 0.5

        def before_batch(self):
            kinds.add(self.mix_or_cut.lam.numel())

    learn = learner()
    lf = learn.loss_func
    learn.fit_recipe(fast.but(mixup=0.8, cutmix=1.0), epochs=4, cbs=Get())
    assert kinds == {16, 1} and learn.loss_func is lf


LOSSES = dict(
    weights=CrossEntropyLossFlat(weight=torch.tensor([100.0, 1, 1, 1])),
    ignored=CrossEntropyLossFlat(ignore_index=0),
    torch_weights=nn.CrossEntropyLoss(torch.ones(4)),
    sum=CrossEntropyLossFlat(reduction='sum'),
    focal=FocalLossFlat(),
    function=lambda z, y: F.cross_entropy(z, y),
)


@pytest.mark.parametrize('kind', LOSSES)
def test_a_loss_that_the_recipe_would_drop_is_refused(kind):
    learn = synth_learner(loss_func=LOSSES[kind])
    with pytest.raises(ValueError, match='plain cross-entropy'):
        learn.fit_recipe(fast, epochs=1)


@pytest.mark.parametrize(
    'loss', [CrossEntropyLossFlat(), CrossEntropyLossFlat(label_smoothing=0.1), nn.CrossEntropyLoss(), F.cross_entropy]
)
def test_plain_cross_entropy_is_the_loss_of_the_recipe(loss):
    synth_learner(loss_func=loss).fit_recipe(fast, epochs=1)


# ---------------------------------------------------------------- held-out images and the best epoch
def fashion(**kw):
    return fashion_mnist(n_train=64, n_valid=32, bs=16, device='cpu', **kw)


@pytest.mark.parametrize('make', [synth_dls, fashion, lambda: fashion(mode='RGB')])
def test_held_out_images_are_disjoint_fixed_and_plain(make):
    dls = make()
    train, held = hold_out(dls, 0.25)
    again = hold_out(make(), 0.25)[1]
    key = lambda dl: [o.sum().item() for b in dl.new(shuffle=False, drop_last=False) for o in b[0]]
    a, b = key(train), key(held)
    assert len(held.dataset) == 16 and len(train.dataset) == 48 and b == key(held) == key(again)
    plain = (
        {o.sum().item() for bt in dls.valid.new(dataset=dls.train.dataset) for o in bt[0]}
        if isinstance(dls.train.dataset, list)
        else None
    )
    if plain is not None:
        assert set(a) | set(b) == plain and not set(a) & set(b)
    assert first(train)[0].shape == first(dls.train)[0].shape and type(first(train)[0]) == type(first(dls.train)[0])


def test_hold_out_refuses_what_it_cannot_split():
    ds = [(torch.rand(1, 28, 28), torch.tensor(0))] * 8
    tdl = torch.utils.data.DataLoader(ds, batch_size=4)
    with pytest.raises(TypeError, match="best='test'"):
        hold_out(DataLoaders(tdl, tdl))
    with pytest.raises(ValueError, match='cannot be held out'):
        hold_out(synth_dls(), 0.0)


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


def test_the_thesis_rule_looks_at_the_test_images():
    learn = learner()
    learn.fit_recipe(fast.but(best='test'), epochs=2)
    x, y = [torch.cat(o) for o in zip(*learn.dls.valid)]
    a = fast.attack
    assert (predict(learn.model, a(learn.model, x, y, seed=0)) == y).float().mean().item() == pytest.approx(
        learn.best_epoch.accuracy.max(), abs=1e-6
    )


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
def test_fit_leaves_nothing_on_the_learner():
    learn = learner(metrics=accuracy)
    before = learn.loss_func, learn.opt_func, learn.dls.train, list(learn.cbs), learn.metrics
    hooks = state_of(learn.model)[2]
    learn.fit_recipe(fast.but(mixup=0.8, cutmix=1.0, best='valid'), epochs=2)
    after = learn.loss_func, learn.opt_func, learn.dls.train, list(learn.cbs), learn.metrics
    assert (
        all(a is b or a == b for a, b in zip(before[:2] + before[3:], after[:2] + after[3:]))
        and before[2] is after[2]
        and hooks == state_of(learn.model)[2]
    )


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
    for cb in list(learn.cbs):
        if type(cb).__name__ in (
            'Augment',
            'KeepBest',
            'Stop',
            'AdvTrain',
            'MixUp',
            'ParamScheduler',
            'NoDecay',
            'CleanPass',
        ):
            learn.remove_cb(cb)
    learn.fit_recipe(fast, epochs=1)


def test_contract_learner_then_another_recipe():
    r = xcit_recipe('n12', eps=4 / 255)
    pgd = PGD(4 / 255, steps=2)
    learn = quiet(r.learner(synth_dls(), model=tiny_xcit(), metrics=[accuracy, RobustAccuracy(pgd)]))
    learn.fit_recipe(r.but(eps=8 / 255, steps=2), epochs=1)
    assert learn.recorder.metric_names[-3:-1] == ['accuracy', 'pgd2_acc'] and learn.recipe is r


def test_fit_recipe_needs_a_recipe():
    with pytest.raises(TypeError, match='xcit_recipe'):
        synth_learner().fit_recipe()
    with pytest.raises(TypeError, match='xcit_recipe'):
        learner().fit_recipe('s12')


@pytest.mark.parametrize(
    'cbs',
    [
        lambda: [GradientAccumulation(32)],
        lambda: [EMA(0.9)],
        lambda: [AWP(0.005)],
        lambda: [CatchOverfit(PGD(steps=2))],
        lambda: [GradientClip(1.0)],
        lambda: [MixedPrecision(amp_mode=AMPMode.BF16)],
        lambda: [EMA(0.9), AWP(0.005), GradientAccumulation(32)],
    ],
)
@pytest.mark.parametrize('kw', [{}, dict(method='trades', mixup=0.0), dict(mixup=0.8, cutmix=1.0)])
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


def test_a_learner_of_another_optimiser_gets_adamw_for_the_fit():
    learn, eps = synth_learner(), []
    of = learn.opt_func
    learn.fit(1, 1e-3)

    class Look(Callback):
        def before_fit(self):
            eps.append(self.learn.opt.hypers[0]['eps'])

    learn.fit_recipe(fast, epochs=1, cbs=Look())
    assert eps == [1e-8] and learn.opt_func is of and learn.opt is None


@pytest.mark.parametrize('mixer', [MixUp, CutMix])
def test_two_mixers_are_refused(mixer):
    for r in (fast.but(mixup=0.8), fast.but(mixup=0.8, cutmix=1.0)):
        with pytest.raises(ValueError, match='mixes images'):
            learner().fit_recipe(r, epochs=1, cbs=mixer())
    learner().fit_recipe(fast, epochs=1, cbs=mixer())


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


@pytest.mark.parametrize('cb', [lambda: KeepBest(None, None), lambda: Augment(fast), lambda: CleanPass()])
def test_a_second_copy_beside_the_recipes_is_refused(cb):
    with pytest.raises(ValueError, match='two '):
        learner().fit_recipe(fast.but(best='test'), epochs=1, cbs=cb())


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


@pytest.mark.parametrize('fit', ['fit', 'fit_recipe'])
def test_the_best_epoch_outlives_a_kill(fit, tmp_path, monkeypatch):
    "The first epoch is the best, before and after the kill"
    r, accs = fast.but(best='test', cooldown=0, warmup=0, eps_warmup=0), iter([0.9, 0.5, 0.1, 0.9, 0.5, 0.1])
    monkeypatch.setattr(xc, '_right', lambda *a: next(accs))

    def new(at):
        learn = learner(r)
        learn.path = tmp_path / at
        learn.add_cbs([keep := KeepBest(None, None), SaveRun()])
        return learn, keep

    def train(learn, start=0, cbs=None):
        if fit == 'fit':
            learn.fit(3, 2e-3, start_epoch=start, cbs=cbs)
        else:
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


def test_the_best_epoch_says_that_it_knows_nothing_of_those_before():
    learn = synth_learner(cbs=KeepBest(None, None))
    with pytest.warns(UserWarning, match='nothing of the epochs before'):
        learn.fit(2, 1e-3, start_epoch=1)


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


def test_two_attacks_at_once_are_refused():
    with pytest.raises(ValueError, match='two AdvTrain'):
        learner().fit_recipe(fast, epochs=1, cbs=AdvTrain(FGSM(0.1)))


def test_same_seed_same_weights():
    def w(seed):
        learn = learner(seed=seed)
        learn.fit_recipe(fast.but(mixup=0.8, scale=(0.3, 1.0), randaug=DEIT['randaug']), epochs=1)
        return learn.model.head.weight.detach()

    a, b, c = w(0), w(0), w(1)
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_lr_find_and_export_work(tmp_path):
    learn = learner(path=tmp_path, dls=fashion(), model=tiny_xcit(classes=10))
    learn.fit_recipe(fast.but(best='valid'), epochs=1)
    learn.lr_find(show_plot=False, num_it=4)
    learn.export('r.pkl')
    z = learn.get_preds()[0]
    assert (tmp_path / 'r.pkl').stat().st_size < 2e6 and torch.equal(
        quiet(load_learner(tmp_path / 'r.pkl')).get_preds(dl=learn.dls.valid)[0], z
    )


def test_normalised_data_is_refused():
    dls = fashion()
    dls.train.after_batch.add(Normalize.from_stats([0.5], [0.5], cuda=False))
    with pytest.raises(ValueError, match='Normalize'):
        learner(dls=dls, model=tiny_xcit(classes=10)).fit_recipe(fast, epochs=1)


def test_weight_decay_spares_what_timm_spares():
    learn = learner()
    learn.fit_recipe(fast, epochs=1)
    no = no_decay_names(learn.model)
    for n, p in learn.model.named_parameters():
        assert (learn.opt.state[p].get('do_wd') is False) == (n in no)
    assert (
        learn.opt.hypers[0]['wd'] == 0.5
        and learn.opt.hypers[0]['eps'] == 1e-8
        and learn.opt.hypers[0]['sqr_mom'] == 0.999
        and any('temperature' in n for n in no)
    )


@pytest.mark.parametrize('side,patch', [(224, 16), (128, 16), (64, 8), (56, 8), (48, 4), (32, 4), (28, 4), (20, 4)])
def test_patch_for_a_side(side, patch):
    assert patch_for(side) == patch


def test_models_of_a_recipe():
    m = xcit_recipe('n12').model(32, 10, 3)
    assert isinstance(m, Xcit) and patch_grid(m, torch.rand(1, 3, 32, 32)) == (8, 8)  # raw pixels: no Normalized
    m = xcit_recipe('n12', task='cifar10').model(32, 10, 3)
    assert isinstance(m, Normalized) and m.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])
    m = xcit_recipe('n12').but(drop_path=0.1).model(32, 10, 1)
    assert any(type(o).__name__ == 'DropPath' for o in m.modules()) and in_chans(m) == 1
    assert not any(type(o).__name__ == 'DropPath' for o in xcit_recipe('n12').model(32, 10, 1).modules())


@pytest.mark.parametrize(
    'name',
    [
        'resnet18',
        'resnet50',
        'resnet18d',
        'convnext_atto',
        'vit_tiny_patch16_224',
        'swin_tiny_patch4_window7_224',
        'mobilenetv3_small_050',
        'vgg11',
    ],
)
def test_any_model_of_timm(name):
    r = xcit_recipe(name, eps=4 / 255).but(drop_path=0.0)
    x = torch.rand(2, 1, 32, 32)
    m = r.model(32, 5, 1).eval()
    assert m(x).shape == (2, 5) and in_chans(m) == 1
    if 'resnet' in name:
        assert m.forward_features(x).shape[2:] == (4, 4) and r.model(224, 5, 1).forward_features(
            torch.rand(1, 1, 224, 224)
        ).shape[2:] == (7, 7)
    if 'vit' in name:
        assert patch_grid(m, x) == (8, 8)
    if 'swin' in name:
        assert m.patch_embed.patch_size == (4, 4) and r.model(224, 5, 1).patch_embed.patch_size == (
            4,
            4,
        )  # never larger than its own


def test_a_model_without_drop_path_says_so():
    with pytest.raises(ValueError, match='has no drop path'):
        xcit_recipe('vgg11').but(drop_path=0.1).model(32)


def test_a_resnet_trains_by_the_recipe():
    r = fast.but(size='resnet18')
    learn = quiet(r.learner(synth_dls(32)))
    learn.dls.c = 4
    w = learn.model.fc.weight.detach().clone()
    learn.fit_recipe(epochs=1)
    assert not torch.equal(w, learn.model.fc.weight)


def test_learner_builds_the_model_for_the_data():
    learn = xcit_recipe('n12', eps=0.1).learner(fashion())
    assert (
        in_chans(learn.model) == 1
        and learn.model.head.out_features == 10
        and patch_grid(learn.model, torch.rand(1, 1, 28, 28)) == (7, 7)
    )


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
    learner(dls=dls2).fit_recipe(fast.but(best='valid'), epochs=2)


def test_gaussian_images_look_like_their_class():
    x = torch.cat([torch.rand(50, 1, 4, 4) * 0.1, 0.9 + torch.rand(50, 1, 4, 4) * 0.1])
    y = torch.tensor([0] * 50 + [1] * 50)
    g, t = gaussian_images(x, y, 21, k=3)
    assert (
        len(g) == len(t) == 21
        and 0 <= g.min()
        and g.max() <= 1
        and g[t == 0].mean() < 0.2
        and g[t == 1].mean() > 0.8
        and torch.equal(g, gaussian_images(x, y, 21, k=3)[0])
    )


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
    torch.rand(3)
    a = train_and_attack(**a_run())
    for f in weights_here.iterdir():
        f.unlink()
    set_seed(7)
    b = train_and_attack(**a_run())
    assert (
        a.numbers == b.numbers
        and all((a.verdicts[k] == b.verdicts[k]).all() for k in a.verdicts)
        and a.images == b.images
    )


def test_weights_that_were_found_give_the_row_of_those_that_were_trained(weights_here):
    a = train_and_attack(**a_run())
    changed = {f: f.stat().st_mtime_ns for f in weights_here.iterdir()}
    b = train_and_attack(**a_run())
    assert (
        a.numbers == b.numbers
        and changed == {f: f.stat().st_mtime_ns for f in weights_here.iterdir()}
        and len(changed) == 1
    )


def test_the_same_weights_serve_another_attack():
    assert xc._weights(a_run()) == xc._weights(a_run(attack='autoattack', n=500)) and xc._weights(
        a_run()
    ) != xc._weights(a_run(seed=1))


@pytest.mark.parametrize(
    'change,field,value',
    [
        (dict(augs='mixup erase'), 'erase', 0.25),
        (dict(wd=0.5), 'wd', 0.5),
        (dict(start=False), 'rand', False),
        (dict(train_steps=2), 'steps', 2),
        (dict(method='clean'), 'method', 'clean'),
        (dict(warm=0), 'eps_warmup', 0),
    ],
)
def test_a_key_becomes_a_recipe(change, field, value):
    assert getattr(recipe_of(a_run(**change)), field) == value and getattr(recipe_of(a_run()), field) != value


def test_the_basic_run_has_no_strong_augmentation():
    assert recipe_of(a_run()).augs == 'crop 0.8-1.2 flip 0.5'


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


def test_plot_of_rows_names_each_setting():
    df = pd.DataFrame(
        [
            dict(method=m, augs=a, clean=50.0, strong=20.0, seed=s)
            for m in ('adv', 'clean')
            for a in ('', 'mixup')
            for s in (0, 1)
        ]
    )
    ax = plot_rows(df, 'augs')
    assert [o.get_text() for o in ax.get_yticklabels()] == ['none', 'mixup'] and len(ax.get_legend().get_texts()) == 4
    plt.close('all')


# ---------------------------------------------------------------- analyses
lin = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))
torch.manual_seed(0)
lin[1].weight.data = torch.sign(torch.randn(3, 16))


def test_delta_image_has_both_signs_and_8_bits():
    x = torch.rand(4, 1, 4, 4) * 0.6 + 0.2
    x_adv = PGD(0.1, steps=3)(lin, x, torch.tensor([0, 1, 2, 0]))
    a, b = delta_image(x, x_adv, 0.1), delta_image(x, x_adv, 0.1, -1)
    assert (
        torch.allclose(a, ((x_adv - x) + 0.1) / 0.2, atol=1 / 255)
        and torch.allclose(a + b, torch.ones_like(a), atol=2 / 255)
        and torch.allclose(255 * a, (255 * a).round(), atol=1e-3)
    )
    assert (delta_image(x, x, 0.1) - 0.5).abs().max() < 1 / 255
    with pytest.raises(ValueError, match='sign'):
        delta_image(x, x, 0.1, 0)


def test_the_negative_of_an_attack_points_to_the_true_class():
    x, y = torch.full((3, 1, 4, 4), 0.5), torch.arange(3)
    t = semantic_table(dict(lin=lin), dict(lin=lin), x, y, PGD(0.1, steps=3, rand=False), ks=(1, 3))
    assert t['sign'].tolist() == ['+1', '-1'] and t['top-1'].tolist() == [0, 100] and t['top-3'].tolist() == [100, 100]


def test_class_images_reach_their_class():
    st = state_of(lin)
    t = torch.arange(3)
    for start in ('binary', 'uniform', 'grey'):
        im = class_images(lin, t, (1, 4, 4), steps=20, start=start)
        assert im.shape == (3, 1, 4, 4) and 0 <= im.min() and im.max() <= 1 and lin(im).argmax(1).tolist() == [0, 1, 2]
    assert (
        state_of(lin) == st
        and torch.equal(class_images(lin, t, (1, 4, 4), steps=3), class_images(lin, t, (1, 4, 4), steps=3))
        and not torch.equal(class_images(lin, t, (1, 4, 4), steps=0), class_images(lin, t, (1, 4, 4), steps=0, seed=1))
    )
    with pytest.raises(ValueError, match='start'):
        class_images(lin, t, (1, 4, 4), start='noise')


def test_attack_effect_counts_what_is_missed():
    learn = learner()
    cb = AttackEffect(0.1, steps=(1, 2), many=10, n=16, every=2)
    learn.fit_recipe(fast, epochs=3, cbs=cb)
    assert cb.df.epoch.tolist() == [1, 1, 2, 2] and (cb.df.missed < 0.5).all() and cb.df.steps.tolist() == [1, 2, 1, 2]
    r = cb.rows[-1]
    x, y = [torch.cat(o)[:16].as_subclass(Tensor) for o in zip(*learn.dls.valid)]
    loss = lambda k: ce(learn.model(PGD(0.1, steps=k, alpha=0.15 / k)(learn.model.eval(), x, y)), y).mean().item()
    assert r['missed'] == pytest.approx((loss(10) - loss(2)) / loss(10), abs=1e-4)


def test_attack_effect_takes_all_the_images_it_is_asked_for():
    "Also where they fill several batches, and from all classes of sorted data"
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tiny_vit(num_classes=4)

        def forward(self, x):
            if not self.training and not torch.is_grad_enabled():
                seen.append(len(x))
            return self.net(x)

    learn = synth_learner(model=Spy(), dls=synth_dls(128, bs=8), cbs=AttackEffect(0.1, steps=(1,), many=2, n=20))
    learn.fit(1)
    assert 20 in seen


def test_analyses_leave_the_images_alone():
    "Of a model that normalises its input where it stands"

    class InPlace(nn.Module):
        def forward(self, x):
            return lin(x.sub_(0.5).div_(0.5))

    x = torch.rand(4, 1, 4, 4)
    was, y = x.clone(), torch.tensor([0, 1, 2, 0])
    topk(InPlace(), x, y)
    assert torch.equal(x, was)


def test_restart_losses():
    x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 1])
    t = restart_losses(PGD(0.1, steps=4), lin, x, y, restarts=3)
    assert t.shape == (3, 4, 2) and (t[:, -1] >= t[:, 0] - 1e-6).all() and not torch.equal(t[0, 0], t[1, 0])


class OneStepOnly(nn.Module):
    "Wrong only on a ring half-way through the ball: one long step jumps over it"

    def forward(self, x):
        d = x.flatten(1).mean(1) - 0.5
        return torch.stack(
            [
                torch.ones_like(d),
                2 * torch.exp(-(((d - 0.05) / 0.02) ** 2)) + 0.3 * torch.exp(-(((d - 0.05) / 0.1) ** 2)),
            ],
            1,
        )


def test_one_step_check_finds_a_model_that_resists_only_one_step():
    x, y = torch.full((20, 1, 8, 8), 0.5), torch.zeros(20, dtype=torch.long)
    t = one_step_check(dict(jumped=OneStepOnly()), (x, y), 0.1, many=50)
    assert t['PGD-1'][0] > 90 and t['PGD-50'][0] < 10 and t['overfits one step'][0] == 'yes'
    assert (
        one_step_check(dict(lin=lin), (torch.rand(20, 1, 4, 4), torch.zeros(20, dtype=torch.long)), 0.1, many=5)[
            'overfits one step'
        ][0]
        == 'no'
    )


class Sorted(torch.utils.data.Dataset):
    "Sorted by class, and its labels cannot be read without its images"

    def __init__(self, classes=4, k=30):
        self.y = torch.arange(classes).repeat_interleave(k)
        self.x = torch.rand(len(self.y), 1, 4, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def test_one_step_check_hands_the_warnings_of_its_reports_on():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    dl = torch.utils.data.DataLoader(Sorted(), batch_size=10)
    with pytest.warns(UserWarning, match='mine: the 40 images are of 2 of 4 classes'):
        one_step_check(dict(mine=net), dl, 0.01, many=2, n=40)


def test_show_deltas_draws_a_row_per_model():
    fig = plt.figure()
    show_deltas(dict(a=lin, b=lin), torch.rand(3, 1, 4, 4), torch.arange(3), PGD(0.1, steps=1), fig=fig)
    assert len(fig.axes) == 9
    plt.close('all')


# ---------------------------------------------------------------- paper scale
@pytest.mark.slow
def test_xcit_s12_takes_one_recipe_step_and_one_apgd_step_at_224():
    r = xcit_recipe('s12', eps=4 / 255)
    items = [(TensorImage(torch.rand(3, 224, 224)), TensorCategory(i)) for i in range(2)]
    dls = DataLoaders.from_dsets(items, items, bs=2, device='cpu')
    dls.c = 1000
    learn = quiet(r.learner(dls))
    assert isinstance(learn.model, Xcit) and patch_grid(learn.model, torch.rand(1, 3, 224, 224)) == (14, 14)
    w = learn.model.head.weight.detach().clone()
    learn.fit_recipe(r.but(epochs=1, cooldown=0, warmup=0, eps_warmup=0, best='last'))
    assert not torch.equal(w, learn.model.head.weight) and np.isfinite(learn.recorder.values[-1]).all()
    x, y = learn.dls.valid.one_batch()
    x_adv = APGD(4 / 255, steps=1)(learn.model, x, y)
    assert (x_adv - x).abs().max() <= 4 / 255 + 1e-6 and x_adv.shape == x.shape


@pytest.mark.parametrize(
    'kw,says',
    [
        (dict(size='s13'), "got 's13'"),
        (dict(scale=(1, 0.5)), 'scale must be a pair'),
        (dict(pad=-1), 'pad must be a number >= 0'),
        (dict(beta=-1), 'beta must be a number >= 0'),
        (dict(bs=0), 'bs must be a number >= 1, got 0'),
        (dict(epochs='3'), "epochs must be a number >= 0, got '3'"),
        (dict(extra=2), 'extra must be a number between 0 and 1'),
    ],
)
def test_a_setting_out_of_range_is_named(kw, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        XcitRecipe(**kw)


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
