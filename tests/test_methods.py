"All methods from one backbone for one budget: what the rows of the table rest on."

import json
import numpy as np, pytest
from robust_nbdev.all import METHODS, compared
from robust_nbdev.experiments import images_of, profile_for
from robust_nbdev.methods import method_run, methods_table
from robust_nbdev import experiments as ex, methods

LITTLE = dict(n_train=32, n=16, bs=8, budget=2, attacks='fgsm')


@pytest.fixture
def little(monkeypatch, tmp_path):
    "The settings of a run that takes a second; weights go into a folder of this test"
    s = ex.RunSettings(profile_for('methods', 'smoke') | LITTLE)
    monkeypatch.setattr(methods, 'settings', lambda: ex.RunSettings(s | dict(out=tmp_path / 'out')))
    return s


def test_all_methods_are_told_the_same_and_name_their_recipe(little):
    runs = [method_run(little, k) for k in METHODS]
    keys = [{k: v for k, v in r.key.items() if k not in ('method', 'recipe', 'threat')} for r in runs]
    assert all(k == keys[0] for k in keys) and len({r.id for r in runs}) == len(METHODS)
    assert [r.key['method'] for r in runs if r.key['threat'] != 'white box'] == ['RobustTokens']
    assert 'AdvTrain(PGD(0.1, steps=2)' in runs[2].key['recipe']
    assert all(json.loads(json.dumps(r.key)) == r.key for r in runs)


def test_added_parts_are_paid_for(little):
    "A forward through adapters and gates costs more than one of the backbone"
    how = method_run(little, 'TORA').key
    dls = images_of(how)
    model = METHODS['TORA'].model(methods.backbone_of(how, dls.c))
    assert methods.predict_cost(model, how, dls) > 1.2


def test_rows_become_a_table_and_a_second_run_does_not_train(little, tmp_path, monkeypatch):
    monkeypatch.setattr(methods, 'step_cost', lambda how, dls: 3.0)  # counting takes longer than the training
    ran = []
    for k in ('plain', 'RobustTokens'):
        ran.append(method_run(little, k))
        path = ex._path(ex.EXPERIMENTS['methods.table'], ran[-1], tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        ex._make(ex.EXPERIMENTS['methods.table'], ran[-1], path, 'smoke')
    t = methods_table(little, tmp_path)
    assert t.df.index.tolist() == ['plain', 'RobustTokens']
    assert t.df.threat.tolist() == ['white box', 'transfer']
    row = json.loads(path.read_text())
    assert t.df.loc['RobustTokens', 'clean'] == pytest.approx(row['numbers']['clean'] / 100)
    assert t.difference('RobustTokens') is None and t.difference('RobustTokens', 'clean').n == 16
    assert t.df.mCE['plain'] in (100, None) or np.isnan(t.df.mCE['plain'])
    monkeypatch.setattr(methods, 'Learner', None)  # not asked for: the weights are on disk
    again = compared(**ran[1].key)
    assert again.numbers == pytest.approx(row['numbers'], abs=0.01, nan_ok=True) and {'clean', 'fog 1'} < set(
        again.verdicts
    )


def test_without_rows_the_command_is_named(little, tmp_path):
    with pytest.raises(ValueError, match='robust-reproduce methods'):
        methods_table(little, tmp_path)
