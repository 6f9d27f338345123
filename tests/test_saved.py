"Saved outputs belong to the code and the weights that are in the repository."

import json, re
from pathlib import Path
import pytest

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
