"""`attacks`: invariants over shapes, norms and types; exact optima; agreement with the reference code; cost and memory
(R05, R07, R11-R16)."""

import copy, gc
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from fastai.callback.schedule import *
import pytest, torch, torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from fastai.vision.core import TensorImage, TensorImageBW
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.adv_train import like
from robust_nbdev.autoattack import *
from robust_nbdev.evaluate import predict, robust_report
from robust_nbdev.test_utils import *
import test_verdicts
from test_verdicts import Pixels, inside, labels, size

C = 4  # classes


def Dense(shape, dtype=torch.float32):
    return test_verdicts.Dense(dtype, shape=shape)


def images(b, c=1, h=6, w=6, dtype=torch.float32, seed=0):
    return test_verdicts.images(b, dtype, seed, (c, h, w))


MAKE = dict(
    fgsm=FGSM,
    pgd=partial(PGD, steps=3),
    pgd_restarts=partial(PGD, steps=2, restarts=3),
    apgd=partial(APGD, steps=6),
    apgd_dlr=partial(APGD, steps=5, loss=dlr),
    apgd_kl=partial(APGD, steps=5, loss=kl),
)
EPS = dict(Linf=0.1, L2=0.7)
ALL = [(k, n) for k in MAKE for n in EPS]
both = pytest.mark.parametrize('kind,norm', [('pgd', 'Linf'), ('apgd_kl', 'L2')])
norms = pytest.mark.parametrize('norm', list(EPS))


def make(kind, norm, eps=None):
    return MAKE[kind](EPS[norm] if eps is None else eps, norm=norm)


TYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16


# --- invariants
# ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_inside_ball_and_range_and_types_kept(data):
    kind, norm = data.draw(st.sampled_from(ALL))
    dtype = data.draw(st.sampled_from(TYPES))
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


# --- R05: degenerate budgets
# --------------------------------------------------------------------------------------------


@norms
def test_no_steps_or_no_length_is_the_start_alone(norm):
    x, y, m = images(4) * 0.6 + 0.2, labels(4), Dense((1, 6, 6))
    a = PGD(0.1, norm=norm, steps=0)
    want = x + a.ball.rand(x, image_seed(x))
    assert torch.allclose(a(m, x, y), want, atol=1e-7)
    assert torch.allclose(a.but(steps=5, alpha=0.0)(m, x, y), want, atol=1e-6)
    assert torch.equal(a.but(rand=False)(m, x, y), x)


# --- R07: zero, tiny and broken gradients
# -------------------------------------------------------------------------------


def _first(z, y):
    return z[:, 0] * 1.0


@norms
@pytest.mark.parametrize('cls', [partial(PGD, steps=4), partial(APGD, steps=8)], ids=['pgd', 'apgd'])
def test_tiny_gradients_take_full_steps(norm, cls, k=2.0**-100):
    "1e-30: a power of two, so that scaling rounds nothing"
    m, x, y = Pixels(), images(4), labels(4)
    a = cls(EPS[norm], norm=norm, loss=_first)
    got = a(lambda v: m(v) * k, x, y)
    assert torch.allclose(got, a(m, x, y), atol=2e-7) and (size(got, x, norm) > 0.5 * EPS[norm]).all()


def test_output_that_ignores_the_input_is_reported_once():
    m = lambda x: torch.zeros(len(x), C)
    with pytest.warns(UserWarning, match='does not depend on its input') as rec:
        x_adv = PGD(0.1, steps=5)(m, images(2), labels(2))
    assert len(rec) == 1 and x_adv.isfinite().all()


# --- R12: dtypes and memory layouts
# ---------------------------------------------------------------------------------------


@both
def test_memory_layout_changes_nothing(kind, norm):
    m, x, y, a = Dense((3, 6, 5)), images(1, 3, 6, 5).repeat(3, 1, 1, 1), labels(3), make(kind, norm)
    want = a(m, x, y)
    permuted = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    for o in (permuted, torch.stack([x, x], -1)[..., 0], x[:1].expand(3, -1, -1, -1)):
        assert torch.equal(o, x) and not o.is_contiguous() and torch.equal(a(m, o, y), want)


@norms
def test_float64_is_computed_in_float64(norm):
    seen = set()
    m = Dense((1, 6, 6), torch.float64)
    m.register_forward_pre_hook(lambda _, a: seen.add(a[0].dtype))
    x = images(3, dtype=torch.float64)
    x_adv = FGSM(1e-12, norm=norm)(m, x, labels(3))  # smaller than float32 can see
    moved = size(x_adv, x, norm)
    assert seen == {torch.float64} and x_adv.dtype == torch.float64 and 0 < moved.min() and moved.max() < 1.001e-12


# --- R13: odd outputs
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('f,pick', [(lambda z: [z, z], 1), (lambda z: dict(logits=z), 'logits')], ids=['list', 'dict'])
def test_odd_outputs_are_refused_or_picked(f, pick):
    m, attack, x, y = Dense((1, 6, 6)), APGD(0.1, steps=3), images(3), labels(3)
    odd = lambda v: f(m(v))
    with pytest.raises(TypeError, match='Logits\\(model, pick='):
        attack(odd, x, y)
    assert torch.equal(attack(Logits(odd, pick), x, y), attack(m, x, y))


@pytest.mark.parametrize(
    'f,words',
    [
        (lambda: PGD(0.1, steps=1.5), 'steps'),
        (lambda: MIFGSM(0.1, restarts=3), 'one and the same run: leave restarts out'),
        (lambda: FGSM(0.1).restart(2), 'one and the same run'),
        (lambda: PGD(0.1, steps=True), 'steps must be a whole number >= 0, got True'),
        (lambda: PGD(0.1, alpha=-1.0), 'alpha'),
        (lambda: PGD(8 / 255, alpha=2), '2/255'),
        (lambda: PGD('8/255'), '8/255'),
        (lambda: PGD(0.1, loss='ce'), 'such as ce'),
        (lambda: PGD(0.1, loss=kl, rand=False), 'start elsewhere'),
    ],
)
def test_wrong_settings_are_refused(f, words):
    with pytest.raises((ValueError, TypeError), match=words):
        f()


@dataclass(frozen=True, repr=False)
class Forgetful(MIFGSM):
    "Loses its momentum"

    def update(self, x, s, g, v, i):
        return dict(d=super().update(x, s, g, v, i)['d'])


@dataclass(frozen=True, repr=False)
class InPlace(MIFGSM):
    "Drops its momentum from the very dict that it got"

    def update(self, x, s, g, v, i):
        s = super().update(x, s, g, v, i)
        s.pop('m')
        return s


@dataclass(frozen=True, repr=False)
class NoReturn(MIFGSM):
    def update(self, x, s, g, v, i):
        super().update(x, s, g, v, i)


@pytest.mark.parametrize('kind', [Forgetful, InPlace, NoReturn])
def test_an_update_that_loses_a_part_of_the_state_is_refused(kind):
    with pytest.raises(ValueError, match=f'{kind.__name__}.update gave a state without'):
        kind(0.1, steps=2)(Dense((1, 6, 6)), images(3), labels(3))


def test_restarts_of_what_may_draw_elsewhere_are_not_refused():
    "An input that is changed at random in each step, as in DIM; a random model"
    assert Forgetful(0.1, restarts=2).restarts == MIFGSM(0.1, draws=2, restarts=2).restarts == 2


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


@pytest.mark.parametrize('kind', [torch.uint8, torch.float])
def test_a_make_of_ones_own_gets_labels_that_losses_take(kind):
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    given = nn.functional.one_hot(y, C).float() if kind is torch.float else y[:, None].to(kind)
    assert torch.equal(Uphill()(m, x, given), Uphill()(m, x, y))


def test_a_make_of_ones_own_gets_no_labels_of_other_images_and_no_target():
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    with pytest.raises(ValueError, match='3 images need 3 labels'):
        Uphill()(m, x, labels(2))
    with pytest.raises(ValueError, match='takes no target'):
        Uphill()(m, x, y, target=(y + 1) % C)


class Shortens(PGD):
    "Half of `eps`, then nothing more"

    def step_at(self, i):
        return torch.where(i == 0, self.eps / 2, 0.0)


def test_a_schedule_of_steps_is_one_method():
    m, x, y = Dense((1, 6, 6)), images(3), labels(3)
    one = PGD(0.1, steps=1, alpha=0.05, rand=False)
    assert torch.equal(Shortens(0.1, steps=3, rand=False)(m, x, y), one(m, x, y))


def test_an_attack_without_labels_looks_at_none():
    m, x = Dense((1, 6, 6)), images(3)
    a = PGD(0.1, steps=2, loss=kl)
    assert torch.equal(a(m, x, torch.full((3, 6, 6), -1)), a(m, x))


# --- R16: graph, cost, memory
# -----------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_steps():
    "The most bytes that autograd's saved tensors hold at one time"
    m, x, y = Dense((1, 6, 6)), images(8), labels(8)

    def peak(attack):
        now, top = [0], [0]

        class Held:
            def __init__(self, t):
                self.t = t
                now[0] += t.numel() * t.element_size()
                top[0] = max(top[0], now[0])

            def __del__(self):
                now[0] -= self.t.numel() * self.t.element_size()

        with torch.autograd.graph.saved_tensors_hooks(Held, lambda h: h.t):
            attack(m, x, y)
        return top[0], now

    for cls in (PGD, APGD):
        (small, left), (large, over) = [peak(cls(0.1, steps=n)) for n in (3, 12)]
        assert 0 < small == large
    gc.collect()
    assert left == over == [0]


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


def test_linear_model_with_clipping():
    w = torch.randn(1, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x, m = images(4, 1, 5, 5, torch.float64), Linear2(w)
    for a in (
        FGSM(0.3, loss=margin),
        PGD(0.3, steps=20, loss=margin),
        APGD(0.3, steps=40, loss=lambda z, y: z[:, 1] - z[:, 0]),
    ):
        got = a(m, x, None if isinstance(a, APGD) else torch.zeros(4, dtype=torch.long))
        assert torch.allclose(got, (x + 0.3 * w.sign()).clamp(0, 1), atol=1e-12)


# --- on a model that has learned
# -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def trained():
    "A tiny ViT that has learned, float64, with 50 images of which it gets most right"
    dls = synth_dls(n=512, bs=32, seed=1)
    learn = synth_learner(dls=dls)
    learn.fit_one_cycle(6, 4e-3)
    dl = synth_dls(n=400, bs=100, seed=5).valid
    x, y = next(iter(dl.new(shuffle=False)))
    m = learn.model.eval().double()
    x, y = x.as_subclass(torch.Tensor).double()[:50], y.as_subclass(torch.Tensor)[:50]
    assert (predict(m, x) == y).float().mean() > 0.9
    return m, x, y


@pytest.mark.parametrize('norm,eps,loss', [('Linf', 0.05, 'dlr'), ('L2', 0.6, 'ce')])
def test_apgd_agrees_with_autoattack(trained, norm, eps, loss):
    aa = pytest.importorskip('pyautoattack.autopgd_base')
    m, x, y = trained
    a = APGD(eps, norm=norm, steps=20, loss=dict(ce=ce, dlr=dlr)[loss])
    x0 = x + a.start(None, x, image_seed(x))['d']
    ref = aa.APGDAttack(m, n_iter=20, norm=norm, n_restarts=1, eps=eps, loss=loss, device='cpu', seed=0)
    ref.init_hyperparam(x)
    _, _, _, adv = ref.attack_single_run(x, y, x_init=x0)
    ours, theirs = predict(m, a(m, x, y)) == y, predict(m, adv) == y
    assert (ours != theirs).sum() <= 1 and 0 < ours.sum() < 50


def test_apgd_loss_per_image_needed():
    with pytest.raises(ValueError, match='one number per image'):
        APGD(0.1, steps=3, loss=lambda z, y: F.cross_entropy(z, y))(Dense((1, 6, 6)), images(2), labels(2))


# --- losses are values
# -------------------------------------------------------------------------------------------------------------


def test_a_partial_compares_with_what_its_function_compares_with():
    tokens = partial(feat_cos, axis=-1)
    assert as_loss(tokens).reference == 'clean' and as_loss(partial(ce, smoothing=0.1)).reference == 'label'
    m, x = Dense((1, 6, 6)), images(3)
    assert torch.equal(PGD(0.1, loss=partial(kl))(m, x), PGD(0.1, loss=kl)(m, x))


def test_losses_of_block_features_are_refused():
    with pytest.raises(ValueError, match='AAS'):
        PGD(0.1, loss=Loss(_first, 'features'))(Dense((1, 6, 6)), images(2), labels(2))


def test_losses_are_pickled_by_name():
    import pickle

    assert all(pickle.loads(pickle.dumps(o)) is o for o in (ce, cw, kl, feat_cos))
    with pytest.raises(ValueError, match='reference must be one of'):
        Loss(_first, 'labels')


# --- found by a reviewer
# ----------------------------------------------------------------------------------------------------------


def test_scripted_models():
    m = torch.jit.script(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)))
    assert PGD(0.1, steps=2)(m, torch.rand(2, 3, 2, 2), torch.tensor([0, 1])).shape == (2, 3, 2, 2)


def test_an_attack_without_a_step_says_so():
    @dataclass(frozen=True, repr=False)
    class Idle(Attack):
        steps: int = 2

    with pytest.raises(TypeError, match=r'Idle has no step of its own: give it update\('):
        Idle(0.1)(Dense((1, 6, 6)), images(2), labels(2))


# --- Fast
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('how,compile', [('replica', True), ('deep copy', False)])
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


@pytest.mark.parametrize(
    'attack,dtype', [(ByHalf(0.05), torch.bfloat16), (WorstCase([ByEllipsoid(0.05)]), torch.float32)]
)
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


def test_a_report_names_its_own_ball_and_compares_it_with_no_norm():
    data = torch.rand(8, 1, 28, 28), torch.arange(8)
    df = robust_report(tiny_vit(), data, [PGD(0.05, steps=1), ByHalf(0.05, steps=1)]).df
    assert df.norm.tolist()[1:] == ['Linf', 'UpperHalf']  # one row each, and no worst case of both


def test_an_attack_takes_its_own_ball_to_another_radius_and_knows_no_other():
    with pytest.raises(ValueError, match='one kind of ball'):
        like(PGD(0.1, steps=5), ByHalf(0.05))
    assert like(ByHalf(0.1), ByHalf(0.05)).ball == UpperHalf(0.05)
    a = ByHalf(0.1, alpha=0.05).at_eps(0.2)
    assert (a.ball, a.alpha) == (UpperHalf(0.2), 0.1)


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


def test_a_make_that_works_in_place_is_checked_against_the_images_it_was_given_and_changes_nothing():
    x = torch.full((2, 1, 4, 4), 0.4)
    with pytest.raises(ValueError, match=r'moved an image 0.47 out of its ball Linf\(0.03\)'):
        InPlace()(nn.Identity(), x)
    target = torch.tensor([1, 2])
    assert (InPlace(0.02)(nn.Identity(), x, target=target) - x).max() == pytest.approx(0.02)
    assert x.unique().tolist() == [x[0, 0, 0, 0]] and target.tolist() == [1, 2]


def test_a_transferred_function_that_works_in_place_moves_no_image():
    x = torch.full((2, 1, 4, 4), 0.4)
    moved = Transfer(nn.Identity(), brightens)(nn.Identity(), x)
    assert (moved - x).min() == pytest.approx(0.5)


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


@pytest.mark.parametrize('ball,size', [(L1, 12.5), (L1NoSize, 48)])
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


def test_an_attack_of_ones_own_takes_its_step_to_another_radius():
    @dataclass(frozen=True, repr=False)
    class Mine(AttackBase):
        eps: float = 0.1
        norm: str = field(default='Linf', kw_only=True)
        alpha: float = field(default=0.02, kw_only=True)

    assert Mine(0.1, alpha=0.04).at_eps(0.2).alpha == pytest.approx(0.08)
