"""The checks of the documentation: what they find, and that there is nothing to find; what the site makes of tables and
signatures"""

import importlib.util, json, sys
from dataclasses import dataclass
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]


def tool(name):
    if str(ROOT / 'tools') not in sys.path:
        sys.path.insert(0, str(ROOT / 'tools'))
    spec = importlib.util.spec_from_file_location(name, ROOT / 'tools' / f'{name}.py')
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    return m


@pytest.fixture(scope='module')
def lint():
    pytest.importorskip('nbdev')
    return tool('docs_lint')


def good(
    x,  # Anything
    *args,  # More
    **kw,  # Named
) -> int:  # Zero
    "One line"

    def inner():
        return 1

    return 0


def bare(x, y=1):
    return x


def nothing(x):  # Anything
    "Returns no value"

    def inner():
        return 1

    if x:
        return
    return None


def two_paragraphs(
    x,  # Anything
):
    """Two

    paragraphs"""


def stream(
    n: int,  # How many
):
    "Numbers"
    yield from range(n)


class Base:
    "A base"

    def __init__(self, x):  # Anything
        self.x = x

    def f(
        self,
        x,  # Anything
    ) -> int:  # One
        "Says one"
        return 1

    @property
    def p(self):
        "A property needs no more than this"
        return 1

    @property
    def q(self):
        return 1


class Child(Base):
    def f(self, x):
        return 2

    def g(self, x):
        return 2


@dataclass
class Fields:
    "Some fields"

    a: int  # The first
    b: int = 0


@pytest.mark.parametrize(
    'o,bad',
    [
        (good, []),
        (bare, ['docstring', 'x', 'y', 'return']),
        (nothing, []),
        (two_paragraphs, ['docstring of one paragraph']),
        (stream, ['return']),
        (Base, []),
        (Base.f, []),
        (Base.p, []),
        (Base.q, ['docstring']),
        (Child, ['docstring']),
        (Child.g, ['docstring', 'x', 'return']),
        (Fields, ['b']),
    ],
    ids=lambda o: getattr(o, '__name__', None) or (o.fget.__name__ if isinstance(o, property) else ''),
)
def test_lint_finds(lint, monkeypatch, o, bad):
    monkeypatch.setattr(lint, 'PKG', __name__.split('.')[0])
    assert lint.lacks(o) == bad


def test_an_override_says_what_its_base_says(lint, monkeypatch):
    monkeypatch.setattr(lint, 'PKG', __name__.split('.')[0])
    assert lint.lacks(Child.f, [Base.f]) == [] and lint.lacks(Child.f) == ['docstring', 'x', 'return']


def test_methods_of_other_libraries_are_described_there_but_not_what_forward_takes(lint, monkeypatch):
    from torch import nn

    monkeypatch.setattr(lint, 'PKG', __name__.split('.')[0])

    class M(nn.Module):
        def forward(self, x):
            return x

        def extra_repr(self):
            return ''

    assert lint.lacks(M.extra_repr, [nn.Module.extra_repr]) == []
    assert lint.lacks(M.forward, [nn.Module.forward]) == ['docstring of one paragraph', 'x', 'return']


def test_everything_that_nbdev_has_indexed_is_looked_at(lint):
    seen = {s for s, _, _ in lint.symbols()}
    assert {
        'robust_nbdev.core.Linf.project',
        'robust_nbdev.evaluate.Learner.robust_report',
        'robust_nbdev.attacks.AttackBase.__call__',
        'robust_nbdev.core.eps_str',
    } <= seen and len(seen) > 500


PAGE = '''<!doctype html><html lang="en"><head><title>T</title><link rel="stylesheet" href="s.css">
<link rel="canonical" href="https://x.org/a.html"></head>
<body><h1 id="top">T</h1><a href="b.html#end">b</a><a href="#top">up</a><a href="https://x.org">out</a>
<a href="mailto:a@b.c">mail</a><a href="sub/">sub</a><img src="p.png" alt="A picture">
<div class="cell-output cell-output-display"><div><img alt="A figure" src="data:image/png;base64,AA"></div></div>
</body></html>'''


@pytest.fixture
def site(tmp_path):
    (tmp_path / 'sub').mkdir()
    for n in ('a.html', 'sub/index.html'):
        (tmp_path / n).write_text(
            PAGE
            if n == 'a.html'
            else PAGE.replace('b.html', '../b.html')
            .replace('s.css', '../s.css')
            .replace('p.png', '../p.png')
            .replace('"sub/"', '"../a.html"')
        )
    (tmp_path / 'b.html').write_text('<html lang="en"><title>B</title><p id="end">')
    (tmp_path / 's.css').write_text('a { background: url(p.png) }')
    (tmp_path / 'p.png').write_bytes(b'')
    return tmp_path


@pytest.fixture(scope='module')
def check_site():
    return tool('check_site')


def test_a_sound_site_has_no_complaints(check_site, site):
    assert check_site.check(site) == []


@pytest.mark.parametrize(
    'old,new,complaint',
    [
        ('b.html#end', 'c.html', 'broken link c.html'),
        ('b.html#end', 'b.html#start', 'no such anchor b.html#start'),
        ('"#top"', '"#bottom"', 'no such anchor #bottom'),
        ('p.png', 'q.png', 'broken link q.png'),
        ('href="s.css"', 'href="https://cdn.org/s.css"', 'loads https://cdn.org/s.css'),
        ('src="p.png"', 'src="//cdn.org/p.png"', 'loads //cdn.org/p.png'),
        ('<h1', '<script src="http://cdn.org/x.js"></script><h1', 'loads http://cdn.org/x.js'),
        (
            '<h1',
            "<script type=module>import m from 'https://cdn.org/m.mjs';</script><h1",
            'loads https://cdn.org/m.mjs',
        ),
        ('<h1', '<style>@import "https://fonts.org/f.css";</style><h1', 'loads https://fonts.org/f.css'),
        ('<h1', '<p style="background:url(https://cdn.org/i.png)"><h1', 'loads https://cdn.org/i.png'),
        ('<title>T</title>', '<title> </title>', 'no title'),
        (' lang="en"', '', 'no language: <html lang="en">'),
        (' alt="A picture"', '', 'image without alt text: p.png'),
        (' alt="A figure"', '', 'image without alt text: data:image/png;base64,AA'),
        ('<h1', '<i id="top"></i><h1', 'two elements have the id top'),
        ('<h1', '<i id="top-1"></i><h1', 'two headings want the anchor #top'),
    ],
)
def test_site_check_finds(check_site, site, old, new, complaint):
    f = site / 'a.html'
    assert old in f.read_text()
    f.write_text(f.read_text().replace(old, new, 1))
    assert f'a.html: {complaint}' in check_site.check(site)


def test_a_style_sheet_that_loads_from_elsewhere_is_found(check_site, site):
    (site / 's.css').write_text('@import url("https://fonts.org/f.css");')
    assert check_site.check(site) == ['s.css: loads https://fonts.org/f.css']


def test_search_must_find_every_public_symbol(check_site, site):
    names = list(check_site.public(ROOT / 'robust_nbdev'))
    assert (
        {'PGD', 'Learner.robust_report', 'Normalized'} <= set(names)
        and not any('._' in n for n in names)
        and 'Linf.project' not in names
    )
    (site / 'search.json').write_text(json.dumps([dict(section=n) for n in names if n != 'PGD']))
    assert check_site.check(site, ROOT / 'robust_nbdev') == ['search.json: no entry for PGD']


# --- small checkpoints
# --------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(monkeypatch, tmp_path):
    "The tool, with a few images for its data"
    import torch
    from robust_nbdev.datasets import fashion_mnist

    t = tool('train_checkpoints')
    key = 'fashion_mnist_vit'
    monkeypatch.setattr(
        t, 'loaders', lambda key, row, seed: fashion_mnist(n_train=32, n_valid=16, bs=16, device=torch.device('cpu'))
    )

    def run(epochs, **kw):
        t.train(key, t.ROWS[key], None, epochs, tmp_path, 7, **kw)
        return json.loads((tmp_path / f'{key}.json').read_text()), t.load_file(tmp_path / f'{key}.safetensors')

    return t, run, tmp_path / f'{key}_epochs'


class Killed(Exception):
    pass


def killed(*args):
    raise Killed('killed')


@pytest.mark.parametrize('epochs,stop,last', [(2, 0, None), (3, 2, 0)], ids=['in the first epoch', 'later'])
def test_a_training_goes_on_where_it_was_stopped(checkpoints, monkeypatch, capsys, epochs, stop, last):
    "Saved are every second epoch and the last; a second run goes on with the average and the time of the first"
    import torch

    t, run, d = checkpoints
    with monkeypatch.context() as m:
        m.setattr(t.EMA, 'after_step', lambda self: killed() if self.epoch == stop else setattr(self, 'n', self.n + 1))
        with pytest.raises(Killed):
            run(epochs, every=2)
    saved = sorted(int(f.stem.split('_')[1]) for f in d.glob(f'{epochs}_*.pth'))
    assert saved == [o for o in range(epochs) if o < stop and (o % 2 == 0 or o == epochs - 1)]
    if saved:
        f = d / f'average_{epochs}_{last}.pth'
        s = torch.load(f)
        assert s['callbacks']['ema']['steps'] == 2 * (last + 1)
        torch.save({**s, 'seconds': 1200.0}, f)
    capsys.readouterr()
    card, _ = run(epochs, every=2)
    said = capsys.readouterr().out
    assert f'goes on after epoch {last}' in said if saved else 'goes on' not in said
    assert (
        (20 if saved else 0) <= card['minutes'] < (25 if saved else 5)
        and card['epochs'] == epochs
        and set(card['holdout']) == {'accuracy', 'ema_accuracy'}
    )
    assert card['command'] == f'python tools/train_checkpoints.py fashion_mnist_vit --epochs {epochs} --seed 7'
    # of all epochs, before and after
    assert torch.load(d / f'average_{epochs}_{epochs - 1}.pth')['callbacks']['ema']['steps'] == 2 * epochs


def test_an_incomplete_state_is_not_gone_on_with(checkpoints, capsys):
    "The average of a state is written last: without it the one before counts"
    t, run, d = checkpoints
    run(2, every=1)
    (d / 'average_2_1.pth').unlink()
    capsys.readouterr()
    run(2, every=1)
    assert 'goes on after epoch 0' in capsys.readouterr().out


# --- in a browser
# ---------------------------------------------------------------------------------------------------------------

check_pages = tool('check_pages')
CHROME = check_pages.chromium()
browser = pytest.mark.skipif(CHROME is None, reason='no chromium here')

SOUND = '''<!doctype html><html lang="en"><head><meta charset="utf-8"><title>T</title><link rel="icon" href="data:,">
<style>body { color: #222 } div { width: 100px; overflow: auto }</style></head>
<body><p>Text</p><a href="#x">Link</a><button>Press</button>
<img alt="A dot" src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">
<div><pre>a line that is longer than its box</pre></div></body></html>'''


@browser
def test_what_a_browser_finds_on_a_page(tmp_path):
    faults = {
        'wide': ('<p>', '<p style="width:1300px">', 'wider than the window: 1308 of 1200 px'),
        'faint': ('<p>', '<p style="color:#999">', 'contrast 2.8, should be 4.5: <p> "Text"'),
        'veiled': ('<p>', '<p style="opacity:.4">', 'contrast 2.'),
        'dark': ('<p>', '<p style="background:#111">', 'contrast'),
        'bare': ('alt="A dot"', '', 'image without alt text'),
        'error': ('<p>', '<script>throw new Error("no such thing")</script><p>', 'error: Error: no such thing'),
        'gone': ('<p>', '<script src="gone.js"></script><p>', 'error: Failed to load resource'),
        'away': (
            '<p>',
            '<script>fetch("http://127.0.0.1:9/x").catch(() => 0)</script><p>',
            'asks another host: http://127.0.0.1:9/x',
        ),
        'unreached': ('<a href="#x">', '<a onclick="1">', 'Tab does not reach <a> "Link"'),
        'unseen': ('<style>', '<style>a { outline: none !important }', 'focus cannot be seen on <a> "Link"'),
    }
    (tmp_path / 'sound.html').write_text(SOUND)
    for k, (a, b, _) in faults.items():
        assert a in SOUND
        (tmp_path / f'{k}.html').write_text(SOUND.replace(a, b, 1))
    bad = list(check_pages.check(tmp_path, CHROME, (1200,), ['sound.html', *(f'{k}.html' for k in faults)]))
    assert not [o for o in bad if o.startswith('sound.html')]
    for k, (_, _, complaint) in faults.items():
        assert any(o.startswith(f'{k}.html at 1200 px: {complaint}') for o in bad), (k, bad)


@browser
def test_a_name_is_found_before_what_resembles_it(tmp_path):
    rows = [
        dict(title='Attacks', section='APGD', text='def APGD( PGD with'),
        dict(title='Glossary', section='PGD', text='Projected gradient descent: PGD'),
        dict(title='Attacks', section='PGD', text='def PGD( eps'),
        dict(title='Questions', section='Where do I normalise?', text='In the model'),
        dict(title='Core', section='Threat models', text='A ball, and train mode'),
    ]
    (tmp_path / 'search.json').write_text(json.dumps(rows))
    (tmp_path / 'index.html').write_text(
        SOUND.replace('<p>', f'<script>{(ROOT / "tools" / "search.js").read_text()}</script><p>')
    )
    with check_pages.Browser(CHROME) as b:
        b.go(check_pages.serve(tmp_path) + 'index.html')
        assert check_pages.find(b, ['PGD', 'APGD']) == [] and check_pages.find(b, ['CWPGD']) == [
            'search for CWPGD: first are []'
        ]
        first = lambda q: b.js(
            f'smalldocsRank(window.found, {json.dumps(q)}, 9, null).map(e => e.title+": "+e.section)'
        )
        assert first('PGD') == ['Attacks: PGD', 'Glossary: PGD', 'Attacks: APGD'] and first('pgd')[:2] == [
            'Attacks: PGD',
            'Glossary: PGD',
        ]
        assert (
            first('normalize') == ['Questions: Where do I normalise?']
            and first('train mode') == ['Core: Threat models']
            and first('train xyz') == []
            and first('PGD (') == ['Attacks: PGD', 'Attacks: APGD']
        )


# --- what the site makes of outputs
# -----------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def docs():
    pytest.importorskip('yaml')
    return tool('docs')


def test_tables_have_numbers_to_the_right_under_their_headings(docs):
    import pandas as pd, re

    df = pd.DataFrame(
        {'attack_name': ['clean', 'PGD'], 'acc': [66.4, None], '95%': ['60.2-73.1', ''], 'why': ['`f` holds', 'no']}
    )
    t = re.sub(r'<table.*?</table>', docs.table, df._repr_html_(), flags=re.S)
    assert (
        [k for k in ('attack_<wbr>name', 'acc', '95%', 'why') if f'<th class="num">{k}</th>' in t] == ['acc', '95%']
        and '<td class="num">66.4</td>' in t
        and '<td>PGD</td>' in t
        and '<code>f</code> holds' in t
    )
    assert 'text-align: right;"' not in t.split('<tbody>')[0].split('<thead>')[1]
    wide = pd.DataFrame({('clean', 'mean'): [1.5], ('clean', 'name'): ['x']})
    t = re.sub(r'<table.*?</table>', docs.table, wide._repr_html_(), flags=re.S)
    assert '<th class="num">mean</th>' in t and '<th>name</th>' in t and '<td class="num">1.5</td>' in t


def test_signatures_say_nothing_of_the_machine(docs):
    s = docs.signature(
        "### averaged\n\n```python\ndef averaged(\n    eps:float=0.03137254901960784, f:<function number at"
        " 0x7f273c1ce8e0>=None, names:tuple=('gaussian_noise', 'shot_noise', 'impulse_noise', 'defocus_blur',"
        " 'glass_blur', 'motion_blur', 'zoom_blur'), x:float=1.3333333333333333\n)->__main__.Source | None: # None |"
        " None: there is nothing\n```",
        'EMA.__call__',
    )
    assert (
        s == "### EMA.\\_\\_call\\_\\_\n\n```python\ndef averaged(\n    eps:float=8/255, f:number=None,"
        " names:tuple=('gaussian_noise', 'shot_noise', ...), x:float=1.33333\n)->Source | None: # None: there is"
        " nothing\n```"
    )
    assert docs.signature(
        '*, after_create:NoneType=None, before_fit:NoneType=None,\n    after_fit:NoneType=None\n):', 'A'
    ).startswith('**events # ')


def test_file_names_in_commands_stay_and_links_follow(docs):
    assert (
        docs.LINK.search('[a](../05_afat.ipynb#x)')
        and docs.LINK.search('<a href="05_afat.ipynb">')
        and not docs.LINK.search('python tools/save_outputs.py nbs/05_afat.ipynb')
    )


def test_a_figure_is_described_by_what_stands_above_it(docs, tmp_path):
    f = tmp_path / 'a.html'
    f.write_text(
        '<h2>Heads</h2><img src="data:image/png;base64,AA"><p>A <em>map</em> of \\(x\\) &amp; y. More.</p><img'
        ' src="data:image/png;base64,AA"><img alt="own" src="data:image/png;base64,AA">'
    )
    docs.describe(tmp_path)
    t = f.read_text()
    assert (
        '<img alt="Figure: Heads" src' in t
        and '<img alt="Figure: A map of x &amp; y." src' in t
        and t.count('alt=') == 3
    )


# --- the teacher of the small checkpoints
# -----------------------------------------------------------------------------------------
