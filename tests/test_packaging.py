"The wheel: what is in it, and that it works away from the sources."

import json, os, re, subprocess, sys, zipfile
from pathlib import Path
import pytest, robust_nbdev
from robust_nbdev.datasets import settings

from checkout import copy_checkout

ROOT = Path(__file__).resolve().parents[1]


def sh(*args, cwd, **env):
    r = subprocess.run(
        [*map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore') | env,
    )
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    pytest.importorskip('build')
    d = tmp_path_factory.mktemp('wheel')
    copy_checkout(d / 'src')
    sh(sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', d / 'dist', cwd=d / 'src')
    (w,) = (d / 'dist').iterdir()
    return w


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
    d = tmp_path_factory.mktemp('env')
    sh(sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--no-index', '--target', d / 'site', wheel, cwd=d)
    (d / 'cwd').mkdir()
    return d


def python(env, code):
    return sh(sys.executable, '-c', code, cwd=env / 'cwd', PYTHONPATH=str(env / 'site'))


def test_contents(wheel):
    z = zipfile.ZipFile(wheel)
    names = set(z.namelist())
    assert wheel.name == f'robust_nbdev-{robust_nbdev.__version__}-py3-none-any.whl'
    assert (
        z.read('robust_nbdev/settings.ini')
        == (ROOT / 'settings.ini').read_bytes()
        == (ROOT / 'robust_nbdev' / 'settings.ini').read_bytes()
    )
    assert (
        z.read('robust_nbdev/data/fmnist_small.npz')
        == (ROOT / 'robust_nbdev' / 'data' / 'fmnist_small.npz').read_bytes()
    )
    assert {n for n in names if n.endswith('.py')} == {
        p.relative_to(ROOT).as_posix() for p in (ROOT / 'robust_nbdev').rglob('*.py')
    }
    assert {n.split('/')[0] for n in names} == {'robust_nbdev', f'robust_nbdev-{robust_nbdev.__version__}.dist-info'}
    info = {n.split('/')[-1]: z.read(n).decode() for n in names if 'dist-info' in n}
    assert (
        'robust-demo = robust_nbdev.__main__:robust_demo' in info['entry_points.txt']
        and 'robust-eval = robust_nbdev.__main__:robust_eval' in info['entry_points.txt']
        and f'Version: {robust_nbdev.__version__}' in info['METADATA']
        and 'License-Expression: Apache-2.0' in info['METADATA']
        and 'LICENSE' in info
    )
    assert sum(o.file_size for o in z.infolist()) < 20e6


def test_versions_agree():
    assert robust_nbdev.__version__ in (ROOT / 'CHANGELOG.md').read_text()


@pytest.fixture(scope='module')
def seen(installed):
    "One process that imports the installed package, without what is to be imported lazily"
    out = python(
        installed,
        '''import sys, os, time, json, importlib, runpy
class Block:
    def find_spec(self, name, path=None, target=None):
        lazy = ('lpips','pyautoattack','ipywidgets','nbdev','pyarrow')
        if name.split('.')[0] in lazy: raise ImportError('blocked: '+name)
sys.meta_path.insert(0, Block())
import timm, io, contextlib
from fastai.vision.all import *
t,said = time.process_time(),io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said): from robust_nbdev.all import *
r = dict(seconds=time.process_time()-t, said=said.getvalue())
import robust_nbdev, robust_nbdev.cli, robust_nbdev.test_utils, robust_nbdev.all as everything
r['where'] = Path(robust_nbdev.__file__).parent.parent.name
r['settings'] = settings('smoke').n_train,settings().profile
dls = fashion_mnist(64, 20, bs=16)
x,y = dls.one_batch()
r['data'] = list(x.shape),len(dls.valid_ds)
small = dict(img_size=28, patch_size=7, in_chans=1, num_classes=10, embed_dim=32, depth=1, num_heads=2)
m = Normalized(timm.create_model('vit_tiny_patch16_224', **small))
r['moved'] = (PGD(8/255, steps=2)(m, x, y)-x).abs().max().item()
r['names'] = [k for k,o in vars(everything).items() if (getattr(o,'__module__','') or '').startswith('robust_nbdev')]
said = io.StringIO()
sys.argv = ['robust-demo', '--help']
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    runpy.run_path(str(Path(robust_nbdev.__file__).parents[1]/'bin'/'robust-demo'), run_name='__main__')
r['help'],r['left'] = said.getvalue(),len(os.listdir())
print('RESULT'+json.dumps(r))''',
    )
    return json.loads(out.split('RESULT')[1])


def test_installed_package_works_elsewhere_without_lazy_packages(seen):
    smoke = [settings('smoke').n_train, 'smoke']
    assert (seen['where'], seen['settings'], seen['data']) == ('site', smoke, [[16, 1, 28, 28], 20])
    assert 0.9 * 8 / 255 < seen['moved'] <= 8 / 255 + 1e-6


def test_import_is_quiet_and_costs_little_more_than_fastai_and_timm(seen):
    assert seen['said'] == '' and seen['seconds'] < 1.5


def test_all_brings_what_a_user_types(seen):
    "Not what only other modules need"
    typed = {
        'Linf',
        'Normalized',
        'AdvCallback',
        'add_tokens',
        'NoDecay',
        'fashion_mnist',
        'settings',
        'PGD',
        'AdvTrain',
        'TRADES',
        'robust_report',
    }
    internal = {
        'image_seed',
        'check_images',
        'Seam',
        'add_part',
        'check_backbone',
        'ImageSource',
        'read_idx',
        'is_summed',
    }
    assert typed <= set(seen['names']) and not internal & set(seen['names'])
    assert len(seen['names']) <= 150


def test_installed_command(seen):
    assert '--profile' in seen['help'] and seen['left'] == 0


def test_no_name_of_fastai_is_hidden():
    "`from robust_nbdev.all import *` leaves fastai's own names as they are"
    import fastai.vision.all as fv, robust_nbdev.all as ra

    assert [
        n for n in dir(fv) if not n.startswith('_') and hasattr(ra, n) and getattr(ra, n) is not getattr(fv, n)
    ] == []


def test_every_extra_that_is_named_exists():
    "In the pages, the code and the scripts: an unknown extra is skipped by pip with a warning"
    known = set(
        re.findall(
            r'^(\w+) = \[',
            (ROOT / 'pyproject.toml').read_text().split('[project.optional-dependencies]')[1].split('\n[')[0],
            re.M,
        )
    )
    files = [
        ROOT / 'README.md',
        ROOT / 'CONTRIBUTING.md',
        *(ROOT / 'benchmarks').iterdir(),
        ROOT / '.ci' / 'run',
        *(ROOT / 'nbs').glob('*.ipynb'),
    ]
    text = '\n'.join(f.read_text() for f in files)
    named = set(re.findall(r'extra `(\w+)`', text)) | {
        o for s in re.findall(r'(?:robust-nbdev|[\s\'"][.])\[([\w,]+)\]', text) for o in s.split(',')
    }
    assert {'bench', 'corruptions', 'dev'} <= named <= known
