"""The pages that gather: results in step with the notebooks, README with its table, glossary and questions with links
that lead somewhere."""

import ast, json, re
from pathlib import Path
import pytest
from execnb.shell import CaptureShell
from fastcore.basics import first
from fastcore.nbio import read_nb
from nbdev.doclinks import NbdevLookup
import robust_nbdev, robust_nbdev.all  # all patches are in place before a notebook adds its own
from robust_nbdev.core import eps_str
from robust_nbdev.models import small_cards

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / 'nbs'
PAPERS = [p.stem for p in sorted(NBS.glob('0[2-6]_*.ipynb'))]
text = lambda c: ''.join(c['source'])


def load(name):
    return json.loads((NBS / f'{name}.ipynb').read_text())['cells']


def html(c):
    return [''.join(o['data']['text/html']) for o in c.get('outputs', []) if 'text/html' in o.get('data', {})]


def cells_of(table):
    "The cells of an HTML table, without the reader of the page: rows of text"
    import html as h

    return [
        [h.unescape(re.sub(r'<[^>]+>', '', c)).strip() for c in re.findall(r'<t[hd][^>]*>(.*?)</t[hd]>', r, re.S)]
        for r in re.findall(r'<tr[^>]*>(.*?)</tr>', table, re.S)
    ]


def columns(header):
    "Where claim, published, measured, verdict and why stand"
    names = ('claim',), ('published',), ('measured', 'measured here', 'effect'), ('verdict',), ('why',)
    return [next(i for i, o in enumerate(header) if o in known) for known in names]


def claims_in(cells):
    "Rows (claim, published, measured, verdict, why) of each saved table of claims"
    got = [cells_of(t) for c in cells for t in html(c) if re.search(r'<th[^>]*>verdict</th>', t)]
    return [[[r[i] for i in columns(rows[0])] for r in rows[1:]] for rows in got]


# --- results
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('paper', PAPERS)
def test_claims_on_the_page_are_those_of_the_notebook(paper):
    """Fails when a notebook was run again and the page was not: python tools/save_outputs.py nbs/results.ipynb, then
    nbs/index.ipynb"""
    (own,) = claims_in(load(paper))
    assert len(own) >= 8 and own in claims_in(load('results'))


def test_every_claims_table_is_gathered():
    assert len(claims_in(load('results'))) == len(PAPERS) == 5


def test_a_changed_claim_would_be_noticed():
    cells = json.loads(json.dumps(load('06_aas')).replace('contradicted', 'holds'))
    assert claims_in(cells)[0] not in claims_in(load('results'))


def saved(name, words):
    "The saved table (first rows are the header) whose header has these words"
    return first(r for c in load(name) for t in html(c) for r in [cells_of(t)] if set(words) <= set(r[0]))


WORDS_OF_VERDICTS = ['holds', 'does not hold', 'contradicted', 'not decided', 'not testable']


def test_verdicts_are_counted():
    counts = {r[0]: [int(o) for o in r[1:]] for r in saved('results', [*WORDS_OF_VERDICTS, 'claims'])[1:]}
    want = []
    for paper in PAPERS:
        (rows,) = claims_in(load(paper))
        want.append([sum(r[3].startswith(k) for r in rows) for k in WORDS_OF_VERDICTS] + [len(rows)])
    assert list(counts.values()) == want + [[sum(o) for o in zip(*want)]] and all(sum(w[:5]) == w[5] for w in want)


def test_cards_on_the_page_are_those_in_the_package():
    rows = {r[0]: r for r in saved('results', ['eps', 'clean', 'PGD-50'])[1:]}
    cards = small_cards()
    assert set(rows) == set(cards.index)
    for k, c in cards.iterrows():
        assert rows[k][1:4] == [
            eps_str(c.eps),
            f'{100 * c.clean:.1f} ({int(c.clean_n)})',
            f'{100 * c.pgd50:.1f} ({int(c.pgd50_n)})',
        ], k


def test_costs_are_those_that_the_notebooks_state():
    F = {r[0]: float(r[1]) for r in saved('results', ['F', 'times plain'])[1:]}
    assert list(F.values()) == [
        3,
        2 * 30 + 5,
        (2 * 5 + 3 + 3) / 2,
        2 * 5 + 6,
        2 * 1 + 3 + 1,
        6,
        2 * 10 + 3,
        2 * 10 + 3 + 21,
    ]


def run_page(name, monkeypatch, keep=lambda c: True):
    "The namespace after the code cells of a page"
    monkeypatch.setenv('IN_TEST', '1')
    monkeypatch.chdir(NBS)
    shell = CaptureShell(NBS / f'{name}.ipynb')
    for c in read_nb(NBS / f'{name}.ipynb').cells:
        if c.cell_type == 'code' and keep(c):
            shell.cell(c, timeout=100)
            assert shell.exc is None, (c.source, shell.exc)
    ns = dict(shell.user_ns)
    shell.close()
    return ns


def test_without_notebooks_the_page_says_so(monkeypatch, tmp_path, capsys):
    "As in an installed package: the cards are there, the claims are not, and nothing fails"
    monkeypatch.setattr(robust_nbdev, '__file__', str(tmp_path / 'site' / 'robust_nbdev' / '__init__.py'))
    ns = run_page(
        'results',
        monkeypatch,
        lambda c: 'step_cost' not in c.source and 'costs' not in c.source and 'table.items' not in c.source,
    )
    assert (
        ns['claims'] == {}
        and ns['show_claims']('06_aas') is None
        and ns['conditions']('06_aas') is None
        and len(ns['cards'])
    )


def test_each_paper_says_attack_radius_images_seed():
    cells = load('results')
    heads = [i for i, c in enumerate(cells) if c['cell_type'] == 'markdown' and text(c).startswith('### ')]
    assert len(heads) == 5
    for i in heads:
        said = text(cells[i + 1]) + ''.join(
            (
                o['data']['text/markdown']
                if isinstance(o['data']['text/markdown'], str)
                else ''.join(o['data']['text/markdown'])
            )
            for o in cells[i + 2]['outputs']
            if 'text/markdown' in o.get('data', {})
        )
        assert (
            re.search('PGD|APGD', said)
            and re.search(r'\d/255|0\.\d', said)
            and re.search(r'L_\\infty|Linf', said)
            and re.search(r'n=\d+|\d+ (test )?images', said)
            and 'seed' in said
        ), text(cells[i])


# --- index and README
# --------------------------------------------------------------------------------------------------------------


def papers_table(name):
    return first(
        t
        for c in load(name)
        for o in c.get('outputs', [])
        for t in [''.join(o.get('data', {}).get('text/markdown', ''))]
        if t.startswith('| paper and notebook')
    )


def test_index_shows_the_table_of_the_results_but_for_the_verdicts():
    short = [r.strip('|').split(' | ') for r in papers_table('index').splitlines()]
    whole = [r.strip('|').split(' | ') for r in papers_table('results').splitlines()]
    assert [[o.strip(' |') for o in r[:3]] for r in short if len(r) > 1] == [
        [o.strip(' |') for o in r[:3]] for r in whole if len(r) > 1
    ]


def test_readme_has_a_row_for_each_paper():
    readme = (ROOT / 'README.md').read_text()
    rows = [r for r in readme.splitlines() if re.match(r'\| \[.*20\d\d', r)]
    assert len(rows) == 5 and all(len(r.strip('|').split(' | ')) == 4 and ' F (' in r for r in rows)
    assert all(re.search(r'[+-]\d+\.\d \[', r) for r in rows)  # what the method did here, with its interval
    for p, r in zip(PAPERS, rows):
        assert f'(nbs/{p}.ipynb)' in r, r


def test_readme_is_markdown_and_short():
    lines = (ROOT / 'README.md').read_text().splitlines()
    assert len(lines) <= 170 and not any(re.match(r'\s*</?(t[rhd]|table|p|div)\b', l) for l in lines)


def test_readme_has_one_picture_one_short_example_and_the_commands():
    t = (ROOT / 'README.md').read_text()
    pics = re.findall(r'!\[[^\]]*\]\(([^)\s]+)', t)
    assert len(pics) == 1 and (ROOT / pics[0]).stat().st_size < 250e3
    shown = t[t.index('## In your own code') : t.index('With images of your own')]
    lines = [l for b in re.findall(r'^``` python\n(.*?)^```', shown, re.S | re.M) for l in b.splitlines() if l.strip()]
    assert 5 <= len(lines) <= 12 and 'AdvTrain' in '\n'.join(lines)
    ast.parse('\n'.join(lines))
    assert all(
        o in t
        for o in (
            'pip install -e . && robust-demo',
            "pip install -e '.[dev]' && pytest",
            'robust-eval --model',
            '## For developers',
        )
    )


def test_readme_says_its_promise_in_two_sentences():
    t = (ROOT / 'README.md').read_text().split('edit the notebook -->')[1].strip().split('\n\n')[0]
    assert len(re.findall(r'[.!?](?=\s|$)', re.sub(r'\]\([^)]*\)', ']', t))) == 2


@pytest.mark.slow
def test_the_example_runs_as_printed(monkeypatch):
    code = [text(c) for c in load('index') if c['cell_type'] == 'code' and not re.match(r'#\|', text(c))]
    ns = {}
    for c in code:
        exec(c, ns)
    assert ns['dls'].train.n == 2000 and ns['learn'].recorder.values[-1][-1] > 0.3


# --- glossary
# ----------------------------------------------------------------------------------------------------------------------


def entries():
    cells = [text(c) for c in load('glossary') if c['cell_type'] == 'markdown']
    return {a[4:]: b for a, b in zip(cells, cells[1:]) if a.startswith('### ')}


PAGES = {
    p.relative_to(NBS).as_posix()
    for p in NBS.rglob('*.ipynb')
    if not any(o[0] in '_.' for o in p.relative_to(NBS).parts)
}
lookup = NbdevLookup('robust_nbdev')


def test_glossary_is_in_the_order_of_the_alphabet():
    names = [k.lower() for k in entries()]
    assert len(names) > 60 and names == sorted(names) and len(set(names)) == len(names)
    letter = None
    for c in load('glossary'):
        if text(c).startswith('## '):
            letter = text(c)[3:].strip()
        if text(c).startswith('### '):
            assert text(c)[4].upper() == letter


@pytest.mark.parametrize('term', entries())
def test_each_term_is_short_and_leads_somewhere(term):
    t = entries()[term]
    pages, words = re.findall(r'\]\(([\w/.-]+\.ipynb)', t), re.findall(r'(?<!`)`([A-Za-z_][\w.]*)`', t)
    linked = [w for w in words if lookup[w]]
    assert set(pages) <= PAGES and (pages or linked), f'{term}: no link'
    loose = (
        set(words)
        - set(linked)
        - {'alpha', 'beta', 'delta', 'x_adv', 'eps', 'smoke', 'laptop', 'gpu', 'paper', 'settings.ini', 'code'}
    )
    assert not loose, f'{term}: {loose} are no public symbols'
    assert 1 <= len(re.findall(r'[.:](?=\s|$)', re.sub(r'settings\.ini|`[^`]*`', 'x', t))) <= 6 and len(t) < 330


WORDS = '''
eps | alpha | steps | restart | norm | threat model | delta | attack | corruption | occlusion | surrogate |
victim | clean accuracy | robust accuracy | trades | mart | awp | ce | kl | dlr | margin | warm-up |
prefix token | register | robust token | patch token | adapter | gate | lam | autoattack | apgd | fab | square
| gradient masking | adaptive attack
'''


def test_words_of_the_style_guide_have_an_entry():
    names = ' '.join(entries()).lower()
    for w in (o.strip() for o in WORDS.split('|')):
        assert w in names, w


# --- questions
# ----------------------------------------------------------------------------------------------------------------------


def questions():
    cells, out = load('faq'), {}
    for c in cells:
        if text(c).startswith('### '):
            q = text(c)[4:]
            out[q] = []
        elif text(c).startswith('## '):
            q = None
        elif out and q:
            out[q].append(c)
    return out


@pytest.mark.parametrize('q', questions())
def test_each_question_has_an_answer_and_a_cell(q):
    answer, *code = questions()[q]
    assert answer['cell_type'] == 'markdown' and code and all(c['cell_type'] == 'code' for c in code)
    assert 1 <= len(re.findall(r'[.?!](?=\s|$)', text(answer))) <= 5, text(answer)
    assert not re.search(r'R\d\d\b|bugreports|issue #', text(answer))


@pytest.mark.parametrize(
    'words',
    [
        'normalise',
        'eps=8 or',
        'batch size',
        'labels or the predictions',
        'model.eval',
        'weak',
        'Half precision',
        'MixUp',
        'BatchNorm',
        'Several GPUs',
        'memory',
        'middle',
        'AutoAttack takes',
        'collapsed',
        'softmax',
        'interrupted',
        'export',
        'random',
    ],
)
def test_what_people_trip_over_is_asked(words):
    assert any(words in q for q in questions())


def test_pages_are_in_the_sidebar():
    y = (ROOT / '_quarto.yml').read_text().split('sidebar:')[1]
    assert all(re.search(rf'- {p}\.ipynb', y) for p in ('results', 'faq', 'glossary', 'index'))
