"The nineteen corruptions beside their originals and other libraries: pixels and time; see README.md beside this file"

import ast, importlib, time, types, warnings
from contextlib import contextmanager
from unittest import mock
import numpy as np
from fastcore.script import call_parse
from fastai.vision.all import *
from scipy.special import ndtri
from scipy.stats import poisson
from sklearn.datasets import load_sample_images
import robust_nbdev.corruptions as C
from robust_nbdev.all import *
from robust_nbdev.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS

ORIGINALS = {32: 'make_cifar_c.py', 224: 'make_imagenet_c.py'}


def photographs(size, n):
    "`n` squares of scikit-learn's two photographs, as uint8 [n,size,size,3]"
    out, rng = [], np.random.default_rng(0)
    for i in range(n):
        photo = load_sample_images().images[i % 2]
        side = int(rng.integers(max(size, 200), 420))
        top, left = [int(rng.integers(0, o - side + 1)) for o in photo.shape[:2]]
        square = Image.fromarray(photo[top : top + side, left : left + side])
        out.append(np.array(square.resize((size, size), Image.BICUBIC)))
    return np.stack(out)


def as_batch(a):
    return torch.from_numpy(a).permute(0, 3, 1, 2) / 255


def pixels(x):
    return (x * 255).round().byte().permute(0, 2, 3, 1).numpy()


# --- the originals and the libraries: name -> f(image uint8 [H,W,3], corruption, severity) --------------------------


def _names_of_the_original():
    "What the functions of the authors' files use, in today's libraries"
    import cv2, ctypes, scipy.ndimage, skimage, skimage.filters, wand.api, wand.image

    wand.api.library.MagickMotionBlurImage.argtypes = (ctypes.c_void_p, *[ctypes.c_double] * 3)

    def gaussian(x, sigma, multichannel=False, **kw):
        return skimage.filters.gaussian(x, sigma, channel_axis=-1 if multichannel else None, **kw)

    def imread(name):
        return cv2.imread(str(C._frost_folder() / Path(name).name))

    return dict(
        np=types.SimpleNamespace(**{**vars(np), 'float_': np.float64, 'fromstring': np.frombuffer}),
        cv2=types.SimpleNamespace(**{**vars(cv2), 'imread': imread}),
        sk=skimage,
        gaussian=gaussian,
        scizoom=scipy.ndimage.zoom,
        map_coordinates=scipy.ndimage.map_coordinates,
        PILImage=Image,
        BytesIO=io.BytesIO,
        WandImage=wand.image.Image,
        wandlibrary=wand.api.library,
    )


def original(folder, size):
    "The functions and classes of the authors' file for images of this size, without the code that runs on import"
    tree = ast.parse((Path(folder) / ORIGINALS[size]).read_text())
    wanted = set(CORRUPTIONS + EXTRA_CORRUPTIONS) | {'disk', 'MotionImage', 'plasma_fractal', 'clipped_zoom'}
    tree.body = [o for o in tree.body if getattr(o, 'name', None) in wanted]
    space = _names_of_the_original()
    exec(compile(tree, ORIGINALS[size], 'exec'), space)
    return lambda a, name, severity: np.uint8(space[name](Image.fromarray(a), severity))


def libraries():
    "Those that are installed"
    res = {}
    for name, call in (
        ('imagecorruptions', lambda m: lambda a, n, s: m.corrupt(a, corruption_name=n, severity=s)),
        ('corrupt_tta', lambda m: lambda a, n, s: m.corrupt(a, s, n)),
    ):
        try:
            res[name] = call(importlib.import_module(name))
        except Exception as e:
            print(f'{name} is left out: {type(e).__name__}: {e}')
    return res


# --- the same random numbers ----------------------------------------------------------------------------------------


def ours(a, name, severity):
    "An image under a corruption of this library, and the uniform numbers that it drew"
    drawn, uniform = [], C.uniform

    def recorded(*args):
        drawn.append(uniform(*args))
        return drawn[-1]

    with mock.patch.object(C, 'uniform', recorded):
        x = corrupt(as_batch(a[None]), name, severity)
    return pixels(x)[0], [o[0].double().numpy() for o in drawn]


def in_their_order(name, drawn, d):
    "The uniform numbers in the order in which the published loops ask for them; `d`: glass blur's largest step"
    if name == 'glass_blur':
        for dy, dx in drawn[0]:
            h, w = dy.shape
            yield from (np.array([dx[r, c], dy[r, c]]) for r in range(h - d, d, -1) for c in range(w - d, d, -1))
    elif name == 'fog':
        step = len(drawn[0])
        while step >= 2:
            on, half = slice(0, None, step), slice(step // 2, None, step)
            yield from (drawn[0][o] for o in ((half, half), (on, half), (half, on)))
            step //= 2
    elif name == 'frost':
        yield from drawn[0]
    elif name == 'elastic_transform':
        yield from (drawn[0], drawn[2][0], drawn[1][0])
    elif name == 'snow':
        yield from (drawn[1][0], drawn[0][0])
    elif name == 'impulse_noise':
        u = drawn[0].transpose(1, 2, 0)
        yield from (u, np.where(np.floor(2**23 * u) % 2, 0.25, 0.75))
    else:
        yield from (o.transpose(1, 2, 0).squeeze() if o.ndim == 3 else o.squeeze() for o in drawn)


@contextmanager
def numpy_draws(numbers):
    "numpy's random functions return what `numbers` yields; those of another shape than is asked for are passed over"

    def take(size):
        shape = () if size is None else tuple(np.atleast_1d(size))
        return first(u for u in map(np.asarray, numbers) if u.size == np.prod(shape)).reshape(shape)

    def randint(lo, hi=None, size=None):
        lo, hi = (0, lo) if hi is None else (lo, hi)
        k = np.floor(lo + (hi - lo) * take(size)).astype(int)
        return k if k.ndim else int(k)

    with mock.patch.multiple(
        np.random,
        uniform=lambda lo=0, hi=1, size=None: lo + (hi - lo) * take(size),
        normal=lambda loc=0, scale=1, size=None: loc + scale * ndtri(take(size)),
        poisson=lambda lam: poisson.ppf(take(lam.shape), lam),
        randint=randint,
        default_rng=lambda *a: types.SimpleNamespace(random=take),
    ):
        yield


def difference(f, a, name, severity, target=None):
    "|f - target| in levels [H,W,3]; the target is the corruption here. All with the same random numbers"
    here, drawn = ours(a, name, severity)
    level = C._KINDS[name].levels[224 if len(a) > 100 else 32][severity - 1]
    d = level[1] if name == 'glass_blur' else 0
    with numpy_draws(in_their_order(name, drawn, d)):
        got = f(a, name, severity)
    if target is not None:
        with numpy_draws(in_their_order(name, drawn, d)):
            here = target(a, name, severity)
    return np.abs(got.astype(int) - here)


def attempt(f):
    try:
        return f()
    except Exception as e:
        return float('nan')


def pixel_table(a, theirs, libs):
    "Levels by which corruptions miss the originals: here also the share of values that miss by more than one level"

    def levels(f, name, target=None):
        return np.stack([difference(f, o, name, s, target) for o in a for s in range(1, 6)])

    rows = {}
    for name in CORRUPTIONS + EXTRA_CORRUPTIONS:
        d = levels(theirs, name)
        per_severity = d.reshape(len(a), 5, -1).swapaxes(0, 1).reshape(5, -1)
        rows[name] = {
            'here': d.mean(),
            'most off by > 1, %': 100 * (per_severity > 1).mean(1).max(),
            'largest': d.max(),
        }
        rows[name] |= {k: attempt(lambda: levels(f, name, theirs).mean()) for k, f in libs.items()}
    return pd.DataFrame(rows).T


def clock(f):
    "CPU seconds, the faster of two"
    times = []
    for _ in range(2):
        t = time.process_time()
        f()
        times.append(time.process_time() - t)
    return min(times)


def time_table(a, others):
    "Time of the originals and libraries over that of the corruptions here (a batch), all severities"
    x, rows = as_batch(a), {}
    for name in CORRUPTIONS + EXTRA_CORRUPTIONS:
        here = clock(lambda: [corrupt(x, name, s) for s in range(1, 6)])
        one = clock(lambda: [corrupt(o[None], name, s) for o in x for s in range(1, 6)])
        times = {
            k: attempt(lambda: clock(lambda: [f(o, name, s) for o in a for s in range(1, 6)]))
            for k, f in others.items()
        }
        rows[name] = {'here': 1.0, 'here, one by one': one / here, **{k: t / here for k, t in times.items()}}
    return pd.DataFrame(rows).T


@call_parse
def main(
    originals: str = None,  # Folder with the authors' make_cifar_c.py and make_imagenet_c.py
    sizes: str = '32,224',  # Sides of the images
    n: int = 8,  # Images of the times
    n_pixels: int = 4,  # Images of the comparison of pixels
    parts: str = 'pixels,time',  # Which tables
):
    "Two tables for each size: levels off the originals with the same random numbers, and time in units of that here"
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    libs = libraries()
    for size in map(int, sizes.split(',')):
        theirs = original(originals, size) if originals else None
        if theirs and 'pixels' in parts:
            print(f'\n{size} px, {n_pixels} images, five severities: levels (of 255) off the originals')
            print(pixel_table(photographs(size, n_pixels), theirs, libs).round(3).to_string(), flush=True)
        if 'time' in parts:
            others = {**({'original': theirs} if theirs else {}), **libs}
            print(f'\n{size} px, {n} images, five severities: time / time here in one batch')
            print(time_table(photographs(size, n), others).round(2).to_string(), flush=True)
