"Corruptions at every size, their seeds, published files, scores and reports (R38-R41, F13, F14)."

import sys, warnings
import numpy as np, pandas as pd, pytest, timm, torch
from PIL import Image
from scipy import ndimage
from torch import nn
from torch.utils.data import DataLoader, Dataset
from fastai.vision.all import Callback, CrossEntropyLossFlat, Learner, Normalize, accuracy
import robust_nbdev.corruptions as C
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.corruptions import *
from robust_nbdev.evaluate import *
from robust_nbdev.datasets import CenterFit, cifar10
from robust_nbdev.test_utils import *

ALL = CORRUPTIONS + EXTRA_CORRUPTIONS
kinds = pytest.mark.parametrize('name', ALL)


def images(n=3, c=3, h=32, w=32, seed=0):
    "Smooth random images on 256 levels"
    x = torch.rand(n, c, 6, 6, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(x, size=(h, w), mode='bicubic').clamp(0, 1) * 255).round() / 255


def rms(a, b):
    return (a - b).square().mean().sqrt().item()


# --- sizes, types, seeds (R41, R03, F13)
# ------------------------------------------------------------------------------------


SIZES = [(1, 28, 28), (3, 32, 32), (1, 16, 16), (3, 33, 47), (3, 64, 64)]


@pytest.mark.parametrize('name,c,h,w', [(k, *SIZES[i % 5]) for i, k in enumerate(ALL)])
def test_every_kind_at_every_size(name, c, h, w):
    x = images(2, c, h, w)
    before = x.clone()
    for s in (1, 5):
        y = corrupt(x, name, s)
        assert y.shape == x.shape and y.dtype == x.dtype and y.min() >= 0 and y.max() <= 1 and y.isfinite().all()
        assert torch.allclose(y * 255, (y * 255).round(), atol=1e-3)
    assert torch.equal(x, before)


def test_frost_where_the_photographs_are_too_small():
    x = images(1, 3, 700, 600)
    assert corrupt(x, 'frost', 1).shape == x.shape


@kinds
def test_same_seed_same_pixels_whatever_the_batch(name):
    x = images(6)
    a = corrupt(x, name, 4, seed=3)
    assert torch.equal(corrupt(x[2:3], name, 4, seed=3), a[2:3])
    assert torch.equal(
        corrupt(x[2:4], name, 4, seed=torch.tensor([8, 9])),
        corrupt(x[2:4].flip(0), name, 4, seed=torch.tensor([9, 8])).flip(0),
    )


# Columns: 32 and 224 px, severities 1, 3 and 5: the mean level of both images, and of a corner of the second
PIXELS = """
gaussian_noise     120.9 82.9 121.2 84.5 121.4 85.5 120.6 31.4 121.1 36.2 122.3 52.9
shot_noise         120.5 82.1 120.2 82.1 119.8 82.2 119.8 30.3 116.7 28.5 107.3 27.9
impulse_noise      121.2 81.7 121.4 82.9 121.8 85.4 121.3 34.0 121.7 39.6 123.0 64.5
defocus_blur       120.7 82.3 120.7 82.7 120.8 83.3 120.9 32.0 120.7 32.0 121.9 32.0
glass_blur         122.2 83.0 121.1 82.4 121.6 80.6 120.5 32.0 120.4 32.0 120.3 32.0
motion_blur        120.8 84.4 120.9 85.1 121.0 84.6 120.7 32.0 120.5 32.0 120.4 35.1
zoom_blur          120.5 81.7 120.2 83.7 119.7 84.4 120.7 32.0 120.4 32.0 119.8 38.3
snow               132.4 97.5 151.0 106.7 188.9 173.6 163.2 74.3 189.1 201.8 216.8 104.8
frost              146.3 109.4 160.6 128.5 150.7 123.0 191.1 123.7 215.9 183.1 217.1 191.4
fog                119.7 81.9 119.4 83.5 125.4 94.7 128.2 28.4 130.7 27.4 131.4 27.4
brightness         128.2 89.7 141.2 105.7 155.1 126.3 135.1 50.7 155.1 89.7 163.4 128.7
contrast           120.6 91.8 120.5 105.6 120.6 115.3 120.5 85.3 120.6 103.3 120.6 117.0
elastic_transform  121.4 97.9 121.0 92.5 120.9 84.8 121.2 32.0 121.4 32.0 121.4 32.0
pixelate           121.1 84.2 121.1 82.4 121.2 82.5 121.1 32.0 121.0 32.0 121.0 32.0
jpeg_compression   121.0 84.2 121.0 84.6 120.9 85.4 121.0 31.3 121.2 28.7 121.5 38.7
speckle_noise      120.4 81.9 119.9 81.9 119.0 81.6 119.6 31.6 116.2 31.7 111.2 32.2
gaussian_blur      120.6 82.1 120.6 82.7 120.5 83.2 120.8 32.0 120.6 32.0 120.5 31.9
spatter            122.1 83.0 127.2 86.0 115.4 80.6 121.9 35.3 128.4 38.7 107.1 34.9
saturate           166.0 126.2 104.4 72.5 93.2 68.8 166.0 38.7 98.0 27.3 90.7 27.3
"""


@kinds
def test_pixels_stay_what_they_were(name):
    "Random numbers and arithmetic may become faster, and must not become others: a saved report would mix two kinds"
    saved = {k: [float(o) for o in v] for k, *v in map(str.split, PIXELS.strip().splitlines())}[name]
    small, got = torch.randint(256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(0)), []
    for size in (32, 224):
        x = small.repeat_interleave(size // 8, 2).repeat_interleave(size // 8, 3) / 255
        for severity in (1, 3, 5):
            y = 255 * corrupt(x, name, severity)
            got += [y.mean().item(), y[1, :, :8, :8].mean().item()]
    assert np.allclose(got, saved, rtol=0, atol=0.5)


def test_seeds_and_images_differ():
    x = images(1).expand(2, -1, -1, -1)
    for name in ALL:
        random = name not in (
            'defocus_blur',
            'zoom_blur',
            'brightness',
            'contrast',
            'pixelate',
            'jpeg_compression',
            'gaussian_blur',
            'saturate',
        )
        a, b, c = (
            corrupt(x, name, 5, seed=0),
            corrupt(x, name, 5, seed=1),
            corrupt(x, name, 5, seed=torch.tensor([1, 2])),
        )
        assert torch.equal(a[0], a[1]) and torch.equal(a, b) != random and torch.equal(c[0], c[1]) != random, name


def test_kinds_of_noise_do_not_share_their_numbers():
    x = torch.full((1, 3, 32, 32), 128 / 255)
    a, b = [(corrupt(x, o, 3) - x).flatten() for o in ('gaussian_noise', 'speckle_noise')]
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.1


def test_global_random_states_are_left_alone():
    x = images(2)
    torch.manual_seed(1)
    np.random.seed(1)
    t, n = torch.get_rng_state(), np.random.get_state()[1].copy()
    for o in ALL:
        corrupt(x, o, 5)
    for o in PERTURBATIONS:
        perturb(x, o)
    assert torch.equal(torch.get_rng_state(), t) and (np.random.get_state()[1] == n).all()
    a = corrupt(x, 'snow', 3)
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(corrupt(x, 'snow', 3), a)


class Items(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.cat([corrupt(self.x[i][None], o, 5, seed=7)[0] for o in ('glass_blur', 'fog', 'shot_noise')])


def test_same_pixels_in_worker_processes():
    x = images(6)
    want = torch.cat([corrupt(x, o, 5, seed=7) for o in ('glass_blur', 'fog', 'shot_noise')], 1)
    dl = DataLoader(
        Items(x), batch_size=4, num_workers=2, multiprocessing_context='spawn' if sys.platform != 'linux' else 'fork'
    )
    assert torch.equal(torch.cat(list(dl)), want)


@pytest.mark.parametrize(
    'x,kw,err,says',
    [
        (images(1), dict(name='rain'), ValueError, 'no corruption'),
        (images(1), dict(severity=0), ValueError, 'from 1 to 5'),
        (images(1), dict(table=128), ValueError, 'table must be'),
        (images(1) * 255, {}, ValueError, 'in \\[0,1\\]'),
        ((images(1) * 255).byte(), {}, TypeError, 'floating point'),
        (images(1, 3, 12, 32), {}, ValueError, 'at least 16'),
        (images(1, 4), {}, ValueError, '1 or 3 channels'),
        (images(2), dict(seed=torch.tensor([1])), ValueError, 'one integer per image'),
    ],
)
def test_errors_say_what_was_given(x, kw, err, says):
    with pytest.raises(err, match=says):
        corrupt(x, **{'name': 'fog', 'severity': 1, **kw})


def test_rounding_outside_the_range_passes():
    x = images(1)
    x[0, 0, 0, 0] = 1 + 1e-6
    assert corrupt(x, 'contrast', 1).max() <= 1


def forget():
    C._photos.cache_clear()
    C._photo.cache_clear()


def test_frost_keeps_its_photographs_once():
    "50 MB at full size: not once more for each size of image"
    a, b = C._ice(0.2, 40, 41), C._ice(0.2, 42, 43)
    assert len({o.data_ptr() for o in (*a, *b)}) == 5


def test_frost_photographs_are_checked(monkeypatch, tmp_path):
    (tmp_path / 'frost').mkdir()
    for f in C._FROST:
        Image.new('RGB', (300, 300)).save(tmp_path / 'frost' / f)
    forget()
    monkeypatch.setattr(C, '_frost_folder', lambda: tmp_path / 'frost')
    with pytest.raises(ValueError, match='not the photograph'):
        corrupt(images(1), 'frost', 1)
    forget()


# --- what they are
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('table', [32, 224])
@pytest.mark.parametrize('s', [1, 3])
def test_noise_has_the_published_strength(table, s):
    v = 128 / 255
    x = torch.full((4, 3, 64, 64), v)
    noisy = lambda o: corrupt(x, o, s, torch.arange(4), table)
    gaussian, speckle, shot, impulse = [
        C._KINDS[f'{o}_noise'].levels[table][s - 1] for o in ('gaussian', 'speckle', 'shot', 'impulse')
    ]
    assert (noisy('gaussian_noise') - x).std().item() == pytest.approx(gaussian, rel=0.03)
    assert (noisy('speckle_noise') - x).std().item() == pytest.approx(speckle * v, rel=0.03)
    assert (noisy('shot_noise') - x).std().item() == pytest.approx((v / shot) ** 0.5, rel=0.05)
    y = noisy('impulse_noise')
    shares = [(y != x).float().mean().item(), (y == 1).float().mean().item()]
    assert shares == pytest.approx([impulse, impulse / 2], rel=0.12)


def test_glass_blur_is_the_published_loop():
    (h, w), d = (16, 20), 2
    steps = torch.randint(-d, d, (2, 2, h, w), generator=torch.Generator().manual_seed(0)).numpy()
    x = np.random.default_rng(0).integers(0, 256, (h, w, 3)).astype(np.uint8)
    y = x.copy()
    for dy, dx in steps:
        for r in range(h - d, d, -1):
            for c in range(w - d, d, -1):
                a, b = r + dy[r, c], c + dx[r, c]
                y[r, c], y[a, b] = y[a, b], y[r, c]  # numpy's views make this a copy, as in the published code
    p = C._jumble(steps, h, w, d)
    assert (x.reshape(-1, 3)[p].reshape(h, w, 3) == y).all()


def test_clouds_are_the_published_recursion():
    "Diamond-square as loops over points"
    n, decay, seed = 8, 2.0, torch.tensor([3])
    u = (2 * uniform(seed, torch.empty(1, n, n)) - 1)[0].double().numpy()
    m, step, amp = np.zeros((n, n)), n, 100.0

    def put(r, c, around):
        m[r, c] = sum(m[i % n, j % n] for i, j in around) / 4 + amp**2 * u[r, c]

    while step >= 2:
        h = step // 2
        corners = [(r, c) for r in range(0, n, step) for c in range(0, n, step)]
        for r, c in corners:
            put(r + h, c + h, [(r, c), (r + step, c), (r, c + step), (r + step, c + step)])
        for r, c in corners:
            put(r, c + h, [(r + h, c + h), (r - h, c + h), (r, c), (r, c + step)])
            put(r + h, c, [(r + h, c + h), (r + h, c - h), (r, c), (r + step, c)])
        step, amp = h, amp / decay
    m -= m.min()
    m /= m.max()
    assert np.allclose(C._plasma(seed, n, decay)[0].numpy(), m, atol=1e-4)


def seeds_of(x, name, seed=0):
    return mix64(image_seed(x, seed) + 1 + sorted(C._KINDS).index(name))


def test_frost_is_a_piece_of_a_photograph():
    x = C._bits(images(6, 3, 32, 32) * 0.2)
    a, b, scale = C._KINDS['frost'].levels[32][3]
    y = C._frost(x, (a, b, scale), seeds_of(x, 'frost'))
    ice = (y - a * x) / b
    for o in ice:
        best = 9
        for photo in C._ice(scale, 32, 32):
            at = photo.unfold(1, 32, 1).unfold(2, 32, 1)  # every place
            best = min(best, (at[:, :, :, 0, :4] - o[:, None, None, 0, :4]).abs().amax((0, 3)).min().item())
        assert best < 1e-3
    assert (corrupt(x, 'frost', 4, floor=False) - y.clamp(0, 1)).abs().max() <= 0.51 / 255


def test_elastic_field_is_scipys():
    x = images(1, 3, 32, 40)
    sd = torch.tensor([3])
    alpha, sigma = 0.5, 0.03
    d = [
        alpha
        * 32
        * ndimage.gaussian_filter(
            2 * uniform(sd, x[:, :1], i)[0, 0].numpy() - 1, sigma * 32, mode='reflect', truncate=3.0
        )
        for i in (1, 2)
    ]
    at = np.mgrid[:32, :40] + np.stack(d)
    want = np.stack([ndimage.map_coordinates(o, at, order=1, mode='reflect') for o in x[0].numpy()])
    assert np.abs(d[0]).max() > 1
    assert np.abs(C._elastic_transform(x, (alpha, sigma, 0), sd)[0].numpy() - want).max() < 1e-3


def test_library_parity():
    "What corrupt-tta does as published, at 224 pixels, to the rounding"
    tta = pytest.importorskip('corrupt_tta', exc_type=ImportError)
    x = images(1, 3, 224, 224)
    a = (x[0] * 255).round().byte().permute(1, 2, 0).numpy()
    for name in (
        'defocus_blur',
        'zoom_blur',
        'brightness',
        'contrast',
        'pixelate',
        'jpeg_compression',
        'gaussian_blur',
        'saturate',
    ):
        for s in (2, 4):
            want = np.asarray(tta.corrupt(a.copy(), s, name)).astype(float)
            got = corrupt(x, name, s, floor=False)[0].permute(1, 2, 0).numpy() * 255
            assert np.abs(got - want).max() <= 0.51, (name, s)


@pytest.fixture
def drops():
    "Drops of water as uint8 levels"
    liquid = C._smooth(0.65 + 0.3 * C._normal(torch.tensor([3]), torch.zeros(1, 1, 90, 70)), 2.0)[0, 0].numpy()
    return (255 * np.where(liquid < 0.68, 0, liquid)).astype(np.uint8)


def test_edges_of_drops_are_opencvs(drops):
    cv2 = pytest.importorskip('cv2', exc_type=ImportError)
    edges = C._canny(drops)
    assert edges.any()
    assert (edges == (cv2.Canny(drops, 50, 150) > 0)).all()


def test_distance_to_an_edge_is_opencvs(drops):
    cv2 = pytest.importorskip('cv2', exc_type=ImportError)
    edges = C._canny(drops)
    want = cv2.distanceTransform(255 - 255 * edges.astype(np.uint8), cv2.DIST_L2, 5)
    assert np.abs(C._distance(edges) / 65536 - want.clip(max=20)).max() < 1e-3


def test_frost_shrinks_its_photographs_as_opencv_does():
    cv2 = pytest.importorskip('cv2', exc_type=ImportError)
    for i, photo in enumerate(C._photos()):
        want = cv2.resize(photo.permute(1, 2, 0).numpy(), (0, 0), fx=0.2, fy=0.2)
        assert np.array_equal((C._photo(i, 0.2) * 255).round().permute(1, 2, 0).numpy(), want)


# --- sequences
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name,c,h,w', [(k, *((1, 28, 28), (3, 32, 40))[i % 2]) for i, k in enumerate(PERTURBATIONS)])
def test_sequences(name, c, h, w):
    x = images(2, c, h, w)
    before, y = x.clone(), perturb(x, name, seed=1)
    assert y.shape[:1] + y.shape[2:] == x.shape and y.shape[1] == {'motion_blur': 21, 'translate': 16}.get(name, 31)
    assert y.min() >= 0 and y.max() <= 1 and torch.equal(perturb(x[1:], name, seed=1), y[1:])
    assert torch.equal(x, before)
    if 'noise' in name or name == 'zoom_blur':
        assert torch.equal(y[:, 0], x)
    if name in ('brightness', 'rotate', 'tilt', 'scale'):
        assert rms(y[:, 15], x) < (0.1 if name == 'tilt' else 0.02)
    if 'noise' in name:
        assert not torch.equal(y[:, 1], y[:, 2])
    else:
        assert max(rms(y[:, i], y[:, i + 1]) for i in range(y.shape[1] - 1)) < 0.35


def test_sequences_of_large_images_have_their_own_settings():
    x = images(1, 3, 96, 96)
    assert perturb(x, 'translate').shape[1] == 41 and perturb(x, 'translate', table=32).shape[1] == 16
    with pytest.raises(ValueError, match='no perturbation'):
        perturb(x, 'fog')
    with pytest.raises(ValueError, match='table must be'):
        perturb(x, 'tilt', table=64)


def test_rotation_and_scale_against_torchvision():
    import torchvision.transforms.v2.functional as T

    x = images(1, 3, 32, 32)
    inner = (..., slice(4, -4), slice(4, -4))
    rot, zoom = perturb(x, 'rotate')[0], perturb(x, 'scale')[0]
    for i in (3, 15, 24):
        want = T.affine(
            x[0], angle=i - 15, translate=[0, 0], scale=1.0, shear=[0.0], interpolation=T.InterpolationMode.BILINEAR
        )
        assert (rot[i][inner] - want[inner]).abs().max() < 0.02
        want = T.affine(
            x[0],
            angle=0,
            translate=[0, 0],
            scale=(2 * i + 70) / 100,
            shear=[0.0],
            interpolation=T.InterpolationMode.BILINEAR,
        )
        assert (zoom[i][inner] - want[inner]).abs().max() < 0.02


# --- scores (R40, F14)
# -------------------------------------------------------------------------------------------------------


def test_extras_do_not_count_and_nothing_may_miss():
    e = {**ALEXNET_C, **{o: 0.0 for o in EXTRA_CORRUPTIONS}}
    assert mce(e) == 100
    with pytest.raises(ValueError, match='shot_noise'):
        mce(e, base={k: v for k, v in ALEXNET_C.items() if k != 'shot_noise'})


def test_nothing_to_divide_by():
    flat = dict.fromkeys(CORRUPTIONS, 0.1)
    with pytest.raises(ValueError, match='nothing to divide by at .*fog'):
        relative_mce(flat, 0.1, flat, 0.1)
    with pytest.raises(ValueError, match='clean='):
        relative_mce(flat)
    # a perfect clean model
    assert relative_mce(flat, 0.0, {k: 0.2 for k in flat}, 0.0) == pytest.approx(50)


# --- files (R38, R39)
# ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cifar_c(tmp_path):
    "Every pixel says its severity, corruption and image"
    n = 7
    np.save(tmp_path / 'labels.npy', np.tile(np.arange(n) % 3, 5))
    for j, name in enumerate(('fog', 'snow')):
        a = np.zeros((5 * n, 32, 32, 3), np.uint8)
        for s in range(5):
            for i in range(n):
                a[s * n + i] = 100 * j + 10 * (s + 1) + i
        np.save(tmp_path / f'{name}.npy', a)
    return tmp_path


@pytest.mark.parametrize('n', [7, 3])
def test_each_severity_has_its_rows(n, cifar_c):
    for j, name in enumerate(('fog', 'snow')):
        for s in range(1, 6):
            x, y = CifarC(cifar_c, n=n).pick(name, s)
            assert (x.mean((1, 2, 3)) * 255).round().tolist() == [100 * j + 10 * s + i for i in range(n)]
            assert y.tolist() == [i % 3 for i in range(n)]


def test_clean_and_corrupted_cifar_come_to_224_pixels_alike(tmp_path):
    a = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
    for name, o in zip(('a', 'b', 'c'), a):
        for part in ('train', 'test'):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(o).save(tmp_path / part / name / '0.png')
    np.save(tmp_path / 'labels.npy', np.tile(np.arange(3), 5))
    np.save(tmp_path / 'fog.npy', np.concatenate([a] * 5))
    x, y = cifar10(path=tmp_path, bs=3, size=224, pct=0.875, interp='bicubic', num_workers=0).valid.one_batch()
    files, labels = CifarC(tmp_path, fit=CenterFit(224, 0.875, 'bicubic')).pick('fog', 3)
    assert files.shape == (3, 3, 224, 224) and labels.tolist() == [0, 1, 2]
    assert torch.equal(files[torch.as_tensor(y)], x.as_subclass(torch.Tensor))
    assert not torch.equal(files, CifarC(tmp_path, fit=CenterFit(224)).pick('fog', 3)[0])


def test_severities_that_are_not_there(cifar_c):
    "0 would be counted from the end of the file, 6 has no rows"
    for s in (0, 6, 2.0):
        with pytest.raises(ValueError, match='severity must be a whole number from 1 to 5'):
            CifarC(cifar_c, n=3).pick('fog', s)
    assert len(CifarC(cifar_c).pick('fog', np.int64(5))[0]) == 7


def test_what_is_wrong_with_the_files(cifar_c):
    with pytest.raises(ValueError, match='each severity has 7'):
        CifarC(cifar_c, n=8)
    with pytest.raises(FileNotFoundError, match='labels.npy'):
        CifarC(cifar_c.parent)
    with pytest.raises(FileNotFoundError, match='is no folder'):
        CifarC(cifar_c / 'nowhere')
    np.save(cifar_c / 'snow.npy', np.zeros((7, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match='five times as many'):
        CifarC(cifar_c).pick('snow', 1)
    np.save(cifar_c / 'labels.npy', np.arange(35))
    with pytest.raises(ValueError, match='same labels five times'):
        CifarC(cifar_c)


WNIDS = ['n01498041', 'n01531178', 'n07695742']


def shift_folder(path, names=WNIDS, n=2):
    "Images whose red value says their class"
    for i, o in enumerate(names):
        (path / o).mkdir(parents=True)
        for j in range(n):
            Image.new('RGB', (40, 32), (50 * (i + 1), 0, 0)).save(path / o / f'{j}.png')
    return path


class Reads(nn.Module):
    "Reads the class off the red value, with a louder distractor outside the subset"

    def __init__(self, at, n=1000, distract=7):
        super().__init__()
        self.at, self.n, self.d = at, n, distract

    def forward(self, x):
        z = torch.zeros(len(x), self.n)
        k = (x[:, 0].mean((1, 2)) * 255 / 50).round().long() - 1
        z[torch.arange(len(x)), torch.tensor(self.at)[k]] = 1
        if self.d is not None:
            z[:, self.d] = 2
        return z


def test_wordnet_names_decide_the_outputs(tmp_path):
    f = shift_folder(tmp_path / 'a')
    at = class_positions(WNIDS).tolist()
    assert at == [imagenet_classes().index(o) for o in WNIDS] and at != [0, 1, 2]
    r = subset_report(Reads(at), f, size=32, num_workers=0)
    assert r.accuracy.tolist() == [1, 0] and r.n.tolist() == [6, 6] and r.classes.tolist() == [3, 1000]
    x, y = wnid_images(f, size=32, num_workers=0).one_batch()
    assert sorted(set(y.tolist())) == sorted(at)
    sub = SubsetLogits(Reads(at), class_positions(WNIDS))
    rep = robust_report(sub, wnid_images(f, subset=True, size=32, num_workers=0), [None])
    assert rep.df.accuracy[0] == 1


def test_models_with_other_outputs_are_refused(tmp_path):
    f = shift_folder(tmp_path / 'a')
    with pytest.raises(ValueError, match='200 outputs'):
        subset_report(Reads([0, 1, 2], 200, None), f, size=32, num_workers=0)
    own = subset_report(Reads([2, 1, 0], 3, None), f, classes=WNIDS[::-1], size=32, num_workers=0)
    assert own.accuracy.tolist() == [1, 1]
    with pytest.raises(ValueError, match='is wanted of a model with 3'):
        SubsetLogits(Reads([0, 1, 2], 3, None), [5])(torch.rand(1, 3, 8, 8))


def test_missing_class_folders_do_not_shift_labels(tmp_path):
    f = shift_folder(tmp_path / 'a')
    at = class_positions(WNIDS).tolist()
    import shutil

    shutil.rmtree(f / WNIDS[0])
    m = Reads(at, distract=None)
    assert subset_report(m, f, size=32, num_workers=0).accuracy.tolist() == [1, 1]
    (f / WNIDS[0]).mkdir()
    with pytest.raises(FileNotFoundError, match='no images in'):
        wnid_images(f)


def test_timm_agrees_on_imagenet_a_and_r():
    import timm.data
    from pathlib import Path

    info = Path(timm.data.__file__).parent / '_info'
    for k in 'ar':
        names = (
            (info / f'imagenet_{k}_synsets.txt').read_text().split()
            if (info / f'imagenet_{k}_synsets.txt').exists()
            else pytest.skip('timm has no list')
        )
        assert len(names) == 200
        assert class_positions(names).tolist() == [
            int(o) for o in (info / f'imagenet_{k}_indices.txt').read_text().split()
        ]


@pytest.mark.parametrize('between', ['', 'weather/'])
def test_imagenet_c_folders(tmp_path, between):
    for s in (1, 2):
        shift_folder(tmp_path / f'{between}fog' / str(s))
    src = ImageNetC(tmp_path, size=32, num_workers=0)
    at = class_positions(WNIDS).tolist()
    rep = corruption_report(Reads(at, distract=None), src, ['fog'], [1, 2])
    assert rep.table.loc['fog'].tolist() == [1, 1, 1] and rep.imagenet and rep.clean is None and rep.meta['n'] == 6


def test_imagenet_c_images_are_cut_and_not_resized(tmp_path):
    d = tmp_path / 'fog' / '1' / WNIDS[0]
    d.mkdir(parents=True)
    a = np.arange(40 * 32).reshape(40, 32, 1).repeat(3, 2) % 251
    Image.fromarray(a.astype(np.uint8)).save(d / 'a.png')
    x, _ = ImageNetC(tmp_path, size=32, num_workers=0).pick('fog', 1).one_batch()
    assert (x[0, 0].cpu() * 255).round().tolist() == a[4:36, :, 0].tolist()


def test_sequences_from_files(tmp_path):
    x = images(5)
    a = (torch.stack([perturb(o[None], 'translate')[0] for o in x]) * 255).round().byte().permute(0, 1, 3, 4, 2).numpy()
    np.save(tmp_path / 'translate.npy', a)
    net = tiny_vit(size=32, patch=8, in_chans=3)
    files, here = [
        flip_report(net, d, ['translate'], **k)
        for d, k in ((CifarP(tmp_path, n=4, bs=3), {}), ((x, torch.zeros(5).long()), dict(n=4)))
    ]
    assert files.flip.tolist() == here.flip.tolist() and files.n.tolist() == [4] and files.frames.tolist() == [16]


# --- reports (R31)
# -----------------------------------------------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


class Spy(Around):
    "Counts the images it sees"

    seen = 0

    def forward(self, x):
        self.seen += len(x)
        return self.model(x)


@pytest.fixture
def data():
    x = images(12, 1, 28, 28)
    return x, torch.arange(12) % 4


def test_batch_size_and_loader_change_nothing(data):
    m = tiny_vit(num_classes=4)
    dl = DataLoader(list(zip(*data)), batch_size=5)
    kw = dict(corruptions=['shot_noise', 'glass_blur', 'frost'], severities=[5])
    a, b, c = [corruption_report(m, d, bs=bs, **kw) for d, bs in ((data, 12), (data, 5), (dl, 12))]
    assert all((a.verdicts[k] == o.verdicts[k]).all() for k in a.verdicts for o in (b, c))
    assert a.meta['images'] == b.meta['images'] == c.meta['images']


def test_goes_on_where_it_stopped(data, tmp_path, monkeypatch):
    m = Spy(tiny_vit(num_classes=4))
    whole = corruption_report(m, data, ['fog', 'snow'], [1, 3])
    real, calls = C.corrupt, []

    def stops(*args, **kw):
        calls.append(args)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return real(*args, **kw)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(C, 'corrupt', stops)
        corruption_report(m, data, ['fog', 'snow'], [1, 3], out=tmp_path / 'r')
    m.seen = 0
    r = corruption_report(m, data, ['fog', 'snow'], [1, 3], out=tmp_path / 'r')
    assert m.seen == 12 * 3
    assert r.table.equals(whole.table) and CorruptionReport.load(tmp_path / 'r').table.equals(whole.table)
    m.seen = 0
    corruption_report(m, data, ['fog'], [1], out=tmp_path / 'r')
    assert m.seen == 12


def test_goes_on_with_nothing_else(data, tmp_path):
    m, out = tiny_vit(num_classes=4), tmp_path / 'r'
    corruption_report(m, data, ['fog'], [1], out=out)
    x, y = data
    for what, args, kw in (
        ('fingerprint', (tiny_vit(num_classes=4, seed=5), data), {}),
        ('images', (m, (x.flip(0), y)), {}),
        ('images', (m, (x, y.flip(0))), {}),
        ('table', (m, data), dict(table=64)),
    ):
        with pytest.raises(ValueError, match=f'differs in .*{what}'):
            corruption_report(*args, ['fog'], [1], out=out, **kw)
    with pytest.raises(ValueError, match='plain function'):
        f = lambda x: m(x)
        corruption_report(f, data, ['fog'], [1], out=tmp_path / 'f')
        corruption_report(f, data, ['fog'], [1], out=tmp_path / 'f')
    corruption_report(m, data, ['fog'], [1], out=out, overwrite=True, seed=1)
    (out / 'report.json').write_text('{')
    with pytest.raises(ValueError, match='no readable report'):
        corruption_report(m, data, ['fog'], [1], out=out, seed=1)


def test_wrong_calls_fail_before_any_work(data):
    m = Spy(tiny_vit(num_classes=4))
    for args, kw, err, words in (
        ((m, data, ['fog', 'rain']), {}, ValueError, 'no corruption'),
        ((m, data, ['fog'], [1, 6]), {}, ValueError, 'from 1 to 5'),
        ((m, data, []), {}, ValueError, 'nothing to measure'),
        ((m, data, ['fog'], []), {}, ValueError, 'nothing to measure'),
        ((m, data, ['fog']), dict(n=True), ValueError, 'n must be'),
        ((m, data, ['fog']), dict(seed=True), ValueError, 'seed must be a whole number'),
        ((m, Corrupted(data), ['fog'], [1]), dict(n=3), ValueError, 'n= goes with clean images'),
        ((synth_learner(), data), {}, TypeError, 'learn.corruption_report'),
    ):
        with pytest.raises(err, match=words):
            corruption_report(*args, **kw)
    assert m.seen == 0
    with pytest.raises(ValueError, match='asked for n=99'):
        corruption_report(m, data, ['fog'], [1], n=99)


def test_broken_answers_count_as_wrong(data):
    r = corruption_report(lambda x: torch.full((len(x), 4), float('nan')), data, ['fog'], [1])
    assert r.clean == 0 and any('not a number' in o for o in r.warnings)


def test_training_batches_stay_clean():
    seen = []
    look = Callback(after_pred=lambda self: seen.append((self.training, self.x.std().item())))
    l = synth_learner(cbs=[CorruptValid('contrast', 5), look])
    l.fit(1, 1e-3)
    assert min(s for t, s in seen if t) > 2 * max(s for t, s in seen if not t)


def test_normalised_data_is_refused():
    l = synth_learner()
    l.dls.valid.after_batch.add(Normalize.from_stats([0.5], [0.5], cuda=False))
    with pytest.raises(ValueError, match='Normalize'):
        l.corruption_report(['fog'], [1])


@pytest.mark.parametrize('bs', [20, 70])
def test_flip_report_holds_few_frames_at_a_time(bs, monkeypatch):
    "`bs` counts frames: the model sees no more at once, and no more sequences are made than have that many"
    data, seen, made, real = (images(5, 1, 28, 28), torch.zeros(5).long()), [], [], C.perturb
    net = tiny_vit(num_classes=4)
    want = flip_report(net, data, ['rotate'])
    monkeypatch.setattr(C, 'perturb', lambda x, *a: made.append(len(x)) or real(x, *a))
    net.register_forward_pre_hook(lambda m, a: seen.append(len(a[0])))
    r, k = flip_report(net, data, ['rotate'], bs=bs), max(bs // 31, 1)
    assert r.equals(want) and sum(seen) == 5 * 31 and max(seen) == min(bs, 31 * k) and sum(made) == 5 and max(made) == k


def test_flip_rates_of_alexnet_are_for_imagenet_p():
    "As for mCE: rates measured on other images need a reference on the same images"
    x = images(2, 1, 28, 28)
    r = flip_report(tiny_vit(num_classes=4), (x, torch.zeros(2).long()))
    with pytest.raises(ValueError, match='give base='):
        mfr(r)
    assert mfr(r, {k: 0.5 for k in r.index}) == pytest.approx(200 * r.flip.mean())
    assert mfr(pd.DataFrame(dict(flip=ALEXNET_P))) == 100


# --- nothing of the caller's is changed
# --------------------------------------------------------------------------------------


class InPlace(Around):
    "Normalises its input in place, as many models do"

    def forward(self, x):
        return self.model(x.sub_(0.5).div_(0.5))


class Fair(Around):
    def forward(self, x):
        return self.model((x - 0.5) / 0.5)


def test_models_that_change_their_input(data, tmp_path):
    net, x = tiny_vit(num_classes=4), data[0].clone()
    for g in (
        lambda m: corruption_report(m, data, ['fog', 'snow'], [1, 5], n=8).df.accuracy,
        lambda m: flip_report(m, data, ['rotate', 'gaussian_noise'], n=4).flip,
    ):
        assert g(InPlace(net)).tolist() == g(Fair(net)).tolist() and torch.equal(data[0], x)

    class Own(nn.Module):
        def forward(self, x):
            z = Reads([0, 1, 2], 3, None)(x)
            x.zero_()
            return z

    f = shift_folder(tmp_path / 'a')
    assert subset_report(Own(), f, classes=WNIDS, size=32, num_workers=0).accuracy.tolist() == [1, 1]
    l = synth_learner(metrics=accuracy)
    m, scores = l.model, []
    for kind in (InPlace, Fair):
        l.model = kind(m)
        scores.append(l.validate(cbs=CorruptValid('contrast', 5)))
    assert scores[0] == scores[1]


# --- settings that are no numbers
# --------------------------------------------------------------------------------------------


def test_seeds_and_numbers_of_images_are_whole(data, cifar_c, tmp_path):
    (tmp_path / 'p').mkdir()
    net, x = tiny_vit(num_classes=4), images()
    for f, words in (
        (lambda: corrupt(x, 'gaussian_noise', 1, True), 'seed must be'),
        (lambda: perturb(x, 'snow', True), 'seed must be'),
        (lambda: CorruptValid('fog', 1, True), 'seed must be'),
        (lambda: flip_report(net, data, ['snow'], seed=True), 'seed must be'),
        (lambda: CifarC(cifar_c, True), 'n must be'),
        (lambda: CifarP(tmp_path / 'p', 0), 'n must be'),
        (lambda: ImageNetP(tmp_path / 'p', True), 'n must be'),
        (lambda: flip_report(net, data, ['snow'], n=0), 'n must be'),
    ):
        with pytest.raises(ValueError, match=words):
            f()


def test_more_sequences_than_there_are(tmp_path):
    np.save(tmp_path / 'tilt.npy', np.zeros((3, 4, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match='asked for n=4 sequences, .* has 3'):
        list(CifarP(tmp_path, n=4).pick('tilt'))


# --- what a saved row must share with the row that would be measured
# ----------------------------------------------------------


class Head(Around):
    def forward(self, x):
        return self.model(x)


class Head2(Around):
    def forward(self, x):
        return self.model(1 - x)


def seen_again(model, data, out, **kw):
    "How often the images are judged, and what is said"
    m = Spy(model)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        r = corruption_report(m, data, ['fog', 'snow'], [2, 3], out=out, **kw)
    return m.seen // len(data[1]), ' '.join(str(o.message) for o in w if 'again' in str(o.message)), r


def test_a_saved_report_is_taken_as_it_is(data, tmp_path):
    net = Head(tiny_vit(num_classes=4))
    assert seen_again(net, data, tmp_path / 'r')[0] == 5
    assert seen_again(net, data, tmp_path / 'r', bs=5)[:2] == (1, '')


def test_the_same_weights_behind_another_forward_are_measured_again(data, tmp_path):
    net = tiny_vit(num_classes=4)
    seen_again(Head(net), data, tmp_path / 'r')
    n, said, r = seen_again(Head2(net), data, tmp_path / 'r')
    assert n == 5 and 'its code' in said and 'its outputs' in said
    assert r.verdicts['fog 3'].tolist() == (predict(Head2(net), corrupt(data[0], 'fog', 3)) == data[1]).tolist()


def test_a_corruption_that_differs_after_the_first_images_is_measured_again(tmp_path, monkeypatch):
    "And no other corruption"
    data, net = (images(24, 1, 28, 28), torch.arange(24) % 4), Head(tiny_vit(num_classes=4))
    fog = C._KINDS['fog'].f
    seen_again(net, data, tmp_path / 'r', bs=24)

    def late(x, c, seed):
        return torch.cat([fog(x[:16], c, seed[:16]), x[16:] * 0.5])

    monkeypatch.setattr(C._KINDS['fog'], 'f', late)
    n, said, r = seen_again(net, data, tmp_path / 'r', bs=24)
    assert n == 3 and said.count('is measured again') == 2 and 'snow' not in said and len(r.df) == 5
    assert r.verdicts['fog 3'].tolist() == (predict(net, corrupt(data[0], 'fog', 3)) == data[1]).tolist()


def test_other_labels_between_rows_are_told(cifar_c):
    m = tiny_vit(size=32, patch=8, in_chans=3, num_classes=3)
    x = images(7, 3)
    says = [
        corruption_report(m, CifarC(cifar_c), ['fog'], clean=(x, y)).warnings
        for y in (torch.arange(7) % 3, torch.arange(7).flip(0) % 3)
    ]
    assert [any('other labels' in o for o in s) for s in says] == [False, True]


# --- sizes between the published ones
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('side,told', [(32, False), (48, True)])
def test_a_size_far_from_its_settings_is_told(side, told):
    class Mean(nn.Module):
        def forward(self, x):
            return torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], 1)

    d = images(2, 1, side, side), torch.tensor([0, 1])
    assert any('not scaled' in o for o in corruption_report(Mean(), d, ['brightness']).warnings) == told


# --- a model's own way of cutting images
# -------------------------------------------------------------------------------------


def test_subset_reports_cut_images_as_the_model_says(tmp_path):
    f = tmp_path / 'a'
    seen = []
    for o in WNIDS:
        (f / o).mkdir(parents=True)
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)).save(f / o / '0.png')

    class Model(nn.Module):
        pretrained_cfg = dict(input_size=(3, 32, 32), crop_pct=1.0, interpolation='bicubic', crop_mode='squash')

        def forward(self, x):
            seen.append(x.clone())
            return torch.zeros(len(x), 3)

    for kw, want in (({}, 'pct 1, bicubic, squash'), (dict(pct=0.5, interp='nearest'), 'pct 0.5, nearest, squash')):
        r = subset_report(Model(), f, classes=WNIDS, size=32, num_workers=0, **kw)
        assert want in r.attrs['images']
    assert not torch.equal(*seen)


def test_what_files_give_is_the_callers_own(cifar_c):
    src = CifarC(cifar_c)
    x, y = src.pick('fog', 1)
    a, b = x.clone(), y.clone()
    x.zero_()
    y.add_(1)
    assert torch.equal(src.pick('fog', 1)[0], a) and torch.equal(src.pick('fog', 1)[1], b)


# --- what else a model is made of
# ------------------------------------------------------------------------------------------------

FLAT = 9.0


class Guard(nn.Module):
    "Answers otherwise for images that are nowhere black; what black means is an attribute, a buffer or a global"

    def __init__(self, model, where, flat):
        super().__init__()
        self.model, self.where, self.flat = model, where, flat if where == 'attribute' else 9.0
        self.register_buffer('buffer', torch.tensor(flat if where == 'buffer' else 9.0), persistent=False)

    def forward(self, x):
        return torch.where(
            (x.amin((1, 2, 3)) > min(self.flat, self.buffer, FLAT))[:, None], self.model(x).flip(1), self.model(x)
        )


@pytest.mark.parametrize('where', ['buffer', 'global'])
def test_a_model_with_another_setting_is_measured_again(where, data, tmp_path, monkeypatch):
    net, x = tiny_vit(num_classes=4), data[0].clone()
    x[:, :, 0, 0] = 0
    data = x, predict(tiny_vit(num_classes=4), x)

    def report(flat, out):
        monkeypatch.setitem(globals(), 'FLAT', flat if where == 'global' else 9.0)
        return corruption_report(Guard(net, where, flat), data, ['brightness'], [5], out=out).df.accuracy.tolist()

    old = report(9.0, tmp_path / 'r')
    with pytest.warns(UserWarning, match='attributes or globals changed'):
        new = report(0.01, tmp_path / 'r')
    assert new == report(0.01, None) != old and new[0] == old[0]


def test_another_answer_to_clean_images_is_measured_again(data, tmp_path):
    m = tiny_vit(num_classes=4)
    r = corruption_report(m, data, ['fog'], [1], out=tmp_path / 'r')
    r.preds['clean'] = (r.preds['clean'] + 1) % 4
    r.save(tmp_path / 'r', page=False)
    with pytest.warns(UserWarning, match='its answers changed'):
        corruption_report(m, data, ['fog'], [1], out=tmp_path / 'r')


def test_every_image_of_a_file_counts(tmp_path):
    x, y = (images(40, 3) * 255).byte().permute(0, 2, 3, 1).numpy(), np.arange(40) % 3
    for name in ('fog', 'snow'):
        np.save(tmp_path / f'{name}.npy', np.tile(x, (5, 1, 1, 1)))
    np.save(tmp_path / 'labels.npy', np.tile(y, 5))
    m = tiny_vit(size=32, patch=8, in_chans=3, num_classes=3)

    def report():
        return corruption_report(m, CifarC(tmp_path), ['fog', 'snow'], [1, 2], bs=7, out=tmp_path / 'r')

    old = report()
    a = np.load(tmp_path / 'snow.npy')
    a[39] = 255 - a[39]
    np.save(tmp_path / 'snow.npy', a)
    with pytest.warns(UserWarning, match='snow 1 is measured again') as w:
        new = report()
    assert not any('snow 2' in str(o.message) for o in w) and len(new.df) == len(old.df) == 4


def other_order():
    "A Learner of classes 0 to 11 in the order of text, and images whose classes are ordered by value"
    dls = [synth_dls(16) for _ in range(2)]
    for d, vocab in zip(dls, (sorted(map(str, range(12))), [*map(str, range(12))])):
        d.vocab = d.valid.vocab = vocab
    return Learner(dls[0], tiny_vit(num_classes=12), loss_func=CrossEntropyLossFlat()), dls[1].valid


@pytest.mark.parametrize('report', ['corruption_report', 'flip_report'])
def test_another_dataloader_numbers_its_classes_alike(report):
    learn, dl = other_order()
    with pytest.raises(ValueError, match='2 is class 4 of the Learner, but class 2 of dl'):
        getattr(learn, report)(dl=dl)


# --- few classes
# -----------------------------------------------------------------------------------------------------------------


def test_a_corruption_comes_before_an_attack_whatever_their_order_in_the_list():
    learn, c, a = synth_learner(), CorruptValid('brightness', 5), AdvValid(FGSM(0.05))
    assert learn.validate(cbs=[c, a]) == learn.validate(cbs=[a, c])


def test_classes_that_come_late_in_the_file_are_seen(tmp_path):
    "600 images of six classes in mixed order, then 400 of the other four: not sorted, yet the first 100 show six"
    r = np.random.default_rng(0)
    labels = np.concatenate([r.permutation(np.arange(600) % 6), r.permutation(6 + np.arange(400) % 4)])
    np.save(tmp_path / 'labels.npy', np.tile(labels, 5))
    assert set(CifarC(tmp_path, n=100).y.tolist()) == set(range(10))


def test_frost_without_photographs_is_refused_before_anything_is_measured(monkeypatch):
    forget()
    monkeypatch.setattr(C.importlib.util, 'find_spec', lambda name: None)
    calls, data = [], (torch.rand(4, 1, 28, 28), torch.zeros(4).long())
    with pytest.raises(ImportError, match='corrupt-tta'):
        corruption_report(lambda x: calls.append(x), data, ['fog', 'frost'])
    assert not calls
    forget()


def test_flips_of_answers_that_are_no_numbers_are_noticed():
    with pytest.warns(UserWarning, match='not a number'):
        flip_report(lambda x: x.flatten(1)[:, :3] * float('nan'), (images(2), torch.zeros(2).long()), ['brightness'])
