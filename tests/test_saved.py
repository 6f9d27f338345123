"Saved outputs belong to the code and the weights that are in the repository."

import json, re
from pathlib import Path
import pytest
from robust_nbdev.datasets import settings

ROOT = Path(__file__).resolve().parents[1]
CARDS = json.loads((ROOT / 'robust_nbdev' / 'data' / 'models.json').read_text())
NOTES = json.loads((ROOT / 'nbs' / 'weights.json').read_text())


def code(path):
    return '\n'.join(''.join(c['source']) for c in json.loads(path.read_text())['cells'] if c['cell_type'] == 'code')


@pytest.mark.parametrize('name', sorted(NOTES))
def test_saved_outputs_are_those_of_the_weights_in_the_package(name):
    assert (ROOT / 'nbs' / name).exists()
    old = [key for key, sha in NOTES[name].items() if key not in CARDS or CARDS[key]['sha256'] != sha]
    assert old == [], f'{name} was run with other weights: python tools/save_outputs.py nbs/{name}'


def test_every_notebook_that_loads_a_checkpoint_is_noted():
    users = [p for p in (ROOT / 'nbs').rglob('*.ipynb') if re.search(r'small_model\((?!.*weights=False)', code(p))]
    assert [p.name for p in users if p.relative_to(ROOT / 'nbs').as_posix() not in NOTES] == []


def test_the_table_of_profiles_is_that_of_settings_ini():
    cells = json.loads((ROOT / 'nbs' / 'tutorials' / 'laptop_to_paper.ipynb').read_text())['cells']
    (cell,) = [c for c in cells if 'profiles = [' in ''.join(c['source'])]
    shown = re.findall('<t[dh]>(.*)</t[dh]>', ''.join(cell['outputs'][0]['data']['text/html']))
    head, *table = [shown[i : i + 5] for i in range(0, len(shown), 5)]
    now = [settings(o) for o in head[1:]]
    assert head == ['', 'smoke', 'laptop', 'gpu', 'paper'] and len(table) == 8
    assert table == [[k, *('all' if s.get(k) is None else str(s[k]) for s in now)] for k, *_ in table]
