"""`attacks`: invariants over shapes, norms and types; exact optima; agreement with the reference code; cost and memory
(R05, R07, R11-R16, R22)."""

import copy, gc, random, warnings, weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from fastai.callback.schedule import *
import numpy as np, pytest, torch, torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from fastai.vision.core import TensorImage, TensorImageBW
from fastai.torch_core import TensorCategory
from timm.layers import DropPath
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.adv_train import like
from robust_nbdev.autoattack import *
from robust_nbdev.evaluate import predict, robust_report
from robust_nbdev.test_utils import *

C = 4  # classes


class Pixels(nn.Module):
    "Logits that are sums of one pixel after the other: no image's output depends, by a bit, on the rest of the batch"

    def __init__(self, c=C, scale=4.0, seed=0):
        super().__init__()
        self.c, self.scale, self.seed = c, scale, seed

    def forward(self, x):
        g = torch.Generator().manual_seed(self.seed)
        w = torch.randn(self.c, x[0].numel(), generator=g).to(x.dtype) * self.scale / x[0].numel() ** 0.5
        f = (x.flatten(1) - 0.5).tanh()
        o = torch.zeros(len(x), self.c, dtype=x.dtype)
        for j in range(f.shape[1]):
            o = o + f[:, j : j + 1] * w[:, j]
        return o


class Dense(nn.Module):
    "A small smooth network for any shape and type of image"

    def __init__(self, shape, dtype=torch.float32, c=C, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        n = int(np.prod(shape))
        self.a = nn.Parameter((torch.randn(16, n, generator=g) * 3 / n**0.5).to(dtype))
        self.b = nn.Parameter(torch.randn(c, 16, generator=g).to(dtype))

    def forward(self, x):
        return ((x.flatten(1) - 0.5) @ self.a.T).tanh() @ self.b.T


def images(b, c=1, h=6, w=6, dtype=torch.float32, seed=0):
    "With saturated pixels: some are exactly 0 or 1"
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(b, c, h, w, generator=g) * 1.4 - 0.2).clamp(0, 1).to(dtype)


def labels(b, c=C, seed=0):
    return torch.randint(0, c, (b,), generator=torch.Generator().manual_seed(seed + 1))


MAKE = dict(
    fgsm=FGSM,
    pgd=partial(PGD, steps=3),
    pgd_still=partial(PGD, steps=3, rand=False),
    apgd=partial(APGD, steps=6),
    pgd_restarts=partial(PGD, steps=2, restarts=3),
    apgd_restarts=partial(APGD, steps=4, restarts=2),
    pgd_dlr=partial(PGD, steps=3, loss=dlr),
    apgd_dlr=partial(APGD, steps=5, loss=dlr),
    pgd_margin=partial(PGD, steps=3, loss=margin),
    pgd_kl=partial(PGD, steps=3, loss=kl),
    apgd_kl=partial(APGD, steps=5, loss=kl),
)
EPS = dict(Linf=0.1, L2=0.7)
ALL = [(k, n) for k in MAKE for n in EPS]
each = pytest.mark.parametrize('kind,norm', ALL, ids=[f'{k}-{n}' for k, n in ALL])
norms = pytest.mark.parametrize('norm', list(EPS))


def make(kind, norm, eps=None):
    return MAKE[kind](EPS[norm] if eps is None else eps, norm=norm)


def size(x_adv, x, norm):
    d = (x_adv.double() - x.double()).flatten(1)
    return d.abs().amax(1) if norm == 'Linf' else d.norm(dim=1)


# float32 rounds x+d once: half a unit in the last place below 1 is 3e-8 a pixel. Half types are rounded towards x
ROUND = {torch.float64: 1e-15, torch.float32: 6e-8, torch.float16: 0.0, torch.bfloat16: 0.0}


def inside(x_adv, x, norm, eps):
    assert x_adv.shape == x.shape and x_adv.dtype == x.dtype
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    n = x[0].numel() ** 0.5 if norm == 'L2' else 1
    assert size(x_adv, x, norm).max().item() <= eps + ROUND[x.dtype] * n + 1e-7 * eps * (x.dtype == torch.float32) * (
        norm == 'L2'
    )


# --- invariants
# ---------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_inside_ball_and_range_and_types_kept(data):
    kind, norm = data.draw(st.sampled_from(ALL))
    dtype = data.draw(st.sampled_from(list(ROUND)))
    b, c = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3]))
    h, w = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    eps = data.draw(
        st.sampled_from([1e-3, 2 / 255, 8 / 255, 0.1, 0.5, 1.0] if norm == 'Linf' else [1e-3, 0.5, 1.0, 3.0])
    )
    cls = data.draw(st.sampled_from([torch.Tensor, TensorImage, TensorImageBW]))
    x, y = images(b, c, h, w, dtype, data.draw(st.integers(0, 99))).as_subclass(cls), labels(b)
    keep, m = x.clone(), Dense((c, h, w), dtype)
    x_adv = make(kind, norm, eps)(m, x, y, seed=data.draw(st.integers(-5, 2**40)))
    inside(x_adv, x, norm, eps)
    assert (
        type(x_adv) is cls
        and type(x) is cls
        and torch.equal(x, keep)
        and not x_adv.requires_grad
        and x_adv.grad_fn is None
    )


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 3]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(list(EPS)),
    st.sampled_from(['pgd', 'apgd', 'fgsm']),
    st.integers(0, 99),
)
def test_targeted_inside_ball(b, c, h, w, norm, kind, seed):
    x, y = images(b, c, h, w, seed=seed), labels(b, seed=seed)
    inside(make(kind, norm)(Dense((c, h, w)), x, y, target=(y + 1) % C, targeted=True), x, norm, EPS[norm])


@each
def test_nothing_changed_on_the_model(kind, norm):
    m = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, C)).train()
    m[1].eval()
    m[0].bias.requires_grad_(False)
    seen = []
    m[0].register_forward_hook(lambda *a: seen.append(1))
    m[4].register_forward_pre_hook(lambda *a: None)
    m[4].register_full_backward_hook(lambda *a: None)
    m[4].weight.grad = torch.full_like(m[4].weight, 3.0)
    kept = m[4].weight.grad
    state, buffers = state_of(m), {k: v.clone() for k, v in m.state_dict().items()}
    make(kind, norm)(m, images(3), labels(3))
    assert state_of(m) == state and seen
    assert all(torch.equal(v, buffers[k]) for k, v in m.state_dict().items())
    assert m[4].weight.grad is kept and (kept == 3).all()


@each
def test_input_labels_and_global_random_state_untouched(kind, norm):
    x, y = images(3), labels(3)
    x.requires_grad_()
    x.grad = torch.ones_like(x)
    x0, y0 = x.detach().clone(), y.clone()
    rng = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    make(kind, norm)(Dense((1, 6, 6)), x, y)
    assert torch.equal(x, x0) and torch.equal(y, y0) and (x.grad == 1).all() and x.requires_grad and x.is_leaf
    assert (
        torch.equal(torch.get_rng_state(), rng[0])
        and (np.random.get_state()[1] == rng[1]).all()
        and random.getstate() == rng[2]
    )


@each
@pytest.mark.parametrize('seeds', ['default', 'int', 'per_image'])
def test_batch_layout_changes_no_image(kind, norm, seeds):
    "Permuted, split, padded: bit for bit"
    m, a, x, y = Pixels(), make(kind, norm), images(5, 1, 3, 4, seed=3), labels(5)
    s = torch.tensor([5, -1, 2**62, 0, 77])

    def run(i):
        kw = {} if seeds == 'default' else dict(seed=11) if seeds == 'int' else dict(seed=s[i])
        return a(m, x[i], y[i], **kw)

    whole = run(torch.arange(5))
    p = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(run(p), whole[p])
    assert torch.equal(torch.cat([run(torch.tensor([i])) for i in range(5)]), whole)
    assert torch.equal(run(torch.tensor([1, 1, 1, 0, 2, 3, 4, 4]))[[3, 0, 4, 5, 6]], whole)
    assert torch.equal(torch.cat([run(torch.arange(2)), run(torch.arange(2, 5))]), whole)


@norms
@pytest.mark.parametrize('kind', ['pgd', 'apgd'])
def test_seed_changes_the_start_and_repeats(kind, norm):
    m, a, x, y = Dense((1, 6, 6)), make(kind, norm), images(3), labels(3)
    assert torch.equal(a(m, x, y, seed=1), a(m, x, y, seed=1))
    assert (a.but(steps=0)(m, x, y, seed=1) != a.but(steps=0)(m, x, y, seed=2)).flatten(1).any(1).all()


# --- R05: degenerate budgets
# --------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize('dtype', list(ROUND))
def test_eps_0_returns_the_input(kind, norm, dtype):
    x = images(3, dtype=dtype)
    assert torch.equal(make(kind, norm, 0)(Dense((1, 6, 6), dtype), x, labels(3)), x)


@norms
@pytest.mark.parametrize(
    'kw',
    [dict(steps=0, rand=False), dict(steps=5, alpha=0.0, rand=False), dict(steps=0, rand=False, restarts=3)],
    ids=['steps0', 'alpha0', 'restarts'],
)
def test_no_steps_or_no_length_returns_the_input(norm, kw):
    x = images(4)
    assert torch.equal(PGD(EPS[norm], norm=norm, **kw)(Dense((1, 6, 6)), x, labels(4)), x)


@norms
def test_no_steps_with_random_start_is_the_start_alone(norm):
    x, m = images(4) * 0.6 + 0.2, Dense((1, 6, 6))
    a = PGD(0.1, norm=norm, steps=0)
    want = x + a.ball.rand(x, image_seed(x))
    assert torch.allclose(a(m, x, labels(4)), want, atol=1e-7)
    assert torch.allclose(a.but(steps=5, alpha=0.0)(m, x, labels(4)), want, atol=1e-6)


@norms
def test_apgd_without_steps_stays_in_the_ball(norm):
    x = images(4)
    inside(APGD(EPS[norm], norm=norm, steps=0)(Dense((1, 6, 6)), x, labels(4)), x, norm, EPS[norm])


# --- R07: zero, tiny and broken gradients
# -------------------------------------------------------------------------------


class HalfFlat(nn.Module):
    "Constant output, hence an exactly zero gradient, for dark images"

    def __init__(self):
        super().__init__()
        self.m = Pixels()

    def forward(self, x):
        return self.m(x) * (x.detach().flatten(1).mean(1) > 0.5).to(x.dtype)[:, None]


@norms
@pytest.mark.parametrize('kind', ['fgsm', 'pgd', 'apgd', 'pgd_still'])
def test_zero_gradient_for_half_of_the_batch(kind, norm):
    x, y = torch.cat([images(3) * 0.2, images(3) * 0.2 + 0.8]), labels(6)
    m, a = HalfFlat(), make(kind, norm, 0.05)
    x_adv = a(m, x, y)
    assert x_adv.isfinite().all()
    inside(x_adv, x, norm, 0.05)
    assert torch.equal(x_adv[3:], a(m, x[3:], y[3:]))  # the others are as they would be alone
    if kind in ('fgsm', 'pgd_still'):
        assert torch.equal(x_adv[:3], x[:3])  # nowhere to go
    else:
        assert (size(x_adv, x, norm)[:3] > 0).all()  # the random start


class Scaled(nn.Module):
    "Raises the loss `k` times: same directions, tiny gradients"

    def __init__(self, k):
        super().__init__()
        self.k, self.w = k, Pixels()

    def forward(self, x):
        return self.w(x) * self.k


def _first(z, y):
    return z[:, 0] * 1.0


@norms
# 1e-9 and 1e-30: powers of two, so that scaling rounds nothing
@pytest.mark.parametrize('k', [2.0**-30, 2.0**-100])
@pytest.mark.parametrize('cls', [FGSM, partial(PGD, steps=4), partial(APGD, steps=8)], ids=['fgsm', 'pgd', 'apgd'])
def test_tiny_gradients_take_full_steps(norm, k, cls):
    x, y = images(4), labels(4)
    a = cls(EPS[norm], norm=norm, loss=_first)
    assert torch.allclose(a(Scaled(k), x, y), a(Scaled(1.0), x, y), atol=2e-7)
    assert (size(a(Scaled(k), x, y), x, norm) > 0.5 * EPS[norm]).all()


class Break(torch.autograd.Function):
    "The identity, whose gradient is not finite for images that are marked by a last pixel of 1"

    @staticmethod
    def forward(ctx, x, bad):
        ctx.mark, ctx.bad = x.flatten(1)[:, -1] == 1, bad
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        g[ctx.mark, :, 0] = ctx.bad
        return g, None


@norms
@pytest.mark.parametrize('bad', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('kind', ['fgsm', 'pgd_still', 'pgd', 'apgd'])
def test_one_broken_gradient_leaves_the_others_alone(kind, norm, bad):
    m, f = Pixels(), lambda x: m(Break.apply(x, bad))
    x, y, others = images(5) * 0.5 + 0.2, labels(5), torch.tensor([0, 1, 3, 4])
    x[2, 0, -1, -1] = 1.0
    a = make(kind, norm, 0.05)
    with pytest.warns(UserWarning, match='1 of 5 images had gradients that are not finite') as rec:
        x_adv = a(_stay(f), x, y)
    assert len(rec) == 1
    assert x_adv.isfinite().all()
    inside(x_adv, x, norm, 0.05)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert torch.equal(x_adv[others], a(_stay(f), x[others], y[others]))


def _stay(f):
    "The mark outlives the attack's steps: pixels from .95 up count as 1"
    return lambda x: f(torch.where(x >= 0.94, (x - x.detach()) + 1, x))


def test_output_that_ignores_the_input_is_reported_once():
    m = lambda x: torch.zeros(len(x), C)
    with pytest.warns(UserWarning, match='does not depend on its input') as rec:
        x_adv = PGD(0.1, steps=5)(m, images(2), labels(2))
    assert len(rec) == 1 and x_adv.isfinite().all()


# --- R11: labels
# ---------------------------------------------------------------------------------------------------------

Y = [0, 3, 1]
LABELS = dict(
    int32=torch.tensor(Y, dtype=torch.int32),
    uint8=torch.tensor(Y, dtype=torch.uint8),
    int16=torch.tensor(Y, dtype=torch.int16),
    numpy=np.array(Y),
    numpy32=np.array(Y, dtype=np.int32),
    list=Y,
    category=TensorCategory(torch.tensor(Y)),
    column=torch.tensor(Y)[:, None],
)


@pytest.mark.parametrize('kind', LABELS)
@pytest.mark.parametrize('attack', [PGD(0.1, steps=2), APGD(0.1, steps=3, loss=dlr), FGSM(0.1, loss=margin)], ids=repr)
def test_label_types(kind, attack):
    m, x = Dense((1, 6, 6)), images(3)
    assert torch.equal(attack(m, x, LABELS[kind]), attack(m, x, torch.tensor(Y)))


def test_scalar_label_for_a_single_image():
    m, x = Dense((1, 6, 6)), images(1)
    assert torch.equal(PGD(0.1)(m, x, torch.tensor(2)), PGD(0.1)(m, x, torch.tensor([2])))


def test_float_one_hot_is_a_soft_label_and_integer_one_hot_is_refused():
    m, x = Dense((1, 6, 6)), images(3)
    assert torch.allclose(
        PGD(0.1)(m, x, F.one_hot(torch.tensor(Y), C).float()), PGD(0.1)(m, x, torch.tensor(Y)), atol=1e-6
    )
    with pytest.raises(ValueError, match='one-hot labels as floats'):
        PGD(0.1)(m, x, F.one_hot(torch.tensor(Y), C))


@pytest.mark.parametrize('attack', [PGD(0.1, loss=margin), APGD(0.1, steps=3, loss=dlr)], ids=repr)
def test_soft_labels_with_a_margin_loss_are_refused_in_words(attack):
    with pytest.raises((TypeError, ValueError), match='soft|class numbers|\\[B\\]'):
        attack(Dense((1, 6, 6)), images(3), torch.full((3, C), 0.25))


@pytest.mark.parametrize(
    'y,err,words',
    [
        ([0, 1], ValueError, '3 images need 3 labels'),
        ([0, 1, C], ValueError, 'labels for 5 classes do not fit a model with 4'),
        ([0, 1, -1], ValueError, '>= 0, got -1'),
        (torch.tensor([0.0, 1.0, 2.0]), TypeError, 'use y.long'),
        (torch.ones(3, 7) / 7, ValueError, '7 classes'),
        (None, ValueError, 'needs labels'),
    ],
)
def test_wrong_labels_are_refused(y, err, words):
    with pytest.raises(err, match=words):
        PGD(0.1)(Dense((1, 6, 6)), images(3), y)


# --- R12: dtypes and memory layouts
# ---------------------------------------------------------------------------------------

LAYOUTS = dict(
    permuted=lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    channels_last=lambda x: x.contiguous(memory_format=torch.channels_last),
    sliced=lambda x: torch.stack([x, x], -1)[..., 0],
    flipped_back=lambda x: x.flip(3).flip(3),
)


@each
@pytest.mark.parametrize('layout', LAYOUTS)
def test_memory_layout_changes_nothing(kind, norm, layout):
    m, x, y, a = Dense((3, 6, 5)), images(3, 3, 6, 5), labels(3), make(kind, norm)
    o = LAYOUTS[layout](x)
    assert torch.equal(o, x) and torch.equal(a(m, o, y), a(m, x, y))


@each
def test_expanded_batch(kind, norm):
    m, x, y, a = Dense((1, 6, 6)), images(1).expand(3, -1, -1, -1), torch.tensor([0, 1, 2]), make(kind, norm)
    assert x.stride(0) == 0 and torch.equal(a(m, x, y), a(m, x.contiguous(), y))


def test_channels_last_model_agrees():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 16, C)).double()
    x, y = images(3, 3, 6, 6, torch.float64), labels(3)
    want = PGD(0.1)(m, x, y)
    m = m.to(memory_format=torch.channels_last)
    assert torch.allclose(PGD(0.1)(m, x.contiguous(memory_format=torch.channels_last), y), want, atol=1e-9)


@norms
def test_float64_is_computed_in_float64(norm):
    seen = set()
    m = Dense((1, 6, 6), torch.float64)
    m.register_forward_pre_hook(lambda _, a: seen.add(a[0].dtype))
    x = images(3, dtype=torch.float64)
    x_adv = FGSM(1e-12, norm=norm)(m, x, labels(3))  # smaller than float32 can see
    assert seen == {torch.float64} and x_adv.dtype == torch.float64 and (size(x_adv, x, norm) > 0).all()
    inside(x_adv, x, norm, 1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_models_see_their_own_type(dtype):
    seen = set()
    m = Dense((1, 6, 6), dtype)
    m.register_forward_pre_hook(lambda _, a: seen.add(a[0].dtype))
    x = images(3, dtype=dtype)
    assert PGD(0.1)(m, x, labels(3)).dtype == dtype and seen == {dtype}


def test_numpy_numbers():
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    assert torch.equal(PGD(np.float64(0.1), steps=3)(m, x, y), PGD(0.1, steps=3)(m, x, y))
    assert torch.equal(PGD(0.1, steps=np.int64(3))(m, x, y), PGD(0.1, steps=3)(m, x, y))


# --- R13: odd outputs
# -----------------------------------------------------------------------------------------------------


class Out(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.m, self.f = Dense((1, 6, 6)), f

    def forward(self, x):
        return self.f(self.m(x))


class Obj:
    def __init__(self, z):
        self.logits = z


ODD = dict(
    tuple=(lambda z: (z, z), 0),
    dict=(lambda z: dict(logits=z), 'logits'),
    object=(Obj, 'logits'),
    list=(lambda z: [z, z], 1),
)


@pytest.mark.parametrize('kind', ODD)
@pytest.mark.parametrize('attack', [FGSM(0.1), PGD(0.1), APGD(0.1, steps=3)], ids=repr)
def test_odd_outputs_are_refused_or_picked(kind, attack):
    f, pick = ODD[kind]
    x, y = images(3), labels(3)
    with pytest.raises(TypeError, match='Logits\\(model, pick='):
        attack(Out(f), x, y)
    assert torch.equal(attack(Logits(Out(f), pick), x, y), attack(Dense((1, 6, 6)), x, y))


@pytest.mark.parametrize(
    'f',
    [lambda z: z[:, 0], lambda z: z[:1], lambda z: z[:, :, None], lambda z: z.sum()],
    ids=['1d', 'batch1', '3d', '0d'],
)
def test_outputs_that_are_no_logits(f):
    with pytest.raises(TypeError, match=r'expected logits \[3,C\]'):
        PGD(0.1)(Out(f), images(3), labels(3))


@pytest.mark.parametrize(
    'x,err,words',
    [
        (torch.full((2, 1, 6, 6), 1.02), ValueError, 'from 1.02 to 1.02'),
        (torch.full((2, 1, 6, 6), -0.1), ValueError, 'from -0.1'),
        (torch.ones(2, 1, 6, 6) * 255, ValueError, 'to 255'),
        (torch.ones(2, 1, 6, 6, dtype=torch.uint8), TypeError, 'uint8'),
        (torch.ones(0, 1, 6, 6), ValueError, 'B>=1'),
        (torch.full((2, 1, 6, 6), float('nan')), ValueError, 'nan'),
        (np.ones((2, 1, 6, 6), dtype=np.float32), TypeError, 'floating point tensor'),
    ],
)
def test_wrong_images_are_refused(x, err, words):
    for a in (FGSM(0.1), PGD(0.1), APGD(0.1)):
        with pytest.raises(err, match=words):
            a(Dense((1, 6, 6)), x, labels(len(x)))


def test_wrong_channels_are_refused():
    with pytest.raises(ValueError, match='takes 1 channel.*images have 3'):
        PGD(0.1)(tiny_vit(), images(2, 3, 28, 28), labels(2))


@pytest.mark.parametrize(
    'f,words',
    [
        (lambda: PGD(-0.1), '>= 0'),
        (lambda: PGD(8), '8/255'),
        (lambda: PGD(float('nan')), 'finite'),
        (lambda: PGD(float('inf'), norm='L2'), 'finite'),
        (lambda: PGD(0.1, norm='L1'), 'Linf'),
        (lambda: PGD(0.1, steps=-1), 'steps'),
        (lambda: PGD(0.1, steps=1.5), 'steps'),
        (lambda: PGD(0.1, restarts=0), 'restarts'),
        (lambda: PGD(0.1, alpha=-1.0), 'alpha'),
    ],
)
def test_wrong_settings_are_refused(f, words):
    with pytest.raises(ValueError, match=words):
        f()


def test_a_target_is_enough_and_is_not_the_label():
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    t = (y + 1) % C
    assert torch.equal(PGD(0.1)(m, x, y, target=t), PGD(0.1)(m, x, y, target=t, targeted=True))
    with pytest.raises(ValueError, match='needs labels to reach'):
        PGD(0.1)(m, x, y, targeted=True)
    with pytest.raises(ValueError, match='target equals the label'):
        PGD(0.1)(m, x, y, target=y, targeted=True)


@dataclass(frozen=True, repr=False)
class Uphill(AttackBase):
    "One step along the gradient, without a thought for modes, targets or kinds of labels"

    by: float = 0.1

    def make(self, model, x, y, target, seed):
        x = x.requires_grad_()
        (g,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), x)
        return (x + self.by * g.sign()).clamp(0, 1).detach()


def norm_and_dropout():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, C))


def test_a_make_of_ones_own_sees_the_model_in_evaluation_mode():
    m, x, y = norm_and_dropout().train(), images(3), labels(3)
    before = state_of(m)
    x_adv = Uphill()(m, x, y)
    assert state_of(m) == before and torch.equal(x_adv, Uphill()(m.eval(), x, y))


@pytest.mark.parametrize('kind', [torch.int32, torch.uint8, torch.float])
def test_a_make_of_ones_own_gets_labels_that_losses_take(kind):
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    given = nn.functional.one_hot(y, C).float() if kind is torch.float else y[:, None].to(kind)
    assert torch.equal(Uphill()(m, x, given), Uphill()(m, x, y))


def test_a_make_of_ones_own_gets_no_labels_of_other_images():
    with pytest.raises(ValueError, match='3 images need 3 labels'):
        Uphill()(Dense((1, 6, 6)), images(3), labels(2))


@pytest.mark.parametrize(
    'attack', [Uphill(), APGDT(0.1), Square(0.1), FAB(0.1), AutoAttack(0.1), WorstCase([Square(0.1)])], ids=repr
)
def test_a_target_that_nobody_would_look_at_is_refused(attack):
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    with pytest.raises(ValueError, match='takes no target'):
        attack(m, x, y, target=(y + 1) % C)


class Shortens(PGD):
    "Half of `eps`, then nothing more"

    def step_at(self, i):
        return torch.where(i == 0, self.eps / 2, 0.0)


def test_a_schedule_of_steps_is_one_method():
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    one = PGD(0.1, steps=1, alpha=0.05, rand=False)
    assert torch.equal(Shortens(0.1, steps=3, rand=False)(m, x, y), one(m, x, y))
    y = predict(m, x)
    reports = [robust_report(m, (x, y), [o]) for o in (Shortens(0.1, steps=3, rand=False), one)]
    assert len({o.rows[1]['accuracy'] for o in reports}) == 1


def test_an_attack_without_labels_looks_at_none():
    m, x = Dense((1, 6, 6)), images(3)
    a = PGD(0.1, steps=2, loss=kl)
    assert torch.equal(a(m, x, torch.full((3, 6, 6), -1)), a(m, x))


# --- R14: train mode
# ------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.c, self.bn, self.do, self.dp, self.l = (
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Dropout(0.5),
            DropPath(0.5),
            nn.Linear(64, C),
        )
        self.bn.running_mean.normal_()
        self.double()

    def forward(self, x):
        f = self.bn(self.c(x))
        return self.l(self.do(f + self.dp(f.tanh())).flatten(1))


@norms
@pytest.mark.parametrize('kind', ['fgsm', 'pgd', 'apgd'])
def test_train_mode_makes_no_difference(kind, norm):
    m = Noisy()
    m.train()
    m.bn.eval()
    x, y, a, modes = (
        images(64, dtype=torch.float64),
        labels(64),
        make(kind, norm, 0.02),
        [o.training for o in m.modules()],
    )
    outs = {bs: torch.cat([a(m, x[i : i + bs], y[i : i + bs]) for i in range(0, 64, bs)]) for bs in (1, 7, 64)}
    assert [o.training for o in m.modules()] == modes
    for bs in (1, 7):
        assert torch.allclose(outs[bs], outs[64], atol=1e-9)
    assert torch.allclose(a(m.eval(), x, y), outs[64], atol=1e-12)


# --- R15: no_grad, inference_mode, exceptions
# -----------------------------------------------------------------------------

SCOPES = dict(no_grad=torch.no_grad, inference=torch.inference_mode, grad=torch.enable_grad)


@pytest.mark.parametrize('scope', SCOPES)
@each
def test_works_in_every_grad_scope(kind, norm, scope):
    m, x, y, a = Dense((1, 6, 6)), images(3), labels(3), make(kind, norm)
    want = a(m, x, y)
    with SCOPES[scope]():
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        # clones are inference tensors there
        assert torch.equal(a(m, x, y), want) and torch.equal(a(m, x.clone(), y.clone()), want)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == state
    assert torch.is_grad_enabled()


@pytest.mark.parametrize('err', [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize('scope', SCOPES)
def test_everything_restored_after_an_exception(scope, err):
    m = nn.Sequential(nn.Flatten(), nn.Linear(36, C), nn.Dropout()).train()
    m[1].bias.requires_grad_(False)
    calls = []

    def boom(*a):
        calls.append(1)
        if len(calls) == 3:
            raise err('stop')

    m[1].register_forward_hook(boom)
    state = state_of(m)
    with SCOPES[scope]():
        grad = torch.is_grad_enabled()
        with pytest.raises(err, match='stop'):
            PGD(0.1, steps=5)(m, images(2), labels(2))
        assert torch.is_grad_enabled() == grad
    assert state_of(m) == state and m[1].weight.grad is None


# --- R16: graph, cost, memory
# -----------------------------------------------------------------------------------------------


def test_results_are_leaves_and_keep_no_graph():
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    kept, alive = [], []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z.clone())
            alive.append(weakref.ref(ctx))
            return z

        @staticmethod
        def backward(ctx, g):
            return g

    f = lambda x: Probe.apply(m(x))
    for a in (FGSM(0.1), PGD(0.1, steps=3), APGD(0.1, steps=5), PGD(0.1, steps=2, restarts=2)):
        kept.append(a(f, x, y))
    gc.collect()
    assert alive and all(o() is None for o in alive)
    assert all(o.is_leaf and not o.requires_grad and o.grad_fn is None for o in kept)


def cost(a, m, x, y, **kw):
    "Images sent forward, and images sent backward"
    n = dict(f=0, b=0)

    class Count(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, g):
            n['b'] += len(g)
            return g

    def f(x):
        n['f'] += len(x)
        return Count.apply(m(x))

    a(f, x, y, **kw)
    return n['f'] // len(x), n['b'] // len(x)


@norms
@pytest.mark.parametrize(
    'make,want',
    [
        (FGSM, (1, 1)),
        (partial(PGD, steps=7), (7, 7)),
        (partial(PGD, steps=0), (0, 0)),
        (partial(APGD, steps=9), (10, 9)),
        (partial(PGD, steps=3, loss=kl), (4, 3)),
        (partial(PGD, steps=3, restarts=2), (8, 6)),
        (partial(APGD, steps=4, restarts=2), (12, 8)),
    ],
    ids=['fgsm', 'pgd7', 'pgd0', 'apgd9', 'pgd3_kl', 'pgd3x2', 'apgd4x2'],
)
def test_number_of_passes(make, want, norm):
    assert cost(make(EPS[norm], norm=norm), Dense((1, 6, 6)), images(3), labels(3)) == want


def test_eps_0_costs_nothing():
    assert cost(PGD(0), Dense((1, 6, 6)), images(3), labels(3)) == (0, 0)


@each
def test_no_weight_gradient_is_computed(kind, norm):
    "Neither accumulated nor computed: no product of the weight's size in the backward pass"
    asked = []

    class Lin(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.T

        @staticmethod
        def backward(ctx, g):
            asked.append(ctx.needs_input_grad)
            x, w = ctx.saved_tensors
            return g @ w, (g.T @ x if ctx.needs_input_grad[1] else None)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(C, 36, generator=torch.Generator().manual_seed(0)))

        def forward(self, x):
            return Lin.apply((x.flatten(1) - 0.5).tanh(), self.w)

    m = M()
    m.w.register_hook(lambda g: pytest.fail('a weight received a gradient'))
    make(kind, norm)(m, images(3), labels(3))
    assert set(asked) == {(True, False)} and m.w.requires_grad and m.w.grad is None


@pytest.mark.parametrize('make', [PGD, APGD])
def test_memory_does_not_grow_with_steps(make):
    "The most bytes that autograd's saved tensors hold at one time"
    m, x, y = Dense((1, 6, 6)), images(8), labels(8)

    def peak(steps):
        now, top, live = [0], [0], {}

        class Held:
            def __init__(self, t):
                self.t = t
                now[0] += t.numel() * t.element_size()
                top[0] = max(top[0], now[0])

            def __del__(self):
                now[0] -= self.t.numel() * self.t.element_size()

        with torch.autograd.graph.saved_tensors_hooks(Held, lambda h: h.t):
            make(0.1, steps=steps)(m, x, y)
        gc.collect()
        return top[0], now[0]

    small, large = peak(3), peak(60)
    assert small[0] > 0 and large[0] == small[0] and small[1] == large[1] == 0


# --- R22: straight from fastai
# ------------------------------------------------------------------------------------------------


@each
def test_one_batch_straight_from_dls(kind, norm):
    dls, m = synth_dls(n=16, size=28, bs=8), tiny_vit(num_classes=4)
    x, y = dls.one_batch()
    x_adv = make(kind, norm)(m, x, y)
    assert type(x_adv) is type(x) is TensorImageBW and type(y) is TensorCategory
    inside(x_adv.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor), norm, EPS[norm])
    assert torch.equal(
        x_adv.as_subclass(torch.Tensor), make(kind, norm)(m, x.as_subclass(torch.Tensor), y.as_subclass(torch.Tensor))
    )


# --- exact optima on a linear model
# -------------------------------------------------------------------------------------------


class Linear2(nn.Module):
    "Two classes, z_1-z_0 = w.x"

    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        z = (x * self.w).flatten(1).sum(1)
        return torch.stack([torch.zeros_like(z), z], 1)


def project_l2(v, x, eps):
    "The exact maximiser of w.d over |d|<=eps and x+d in [0,1] has the form clip(t*w): find t"
    lo, hi = 0.0, 1e6
    for _ in range(200):
        t = (lo + hi) / 2
        if ((x + t * v).clamp(0, 1) - x).norm() <= eps:
            lo = t
        else:
            hi = t
    return (x + lo * v).clamp(0, 1)


LIN = [(k, n) for n in EPS for k in ('fgsm', 'pgd', 'apgd')]


@pytest.mark.parametrize('kind,norm', LIN)
def test_linear_model_without_clipping(kind, norm):
    w = torch.randn(1, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x, y, eps = (
        images(4, 1, 5, 5, torch.float64) * 0.2 + 0.4,
        torch.zeros(4, dtype=torch.long),
        dict(Linf=0.05, L2=0.3)[norm],
    )
    a = dict(
        fgsm=FGSM(eps, norm=norm),
        pgd=PGD(eps, norm=norm, steps=40, alpha=eps),
        apgd=APGD(eps, norm=norm, steps=100, loss=margin),
    )[kind]
    a = a.but(loss=margin)
    # z_1-z_0 is to fall; start below, so that nothing is fooled on the way
    if kind == 'apgd':
        y = torch.ones_like(y)
        w = -w
    m = Linear2(w)
    step = eps * (w.sign() if norm == 'Linf' else w / w.norm()) * (1 if kind != 'apgd' else -1)
    tol = dict(fgsm=1e-12, pgd=1e-3 * eps, apgd=1e-2 * eps)[kind] if norm == 'L2' else 1e-12
    # a loss without labels: no early return
    if kind == 'apgd':
        a = a.but(loss=_pull)
    got = a(m, x, y) if kind != 'apgd' else a(m, x, None)
    assert torch.allclose(got, x + step, atol=tol)


def _pull(z, y):
    return z[:, 0] - z[:, 1]


@pytest.mark.parametrize('norm', list(EPS))
def test_linear_model_with_clipping(norm):
    w = torch.randn(1, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x, m = images(4, 1, 5, 5, torch.float64), Linear2(w)
    if norm == 'Linf':
        for a in (
            FGSM(0.3, loss=margin),
            PGD(0.3, steps=20, loss=margin),
            APGD(0.3, steps=40, loss=lambda z, y: z[:, 1] - z[:, 0]),
        ):
            got = a(m, x, None if isinstance(a, APGD) else torch.zeros(4, dtype=torch.long))
            assert torch.allclose(got, (x + 0.3 * w.sign()).clamp(0, 1), atol=1e-12)
    else:
        want = torch.stack([project_l2(w, o, 0.7) for o in x])
        got = PGD(0.7, norm='L2', steps=1000, alpha=0.01, loss=margin)(m, x, torch.zeros(4, dtype=torch.long))
        gain = lambda o: ((o - x) * w).flatten(1).sum(1)
        assert (gain(got) >= 0.995 * gain(want)).all() and (gain(got) <= gain(want) + 1e-9).all()


@norms
def test_targeted_reaches_the_target(norm):
    m, x, y = Dense((1, 6, 6), c=3), images(20), labels(20, 3)
    t = (y + 1) % 3
    for a in (
        PGD(1.0 if norm == 'Linf' else 6.0, norm=norm, steps=40),
        APGD(1.0 if norm == 'Linf' else 6.0, norm=norm, steps=40),
    ):
        assert (predict(m, a(m, x, target=t, targeted=True)) == t).float().mean() >= 0.95


def test_targeted_needs_only_what_lowers_the_loss():
    m, x, y = Dense((1, 6, 6)), images(6), labels(6)
    t = (y + 1) % C
    start, end = ce(m(x), t), ce(m(FGSM(0.01)(m, x, y, target=t, targeted=True)), t)
    assert (end < start).all()


# --- losses by hand
# -------------------------------------------------------------------------------------------------------------


def test_losses_by_hand():
    z, y = torch.tensor([[3.0, 1.0, 2.0, 0.0], [1.0, 4.0, 2.0, 0.0], [2.0, 2.0, 2.0, 2.0]]), torch.tensor([0, 0, 0])
    assert torch.allclose(margin(z, y), torch.tensor([-1.0, 3.0, 0.0]))
    # (3-1); (4-1); three tied logits: finite
    assert torch.allclose(dlr(z, y)[:2], torch.tensor([-1 / 2, 3 / 3])) and dlr(z, y)[2].item() == 0
    assert torch.allclose(ce(z, y), -z.log_softmax(1)[:, 0])
    p, q = z.softmax(1), z.flip(1).softmax(1)
    assert torch.allclose(kl(z.flip(1), z), (p * (p / q).log()).sum(1), atol=1e-6)
    with pytest.raises(ValueError, match='at least 3 classes'):
        dlr(z[:, :2], y)


def test_apgd_checkpoints_of_the_paper():
    assert apgd_checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]  # Croce and Hein 2020


# --- on a model that has learned
# -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def trained():
    "A tiny ViT that has learned, float64, with 100 images of which it gets most right"
    dls = synth_dls(n=512, bs=32, seed=1)
    learn = synth_learner(dls=dls)
    learn.fit_one_cycle(6, 4e-3)
    dl = synth_dls(n=400, bs=100, seed=5).valid
    x, y = next(iter(dl.new(shuffle=False)))
    m = learn.model.eval().double()
    x, y = x.as_subclass(torch.Tensor).double()[:100], y.as_subclass(torch.Tensor)[:100]
    assert (predict(m, x) == y).float().mean() > 0.9
    return m, x, y


@norms
@pytest.mark.parametrize('kind', ['fgsm', 'pgd', 'apgd'])
def test_vit_verdicts_do_not_depend_on_the_batch(trained, kind, norm):
    m, x, y = trained
    m, x, a = copy.deepcopy(m).float(), x.float(), make(kind, norm, dict(Linf=0.05, L2=0.6)[norm])
    whole = predict(m, a(m, x, y)) == y
    assert 10 < whole.sum() < 90
    for bs in (1, 7):
        assert torch.equal(
            torch.cat([predict(m, a(m, x[i : i + bs], y[i : i + bs])) == y[i : i + bs] for i in range(0, 100, bs)]),
            whole,
        )


@norms
def test_pgd_is_the_textbook_loop(trained, norm):
    m, x, y = trained
    eps, steps = dict(Linf=0.05, L2=0.6)[norm], 7
    a = PGD(eps, norm=norm, steps=steps)
    alpha = 2.5 * eps / steps
    delta = a.but(steps=0)(m, x, y) - x  # the same start
    for _ in range(steps):
        delta = delta.detach().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(m(x + delta), y, reduction='sum'), delta)
        with torch.no_grad():
            if norm == 'Linf':
                delta = (delta + alpha * g.sign()).clamp(-eps, eps)
            else:
                delta = delta + alpha * g / g.flatten(1).norm(dim=1)[:, None, None, None]
                delta = delta * (eps / delta.flatten(1).norm(dim=1).clamp(min=eps))[:, None, None, None]
            delta = (x + delta).clamp(0, 1) - x
    assert torch.allclose(a(m, x, y), x + delta, atol=1e-6)


def plain_apgd(m, x, y, x0, eps, steps, norm):
    "Algorithm 1 of Croce and Hein (2020), one image at a time; returns the verdict and the best loss"

    def loss(o):
        z = m(o[None])
        return F.cross_entropy(z, y[None]), z.argmax(1) == y

    def grad(o):
        o = o.detach().requires_grad_()
        l, ok = loss(o)
        return torch.autograd.grad(l, o)[0], l.item(), ok.item()

    def proj(o):
        d = o - x
        d = d.clamp(-eps, eps) if norm == 'Linf' else d * min(1.0, eps / max(d.norm().item(), 1e-30))
        return (x + d).clamp(0, 1)

    unit = lambda g: g.sign() if norm == 'Linf' else g / (g.norm() + 1e-30)
    windows, p = [0], [0, 0.22]
    while p[-1] < 1:
        windows.append(int(np.ceil(p[-1] * steps - 1e-9)))
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    xs, old, step = x0, x0, 2 * eps
    g, f, ok = grad(xs)
    best, fbest, gbest = xs, f, g
    right, fs = ok, [f]
    halved_last, fbest_last = False, fbest
    for k in range(1, steps + 1):
        z = proj(xs + step * unit(g))
        new = z if k == 1 else proj(xs + 0.75 * (z - xs) + 0.25 * (xs - old))
        old, xs = xs, new
        g, f, ok = grad(xs)
        fs.append(f)
        right = right and ok
        if f > fbest:
            best, fbest, gbest = xs, f, g
        if k in windows[1:]:
            prev = windows[windows.index(k) - 1]
            rises = sum(fs[i] > fs[i - 1] for i in range(prev + 1, k + 1))
            halve = rises <= 0.75 * (k - prev) or (not halved_last and fbest_last >= fbest)
            if halve:
                step, xs, g = step / 2, best, gbest
            halved_last, fbest_last = halve, fbest
    return right, fbest


@pytest.mark.parametrize('norm,eps', [('Linf', 0.05), ('L2', 0.6)])
def test_apgd_is_the_published_algorithm(trained, norm, eps):
    m, x, y = [o[:16] if isinstance(o, torch.Tensor) else o for o in trained]
    # where the paper's checkpoints and the code's are the same
    a = APGD(eps, norm=norm, steps=100)
    x0 = x + a.start(None, x, image_seed(x))['d']
    want = [plain_apgd(m, x[i], y[i], x0[i], eps, 100, norm) for i in range(len(x))]
    x_adv = a(m, x, y)
    right = predict(m, x_adv) == y
    assert right.tolist() == [o[0] for o in want]
    # the test means something
    assert 0 < right.sum() < len(x)
    found = F.cross_entropy(m(x_adv), y, reduction='none')
    best = torch.tensor([o[1] for o in want], dtype=torch.float64)
    assert torch.allclose(found[right], best[right], rtol=1e-6)


@pytest.mark.parametrize(
    'norm,eps,loss', [('Linf', 0.05, 'ce'), ('Linf', 0.05, 'dlr'), ('L2', 0.6, 'ce'), ('L2', 0.6, 'dlr')]
)
def test_apgd_agrees_with_autoattack(trained, norm, eps, loss):
    aa = pytest.importorskip('pyautoattack.autopgd_base')
    m, x, y = trained
    a = APGD(eps, norm=norm, steps=30, loss=dict(ce=ce, dlr=dlr)[loss])
    x0 = x + a.start(None, x, image_seed(x))['d']
    ref = aa.APGDAttack(m, n_iter=30, norm=norm, n_restarts=1, eps=eps, loss=loss, device='cpu', seed=0)
    ref.init_hyperparam(x)
    _, _, _, adv = ref.attack_single_run(x, y, x_init=x0)
    ours, theirs = predict(m, a(m, x, y)) == y, predict(m, adv) == y
    assert (ours != theirs).sum() <= 1 and 0 < ours.sum() < 100


@norms
def test_restarts_never_lose(trained, norm):
    m, x, y = trained
    a = PGD(dict(Linf=0.06, L2=0.7)[norm], norm=norm, steps=1)
    one, five = predict(m, a(m, x, y)) == y, predict(m, a.restart(5)(m, x, y)) == y
    assert not (five & ~one).any()
    runs = [a(m, x, y, seed=image_seed(x))] + [a(m, x, y, seed=mix64(image_seed(x) + r)) for r in range(1, 5)]
    assert torch.equal(five, torch.stack([predict(m, o) == y for o in runs]).all(0)) and five.sum() < one.sum()


def test_apgd_loss_per_image_needed():
    with pytest.raises(ValueError, match='one number per image'):
        APGD(0.1, steps=3, loss=lambda z, y: F.cross_entropy(z, y))(Dense((1, 6, 6)), images(2), labels(2))


# --- values
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'a,words',
    [
        (PGD(4 / 255, steps=10), 'PGD(4/255, steps=10)'),
        (FGSM(4 / 255), 'FGSM(4/255)'),
        (PGD(0.5, norm='L2'), "PGD(0.5, norm='L2', steps=10)"),
        (APGD(4 / 255, loss=dlr), 'APGD(4/255, loss=dlr, steps=100)'),
        (PGD(4 / 255).restart(5), 'PGD(4/255, restarts=5, steps=10)'),
        (PGD(0.1).but(steps=50), 'PGD(0.1, steps=50)'),
        (PGD(L2(0.5)), "PGD(0.5, norm='L2', steps=10)"),
    ],
)
def test_one_line_repr(a, words):
    assert repr(a) == words


def test_attacks_are_values():
    assert PGD(0.1) == PGD(0.1) and PGD(0.1) != PGD(0.2) and hash(PGD(0.1)) == hash(PGD(0.1)) and PGD(0.1) != APGD(0.1)
    with pytest.raises(Exception):
        PGD(0.1).steps = 3
    import pickle

    assert pickle.loads(pickle.dumps(APGD(0.1, loss=dlr))) == APGD(0.1, loss=dlr) and len(pickle.dumps(PGD(0.1))) < 1000
    assert FGSM(0.1).but(eps=0.2) == FGSM(0.2)


# --- losses are values
# -------------------------------------------------------------------------------------------------------------


def test_a_partial_compares_with_what_its_function_compares_with():
    tokens = partial(feat_cos, axis=-1)
    assert as_loss(tokens).reference == 'clean' and as_loss(partial(ce, smoothing=0.1)).reference == 'label'
    m, x = Dense((1, 6, 6)), images(3)
    assert torch.equal(PGD(0.1, loss=partial(kl))(m, x), PGD(0.1, loss=kl)(m, x))


def test_a_plain_function_compares_with_labels():
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    assert torch.equal(PGD(0.1, loss=lambda z, y: margin(z, y))(m, x, y), PGD(0.1, loss=margin)(m, x, y))


def test_a_targeted_attack_lowers_the_targeted_form():
    m, x, t = Dense((1, 6, 6)), images(3), labels(3)
    same = Loss(lambda z, y: z.sum(1), targeted=lambda z, y: margin(z, y))
    assert torch.equal(PGD(0.1, loss=same)(m, x, target=t), PGD(0.1, loss=margin)(m, x, target=t))


@pytest.mark.parametrize('reference', ['features', 'both'])
def test_losses_of_block_features_are_refused(reference):
    with pytest.raises(ValueError, match='AAS'):
        PGD(0.1, loss=Loss(_first, reference))(Dense((1, 6, 6)), images(2), labels(2))


def test_losses_are_pickled_by_name():
    import pickle

    assert all(pickle.loads(pickle.dumps(o)) is o for o in (ce, cw, kl, feat_cos))
    with pytest.raises(ValueError, match='reference must be one of'):
        Loss(_first, 'labels')


# --- one loop
# ------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_an_attack_that_writes_its_own_run_does_not_go_in_steps():
    class Own(PGD):
        def run(self, obj, x, seed):
            return x

    assert PGD.in_steps and APGD.in_steps and not Own.in_steps
    x = images(3)
    assert torch.equal(Own(0.1)(Dense((1, 6, 6)), x, labels(3)), x)


class Ends:
    "Keeps the points where the last rounds end"

    def __init__(self):
        self.most = 0

    def seen(self, rows, d, v, z):
        self.most = max(self.most, len(rows))

    def ended(self, rows, over):
        self.end = rows.img.x + rows.state['d']
        return over & (rows.img.r + 1 >= rows.rounds)

    def result(self, rows, gone):
        return rows.img.pos[gone], self.end[gone]


def stream(a, m, x, y, bs, portion):
    """Positions and ends of images that are given to the loop in small portions; the most images that were in it at a
    time"""
    todo, keep = list(range(len(x))), Ends()

    def more(n):
        i = torch.tensor([todo.pop(0) for _ in range(min(n, portion, len(todo)))])
        return Rows(a, a.objective(m, x[i], y[i]), x[i], image_seed(x[i]), i) if len(i) else None

    pos, ends = map(torch.cat, zip(*drive(more, keep, bs)))
    return pos, ends, keep.most


@pytest.mark.parametrize(
    'a', [PGD(0.1, steps=3), MIFGSM(0.7, norm='L2', steps=3), PGD(0.1, steps=2, restarts=3)], ids=repr
)
def test_images_that_come_and_go_end_where_a_call_ends(a):
    m, x, y = Pixels(), images(7), labels(7)
    pos, ends, most = stream(a, m, x, y, bs=4, portion=2)
    assert sorted(pos.tolist()) == list(range(7)) and most <= 4
    if a.restarts == 1:
        assert torch.equal(ends, a(m, x, y)[pos])


# --- found by a reviewer
# ----------------------------------------------------------------------------------------------------------


def test_clean_losses_know_no_target_and_need_a_start():
    m, x = tiny_vit(num_classes=4), torch.rand(2, 1, 28, 28)
    with pytest.raises(ValueError, match='no target'):
        PGD(0.1, loss=kl)(m, x, target=torch.tensor([0, 1]), targeted=True)
    for f in (lambda: FGSM(0.1, loss=kl), lambda: PGD(0.1, loss=kl, rand=False)):
        with pytest.raises(ValueError, match='start elsewhere'):
            f()


def test_units_of_alpha_and_words_for_losses():
    with pytest.raises(ValueError, match='2/255'):
        PGD(8 / 255, alpha=2)
    with pytest.raises(TypeError, match='such as ce'):
        PGD(0.1, loss='ce')
    with pytest.raises(TypeError, match='8/255'):
        PGD('8/255')


def test_scripted_models_and_folded_pixels():
    import timm

    m = torch.jit.script(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)))
    assert PGD(0.1, steps=2)(m, torch.rand(2, 3, 2, 2), torch.tensor([0, 1])).shape == (2, 3, 2, 2)
    assert in_chans(timm.create_model('tresnet_m', num_classes=3)) is None


def test_an_attack_without_a_step_says_so():
    from dataclasses import dataclass

    @dataclass(frozen=True, repr=False)
    class Idle(Attack):
        steps: int = 2

    m, x, y = tiny_vit(), torch.rand(2, 1, 28, 28), torch.tensor([0, 1])
    for run in (lambda: Idle(0.1)(m, x, y), lambda: robust_report(m, (x, y), [Idle(0.1)])):
        with pytest.raises(TypeError, match=r'Idle has no step of its own: give it update\('):
            run()


# --- Fast
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('compile', [False, True])
@pytest.mark.parametrize('how', ['exchanged', 'deep copy', 'replica'])
def test_fast_runs_the_model_that_it_holds(how, compile, monkeypatch):
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='eager'))
    torch.manual_seed(0)
    x = torch.rand(4, 2)
    f = Fast(nn.Linear(2, 3), dtype=None, compile=compile)
    was = f(x)
    g = copy.deepcopy(f) if how == 'deep copy' else copy.copy(f)
    g._modules = dict(g._modules)  # as torch.nn.parallel.replicate does it
    if how == 'deep copy':
        g.model.weight.data.zero_()
    else:
        g.model = nn.Linear(2, 3)
    assert torch.equal(g(x), g.model(x)) and not torch.equal(g(x), was) and torch.equal(f(x), was)


# --- a ball of one's own
# -----------------------------------------------------------------------------------------------------


class Ellipsoid(Linf):
    "Each pixel may move by its own radius: three times `eps` on the left half, `eps` on the right half"

    def project(self, x, delta):
        left = torch.arange(x.shape[-1]) < x.shape[-1] // 2
        radius = self.eps * (1 + 2 * left)
        return (x + torch.minimum(torch.maximum(delta, -radius), radius)).clamp(0, 1) - x


class UpperHalf(Linf):
    "Only the upper half of an image may change"

    def project(self, x, delta):
        rows = torch.arange(x.shape[-2])[:, None]
        return super().project(x, delta * (rows < x.shape[-2] // 2))


class ByEllipsoid(PGD):
    @property
    def ball(self):
        return Ellipsoid(self.eps)


class ByHalf(PGD):
    @property
    def ball(self):
        return UpperHalf(self.eps)


class Outside(ByHalf):
    "Promises to leave the lower half alone, and does not"

    def update(self, x, s, g, v, i):
        return {**s, 'd': Linf(self.eps).project(x, s['d'] + self.step_at(i) * self.ball.step(g))}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('attack', [ByEllipsoid(0.05), ByHalf(0.05), WorstCase([ByEllipsoid(0.05)])], ids=repr)
def test_an_attack_with_a_ball_of_its_own_stays_in_that_ball(attack, dtype):
    m, x, y = tiny_vit().to(dtype), torch.rand(3, 1, 28, 28).to(dtype), torch.tensor([0, 1, 2])
    assert check_result(attack(m, x, y), x, attack).shape == x.shape


def test_a_larger_ball_of_its_own_is_used_whole():
    x = torch.full((2, 1, 28, 28), 0.5)
    moved = (ByEllipsoid(0.05)(tiny_vit(), x, torch.tensor([0, 1])) - x).abs().amax((0, 1, 2))
    assert moved[:14].max() > 0.12 and moved[14:].max() < 0.0501


@pytest.mark.parametrize('attack', [Outside(0.05), WorstCase([Outside(0.05)])], ids=repr)
def test_an_attack_that_leaves_its_own_ball_is_refused(attack):
    with pytest.raises(ValueError, match='out of its ball UpperHalf'):
        attack(tiny_vit(), torch.full((2, 1, 28, 28), 0.5), torch.tensor([0, 1]))


def test_balls_of_two_kinds_are_two_threat_models():
    assert threat(ByHalf(0.05)) == ('UpperHalf', 0.05) != threat(PGD(0.05))
    assert WorstCase([ByHalf(0.05), ByHalf(0.05, steps=2)]).norm == 'UpperHalf'
    with pytest.raises(ValueError, match='different threat models'):
        WorstCase([PGD(0.05), ByHalf(0.05)])


def test_a_ball_of_its_own_moves_with_the_radius():
    assert ByHalf(0.1, alpha=0.05).at_eps(0.2).ball == UpperHalf(0.2)
    assert ByHalf(0.1, alpha=0.05).at_eps(0.2).alpha == 0.1


def test_a_report_names_its_own_ball_and_compares_it_with_no_norm():
    data = torch.rand(8, 1, 28, 28), torch.arange(8)
    df = robust_report(tiny_vit(), data, [PGD(0.05, steps=1), ByHalf(0.05, steps=1)]).df
    assert df.norm.tolist()[1:] == ['Linf', 'UpperHalf']  # one row each, and no worst case of both


def test_no_attack_is_moved_into_a_ball_that_it_does_not_know():
    with pytest.raises(ValueError, match='one kind of ball'):
        like(PGD(0.1, steps=5), ByHalf(0.05))
    assert like(ByHalf(0.1), ByHalf(0.05)).ball == UpperHalf(0.05)


def test_a_flag_is_no_number_of_steps():
    with pytest.raises(ValueError, match='steps must be a whole number >= 0, got True'):
        PGD(0.1, steps=True)


@dataclass(frozen=True, repr=False)
class InPlace(AttackBase):
    "Moves the images that it is given, and reverses the targets"

    by: float = 0.5
    norm, eps, takes_target = 'Linf', 0.03, True

    def make(self, model, x, y, target, seed):
        if target is not None:
            target.fill_(0)
        return x.add_(self.by).clamp_(0, 1)


def brightens(model, x, y, seed=0):
    return x.add_(0.5).clamp_(0, 1)


def test_a_make_that_works_in_place_is_checked_against_the_images_it_was_given():
    x = torch.full((2, 1, 4, 4), 0.4)
    with pytest.raises(ValueError, match=r'moved an image 0.47 out of its ball Linf\(0.03\)'):
        InPlace()(nn.Identity(), x)
    assert (InPlace(0.02)(nn.Identity(), x) - x).max() == pytest.approx(0.02) and x.unique().tolist() == [x[0, 0, 0, 0]]


def test_a_transferred_function_that_works_in_place_moves_no_image():
    x = torch.full((2, 1, 4, 4), 0.4)
    moved = Transfer(nn.Identity(), brightens)(nn.Identity(), x)
    assert (moved - x).min() == pytest.approx(0.5)


def test_a_make_that_writes_into_its_targets_changes_no_others():
    target = torch.tensor([1, 2])
    InPlace(0.02)(nn.Identity(), torch.rand(2, 1, 4, 4), target=target)
    assert target.tolist() == [1, 2]


class L1(Ball):
    "The sum of all moves"

    def size(self, delta):
        return delta.flatten(1).abs().sum(1)

    def project(self, x, delta):
        "By soft thresholding (Duchi et al., 2008)"
        d = delta.flatten(1)
        u = d.abs().sort(1, descending=True).values
        over = (u.cumsum(1) - self.eps) / torch.arange(1, u.shape[1] + 1)
        threshold = over.gather(1, (u > over).sum(1, keepdim=True) - 1).clamp(min=0)
        delta = (d.sign() * (d.abs() - threshold).clamp(min=0)).view_as(delta)
        return (x + delta).clamp(0, 1) - x


class L1NoSize(L1):
    "Where `project` is overridden, the size of a class above says nothing"

    def project(self, x, delta):
        delta = delta.clone()
        return super().project(x, delta)


def moved_by(ball, size, eps=12.0):
    "A result whose every pixel moves alike, `size` in all"
    x = torch.full((2, 3, 32, 32), 0.5)
    return check_result(x + size / 3072, x, SimpleNamespace(ball=ball(eps)))


@pytest.mark.parametrize('ball', [L1, L1NoSize])
@pytest.mark.parametrize('size', [12.5, 24, 48])
def test_a_sum_beyond_its_radius_is_refused_however_little_each_pixel_moves(ball, size):
    assert moved_by(ball, 11.999).shape == (2, 3, 32, 32)
    with pytest.raises(ValueError, match='out of its ball L1'):
        moved_by(ball, size)


class Erases(UpperHalf):
    "Projects the very tensor that it is given"

    def project(self, x, delta):
        delta[..., x.shape[-2] // 2 :, :] = 0
        return Linf.project(self, x, delta)


def test_a_projection_in_place_hides_no_move():
    with pytest.raises(ValueError, match='out of its ball Erases'):
        moved_by(Erases, 1, eps=0.1)


class Mixing(Linf):
    "A projection by a matrix: the upper half of the rows"

    def project(self, x, delta):
        keep = torch.diag((torch.arange(x.shape[-2]) < x.shape[-2] // 2).float())
        return super().project(x, keep @ delta.float())


def test_a_right_result_is_accepted_in_mixed_precision():
    x = torch.rand(2, 1, 28, 28)
    x_adv = x + Mixing(0.1).project(x, torch.rand_like(x) * 0.1)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(check_result(x_adv, x, SimpleNamespace(ball=Mixing(0.1))), x_adv)


class ScaledBall(Linf):
    def __init__(self, eps, w):
        super().__init__(eps * w)
        self.w = w


@dataclass(frozen=True, repr=False)
class ByScaled(PGD):
    w: int = 1

    @property
    def ball(self):
        return ScaledBall(self.eps / self.w, self.w)


def test_balls_of_two_settings_are_two_threat_models():
    a, b = ByScaled(0.1, w=1), ByScaled(0.1, w=2)
    assert threat(a) == ('ScaledBall(w=1)', 0.1) and threat(b) == ('ScaledBall(w=2)', 0.1)
    with pytest.raises(ValueError, match='different threat models'):
        WorstCase([a, b])
