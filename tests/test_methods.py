"All methods from one backbone for one budget: what the rows of the table rest on."

import json
import numpy as np, pytest
from robust_nbdev.all import METHODS, PGD, AdvTrain, compared
from robust_nbdev.experiments import profile_for
from robust_nbdev.methods import Method, method_run, methods_table
from robust_nbdev import experiments as ex, methods

LITTLE = dict(n_train=64, n=16, bs=16, budget=2, attacks='fgsm')


@pytest.fixture
def little(monkeypatch, tmp_path):
    "The settings of a run that takes a second; weights go into a folder of this test"
    s = ex.RunSettings(profile_for('methods', 'smoke') | LITTLE)
    monkeypatch.setattr(methods, 'settings', lambda: ex.RunSettings(s | dict(out=tmp_path / 'out')))
    return s


def test_every_method_of_the_package_is_there():
    names = {'plain', 'FGSM-RS', 'PGD-AT', 'TRADES', 'MART', 'ARD/PRM', 'XCiT recipe', 'TORA', 'AFAT', 'AAS-AT'}
    assert names < set(METHODS) and len(METHODS) == 16 and next(iter(METHODS)) == 'plain'


def test_all_methods_are_told_the_same_and_name_their_recipe(little):
    runs = [method_run(little, k) for k in METHODS]
    keys = [{k: v for k, v in r.key.items() if k not in ('method', 'recipe', 'threat')} for r in runs]
    assert all(k == keys[0] for k in keys) and len({r.id for r in runs}) == len(METHODS)
    assert [r.key['method'] for r in runs if r.key['threat'] != 'white box'] == ['RobustTokens']
    assert 'AdvTrain(PGD(0.1, steps=2)' in runs[2].key['recipe']
    assert all(json.loads(json.dumps(r.key)) == r.key for r in runs)


def test_the_budget_buys_fewer_images_of_a_dearer_method(little):
    plans = {}
    for name in ('plain', 'TRADES'):
        how = method_run(little, name).key | dict(budget=24)
        step, epochs, n = methods.plan_of(how, methods.images_for_methods(how))
        plans[name] = step, epochs * n
        assert step * epochs * n == pytest.approx(24 * 64, rel=0.2) and n <= 64
    assert plans['TRADES'][0] > 3 * plans['plain'][0] and plans['TRADES'][1] < plans['plain'][1]


def test_added_parts_are_paid_for(little):
    "A forward through adapters and gates costs more than one of the backbone, so the budget buys fewer of them"
    how = method_run(little, 'TORA').key | dict(budget=24)
    dls = methods.images_for_methods(how)
    model = METHODS['TORA'].model(methods.backbone_of(how, dls.c))
    dearer = methods.predict_cost(model, how, dls)
    step, epochs, n = methods.plan_of(how, dls)
    assert dearer > 1.2 and step > 3 * dearer and step * epochs * n == pytest.approx(24 * 64, rel=0.2)


def test_images_come_in_turns():
    draw = methods._in_turns(5, 3, seed=1)
    got = [draw() for _ in range(5)]
    assert all(len(o) == 3 for o in got) and np.bincount(sum(got, [])).tolist() == [3] * 5
    again = methods._in_turns(5, 3, seed=1)
    assert [again() for _ in range(5)] == got


@pytest.mark.parametrize('name', ['TRADES + AWP + EMA', 'RobustTokens'])
def test_a_run_gives_its_numbers_and_a_second_one_does_not_train(name, little, monkeypatch):
    run = method_run(little, name)
    first = compared(**run.key)
    assert {'clean', 'fog 1'} < set(first.verdicts) and all(len(v) == 16 for v in first.verdicts.values())
    assert first.numbers['step'] > 3 and 0 <= first.numbers['corrupted'] <= 100
    monkeypatch.setattr(methods, 'Learner', None)  # not asked for: the weights are on disk
    again = compared(**run.key)
    assert again.numbers == first.numbers
    assert all(np.array_equal(again.verdicts[k], v) for k, v in first.verdicts.items())


def test_rows_become_a_table(little, tmp_path):
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


def test_without_rows_the_command_is_named(little, tmp_path):
    with pytest.raises(ValueError, match='robust-reproduce methods'):
        methods_table(little, tmp_path)


def test_a_defence_of_ones_own_is_one_more_entry(little, monkeypatch):
    monkeypatch.setitem(METHODS, 'mine', Method(lambda how: [AdvTrain(PGD(how['eps'], steps=1))]))
    run = method_run(little, 'mine')
    assert 'PGD(0.1, steps=1)' in run.key['recipe'] and set(compared(**run.key).verdicts) > {'clean', 'FGSM(0.1)'}
