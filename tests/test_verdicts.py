"""Every attack class, in both norms: what it may depend on, what it must leave alone, what it refuses (R07, R08,
R10, R14-R17, R30)."""

import random, sys, warnings
import numpy as np, pytest, torch
from torch import nn
from fastai.vision.core import TensorImage
from robust_nbdev.adv_train import BernoulliFGSM
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.evaluate import predict
from robust_nbdev.test_utils import *

C, H, W = 4, 6, 7  # classes; images are not square
EPS = dict(Linf=0.1, L2=0.7)


class Pixels(nn.Module):
    "Sums of one pixel after the other: no image's output depends, by a bit, on the rest of the batch"

    def __init__(self, c=C, scale=4.0, seed=0):
        super().__init__()
        self.c, self.scale, self.seed = c, scale, seed

    def forward(self, x):
        w = (
            torch.randn(self.c, x[0].numel(), generator=torch.Generator().manual_seed(self.seed)).to(x.dtype)
            * self.scale
            / x[0].numel() ** 0.5
        )
        f = (x.flatten(1) - 0.5).tanh()
        o = torch.zeros(len(x), self.c, dtype=x.dtype)
        for j in range(f.shape[1]):
            o = o + f[:, j : j + 1] * w[:, j]
        return o


class Dense(nn.Module):
    "A small smooth network"

    def __init__(self, dtype=torch.float32, c=C, seed=0, k=1.0, shape=(1, H, W)):
        super().__init__()
        g, n = torch.Generator().manual_seed(seed), int(np.prod(shape))
        self.a, self.b, self.k = (
            nn.Parameter((torch.randn(16, n, generator=g) * 3 / n**0.5).to(dtype)),
            nn.Parameter(torch.randn(c, 16, generator=g).to(dtype)),
            k,
        )

    def forward(self, x):
        return ((x.flatten(1) - 0.5) @ self.a.T).tanh() @ self.b.T * self.k


def images(b, dtype=torch.float32, seed=0, shape=(1, H, W)):
    "Some pixels are exactly 0 or 1"
    return (torch.rand(b, *shape, generator=torch.Generator().manual_seed(seed)) * 1.4 - 0.2).clamp(0, 1).to(dtype)


def labels(b, c=C, seed=0):
    return torch.randint(0, c, (b,), generator=torch.Generator().manual_seed(seed + 1))


SUR = Dense(seed=5)
ZOO = dict(
    fgsm=lambda e, n: FGSM(e, norm=n),
    pgd=lambda e, n: PGD(e, norm=n, steps=3),
    bernoulli=lambda e, n: BernoulliFGSM(e, norm=n),
    pgd_restarts=lambda e, n: PGD(e, norm=n, steps=2, restarts=3),
    mifgsm=lambda e, n: MIFGSM(e, norm=n, steps=3),
    gama=lambda e, n: GAMAPGD(e, norm=n, steps=5),
    gama_clean=lambda e, n: GAMAPGD(e, norm=n, steps=5, ref='clean', restarts=2),
    gamafw=lambda e, n: GAMAFW(e, norm=n, steps=5),
    apgd=lambda e, n: APGD(e, norm=n, steps=6),
    apgdt=lambda e, n: APGDT(e, norm=n, steps=4, targets=2, restarts=2),
    square=lambda e, n: Square(e, norm=n, queries=12),
    fab=lambda e, n: FAB(e, norm=n, steps=4, targets=2, restarts=2),
    fab_u=lambda e, n: FAB(e, norm=n, steps=3, targets=0, restarts=2),
    auto=lambda e, n: AutoAttack(
        e,
        norm=n,
        attacks=[
            APGDT(e, norm=n, steps=3, targets=2),
            FAB(e, norm=n, steps=3, targets=2),
            Square(e, norm=n, queries=6),
        ],
    ),
    worst=lambda e, n: WorstCase([PGD(e, norm=n, steps=1, alpha=e / 9), Square(e, norm=n, queries=6)]),
    transfer=lambda e, n: Transfer(SUR, PGD(e, norm=n, steps=3)),
    apgd_kl=lambda e, n: APGD(e, norm=n, steps=4, loss=kl),
    pgd_feat=lambda e, n: PGD(e, norm=n, steps=3, loss=feat_cos),
    pgd_scaled=lambda e, n: PGD(e, norm=n, steps=3, loss=scaled_ce),
)
# one norm each; both where the norms have code of their own
TWO = ('apgd', 'fab', 'square', 'gamafw')
SOME = [(k, n) for i, k in enumerate(ZOO) for j, n in enumerate(EPS) if k in TWO or i % 2 == j]
each = pytest.mark.parametrize('kind,norm', SOME, ids=[f'{k}-{n}' for k, n in SOME])


def make(kind, norm, eps=None):
    return ZOO[kind](EPS[norm] if eps is None else eps, norm)


RAND = [k for k in ZOO if k not in ('fgsm', 'mifgsm')]
PACKAGE = ('square', 'fab', 'fab_u', 'auto', 'worst')  # computed in float32 at least in part
NO_LABELS = ('apgd_kl', 'pgd_feat')
NO_TARGET = ('apgdt', 'square', 'fab', 'fab_u', 'auto', 'worst', *NO_LABELS)
# one for each way in which a class runs
WAYS = ('pgd_restarts', 'apgd', 'gamafw', 'apgdt', 'square', 'fab', 'auto', 'worst')


def size(x_adv, x, norm):
    d = (x_adv.double() - x.double()).flatten(1)
    return d.abs().amax(1) if norm == 'Linf' else d.norm(dim=1)


def inside(x_adv, x, norm, eps, dtype=None):
    assert (
        x_adv.shape == x.shape
        and x_adv.dtype == x.dtype
        and x_adv.isfinite().all()
        and x_adv.min() >= 0
        and x_adv.max() <= 1
    )
    slack = 0 if x.dtype in (torch.float16, torch.bfloat16) and norm == 'Linf' else 1e-6
    assert size(x_adv, x, norm).max().item() <= eps + slack


def quiet(f):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return f()


# --- what the images depend on
# ----------------------------------------------------------------------------------------------


@each
def test_images_do_not_depend_on_batch_mates(kind, norm):
    m, a, x = Pixels(), make(kind, norm, (2 if kind in PACKAGE else 1) * EPS[norm]), images(5, seed=3)
    y = predict(m, x)
    if kind == 'transfer':
        object.__setattr__(a, 'surrogate', Pixels(seed=5))
    # without a seed each image has its own
    run = lambda i: a(m, x[i], y[i], **(dict(seed=11) if norm == 'Linf' else {}))
    whole = run(torch.arange(5))
    assert not torch.equal(whole, x)
    for p in (torch.tensor([3, 0, 4, 1, 1]), torch.tensor([2])):
        assert torch.equal(run(p), whole[p])


def test_random_restarts_of_fab_do_not_depend_on_batch_mates():
    "Where the first run finds nothing the random starts of the later ones decide"
    p = Pixels()
    m = lambda v: p((v * 30).sin() * 0.5 + 0.5)  # far from linear
    x = images(40, seed=3)
    y = predict(m, x)
    a = FAB(0.1, norm='L2', steps=1, targets=2, restarts=4)
    whole, i = a(m, x, y, seed=1), torch.arange(40).flip(0)
    assert not torch.equal(whole, a.but(restarts=1)(m, x, y, seed=1))
    assert torch.equal(a(m, x[i], y[i], seed=1)[i], whole) and torch.equal(
        torch.cat([a(m, x[j : j + 7], y[j : j + 7], seed=1) for j in range(0, 40, 7)]), whole
    )


@pytest.mark.parametrize('kind,norm', [(k, n) for k, n in SOME if k in ('apgdt', 'fab')])
def test_one_seed_per_image(kind, norm):
    "As an int64 tensor: each image keeps its own, whatever the batch"
    m, a, x, y, s = (
        Pixels(),
        make(kind, norm, (2 if kind in PACKAGE else 0.3) * EPS[norm]),
        images(5, seed=3),
        predict(Pixels(), images(5, seed=3)),
        torch.tensor([5, -1, 2**62, 0, 77]),
    )
    whole = a(m, x, y, seed=s)
    assert torch.equal(torch.cat([a(m, x[i : i + 1], y[i : i + 1], seed=s[i : i + 1]) for i in range(5)]), whole)


def test_square_has_one_seed_for_all():
    with pytest.raises(ValueError, match='one integer'):
        make('square', 'Linf')(Pixels(), images(5), labels(5), seed=torch.arange(5))


@each
def test_same_seed_same_images_and_another_seed_others(kind, norm):
    m, a, x = Dense(), make(kind, norm, (1 if kind in PACKAGE else 0.2) * EPS[norm]), images(6)
    y = predict(m, x)
    one = a(m, x, y, seed=1)
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert torch.equal(a(m, x, y, seed=1), one)
    # FAB's answer is the nearest point, wherever it starts
    if kind in RAND and not kind.startswith('fab'):
        assert not torch.equal(a(m, x, y, seed=2), one)


def test_global_random_state_is_left_by_the_package_as_a_whole():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    quiet(lambda: AutoAttack(0.01, attacks='apgd-ce', reference=True)(Dense(c=10), images(3), labels(3)))
    assert (
        torch.equal(torch.get_rng_state(), before[0])
        and (np.random.get_state()[1] == before[1]).all()
        and random.getstate() == before[2]
    )


# --- what they leave alone
# ---------------------------------------------------------------------------------------------------


def _net():
    m = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(80, C)).train()
    m[1].eval()
    m[0].bias.requires_grad_(False)
    m[4].weight.grad = torch.full_like(m[4].weight, 3.0)
    return m


@each
def test_model_and_random_state_are_left(kind, norm):
    m = _net()
    rng = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate(), sys.gettrace()
    seen, grad = [], m[4].weight.grad
    m[0].register_forward_hook(lambda *a: seen.append(m[2].training))
    m[4].register_full_backward_hook(lambda *a: None)
    state, buf = state_of(m), {k: v.clone() for k, v in m.state_dict().items()}
    x, y = images(3), labels(3)
    x0, y0 = x.clone(), y.clone()
    make(kind, norm)(m, x, y)
    assert (seen and not any(seen)) or kind == 'transfer'
    assert (
        state_of(m) == state
        and m[4].weight.grad is grad
        and (grad == 3).all()
        and all(torch.equal(v, buf[k]) for k, v in m.state_dict().items())
    )
    assert torch.equal(x, x0) and torch.equal(y, y0) and torch.equal(torch.get_rng_state(), rng[0])
    assert rng[1:] == (np.random.get_state()[1].tolist(), random.getstate(), sys.gettrace())


@pytest.mark.parametrize('kind', WAYS)
def test_everything_is_restored_after_an_exception(kind):
    m, x, n = _net(), images(3), []
    y = predict(m, x)
    a = make(kind, 'Linf', 0.02)
    with torch.random.fork_rng(devices=[]):
        h = m[3].register_forward_hook(lambda *a: n.append(1))
        quiet(lambda: a(m, x, y))
        h.remove()
    last = min(3, len(n))
    n.clear()

    def boom(*a):
        n.append(1)
        if len(n) == last:
            raise KeyboardInterrupt('stop')

    m[3].register_forward_hook(boom)
    before = state_of(m), sys.gettrace(), torch.get_rng_state().tolist()
    with torch.inference_mode():
        with pytest.raises(KeyboardInterrupt, match='stop'):
            a(m, x, y)
        assert torch.is_inference_mode_enabled()
    assert (state_of(m), sys.gettrace(), torch.get_rng_state().tolist()) == before


# --- the ball, eps 0, scopes, types
# ---------------------------------------------------------------------------------------------


@each
def test_inside_the_ball_and_of_the_same_type(kind, norm, dtype=torch.bfloat16):
    a, x = make(kind, norm), images(4, dtype, seed=2)
    if kind == 'transfer':
        object.__setattr__(a, 'surrogate', Dense(dtype, seed=5))
    x_adv = a(Dense(dtype), x.as_subclass(TensorImage), labels(4))
    assert type(x_adv) is TensorImage and not x_adv.requires_grad
    inside(x_adv.as_subclass(torch.Tensor), x, norm, EPS[norm])


@each
def test_eps_0_returns_the_input(kind, norm):
    x = images(3)
    assert torch.equal(make(kind, norm, 0)(Dense(), x, labels(3)), x)


@pytest.mark.parametrize('kind', [*WAYS, 'transfer'])
def test_works_in_inference_mode(kind):
    a, m, x, y = make(kind, 'Linf'), Dense(), images(3), labels(3)
    want = a(m, x, y)
    with torch.inference_mode():
        # clones are inference tensors there
        got = [a(m, x, y), a(m, x.clone(), y.clone())]
    assert all(torch.equal(o, want) for o in got)


# --- targets
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind,norm', [(k, n) for k, n in SOME if k in ('pgd', 'gama', 'gamafw', 'apgd', 'transfer')])
def test_targeted_reaches_more_targets(kind, norm):
    a, m, x = make(kind, norm, 3 * EPS[norm]), Dense(), images(24)
    if kind == 'transfer':
        object.__setattr__(a, 'surrogate', m)
    y = predict(m, x)
    t = (y + 1) % C
    x_adv = a(m, x, y, target=t, targeted=True)
    hit = (predict(m, x_adv) == t).float().mean()
    assert hit >= 0.25 and torch.equal(x_adv, a(m, x, target=t, targeted=True))
    inside(x_adv, x, norm, 3 * EPS[norm])


@pytest.mark.parametrize('kind', NO_TARGET)
def test_attacks_without_targets_say_so(kind):
    m, x = Dense(), images(3)
    y = predict(m, x)
    for kw in (dict(target=(y + 1) % C), dict(targeted=True), dict(target=(y + 1) % C, targeted=True)):
        with pytest.raises(ValueError, match='target'):
            make(kind, 'Linf')(m, x, y, **kw)


def test_targeted_cw_has_a_gradient_however_confident_the_model():
    m, x = Dense(k=50.0), images(24)
    y = predict(m, x)
    t = (y + 1) % C
    hit = lambda a: (predict(m, a(m, x, y, target=t, targeted=True)) == t).float().mean().item()
    assert hit(PGD(0.3, steps=20, loss=margin)) > 0.9 and hit(CWPGD(0.3, steps=20)) > 0.9


@pytest.mark.parametrize('how', ['random', 'likely', 'least', 'next'])
@pytest.mark.parametrize('c', [2, 6])
def test_chosen_targets(how, c, b=9):
    "Never the label, the last class included; by the definition; independent of the batch"
    m, x, y = Dense(c=c), images(b), labels(b, c)
    y[-1] = c - 1
    t = choose_target(m, x, y, how)
    assert t.dtype == torch.long and (t != y).all() and t.min() >= 0 and t.max() < c
    assert torch.equal(torch.cat([choose_target(m, x[i : i + 1], y[i : i + 1], how) for i in range(b)]), t)
    by = dict(likely=lambda z: z.argmax(1), least=lambda z: (-z).argmax(1), next=lambda z: (y + 1) % c)
    if how in by:
        others = m(x).detach().scatter(1, y[:, None], float('nan'))
        assert torch.equal(t, by[how](others.nan_to_num(-99 if how == 'likely' else 99)))


def test_random_targets_take_every_class_and_depend_on_the_seed():
    m, x, y = Dense(c=5), images(300), torch.zeros(300).long()
    n = torch.bincount(choose_target(m, x, y), minlength=5)
    assert n[0] == 0 and (n[1:] > 45).all() and (choose_target(m, x, y) != choose_target(m, x, y, seed=1)).any()
    with pytest.raises(ValueError, match='how must be'):
        choose_target(m, x, y, 'best')


# --- restarts, ensembles
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind,norm', [(k, n) for k, n in SOME if k in ('pgd', 'apgd', 'square')])
def test_restarts_find_more_and_lose_nothing(kind, norm):
    m, x = Dense(), images(100)
    y = predict(m, x)
    a = make(kind, norm, 0.4 * EPS[norm])
    a = a.but(restarts=1, **(dict(queries=6) if kind == 'square' else dict(steps=1)))
    one, many = [predict(m, o(m, x, y)) == y for o in (a, a.restart(6))]
    assert not (many & ~one).any() and many.sum() < one.sum()


def test_an_ensemble_is_its_members_one_after_the_other(e=0.025):
    m, x = Dense(), images(60)
    y = predict(m, x)
    mem = [PGD(e, steps=1, alpha=e / 9), APGD(e, steps=5), Square(e, queries=20), FAB(e, steps=5)]
    each = torch.stack([predict(m, a(m, x, y)) == y for a in mem])
    for a in (WorstCase(mem), AutoAttack(e, attacks=mem)):
        x_adv = a(m, x, y)
        assert torch.equal(predict(m, x_adv) == y, each.all(0)) and 0 < each.all(0).sum() < each[0].sum()
        assert torch.equal(x_adv[~each[0]], mem[0](m, x, y)[~each[0]])


def test_an_ensemble_has_one_radius_and_changes_it_as_a_whole():
    with pytest.raises(ValueError, match='threat model'):
        AutoAttack(0.1, attacks=[PGD(0.05)])
    assert all(a.eps == 0.05 for a in AutoAttack(0.1, attacks=[PGD(0.1), 'square']).but(eps=0.05).members(10))


# --- few classes, wrong calls
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('norm,c', [('Linf', 2), ('L2', 3)])
def test_every_attack_takes_few_classes_or_says_what_to_do(norm, c):
    m, x = Dense(c=c), images(12)
    y = predict(m, x)
    for kind in WAYS:
        a = make(kind, norm, 0.2 * EPS[norm])
        if c == 2 and kind in ('apgdt', 'auto'):
            with pytest.raises(ValueError, match='at least 3 classes'):
                a(m, x, y)
        else:
            inside(quiet(lambda: a(m, x, y)), x, norm, 0.2 * EPS[norm])
    std = AutoAttack(0.2 * EPS[norm], norm=norm).members(c)
    assert len(std) == 4 and std[2].targets == c - 1 and (c == 2 or std[1].targets == c - 1)


WRONG = dict(
    few_labels=(lambda x: x, [0, 1], '3 images need 3 labels'),
    negative=(lambda x: x, [0, 1, -1], '>= 0, got -1'),
    float_labels=(lambda x: x, torch.tensor([0.0, 1.0, 2.0]), 'use y.long'),
    fifth_class=(lambda x: x, [0, 1, C], '5 classes do not fit a model with 4'),
    no_labels=(lambda x: x, None, 'label'),
    out_of_range=(lambda x: x + 0.5, [0, 1, 2], r'\[0,1\]'),
    no_images=(lambda x: x[:0], [], 'B>=1'),
)


@pytest.mark.parametrize('kind', WAYS)
def test_wrong_calls_are_refused_in_words(kind):
    a, m, x = make(kind, 'Linf'), Dense(), images(3)
    for change, y, words in WRONG.values():
        with pytest.raises((ValueError, TypeError), match=words):
            a(m, change(x), y)
    with pytest.raises(TypeError, match='first argument|images must be'):
        a(x, m, labels(3))


# --- R07, R17: broken gradients
# ----------------------------------------------------------------------------------------------------------


class Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bad):
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        g[1, :, 0] = ctx.bad
        return g, None


@pytest.mark.parametrize('kind,norm', [(k, n) for k, n in SOME if k in ('pgd', 'mifgsm', 'gamafw', 'apgd', 'apgd_kl')])
def test_broken_gradients_give_one_warning_and_stay_with_their_image(kind, norm):
    bad = float('nan' if norm == 'Linf' else 'inf')
    p, x, y, a = Pixels(), images(3), labels(3), make(kind, norm, 0.02)
    m = lambda v: p(Break.apply(v, bad))
    with pytest.warns(UserWarning, match='1 of 3 images had gradients that are not finite') as rec:
        x_adv = a(m, x, y)
    assert len([r for r in rec if 'not finite' in str(r.message)]) == 1
    inside(x_adv, x, norm, 0.02)
    assert torch.equal(x_adv[[0, 2]], a(p, x, y)[[0, 2]])


class Flat(nn.Module):
    def forward(self, x):
        return torch.tensor([3.0, 1.0, 0.0, -1.0]).expand(len(x), -1) + 0 * x.flatten(1).sum(1, keepdim=True)


@each
def test_zero_gradients_leave_numbers(kind, norm):
    x, y = images(3), torch.zeros(3).long()
    inside(quiet(lambda: make(kind, norm)(Flat(), x, y)), x, norm, EPS[norm])


# --- R08: very confident models
# ------------------------------------------------------------------------------------------------------------


def test_margin_losses_break_what_cross_entropy_cannot(e=0.1):
    m, x = Dense(k=1e4), images(40)
    y = predict(m, x)
    left = lambda a: (predict(m, a(m, x, y)) == y).float().mean().item()
    stuck = left(PGD(e, rand=False))
    soft = (predict(Dense(), PGD(e, rand=False)(Dense(), x, y)) == y).float().mean().item()
    assert stuck > soft + 0.2
    losses = [PGD(e, loss=o) for o in (margin, dlr, scaled_ce, cw)]
    for a in (*losses, APGDT(e, steps=20, targets=3), FAB(e, steps=20)):
        assert left(a) <= soft + 0.1, a


# --- R33: larger radius, no fewer successes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind,norm', [(k, n) for k, n in SOME if k in ('mifgsm', 'gama', 'apgdt', 'square', 'fab')])
def test_a_larger_ball_breaks_more(kind, norm):
    m, x = Dense(), images(100)
    y = predict(m, x)
    acc = [(predict(m, make(kind, norm, k * EPS[norm])(m, x, y)) == y).float().mean().item() for k in (0, 0.2, 0.6, 3)]
    assert acc[0] == 1 and all(b <= a + 0.03 for a, b in zip(acc, acc[1:])) and acc[-1] < 0.4
