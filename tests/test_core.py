"`core`: balls, seeds, normalisation, `attack_mode` and the input checks (R01-R04)."

import warnings
from functools import partial
from types import SimpleNamespace
import numpy as np, pytest, timm, torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import nn
from fastai.vision.core import TensorImage
from robust_nbdev import core
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.test_utils import *

BALLS = dict(Linf=Linf, L2=L2)
shapes = st.tuples(st.integers(1, 5), st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 9))
radii = dict(Linf=st.sampled_from([0.0, 1e-4, 4 / 255, 0.3, 1.0]), L2=st.sampled_from([0.0, 1e-4, 0.5, 2.0, 50.0]))


def gen(seed):
    return torch.Generator().manual_seed(seed)


def length(d, norm):
    return d.double().flatten(1).abs().amax(1) if norm == 'Linf' else d.double().flatten(1).norm(dim=1)


# --- balls
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('norm', list(BALLS))
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_projection_lands_inside_and_is_idempotent(norm, data):
    shape, eps, seed = data.draw(shapes), data.draw(radii[norm]), data.draw(st.integers(0, 99))
    b, x, d = (
        BALLS[norm](eps),
        torch.rand(shape, generator=gen(seed), dtype=torch.float64),
        torch.randn(shape, generator=gen(seed + 1), dtype=torch.float64) * data.draw(st.sampled_from([1e-6, 0.1, 3.0])),
    )
    p = b.project(x, d)
    assert (length(p, norm) <= eps * (1 + 1e-12) + 1e-15).all() and (x + p).min() >= 0 and (x + p).max() <= 1
    assert torch.allclose(b.project(x, p), p, atol=1e-15, rtol=1e-12)
    inside = d * (0.5 * eps / length(d, norm).clamp(min=1e-30))[:, None, None, None]
    inside = (x * 0.8 + 0.1 + inside).clamp(0, 1) - (x * 0.8 + 0.1)
    assert torch.allclose(b.project(x * 0.8 + 0.1, inside), inside, atol=1e-15)  # what is allowed stays


@pytest.mark.parametrize('norm', list(BALLS))
def test_random_points_fill_the_ball(norm):
    "Linf: each pixel uniform; L2: (|d|/eps)^n uniform, directions without preference"
    x = torch.rand(4000, 1, 3, 3, generator=gen(0))
    b = BALLS[norm](0.5)
    d = b.rand(x, image_seed(x))
    assert length(d, norm).max() <= 0.5 * (1 + 1e-6) and d.shape == x.shape
    if norm == 'Linf':
        u = ((d / 0.5 + 1) / 2).flatten()
    else:
        u = (d.flatten(1).norm(dim=1) / 0.5) ** 9
        # E dd' = eps^2/(n+2)
        assert d.flatten(1).mean(0).abs().max() < 0.02 and torch.allclose(
            d.flatten(1).T @ d.flatten(1) / 4000, torch.eye(9) * 0.25 / 11, atol=0.003
        )
    assert stats.kstest(u.double().numpy(), 'uniform').pvalue > 1e-3


@pytest.mark.parametrize(
    'f,words',
    [
        (lambda: Linf(-1), '>= 0'),
        (lambda: Linf(8), 'write 8/255'),
        (lambda: L2(float('nan')), 'finite'),
        (lambda: Linf(float('inf')), 'finite'),
        (lambda: threat_model(0.1, 'L1'), "Linf.*L2.*'L1'"),
    ],
)
def test_wrong_radii(f, words):
    with pytest.raises(ValueError, match=words):
        f()


@pytest.mark.parametrize(
    'eps,s',
    [
        (8 / 255, '8/255'),
        (1 / 255, '1/255'),
        (0.1, '0.1'),
        (0.5, '0.5'),
        (0, '0'),
        (1, '1'),
        (0.2, '0.2'),
        (0.031, '0.031'),
        (0.5 / 255, '0.5/255'),
        (2.5 * 1 / 255 / 5, '0.5/255'),
        (12.75 / 255, '0.05'),
        (1.25 / 255, '1.25/255'),
        (float(np.float32(0.5 / 255)), '0.5/255'),
        (1 / 3000, '0.000333333'),
        (0.0123456, '0.0123456'),
        (3, '3'),
        (1000 / 255, '1000/255'),
    ],
)
def test_eps_as_papers_write_it(eps, s):
    assert eps_str(eps) == s


# --- seeds
# ------------------------------------------------------------------------------------------------------------------


def test_uniform_is_uniform_and_independent():
    x = torch.rand(200, 1, 10, 10, generator=gen(1))
    s = image_seed(x)
    us = [uniform(s, x, k).flatten(1).double() for k in (0, 1)]
    for u in us:
        assert stats.kstest(u.flatten().numpy(), 'uniform').pvalue > 1e-3 and 0 < u.min() and u.max() < 1
    z = [(u - 0.5) * 12**0.5 for u in us]
    n = 200 * 100
    assert abs((z[0] * z[1]).mean()) < 4 / n**0.5  # streams
    assert abs((z[0][1:] * z[0][:-1]).mean()) < 4 / n**0.5  # images
    assert abs((z[0][:, 1:] * z[0][:, :-1]).mean()) < 4 / n**0.5  # neighbouring pixels
    # seeds that a person would choose
    consecutive = uniform(torch.arange(200), x).double()
    assert (
        stats.kstest(consecutive.flatten().numpy(), 'uniform').pvalue > 1e-3
        and abs(((consecutive[1:] - 0.5) * (consecutive[:-1] - 0.5)).mean() * 12) < 4 / n**0.5
    )


def test_seeds_differ_by_pixel_and_by_number():
    x = torch.zeros(3, 1, 4, 4)
    x[1, 0, 0, 0] = 1e-6
    x[2, 0, 0, 1] = 1e-6
    seeds = torch.cat([image_seed(x, s) for s in (0, 1, 2, -1, 2**40)])
    assert len(set(seeds.tolist())) == 15


@settings(max_examples=50, deadline=None)
@given(
    shape=shapes,
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    seed=st.integers(-(2**40), 2**40),
)
def test_seed_and_noise_ignore_layout_and_batch(shape, dtype, seed):
    x = torch.rand(shape, generator=gen(0)).to(dtype)
    s = image_seed(x, seed)
    p = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert torch.equal(image_seed(p, seed), s) and torch.equal(uniform(s, p), uniform(s, x))
    for i in range(len(x)):
        assert image_seed(x[i : i + 1], seed) == s[i] and torch.equal(
            uniform(s[i : i + 1], x[i : i + 1]), uniform(s, x)[i : i + 1]
        )
    assert uniform(s, x).dtype == torch.promote_types(dtype, torch.float32)


def test_seeds_given_per_image():
    x = torch.rand(3, 1, 2, 2)
    assert torch.equal(image_seed(x, torch.tensor([1, 2, 3])), torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r'one integer per image, \[3\], got \[2\]'):
        image_seed(x, torch.tensor([1, 2]))


# --- Normalized (R01, R02, R03)
# ------------------------------------------------------------------------------------------------

CFG = dict(
    vit_tiny_patch16_224=([0.5] * 3, [0.5] * 3), deit_tiny_patch16_224=([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
)
SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)


@pytest.mark.parametrize('name', CFG)
def test_statistics_are_the_models_own(name):
    m = timm.create_model(name, **SMALL).eval()
    n = Normalized(m)
    mean, std = CFG[name]
    assert n.mean.flatten().tolist() == pytest.approx(mean) and n.std.flatten().tolist() == pytest.approx(std)
    x = torch.rand(3, 3, 32, 32)
    other = Normalized(timm.create_model(name, **SMALL), [0.0] * 3, [1.0] * 3).eval()
    other.load_state_dict(n.state_dict())
    # statistics included
    assert torch.equal(other(x), m((x - n.mean) / n.std))


@pytest.mark.parametrize('wrap', [lambda n: n, lambda n: nn.Sequential(n), lambda n: Logits(n)])
def test_double_normalisation_is_refused(wrap):
    with pytest.raises(ValueError, match='normalises already'):
        Normalized(wrap(Normalized(nn.Flatten(), 0.0, 1.0)), 0.0, 1.0)


def test_wrong_statistics_and_channels():
    with pytest.raises(ValueError, match='give mean= and std='):
        Normalized(nn.Flatten())
    for s in (0.0, -1.0):
        with pytest.raises(ValueError, match='std must be positive'):
            Normalized(nn.Flatten(), 0.0, s)
    with pytest.raises(ValueError, match=r'expected images \[B,3,H,W\], got \[2, 1, 4, 4\]'):
        Normalized(nn.Flatten(), [0.0] * 3, [1.0] * 3)(torch.rand(2, 1, 4, 4))


@pytest.mark.parametrize('cls,norm,eps', [(PGD, 'Linf', 4 / 255), (APGD, 'L2', 0.5)])
def test_eps_is_in_pixels_whatever_the_statistics(norm, eps, cls):
    "R01: three very different deviations"
    m = Normalized(nn.Sequential(nn.Flatten(), nn.Linear(48, 4)), [0.1, 0.5, 0.9], [0.01, 0.2, 3.0])
    x, y = torch.rand(5, 3, 4, 4), torch.arange(5) % 4
    d = cls(eps, norm=norm, steps=5)(m, x, y) - x
    assert (
        length(d, norm).max() <= eps + 1e-6
        and (x + d).min() >= 0
        and (x + d).max() <= 1
        and (length(d, norm) > 0.3 * eps).all()
    )


@pytest.mark.parametrize(
    'm,c',
    [
        (lambda: tiny_vit(in_chans=3), 3),
        (lambda: tiny_vit(in_chans=1), 1),
        (lambda: Logits(tiny_vit(in_chans=1)), 1),
        (lambda: nn.Flatten(), None),
        (lambda: timm.create_model('xcit_nano_12_p8_224', embed_dim=32, num_heads=2, depth=1, in_chans=1), 1),
        (lambda: nn.Conv2d(3, 3, 1, groups=3), 3),
    ],
    ids=['rgb', 'grey', 'logits', 'unknown', 'xcit', 'depthwise'],
)
def test_in_chans(m, c):
    assert in_chans(m()) == c


# --- attack_mode
# ------------------------------------------------------------------------------------------------------------------


class Stop(BaseException):
    pass


def net():
    shared = nn.BatchNorm2d(4)
    m = nn.Sequential(
        nn.Conv2d(1, 4, 3), shared, nn.Dropout(), nn.Sequential(shared, nn.Flatten()), nn.Linear(64, 3)
    ).train()
    # frozen parts; `shared` is reached twice
    m[3].eval()
    m[0].weight.requires_grad_(False)
    return m


def test_attack_mode_inside_and_after():
    m = net()
    before = state_of(m)
    with torch.no_grad(), attack_mode(m) as o:
        assert (
            o is m
            and not any(k.training for k in m.modules())
            and not any(p.requires_grad for p in m.parameters())
            and torch.is_grad_enabled()
        )
        with attack_mode(m):
            assert not m.training
        assert not m.training and not any(p.requires_grad for p in m.parameters())
    assert state_of(m) == before and torch.is_grad_enabled()


@pytest.mark.parametrize('err', [ValueError, KeyboardInterrupt, Stop, GeneratorExit])
def test_attack_mode_restores_after_exceptions(err):
    m = net()
    before = state_of(m)
    with torch.inference_mode():
        with pytest.raises(err):
            with attack_mode(m), attack_mode(m):
                raise err()
        assert torch.is_inference_mode_enabled()
    assert state_of(m) == before


# --- checks (R03, R04)
# ---------------------------------------------------------------------------------------------------------------


def test_rounding_is_clamped_and_more_is_refused():
    x = torch.tensor([[1 + 1e-7, -1e-8, 0.5, 0.0]])
    assert check_images(x).tolist() == [[1.0, 0.0, 0.5, 0.0]] and x[0, 0] > 1
    with pytest.raises(TypeError, match='ndarray'):
        check_images(np.zeros((1, 1, 2, 2)))
    with pytest.raises(ValueError, match='nan'):
        check_images(torch.tensor([[0.0, float('nan')]]))


def test_checked_images_are_plain_and_detached():
    x = check_images(TensorImage(torch.rand(1, 1, 2, 2)).requires_grad_())
    assert type(x) is torch.Tensor and not x.requires_grad


# --- numbers that are off by rounding, statistics and images in other units
# --------------------------------------------------------


def test_radii_that_differ_print_differently():
    vs = [8 / 255, 8.0001 / 255, 0.1, 0.1000001, 0.12345678, 0.12345679]
    assert len({repr(Linf(v)) for v in vs}) == len(set(map(Linf, vs))) == len(vs) and [Linf(v).eps for v in vs] == vs


@pytest.mark.parametrize(
    'kw',
    [
        dict(mean=123.675, std=58.395),
        dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375]),
        dict(mean=0.0, std=255.0),
        dict(mean=[0.5, 0.5, 117.0], std=0.5),
        dict(mean=-124.0, std=1.0),
    ],
)
def test_statistics_in_grey_levels_are_refused(kw):
    with pytest.raises(ValueError, match='divide both by 255'):
        Normalized(nn.Conv2d(3, 3, 1), **kw)


def test_images_divided_twice_are_noticed_and_black_ones_are_not():
    with pytest.warns(UserWarning, match='divided by 255 twice'):
        check_images(torch.rand(2, 3, 4, 4) / 255)
    with pytest.warns(UserWarning, match='divided by 255 twice'):
        outputs(nn.Flatten(), torch.rand(2, 3, 4, 4) / 255)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        check_images(torch.zeros(2, 3, 4, 4))
        check_images(torch.rand(2, 3, 4, 4) * 0.01 + 0.005)
        check_images(torch.cat([torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 4, 4)]))


def test_own_copies_what_holds_tensors():
    z = dict(a=torch.ones(2), b=(torch.zeros(1), None))
    c = own(z)
    z['a'].zero_()
    z['b'][0].add_(5)
    assert c['a'].sum() == 2 and c['b'][0] == 0 and c['b'][1] is None


def test_seeds_of_epochs_meet_those_of_no_other_seed():
    "Of twenty seeds in fifty epochs each, and they stay whole numbers below 2**63"
    cb = AdvCallback()
    cb.learn = type('L', (), dict(epochs_lived=None))()

    def seed_in(seed, epoch):
        torch.manual_seed(seed)
        cb.learn.__dict__['epochs_lived'] = Epochs(epoch=epoch)
        return cb.epoch_seed

    seeds = [seed_in(s, e) for s in (*range(18), 2**62, 2**63 - 1) for e in range(50)]
    assert len(set(seeds)) == len(seeds) - 50 and all(0 <= o < 2**63 for o in seeds)  # 2**62 and 0 are one seed
    assert seed_in(7, 0) == 7 and seed_in(7, 3) == seed_in(7, 3)


def test_images_a_hair_above_one_are_attacked():
    x = torch.full((2, 3, 4, 4), 1 + 8e-5)
    attack = FGSM(8 / 255)
    assert check_result((check_images(x) - attack.eps).clamp(0, 1), x, attack).max() <= 1


def test_standardised_images_of_a_bare_model_are_not_taken_for_255():
    x = torch.linspace(-12.5, 12.5, 48).reshape(1, 3, 4, 4)
    assert torch.equal(outputs(nn.Identity(), x), x)
    with pytest.raises(ValueError, match='divide by 255'):
        outputs(nn.Identity(), 255 * torch.rand(1, 3, 4, 4))


@pytest.mark.parametrize('norm', ['Linf', 'L2', None])
def test_a_result_is_checked_with_one_read_of_the_device(norm, monkeypatch):
    reads = []
    for name in ('tolist', 'item', '__bool__', '__float__', '__int__'):
        was = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, was=was: reads.append(was) or was(t))
    attack = SimpleNamespace(norm=norm, eps=0.1)
    check_result(torch.full((2, 1, 2, 2), 0.55), torch.full((2, 1, 2, 2), 0.5), attack)
    assert len(reads) == 1


@pytest.mark.parametrize('eps', [True, np.True_, None, 'large'])
def test_a_radius_is_a_number(eps):
    with pytest.raises(TypeError, match='eps must be a number'):
        Linf(eps)


def test_a_column_of_floats_is_no_soft_label():
    "Its largest entry is always the first: every image would be of class 0"
    with pytest.raises(TypeError, match='soft labels'):
        check_labels(torch.ones(3, 1), torch.rand(3, 1, 2, 2))


@pytest.mark.parametrize('dtype', [torch.float16, torch.float64])
def test_a_result_of_another_type_is_refused(dtype):
    x = torch.rand(2, 1, 4, 4)
    with pytest.raises(ValueError, match=f'returned {dtype} on cpu for images of torch.float32'):
        check_result(x.to(dtype), x, 'mine')


def test_a_result_has_no_graph():
    x = torch.rand(2, 1, 4, 4)
    x_adv = check_result(x * torch.ones(1, requires_grad=True), x, 'mine')
    assert torch.equal(x_adv, x) and not x_adv.requires_grad


@pytest.mark.parametrize('error', [torch.OutOfMemoryError, *core._DEVICE_FAULTS])
def test_a_fault_of_the_device_is_no_number_that_cannot_be_read(error, monkeypatch):
    def fails(*args):
        raise error('out of memory')

    monkeypatch.setattr(torch, 'stack', fails)
    with pytest.raises(error):
        core._read(torch.zeros(()))


class Box:
    def attack(self, model, x, y, seed=0):
        return x


def blur(model, x, y, loss=None, seed=0):
    return x


@pytest.mark.parametrize(
    'attack,name',
    [
        (partial(blur, loss=blur), 'blur(loss=blur)'),
        (partial(blur, loss=[blur]), 'blur(loss=[<function blur>])'),
        (partial(blur, loss=0.5), 'blur(loss=0.5)'),
        (Box().attack, 'Box.attack'),
        (Box(), 'Box'),
        (WorstCase([blur]), 'WorstCase([blur])'),
        (Transfer(nn.Flatten(), partial(blur, loss=Box())), 'Transfer(Flatten, blur(loss=Box))'),
        (PGD(0.1, loss=partial(blur, y=1)), 'PGD(0.1, loss=blur(y=1), steps=10)'),
    ],
)
def test_names_hold_no_address(attack, name):
    assert row_name(attack) == name


class Weighted(Linf):
    "Pixels have weights"

    def __init__(self, eps, w):
        super().__init__(eps)
        self.w = w


def test_balls_that_differ_beside_the_radius_differ():
    assert Weighted(0.1, 1) == Weighted(0.1, 1) != Weighted(0.1, 2)
    assert repr(Weighted(0.1, 2)) == 'Weighted(0.1, w=2)'
    many = torch.zeros(5000)
    assert Weighted(0.1, many) == Weighted(0.1, many.clone()) != Weighted(0.1, many.index_fill(0, torch.tensor(9), 1))
    assert Linf(0.1) == Linf(0.1) != L2(0.1) and repr(Linf(0.1)) == 'Linf(0.1)'
