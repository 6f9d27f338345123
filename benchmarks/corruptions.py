"Seconds per image of the nineteen corruptions beside the libraries that are installed; see README.md beside this file"

import importlib, time, warnings
import numpy as np
from fastcore.script import call_parse
from fastai.vision.all import *
from robust_nbdev.all import *


def peers():
    "name -> f(image uint8 [H,W,3], corruption, severity)"
    res = {}
    for name, call in (
        ('corrupt_tta', lambda m: lambda a, n, s: m.corrupt(a, s, n)),
        ('imagecorruptions', lambda m: lambda a, n, s: m.corrupt(a, corruption_name=n, severity=s)),
    ):
        try:
            res[name] = call(importlib.import_module(name))
        except Exception as e:
            print(f'{name} is left out: {type(e).__name__}: {e}')
    return res


def images(n, size):
    x = F.interpolate(
        torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0)), size=(size, size), mode='bicubic'
    ).clamp(0, 1)
    return (x * 255).round() / 255


def clock(f):
    f()
    t = time.process_time()
    f()
    return time.process_time() - t


def one_by_one(f, a, name):
    try:
        return clock(lambda: [f(o, name, s) for o in a for s in range(1, 6)]) / len(a)
    except Exception as e:
        return float('nan')


@call_parse
def main(
    sizes: str = '32,224',  # Sides of the images
    n: int = 16,  # Images
):
    "Milliseconds per image, all five severities, one thread"
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    others = peers()
    for size in map(int, sizes.split(',')):
        x = images(n, size)
        a = (x * 255).round().byte().permute(0, 2, 3, 1).numpy()
        rows = {
            k: {
                'here': clock(lambda: [corrupt(x, k, s) for s in range(1, 6)]) / n,
                **{p: one_by_one(f, a, k) for p, f in others.items()},
            }
            for k in CORRUPTIONS + EXTRA_CORRUPTIONS
        }
        df = 1000 * pd.DataFrame(rows).T
        df.loc['all'] = df.sum()
        print(f'\n{size} px, batches of {n}, ms per image')
        print(df.round(2).to_string())
