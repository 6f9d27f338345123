"Experiments: runs that write a row each, killed, continued, shared, read and compared"

import importlib, json, multiprocessing, os, re, signal, sys, time
from pathlib import Path
import numpy as np, pytest, timm
import robust_nbdev.all  # registers the experiments of all papers
from robust_nbdev import experiments as ex
from robust_nbdev.autoattack import AutoAttack, Square
from PIL import Image
from robust_nbdev.compare import Claim
from robust_nbdev.corruptions import PERTURBATIONS
from robust_nbdev.cli import robust_reproduce
from robust_nbdev.datasets import RunSettings, settings
from robust_nbdev.experiments import (
    EXPERIMENTS,
    Outcome,
    Trial,
    _code_of,
    _pack,
    _unpack,
    check_rows,
    confirm_rows,
    difference,
    experiment,
    judge_rows,
    profile_for,
    published_table,
    reproduce,
    rows,
    status,
    trials_of,
    verdicts_of,
)

ROOT = Path(__file__).resolve().parents[1]
toy = RunSettings(profile='toy', n=40, seeds=2)


def luck(share, n, seed, images='these', kill=''):
    "Right on about `share` of the images; kills its own process where the file `kill` is not there yet"
    if kill and not Path(kill).exists():
        Path(kill).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    right = np.random.default_rng(seed).random(n) < share
    return Outcome(dict(clean=100 * right.mean()), dict(clean=right), images)


def slow_luck(folder, **key):
    "Leaves a file for each time that it is run"
    time.sleep(0.02)
    with open(Path(folder) / f'{key["share"]}_{key["seed"]}', 'a') as f:
        f.write('x')
    return luck(**key)


@pytest.fixture
def register():
    "Experiments of one test"
    before = dict(EXPERIMENTS)

    def _register(name, trials, **kw):
        experiment(name, 'a table', **kw)(trials)

    yield _register
    EXPERIMENTS.clear()
    EXPERIMENTS.update(before)


def shares(s, fn=luck, **key):
    for share in (0.2, 0.8):
        for seed in range(s.seeds):
            yield Trial(dict(share=share, n=s.n, seed=seed, **key), fn, cost=s.n)


def made(folder):
    "What the rows in a folder say, without what may differ between two machines"
    found = [json.loads(f.read_text()) for f in sorted(Path(folder).rglob('*.json'))]
    return [{k: r[k] for k in ('experiment', 'key', 'numbers', 'verdicts')} for r in found]


def in_process(*names, out):
    p = multiprocessing.get_context('fork').Process(target=lambda: [reproduce(o, toy, out) for o in names])
    p.start()
    return p


# ---------------------------------------------------------------- making rows


def test_finished_rows_outlive_a_kill_and_are_not_made_again(register, tmp_path):
    def trials(s):
        *first, last = shares(s)
        yield from first
        yield Trial(last.key | dict(kill=str(tmp_path / 'mark')), luck)

    register('toy.shares', trials)
    child = in_process('toy.shares', out=tmp_path / 'r')
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert status('toy', toy, tmp_path / 'r').done.tolist() == [3]
    assert reproduce('toy.shares', toy, tmp_path / 'r') == 1
    reproduce('toy.shares', toy, tmp_path / 'whole')
    assert made(tmp_path / 'r') == made(tmp_path / 'whole') and len(made(tmp_path / 'r')) == 4


def test_two_processes_make_the_same_rows_as_one_each_once(register, tmp_path):
    (tmp_path / 'ran').mkdir()
    many = RunSettings(toy, seeds=10)
    register('toy.shares', lambda s: shares(many, slow_luck, folder=str(tmp_path / 'ran')))
    both = [in_process('toy.shares', out=tmp_path / 'two') for _ in range(2)]
    for p in both:
        p.join()
    assert [p.exitcode for p in both] == [0, 0]
    assert {f.read_text() for f in (tmp_path / 'ran').iterdir()} == {'x'}
    reproduce('toy.shares', toy, tmp_path / 'one')
    assert made(tmp_path / 'one') == made(tmp_path / 'two') and len(made(tmp_path / 'two')) == 20


def test_a_cell_of_a_notebook_does_not_replace_the_experiment_of_its_module(monkeypatch):
    monkeypatch.setattr(ex, 'EXPERIMENTS', dict(EXPERIMENTS))
    cell = {'experiment': experiment}
    exec("@experiment('aas.eta', 'mine')\ndef a(s): yield\n@experiment('toy.cell', 'mine')\ndef b(s): yield", cell)
    assert ex.EXPERIMENTS['aas.eta'].shows != 'mine' and ex.EXPERIMENTS['toy.cell'].trials is cell['b']


def test_two_experiments_of_a_paper_share_a_run(register, tmp_path):
    register('toy.a', shares)
    register('toy.b', shares)
    assert [reproduce(o, toy, tmp_path) for o in ('toy.a', 'toy.b')] == [4, 0]
    assert len(rows('toy.b', toy, tmp_path)) == 4


def test_a_run_that_fails_leaves_no_row(register, tmp_path):
    register('toy.shares', lambda s: [Trial(dict(share=0.5, n='many', seed=0), luck)])
    with pytest.raises(Exception):
        reproduce('toy.shares', toy, tmp_path)
    assert made(tmp_path) == []


# ---------------------------------------------------------------- which rows count


def test_rows_of_an_earlier_package_are_counted(register, tmp_path, monkeypatch):
    register('toy.shares', shares)
    reproduce('toy.shares', toy, tmp_path)
    monkeypatch.setattr(ex, '_library', lambda: 'changed')
    assert status('toy', toy, tmp_path)[['done', 'earlier']].values.tolist() == [[4, 4]]


MODULE = '''
CONSTANT = 2
def helper(a):
    return a*CONSTANT
def run(a):
    return helper(a)
def unused(a): return a
'''
CHANGES = {
    'a comment': ('return a*CONSTANT', 'return a*CONSTANT   # twice', True),
    'an unused function': ('unused(a): return a', 'unused(a): return -a', True),
    'a constant': ('CONSTANT = 2', 'CONSTANT = 3', False),
    'a helper': ('return a*CONSTANT', 'return a+CONSTANT', False),
}


def hash_of(text, tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f'{name}.py').write_text(text)
    return _code_of(__import__(name).run)


@pytest.mark.parametrize('what', CHANGES)
def test_code_counts_and_words_do_not(what, tmp_path, monkeypatch):
    old, new, same = CHANGES[what]
    name = re.sub(r'\W', '_', f'mod_{what}')
    hashes = [
        hash_of(t, tmp_path, monkeypatch, f'{name}_{i}') for i, t in enumerate((MODULE, MODULE.replace(old, new)))
    ]
    assert (hashes[0] == hashes[1]) == same


PATCHED = '''
from fastcore.basics import patch
class Method: pass
@patch
def after_loss(self: Method): return scaled(2)
def scaled(a): return a*3
def run(a): return Method()
'''


@pytest.mark.parametrize('change', ['scaled(2)', 'a*3'])
def test_a_method_that_is_patched_into_a_class_counts_with_what_it_uses(change, tmp_path, monkeypatch):
    "fastai calls `after_loss` by its name, so `run` never mentions it"
    texts = PATCHED, PATCHED.replace(change, f'-{change}')
    name = 'patched_' + re.sub(r'\W', '_', change)
    old, new = [hash_of(t, tmp_path, monkeypatch, f'{name}_{i}') for i, t in enumerate(texts)]
    assert old != new


def test_a_row_names_the_code_that_made_it_though_the_file_is_saved_meanwhile(register, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / 'saved_meanwhile.py'
    text = SAVED_MEANWHILE.replace('FILE', repr(str(file)))
    file.write_text(text)
    of_old = ex._code_of(importlib.import_module('saved_meanwhile').run)
    ex._code_of.cache_clear()
    register('toy.shares', lambda s: [Trial(dict(seed=0), importlib.import_module('saved_meanwhile').run)])
    reproduce('toy.shares', toy, tmp_path / 'rows')
    (row,) = [json.loads(f.read_text()) for f in (tmp_path / 'rows').rglob('*.json')]
    assert row['made']['code'] == of_old and 'GAIN = 3' in file.read_text()


SAVED_MEANWHILE = '''
from pathlib import Path
from robust_nbdev.experiments import Outcome
GAIN = 2
def run(seed):
    file = Path(FILE)
    file.write_text(file.read_text().replace('GAIN = 2', 'GAIN = 3'))
    return Outcome(dict(gain=GAIN))
'''


# ---------------------------------------------------------------- reading
def test_verdicts_come_seed_by_seed(register, tmp_path):
    register('toy.shares', lambda s: reversed(list(shares(s))))
    reproduce('toy.shares', toy, tmp_path)
    got = verdicts_of('toy.shares', 'clean', toy, tmp_path, share=0.2)
    assert (got == np.stack([luck(0.2, 40, seed).verdicts['clean'] for seed in (0, 1)])).all()


def struck(attack, seed):
    return luck(dict(pgd=0.2, fgsm=0.6)[attack], 40, seed)


def test_a_key_of_a_run_may_be_called_attack(register, tmp_path):
    register('toy.struck', lambda s: [Trial(dict(attack=o, seed=0), struck) for o in ('pgd', 'fgsm')])
    reproduce('toy.struck', toy, tmp_path)
    got = verdicts_of('toy.struck', 'clean', toy, tmp_path, attack='fgsm')
    assert (got[0] == struck('fgsm', 0).verdicts['clean']).all()


def test_a_difference_takes_the_seeds_that_both_have(register, tmp_path):
    def trials(s):
        yield from shares(s)
        yield Trial(dict(share=0.8, n=s.n, seed=7), luck)

    register('toy.shares', trials)
    reproduce('toy.shares', toy, tmp_path)
    d = difference('toy.shares', 'clean', dict(share=0.8), dict(share=0.2), toy, tmp_path)
    assert d.seeds == 2 and d.value > 0.3


def fog_and_rain(share, n, seed):
    fog, rain = [np.random.default_rng(o).random(n) < share for o in (seed, seed + 10)]
    return Outcome(dict(clean=100 * fog.mean()), dict(clean=fog, fog=fog, rain=rain), 'these')


def test_several_attacks_are_compared_by_their_mean_or_as_they_are_weighed(register, tmp_path):
    register('toy.shares', lambda s: shares(s, fog_and_rain))
    reproduce('toy.shares', toy, tmp_path)
    keys = dict(share=0.8), dict(share=0.2)
    by_fog, by_rain, by_both, weighed = [
        difference('toy.shares', o, *keys, toy, tmp_path).value
        for o in ('fog', 'rain', ['fog', 'rain'], dict(fog=0.1, rain=0.9))
    ]
    assert by_fog != by_rain and by_both == pytest.approx((by_fog + by_rain) / 2)
    assert weighed == pytest.approx(0.1 * by_fog + 0.9 * by_rain)
    with pytest.raises(ValueError, match='named twice'):
        difference('toy.shares', ['fog', 'fog', 'rain'], *keys, toy, tmp_path)
    with pytest.raises(ValueError, match="no verdicts 'snow' for seed 0, it has"):
        difference('toy.shares', ['fog', 'snow'], *keys, toy, tmp_path)
    with pytest.raises(ValueError, match='no attack is named'):
        difference('toy.shares', [], *keys, toy, tmp_path)


def test_what_is_right_under_all_of_many_attacks_is_right(register, tmp_path):
    "75 times 1/75, added up, is more than 1"
    names = [f'fog {o}' for o in range(75)]
    register('toy.all', lambda s: [Trial(dict(seed=0), always_right)])
    reproduce('toy.all', toy, tmp_path)
    assert (verdicts_of('toy.all', names, toy, tmp_path) == 1).all()


def always_right(seed):
    right = np.ones(8, bool)
    return Outcome(dict(clean=100.0), {o: right for o in ('clean', *[f'fog {i}' for i in range(75)])}, 'these')


def test_a_goal_with_clean_accuracy_in_it_still_needs_a_baseline_above_chance_under_the_attack(register, tmp_path):
    register('toy.shares', lambda s: shares(s, fog_and_rain))
    reproduce('toy.shares', toy, tmp_path)
    claim, keys = Claim('more is better', trained=False), (dict(share=0.2), dict(share=0.8))
    v = judge_rows(claim, 'toy.shares', *keys, dict(clean=0.9, rain=0.1), profile=toy, out=tmp_path, cost=1.0)
    by_rain = verdicts_of('toy.shares', 'rain', toy, tmp_path, share=0.8).mean()
    assert [o.value for o in v.needs][1] == pytest.approx(by_rain)


def test_a_claim_on_rows_of_different_seeds_is_not_testable(register, tmp_path):
    register('toy.shares', lambda s: [Trial(dict(share=o, n=s.n, seed=i), luck) for i, o in enumerate((0.2, 0.8))])
    reproduce('toy.shares', toy, tmp_path)
    keys = dict(share=0.8), dict(share=0.2)
    got = judge_rows(Claim('more is better'), 'toy.shares', *keys, 'clean', profile=toy, out=tmp_path)
    assert got.word == 'not testable here' and 'no seed has finished rows of' in got.why


REFUSED = {
    'other images': (
        lambda s: [*shares(s), *[Trial(dict(share=0.5, n=s.n, seed=i, images='those'), luck) for i in range(2)]],
        'same images',
    ),
    'no rows': (lambda s: shares(s), 'no finished rows'),
    'two rows of a seed': (
        lambda s: [*shares(s), *[Trial(dict(share=0.5, n=s.n, seed=0, images=o), luck) for o in ('a', 'b')]],
        'several rows of one seed',
    ),
}


@pytest.mark.parametrize('why', REFUSED)
def test_rows_that_cannot_be_compared_are_refused(why, register, tmp_path):
    trials, says = REFUSED[why]
    register('toy.shares', trials)
    reproduce('toy.shares', toy, tmp_path)
    with pytest.raises(ValueError, match=says):
        difference('toy.shares', 'clean', dict(share=0.2), dict(share=0.5), toy, tmp_path)


def test_a_table_has_means_over_seeds_beside_the_published_numbers(register, tmp_path):
    register('toy.shares', shares, by='share', published=[dict(share=0.2, clean=21.0)])
    reproduce('toy.shares', toy, tmp_path)
    got = published_table('toy.shares', toy, tmp_path)
    want = [np.mean([luck(0.2, 40, seed).numbers["clean"] for seed in (0, 1)]), 21.0]
    assert got.loc[0.2, ['clean', 'paper: clean']].tolist() == pytest.approx(want, abs=0.1) and got.seeds.tolist() == [
        2,
        2,
    ]


def test_without_keys_the_table_has_one_row_of_all_runs(register, tmp_path):
    register('toy.shares', shares, published=[dict(clean=21.0)])
    reproduce('toy.shares', toy, tmp_path)
    got = published_table('toy.shares', toy, tmp_path)
    assert got.index.tolist() == ['toy.shares'] and got.seeds.tolist() == [4] and got['paper: clean'].tolist() == [21.0]
    assert got.clean.iloc[0] == pytest.approx(rows('toy.shares', toy, tmp_path).clean.mean(), abs=0.1)
    register('toy.shares', shares)
    assert published_table('toy.shares', toy, tmp_path).columns.tolist() == ['seeds', 'clean']


def test_a_check_finds_a_row_that_is_not_what_the_code_makes(register, tmp_path):
    register('toy.shares', shares)
    reproduce('toy.shares', toy, tmp_path)
    assert check_rows('toy.shares', 4, toy, tmp_path).images.tolist() == [0] * 4
    f = next(tmp_path.rglob('*.json'))
    row = json.loads(f.read_text())
    row['verdicts']['clean'] = _pack(~_unpack(row['verdicts']['clean'], 40))
    f.write_text(json.dumps(row))
    assert sorted(check_rows('toy.shares', 4, toy, tmp_path).images.tolist()) == [0, 0, 0, 40]


def test_claims_compare_what_training_cost(register, tmp_path):
    "A training that is a quarter longer, hidden behind an evaluation that costs as much as the training"

    def trials(s):
        for steps in (4, 5):
            for seed in (0, 1):
                yield Trial(dict(share=0.1 * steps, n=s.n, seed=seed), luck, 8 * s.n + steps * s.n, steps * s.n)

    register('toy.shares', trials)
    reproduce('toy.shares', toy, tmp_path)
    keys = dict(share=0.5), dict(share=0.4)
    got = judge_rows(Claim('longer is better'), 'toy.shares', *keys, 'clean', classes=100, profile=toy, out=tmp_path)
    assert got.word == 'not testable here' and 'paid 1.2 times' in got.why


def rewrite(folder, change):
    "`change(row)` for every row in a folder"
    for f in folder.rglob('*.json'):
        row = json.loads(f.read_text())
        change(row)
        f.write_text(json.dumps(row))


def of_yesterday(folder):
    "All rows as if other code had made them"
    rewrite(folder, lambda row: row['made'].update(code='of yesterday'))


def test_a_sample_that_agrees_confirms_the_rest(register, tmp_path):
    register('toy.shares', shares)
    reproduce('toy.shares', toy, tmp_path)
    before = rows('toy.shares', toy, tmp_path).clean.tolist()
    of_yesterday(tmp_path)
    assert len(check_rows('toy.shares', 1, toy, tmp_path)) == 0
    again = confirm_rows('toy.shares', 1, toy, tmp_path)
    made = [json.loads(f.read_text())['made'] for f in tmp_path.rglob('*.json')]
    assert all(list(o['confirmed'].values()) == [again.id.tolist()] for o in made)
    assert rows('toy.shares', toy, tmp_path).clean.tolist() == before
    assert len(confirm_rows('toy.shares', 1, toy, tmp_path)) == 0  # nothing is old any more


def test_a_sample_that_differs_confirms_nothing(register, tmp_path):
    register('toy.shares', shares)
    reproduce('toy.shares', toy, tmp_path)
    of_yesterday(tmp_path)
    f = next(tmp_path.rglob('*.json'))
    row = json.loads(f.read_text())
    row['numbers']['clean'] += 2.5
    f.write_text(json.dumps(row))
    with pytest.raises(ValueError, match='have changed'):
        confirm_rows('toy.shares', 4, toy, tmp_path)
    assert status('toy', toy, tmp_path).old.tolist() == [4]


def by_another_machine(folder):
    "All rows as if another processor had rounded them"
    rewrite(folder, lambda row: row['numbers'].update(clean=row['numbers']['clean'] + 0.5))


def test_rows_of_another_machine_are_confirmed_by_both_codes_on_this_one(register, tmp_path):
    register('toy.shares', shares)
    out, here = tmp_path / 'out', tmp_path / 'here'
    reproduce('toy.shares', toy, out)
    by_another_machine(out)
    assert set(check_rows('toy.shares', 2, toy, out, here=here).id) == {o.stem for o in here.rglob('*.json')}
    of_yesterday(out)
    of_yesterday(here)
    with pytest.raises(ValueError, match='have changed'):
        confirm_rows('toy.shares', 4, toy, out)
    confirm_rows('toy.shares', 2, toy, out, here=here)
    assert status('toy', toy, out)[['done', 'old']].values.tolist() == [[4, 0]]


def test_one_row_here_serves_all_states_of_the_code_that_it_stands_for(register, tmp_path):
    register('toy.shares', shares)
    out, here = tmp_path / 'out', tmp_path / 'here'
    reproduce('toy.shares', toy, out)
    check_rows('toy.shares', 1, toy, out, here=here)
    of_yesterday(out)
    of_yesterday(here)
    kept = next(here.rglob('*.json')).stem
    (out / 'toy' / 'shares' / f'{kept}.json').rename(tmp_path / 'aside')
    rewrite(out, lambda row: row['made'].update(code='of the week before', confirmed={'of yesterday': [kept]}))
    (tmp_path / 'aside').rename(out / 'toy' / 'shares' / f'{kept}.json')
    assert set(confirm_rows('toy.shares', 1, toy, out, here=here).id) == {kept}
    assert status('toy', toy, out).old.tolist() == [0]


def test_rows_made_again_never_take_the_place_of_those_on_disk(register, tmp_path, monkeypatch):
    register('toy.shares', shares)
    monkeypatch.chdir(tmp_path)
    reproduce('toy.shares', toy, tmp_path / 'out')
    with pytest.raises(ValueError, match='would be lost'):
        check_rows('toy.shares', 1, toy, tmp_path / 'out', here='out')


def test_rows_that_yet_another_code_made_here_confirm_nothing(register, tmp_path):
    register('toy.shares', shares)
    out, here = tmp_path / 'out', tmp_path / 'here'
    reproduce('toy.shares', toy, out)
    check_rows('toy.shares', 2, toy, out, here=here)
    of_yesterday(out)
    with pytest.raises(ValueError, match='has no row of toy.shares'):
        confirm_rows('toy.shares', 2, toy, out, here=here)
    assert status('toy', toy, out).old.tolist() == [4]


OTHERS = {
    'a verdict that no number shows': lambda row: row['verdicts'].update(rain=_pack(np.zeros(40, bool))),
    'a verdict that is not made any more': lambda row: row['verdicts'].update(snow=row['verdicts']['rain']),
    'a number that is not made any more': lambda row: row['numbers'].update(snow=1.0),
    'a number that was not made': lambda row: row['numbers'].clear(),
}


@pytest.mark.parametrize('what', OTHERS)
def test_what_differs_in_any_way_confirms_nothing(what, register, tmp_path):
    register('toy.shares', lambda s: shares(s, fog_and_rain))
    reproduce('toy.shares', toy, tmp_path)
    of_yesterday(tmp_path)
    rewrite(tmp_path, OTHERS[what])
    with pytest.raises(ValueError, match='have changed'):
        confirm_rows('toy.shares', 1, toy, tmp_path)


def test_a_number_that_could_not_be_measured_is_kept_and_confirmed_as_such(register, tmp_path):
    register('toy.shares', lambda s: [Trial(dict(seed=0), nothing)])
    reproduce('toy.shares', toy, tmp_path)
    assert rows('toy.shares', toy, tmp_path).gain.isna().all()
    of_yesterday(tmp_path)
    assert len(confirm_rows('toy.shares', 1, toy, tmp_path)) == 1


def nothing(seed):
    return Outcome(dict(gain=None))


def test_code_of_the_day_after_is_confirmed_anew(register, tmp_path, monkeypatch):
    register('toy.shares', shares)
    reproduce('toy.shares', toy, tmp_path)
    of_yesterday(tmp_path)
    confirm_rows('toy.shares', 1, toy, tmp_path)
    monkeypatch.setattr(ex, '_code_of', lambda fn: 'of tomorrow')
    assert status('toy', toy, tmp_path)[['done', 'old']].values.tolist() == [[0, 4]]


def test_the_rest_is_estimated_from_what_is_done(register, tmp_path):
    register('toy.shares', shares, needs=('data',))
    few = RunSettings(toy, seeds=1, data='cifar100', cifar100=tmp_path / 'nowhere')
    assert status('toy', few, tmp_path).minutes_left.tolist() == [None]
    reproduce('toy.shares', few, tmp_path)
    got = status('toy', RunSettings(few, seeds=3), tmp_path)
    assert got.minutes_left.notna().all() and got.open.tolist() == [4] and got.missing.tolist() == ['cifar100']


def test_a_variant_of_imagenet_is_missing_until_its_folder_is_there(register, tmp_path):
    register('toy.shares', shares, by='share', needs=('variants',))
    s = RunSettings(toy, variants='imagenet_a imagenet_p', imagenet_a=tmp_path, imagenet_p=tmp_path / 'nowhere')
    assert status('toy', s, tmp_path).missing.tolist() == ['imagenet_p']
    assert status('toy', RunSettings(s, imagenet_p=None), tmp_path).missing.tolist() == ['imagenet_p']


# ---------------------------------------------------------------- profiles
@pytest.mark.parametrize('profile', ['smoke', 'laptop', 'gpu', 'paper'])
def test_every_profile_says_what_every_experiment_asks_for(profile):
    assert len(EXPERIMENTS) >= 10
    for e in EXPERIMENTS.values():
        found, asked = trials_of(e.name, profile), all(profile_for(e.paper, profile).get(k) for k in e.needs)
        assert (found or not asked) and all(json.loads(json.dumps(o.key)) == o.key for o in found), e.name


# ---------------------------------------------------------------- the command
def test_the_command_lists_runs_and_prints_the_table(register, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ex, '_settings', lambda e, profile: toy)
    monkeypatch.setattr(ex, 'profile_for', lambda paper, profile=None: toy)
    register('toy.shares', shares, by='share', needs=(), published=[dict(share=0.2, clean=21.0)])
    robust_reproduce('toy', list=True, out=str(tmp_path))
    assert re.search(r'toy.shares +a table +0 +0 +4', capsys.readouterr().out)
    robust_reproduce('toy', out=str(tmp_path))
    said = capsys.readouterr().out
    assert 'paper: clean' in said and '21.0' in said and len(made(tmp_path)) == 4


def test_an_unknown_name_is_refused_in_words():
    with pytest.raises(SystemExit, match='no experiment or paper is called'):
        robust_reproduce('nothing')


def test_the_command_keeps_rows_of_this_machine_in_a_folder(register, tmp_path, monkeypatch):
    monkeypatch.setattr(ex, '_settings', lambda e, profile: toy)
    monkeypatch.setattr(ex, 'profile_for', lambda paper, profile=None: toy)
    register('toy.shares', shares, by='share', needs=())
    here = str(tmp_path / 'here')
    robust_reproduce('toy', out=str(tmp_path / 'out'))
    robust_reproduce('toy', out=str(tmp_path / 'out'), check=1, here=here)
    of_yesterday(tmp_path)
    robust_reproduce('toy', out=str(tmp_path / 'out'), confirm=1, here=here)
    assert status('toy', toy, tmp_path / 'out').old.tolist() == [0]
    with pytest.raises(SystemExit, match='goes with --check or --confirm'):
        robust_reproduce('toy', here=here)


# ---------------------------------------------------------------- the rows in the repository
SAVED = sorted((ROOT / 'results').rglob('*.json'))


def test_constants_of_every_form_decide_the_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = 'A: int = 1\nif True:\n    B = 1\nC = 1\nC += 1\n\n\ndef run():\n    return A + B + C\n'
    edits = [('', ''), ('A: int = 1', 'A: int = 2'), ('    B = 1', '    B = 2'), ('C += 1', 'C += 2')]
    codes = []
    for i, (old, new) in enumerate(edits):
        (tmp_path / f'forms{i}.py').write_text(text.replace(old, new) if old else text)
        codes.append(ex._code_of(importlib.import_module(f'forms{i}').run))
    assert len(set(codes)) == len(edits)


def keeps(share, n, seed, **key):
    "A run that keeps what it has trained in the folder `out`"
    f = settings().out / 'kept.json'
    if f.exists():
        return luck(json.loads(f.read_text()), n, seed)
    f.parent.mkdir(exist_ok=True)
    f.write_text(json.dumps(TRAINED[0]))
    return luck(TRAINED[0], n, seed)


TRAINED = [0.25]


def test_a_row_is_made_again_without_the_weights_that_were_kept(register, tmp_path, monkeypatch):
    monkeypatch.setenv('ROBUST_OUT', str(tmp_path / 'out'))
    register('toy.kept', lambda s: [Trial(dict(share=0.2, n=s.n, seed=0), keeps)], by='share')
    reproduce('toy.kept', toy, tmp_path / 'rows')
    assert check_rows('toy.kept', 1, toy, tmp_path / 'rows').images.sum() == 0
    monkeypatch.setattr(sys.modules[__name__], 'TRAINED', [0.75])
    assert check_rows('toy.kept', 1, toy, tmp_path / 'rows').images.sum() > 0


@pytest.mark.skipif(not SAVED, reason='no rows yet')
def test_saved_rows_agree_with_their_verdicts():
    for f in SAVED:
        r = json.loads(f.read_text())
        n, packed = r['verdicts']['n'], {k: v for k, v in r['verdicts'].items() if k not in ('n', 'images')}
        for k, v in packed.items():
            if k in r['numbers']:
                assert r['numbers'][k] == pytest.approx(100 * _unpack(v, n).mean(), abs=1e-3), f.name
        assert f.parent.parent.name == r['experiment'].split('.')[0] and r['made']['command'].startswith(
            'robust-reproduce'
        )


@pytest.mark.skipif(not SAVED, reason='no rows yet')
def test_saved_rows_are_those_of_the_code_as_it_is():
    "A change of an experiment's own code makes its rows old: make them again, or delete them"
    left = status(profile='laptop', out=ROOT / 'results')
    assert left.old.sum() == 0, left[left.old > 0].to_string()


# ----------------------------------------------------------- every experiment of every profile, on generated images
SHRUNK = dict(
    n_train=8,
    n_valid=8,
    n=8,
    n_corrupt=2,
    corruptions='fog frost',
    severities='1 5',
    budget=20,
    aa_valid=8,
    bs=4,
    epochs=1,
    long=1,
    steps=1,
    seeds=1,
    blocks=1,
    tune_train=8,
    tune_valid=4,
    tune_bs=4,
    tune_epochs=1,
    scratch_epochs=1,
    table1_epochs=1,
    table1_bs=4,
    train_steps=1,
    train_attack_steps=1,
    count_steps=1,
    table2_steps=1,
    seg_train=4,
    seg_n=4,
    seg_epochs=1,
    aa_n=4,
    net_train=8,
    net_epochs=1,
    push_epochs=1,
    held=4,
    period=1,
    n_iterations=4,
    long_images=8,
    long_epochs=1,
    n_autoattack=4,
)
CLASSES = dict(imagenet=1000, imagenet100=100, cifar10=10, cifar100=100, imagenette=10, caltech101=101, flowers102=102)


def pixels(side):
    return np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)


def save_png(folder, name, image):
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(folder / name, compress_level=1)


def variants_of_imagenet(root):
    "Two of ImageNet's classes: an image of each, and a sequence of two frames of each under each perturbation"
    for wnid in ('n01440764', 'n01443537'):
        save_png(root / 'imagenet_a' / wnid, '0.png', pixels(64))
        for k in PERTURBATIONS:
            for frame in range(2):
                image = np.roll(pixels(224), frame, axis=0)
                save_png(root / 'imagenet_p' / k / wnid / 'sequence', f'{frame}.png', image)


def tree(folder, classes, side):
    "Class folders with one image each, for training and for testing"
    noise = pixels(side)
    for split in ('train', 'val' if classes == 1000 else 'test'):
        for k in range(classes):
            save_png(folder / split / f'class{k:04d}', '0.png', np.roll(noise, k, axis=0))


def street_scenes(folder):
    "Six images with masks in each split, as CamVid's folders have them"
    for split in ('train', 'val', 'test'):
        for i in range(6):
            image = np.roll(pixels(48), i, axis=0)
            save_png(folder / split, f'{i}.png', image)
            save_png(folder / f'{split}annot', f'{i}.png', image[..., 0] % 12)


@pytest.fixture(scope='module')
def generated(tmp_path_factory):
    "Images of the right number and size for every dataset, and a settings.ini that names them"
    root = tmp_path_factory.mktemp('data')
    for name, classes in CLASSES.items():
        tree(root / name, classes, 32 if name.startswith('cifar') else 64)
    variants_of_imagenet(root)
    street_scenes(root / 'camvid')
    lines = [f'{k} = {root / k}' for k in (*CLASSES, 'camvid', 'imagenet_a', 'imagenet_p')]
    (root / 'settings.ini').write_text(
        '\n'.join(['[DEFAULT]', 'profile = smoke', f'out = {root / "out"}', *lines, '[smoke]', 'epochs = 1'])
    )
    return root


OF_A_KIND = 'dataset net method reading aas start generated maker backbone'.split()


def kinds(trials, of=OF_A_KIND):
    "One run for each dataset, network, method, reading and way to start"
    res = {}
    for t in trials:
        k = t.key
        res.setdefault(
            repr([k.get(o) for o in of] + [k.get('tune', {}).get('method')]),
            t,
        )
    return list(res.values())


# those of `methods` are in test_methods.py
@pytest.mark.parametrize('paper', sorted({o.paper for o in EXPERIMENTS.values()} - {'methods'}))
def test_the_cheapest_run_of_every_paper_makes_a_row(paper, monkeypatch, tmp_path):
    (tmp_path / 'settings.ini').write_text((ROOT / 'settings.ini').read_text())
    monkeypatch.chdir(tmp_path)
    s = RunSettings(profile_for(paper, 'smoke') | SHRUNK)
    here = [e for e in EXPERIMENTS.values() if e.paper == paper and not ex._missing(e, s)]
    e, trial = min([(e, t) for e in here for t in trials_of(e.name, s)], key=lambda o: o[1].cost)
    row = ex._row_of(e, trial, trial.fn(**trial.key), (0, 0), 'smoke')
    assert row['numbers'] and all(np.isfinite(v) for v in row['numbers'].values())


members = AutoAttack.members


def two_steps(attacks):
    return [o.but(queries=2) if isinstance(o, Square) else o.but(steps=2) for o in attacks]


@pytest.mark.slow
@pytest.mark.parametrize('name', list(EXPERIMENTS))
@pytest.mark.parametrize('profile', ['smoke', 'laptop', 'gpu', 'paper'])
def test_every_experiment_is_run_through(profile, name, generated, monkeypatch):
    monkeypatch.chdir(generated)
    make = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda *a, pretrained=False, **kw: make(*a, **kw))
    monkeypatch.setattr(AutoAttack, 'members', lambda self, classes: two_steps(members(self, classes)))
    e = EXPERIMENTS[name]
    s = RunSettings(profile_for(e.paper, profile) | SHRUNK)
    if s.get('reader', '').startswith('timm'):
        s['reader'] = 'timm convnext_atto'
    # at paper scale one reading stands for all, which are run with the smaller networks
    of = [o for o in OF_A_KIND if profile != 'paper' or o != 'reading']
    for t in kinds(trials_of(name, s), of):
        row = ex._row_of(e, t, t.fn(**t.key), (0, 0), profile)
        assert row['numbers'] and all(np.isfinite(v) for v in row['numbers'].values()), t.key
