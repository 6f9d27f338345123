"House rules that a machine can check, over notebooks, modules and tracked files (R43, R44)."

import ast, json, os, re, subprocess, sys
from functools import lru_cache
from pathlib import Path
import pytest

from checkout import copy_checkout

ROOT = Path(__file__).resolve().parents[1]
NBS = sorted(p for p in (ROOT / 'nbs').rglob('*.ipynb') if not any(o[0] in '_.' for o in p.relative_to(ROOT).parts))
MODS = sorted(p for p in (ROOT / 'robust_nbdev').glob('*.py') if p.name not in ('__init__.py', '_modidx.py'))
cells = {p: json.loads(p.read_text())['cells'] for p in NBS}
src = lambda c: ''.join(c['source'])
nbs = pytest.mark.parametrize('nb', NBS, ids=[p.stem for p in NBS])
mods = pytest.mark.parametrize('mod', MODS, ids=[p.stem for p in MODS])


@lru_cache(maxsize=None)
def tree(mod):
    return list(ast.walk(ast.parse(mod.read_text())))


def code(c):
    return '\n'.join('pass' if re.match(r'\s*[%!]', l) else l for l in src(c).splitlines() if not l.startswith('#|'))


def flag(c, *names):
    return any(re.match(rf'#\|\s*{n}\b', l) for l in src(c).splitlines() for n in names)


def code_cells(nb):
    return [c for c in cells[nb] if c['cell_type'] == 'code']


@nbs
def test_no_cell_mixes_imports_with_other_code(nb):
    bad = []
    for c in code_cells(nb):
        # nbdev's own last cell
        if src(c).startswith('#| hide\nimport nbdev'):
            continue
        kinds = {isinstance(o, (ast.Import, ast.ImportFrom)) for o in ast.parse(code(c)).body}
        if len(kinds) == 2:
            bad.append((c['id'], src(c)[:80]))
    assert not bad


@mods
def test_no_function_takes_the_place_of_another(mod):
    "Cells of a notebook share one module: a second function of a name silently replaces the first"

    def extends(o):
        return any(re.match(r'patch|typedispatch|.*\.register', ast.unparse(d)) for d in o.decorator_list)

    found = [o for o in ast.parse(mod.read_text()).body if isinstance(o, (ast.FunctionDef, ast.ClassDef))]
    names = [o.name for o in found if not extends(o)]
    assert sorted(names) == sorted(set(names))


@nbs
def test_headings_are_cells_of_their_own_and_no_symbols(nb):
    names = set(
        re.findall(r'^(?:def|class) (\w+)', '\n'.join(src(c) for c in code_cells(nb) if flag(c, 'export')), re.M)
    )
    bad = []
    for c in cells[nb]:
        if c['cell_type'] != 'markdown':
            continue
        heads = re.findall(r'^#{2,6} +(.*?)\s*$', src(c), re.M)
        if heads and len(src(c).strip().splitlines()) > 1:
            bad.append(f'{heads[0]}: more than the heading in its cell')
        # `## PGD -` is dropped from the page
        bad += [f'{h}: the name of a symbol' for h in heads if h.strip('`') in names]
    assert not bad


@nbs
def test_no_error_is_saved(nb):
    bad = [
        c['id']
        for c in code_cells(nb)
        for o in c.get('outputs', [])
        if o['output_type'] == 'error'
        or (o.get('name') == 'stderr' and ('Warning' in ''.join(o['text']) or 'Traceback' in ''.join(o['text'])))
    ]
    assert not bad


@nbs
def test_first_cell_is_the_title_with_its_sentence(nb):
    first = next(c for c in cells[nb] if c['cell_type'] == 'markdown')
    assert re.match(r'# .+\n+> .+', src(first)), src(first)[:80]


@nbs
def test_cells_that_need_a_gpu_are_flagged(nb):
    assert [
        c['id']
        for c in code_cells(nb)
        if re.search(r"\.cuda\(|device=['\"]cuda|\.to\(['\"]cuda", src(c))
        and not flag(c, 'gpu', 'eval: false', 'export')
    ] == []


@mods
def test_no_assert_in_library_code(mod):
    assert [o.lineno for o in tree(mod) if isinstance(o, ast.Assert)] == []


@mods
def test_nothing_is_swallowed(mod):
    "No bare except, no `except Exception: pass`"
    bad = [
        o.lineno
        for o in tree(mod)
        if isinstance(o, ast.ExceptHandler)
        and (
            o.type is None
            or (
                getattr(o.type, 'id', '') in ('Exception', 'BaseException')
                and all(isinstance(b, ast.Pass) for b in o.body)
            )
        )
    ]
    assert bad == []


ALLOWED = dict(
    core=set(),
    docstrings=set(),
    vit={'core'},
    datasets={'core'},
    models={'core', 'vit', 'datasets'},
    rvt_fan={'core', 'vit'},
    attacks={'core'},
    patch_attacks={'core', 'vit', 'attacks'},
    autoattack={'core', 'attacks'},
    adv_train={'core', 'vit', 'attacks', 'eval_data', 'identity'},
    identity={'core'},
    eval_data={'core', 'datasets'},
    evaluate={'core', 'datasets', 'attacks', 'autoattack', 'identity', 'eval_data'},
    corruptions={'core', 'datasets', 'evaluate', 'identity', 'eval_data'},
    compare={'core', 'vit', 'attacks', 'autoattack', 'eval_data', 'evaluate', 'corruptions', 'cli'},
    experiments={'core', 'datasets', 'models', 'compare'},
    test_utils={'core'},
)
PAPERS = {'robust_tokens', 'tora', 'xcit_recipe', 'afat', 'aas'}
# the one module that shows the papers' together
ALLOWED['explorer'] = {'core', 'vit', 'attacks', 'patch_attacks', 'autoattack', 'evaluate', 'corruptions'} | PAPERS - {
    'xcit_recipe'
}


@mods
def test_direction_of_imports(mod):
    uses = {
        (o.module or '').removeprefix('robust_nbdev').lstrip('.').split('.')[0]
        for o in tree(mod)
        if isinstance(o, ast.ImportFrom) and (o.level or (o.module or '').startswith('robust_nbdev'))
    } - {''}
    if mod.stem in ALLOWED:
        assert uses <= ALLOWED[mod.stem]
    elif mod.stem in PAPERS:
        assert not uses & (PAPERS | {'test_utils', 'all', 'cli'})
    else:
        assert mod.stem in ('all', 'cli', 'methods', '__main__') and 'test_utils' not in uses


def test_core_names_no_model_library_and_draws_nothing():
    text = (ROOT / 'robust_nbdev' / 'core.py').read_text()
    assert not re.search(r'^(import|from) (timm|matplotlib)', text, re.M) and not re.search(
        r'\b(PGD|FGSM|APGD|TRADES|AFAT|TORA)\(', text
    )


def tracked():
    try:
        r = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard'], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        r = None
    if r is None or r.returncode:
        pytest.skip('not a git checkout')
    return [ROOT / f for f in r.stdout.splitlines() if (ROOT / f).is_file()]


def test_no_machine_path_in_any_file():
    words = [f'/{o}\\b' for o in ('wo' + 'rk', 'ro' + 'ot', 'ho' + 'me', 'Us' + 'ers', 'tm' + 'p')] + ['sha' + 'red/']
    pat, bad = re.compile(r'(?<![\w.}/~$-])(' + '|'.join(words) + ')'), []
    for f in tracked():
        try:
            text = f.read_text()
        except UnicodeDecodeError:
            continue
        bad += [
            f'{f.relative_to(ROOT)}:{i}: {l.strip()[:90]}'
            for i, l in enumerate(text.splitlines(), 1)
            if pat.search(l) and 'image/png' not in l and len(l) < 2000
        ]
    assert bad == []


def test_no_address_of_ours_is_named_before_it_is_set():
    """Whoever registers a name that our texts link to owns what readers install; `[project.urls]` says where the
    project is hosted, if it is"""
    urls = re.search(r'^\[project\.urls\]', (ROOT / 'pyproject.toml').read_text(), re.M)
    ours, bad = (
        re.compile(
            r'https?://[\w.-]*(robust-nbdev|robust_nbdev)|github\.com/[\w-]+/robust[-_]nbdev|pip install [\'"]?robust-nbdev',  # noqa: E501
            re.I,
        ),
        [],
    )
    for f in tracked():
        if urls or f.name == 'test_style.py':
            continue
        try:
            text = f.read_text()
        except UnicodeDecodeError:
            continue
        bad += [
            f'{f.relative_to(ROOT)}:{i}: {m[0]}' for i, l in enumerate(text.splitlines(), 1) for m in ours.finditer(l)
        ]
    assert bad == []


def test_no_stray_files():
    names = [f.relative_to(ROOT).as_posix() for f in tracked()]
    assert [
        n
        for n in names
        if re.search(
            r'\.(pth|pkl|tmp|orig|rej|log|pyc)$|(^|/)(_proc|_docs|build|dist|__pycache__|models)/|\.ipynb_checkpoints',
            n,
        )
    ] == []
    assert [f.relative_to(ROOT).as_posix() for f in tracked() if f.stat().st_size > 6e6] == []


def test_modules_are_in_step_with_notebooks(tmp_path):
    pytest.importorskip('nbdev')
    copy_checkout(tmp_path / 'c', '*.npz')
    for f in (tmp_path / 'c' / 'robust_nbdev').glob('*.py'):
        if f.read_text().startswith(('# AUTOGENERATED', '"""')) and 'AUTOGENERATED' in f.read_text():
            f.unlink()
    r = subprocess.run(
        [sys.executable, '-c', 'import nbdev; nbdev.nbdev_export()'],
        cwd=tmp_path / 'c',
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != 'IN_TEST'} | dict(PYTHONPATH=str(tmp_path / 'c')),
    )
    assert r.returncode == 0, r.stderr
    diff = [
        f.name
        for f in sorted((ROOT / 'robust_nbdev').glob('*.py'))
        if not (tmp_path / 'c' / 'robust_nbdev' / f.name).exists()
        or (tmp_path / 'c' / 'robust_nbdev' / f.name).read_text() != f.read_text()
    ]
    assert diff == [] and 'mport' not in r.stderr, r.stderr


def test_readme():
    p = ROOT / 'README.md'
    if not p.exists():
        pytest.skip('no README yet')
    t = p.read_text()
    assert (
        all(o in t for o in ('pip install -e . && robust-demo', "pip install -e '.[dev]' && pytest", '!['))
        and 'Generated from nbs/index.ipynb' in t
    )
    for link in re.findall(r'!\[[^\]]*\]\(([^)\s]+)', t):
        if not link.startswith('http'):
            assert (ROOT / link).exists(), link
    nb = next(n for n in NBS if n.stem == 'index')
    first = re.match(r'# (.+)', src(next(c for c in cells[nb] if c['cell_type'] == 'markdown'))).group(1)
    assert f'# {first}' in t


def test_notebooks_do_not_depend_on_the_working_folder():
    "No relative path to a file beside the notebook in the code"
    bad = [
        (p.name, c['id'])
        for p in NBS
        for c in code_cells(p)
        if re.search(r"""(open|Path|read_text|load)\(\s*['"]\.\./""", src(c))
    ]
    assert bad == []


def test_names_of_tests_do_not_change_between_runs(request):
    "An address in a name (`<function f at 0x...>`) makes the workers of xdist disagree about what there is to run"
    assert [o.nodeid for o in request.session.items if ' at 0x' in o.nodeid] == []


@nbs
def test_sizes_can_be_computed_at_paper_scale(nb):
    "`n_train` is None there, all images, so it is compared or halved only as `(s.n_train or 2000)`"
    assert [
        c['id']
        for c in code_cells(nb)
        if not flag(c, 'export') and re.search(r'min\(s\.n_train *,|s\.n_train *(>|<|//|\*|/|-|\+)', src(c))
    ] == []
