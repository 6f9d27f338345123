"Models side by side, as an author or a student asks for them."

import json, re, shutil, warnings
from functools import partial
import numpy as np, pandas as pd, pytest, torch
from PIL import Image
from fastai.basics import AttrDict, Callback, CancelFitException, Learner, load_learner, nn
from robust_nbdev.all import FGSM, PGD, TRADES, AutoAttack, Entry, StepCost, compare, corruption_report, fashion_mnist
from robust_nbdev.all import image_dls, paired, robust_report, small_model
from robust_nbdev import corruptions
from robust_nbdev.cli import SomeOutputs, eval_settings, named_model, robust_compare, run_compare, run_eval, timm_model
from robust_nbdev.compare import Comparison, Side, _attack_on, report_verdicts
from robust_nbdev.evaluate import Report
from robust_nbdev.datasets import FASHION, embedded_fashion
from robust_nbdev.test_utils import synth_learner, tiny_vit

ATTACKS = [FGSM(0.1), PGD(0.1, steps=3)]
TWO = dict(corruptions=['brightness', 'contrast'], severities=[1, 3])


class Dice(nn.Module):
    "A model that draws random numbers"

    def __init__(self):
        super().__init__()
        self.net = tiny_vit()

    def forward(self, x):
        return self.net(x + 0.5 * torch.rand_like(x))


@pytest.fixture(scope='module')
def nets():
    "Two models of the package, plain and robust"
    return AttrDict({k: small_model('vit', robust=k == 'robust', data='fashion_mnist') for k in ('plain', 'robust')})


@pytest.fixture(scope='module')
def data():
    return fashion_mnist(n_train=64, n_valid=64, bs=64).valid.one_batch()


@pytest.fixture(scope='module')
def both(nets, data):
    return compare(nets, data, ATTACKS, **TWO)


@pytest.fixture(scope='module')
def reports(nets, data):
    return AttrDict({k: robust_report(net, data, ATTACKS) for k, net in nets.items()})


def test_the_table_has_the_numbers_of_the_reports(nets, data, both, reports):
    rep = reports.robust
    row = both.df.loc['robust']
    assert row.clean == rep.verdicts['clean'].mean()
    assert [row[repr(a)] for a in ATTACKS] == [rep.verdicts[repr(a)].mean() for a in ATTACKS]
    assert row['worst case'] == pytest.approx(rep.rows[-1]['accuracy'])
    cor = corruption_report(nets.robust, data, **TWO)
    assert row.corruptions == pytest.approx(np.mean([r['accuracy'] for r in cor.rows if r['severity']]))


def test_differences_are_paired_with_the_first_model(both, reports):
    a, b = reports.robust, reports.plain
    found = both.difference('robust', repr(ATTACKS[1]))
    assert repr(found) == repr(paired(a, b, ATTACKS[1])) and found.n == 64
    assert set(both.differences.column) == set(both.columns) and set(both.differences.model) == {'robust'}


def test_any_two_models_can_be_compared(both):
    there, back = both.difference('robust'), both.difference(both.first.name, base='robust')
    assert there.value == -back.value and (there.wins, there.losses) == (back.losses, back.wins)
    with pytest.raises(ValueError, match="no model 'nobody'"):
        both.difference('robust', base='nobody')


def test_a_larger_model_costs_more_in_forwards_of_the_first(data):
    c = compare({'small': tiny_vit(), 'deep': Entry(tiny_vit(depth=4), step=3)}, data, [])
    assert 1.5 < c.df.predict['deep'] < 2.1 and c.df.step['deep'] == pytest.approx(3 * c.df.predict['deep'])
    assert c.columns == ['clean'] and c.judged == 'clean' and c.difference('deep').n == 64


def test_reports_of_corruptions_are_paired_by_their_mean(nets, data):
    a, b = [corruption_report(nets[k], data, **TWO) for k in ('robust', 'plain')]
    assert paired(a, b).value == pytest.approx(float(a.table['mean'].mean() - b.table['mean'].mean()), abs=1e-6)
    other = corruption_report(nets.plain, data, **{**TWO, 'severities': [1, 2]})
    with pytest.raises(ValueError, match='not in both'):
        paired(a, other)


# --- what the attacker knows
# ------------------------------------------------------------------------------------------------------------


def test_numbers_of_two_threat_models_are_not_compared(nets, data):
    secret, few = Entry(nets.robust, surrogate=nets.plain), (data[0][:32], data[1][:32])
    c = compare({**nets, 'secret': secret}, few, ATTACKS)
    assert c.df.threat.tolist() == ['white box', 'white box', 'transfer']
    assert c.df.loc['secret', 'worst case'] >= c.df.loc['robust', 'worst case']
    assert (
        c.difference('secret') is None
        and c.difference('secret', 'clean').value == c.difference('robust', 'clean').value
    )
    text = c.table().set_index('model')['worst case']
    assert '*' in text['robust'] and '*' not in text['secret'] + text['plain']


def test_a_random_model_is_refused_before_the_first_attack(data, tmp_path):
    with pytest.raises(ValueError, match=r'dice.*Entry\(model, draws=10\)'):
        compare({'plain': tiny_vit(), 'dice': Dice()}, data, ATTACKS, out=tmp_path / 'c')
    assert not (tmp_path / 'c').exists()


def test_a_randomised_model_is_judged_by_the_mean_over_draws(data):
    c = compare({'dice': Entry(Dice(), draws=3)}, data, ATTACKS, n=16)
    assert c.df.threat.tolist() == ['randomised'] and 'mean of 3 draws for dice' in c.about
    assert c.df.loc['dice', 'worst case'] == min(c.df.loc['dice', repr(a)] for a in ATTACKS)


def test_own_members_of_an_ensemble_average_on_a_random_model():
    pgd = PGD(0.1, steps=2)
    made = _attack_on(AutoAttack(0.1, attacks=['square', pgd]), Entry(Dice(), draws=3))
    assert made.attacks == ('square', pgd.eot(3)) and _attack_on(AutoAttack(0.1), Entry(Dice(), draws=3)) == AutoAttack(
        0.1
    )


# --- the folder
# ------------------------------------------------------------------------------------------------------------


def test_a_later_model_is_measured_alone(nets, data, tmp_path):
    out, models = tmp_path / 'c', {'plain': nets.plain, 'AT, PGD-2': nets.robust}
    few = dict(corruptions=['brightness'], severities=[1], n=16, out=out)
    compare({'plain': models['plain']}, data, ATTACKS, **few)
    files = [out / 'plain' / o / 'report.json' for o in ('attacks', 'corruptions')]
    rows = lambda: [json.loads(f.read_text())['rows'][1:] for f in files]
    before = rows()
    c = compare(models, data, ATTACKS, **few)
    assert rows() == before and all(before)
    assert (out / 'AT_PGD-2' / 'attacks' / 'verdicts.npz').exists()
    pd.testing.assert_frame_equal(pd.read_csv(out / 'compare.csv', index_col='model'), c.df, check_dtype=False)
    assert len(pd.read_csv(out / 'differences.csv')) == len(c.columns)
    assert (out / 'compare.png').stat().st_size > 5000


class Breaks(nn.Module):
    "A model that fails under attack"

    def forward(self, x):
        if x.requires_grad:
            raise KeyboardInterrupt
        return torch.zeros(len(x), 10)


def test_before_all_models_are_measured_none_is_the_best(nets, data, tmp_path):
    few = dict(n=16, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compare({**nets, 'late': Breaks()}, data, ATTACKS, **few)
    for file in ('compare.md', 'compare.tex'):
        text = (tmp_path / file).read_text()
        assert '2 of 3 models so far, so none is marked as the best; ' in text and not re.search(r'\*\*|textbf', text)
    compare(nets, data, ATTACKS, **few)
    text = (tmp_path / 'compare.md').read_text()
    assert 'models so far' not in text and '**' in text


def test_rows_from_disk_are_said_in_a_line(nets, data, tmp_path):
    few, said = dict(corruptions=['brightness'], severities=[1, 3], n=16, out=tmp_path), []
    compare({'plain': nets.plain}, data, ATTACKS, **few, say=said.append)
    assert said == ['plain']
    compare(nets, data, ATTACKS, **few, say=said.append)
    assert said[1:3] == ['plain', 'robust'] and said[3].startswith(f'4 of 8 rows are from {tmp_path}, where')


def test_what_cannot_be_compared_is_refused(data, tmp_path):
    m = tiny_vit()
    with pytest.raises(ValueError, match='different folders'):
        compare({'a b': m, 'a/b': m}, data, ATTACKS, out=tmp_path)
    with pytest.raises(ValueError, match='same images'):
        Comparison([Side('a', {'clean': np.ones(4)}), Side('b', {'clean': np.ones(5)})])
    with pytest.raises(ValueError, match='one threat model'):
        compare({'m': m}, data, [FGSM(0.1), FGSM(0.2)])
    with pytest.raises(ValueError, match='either'):
        Entry(1, surrogate=2, draws=3)
    with pytest.raises(ValueError, match=r"no model 'c'"):
        Comparison([Side('a', {'clean': np.ones(4)})]).difference('c')


# --- tables
# ------------------------------------------------------------------------------------------------------------


def sides():
    fog = {'fog 1': np.arange(10) < 8}
    return [
        Side('plain_vit', {'clean': np.ones(10), 'PGD(0.1)': np.arange(10) < 2}, corrupted=fog),
        Side('50% & more|', {'clean': np.ones(10), 'PGD(0.1)': np.arange(10) < 5}, corrupted={'fog 1': np.ones(10)}),
    ]


def test_markdown_and_latex_can_be_pasted():
    c = Comparison(sides(), 'n=10, eps=0.1')
    lines = c.to_markdown().splitlines()
    assert len({len(re.findall(r'(?<!\\)\|', l)) for l in lines[:4]}) == 1 and '**50.0**' in lines[3]
    tex = c.to_latex()
    assert r'50\% \& more|' in tex and r'plain\_vit' in tex and r'\textbf{50.0}' in tex and 'n=10' in tex
    assert max(len(l.split('&')) for l in tex.splitlines() if 'plain' in l) <= 8


def test_a_warning_of_all_models_is_said_once():
    a, b = sides()
    a.warnings, b.warnings = ('few images', 'odd'), ('few images',)
    assert Comparison([a, b]).warnings == ['few images', 'plain_vit: odd']


class Masked(nn.Module):
    "A model whose outputs hide the gradient in rounding, and nothing else: an attack with gradients sees none"

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x).mul(8).round() / 8


def test_a_model_that_hides_its_gradients_is_not_marked_as_the_best(nets, data, tmp_path):
    "Whether its rows were measured now or come from disk; and what is exported says why"
    models = {'plain': nets.plain, 'masked': Masked(nets.plain), 'robust': nets.robust}
    for again in (False, True):
        c = compare(models, data, [PGD(0.1, steps=5)], n=32, out=tmp_path)
        assert c.df.loc['masked', c.judged] > c.df.loc['robust', c.judged]
        marked = c.table().set_index('model')[c.judged].str.startswith('*')
        assert marked.index[marked].tolist() == ['robust']
        (said,) = [o for o in c.warnings if o.startswith('masked is not marked')]
        assert said.endswith('robust is marked')
    assert f'\n- {said}\n' in (tmp_path / 'compare.md').read_text()
    assert f'\n% warning: {said}\n' in (tmp_path / 'compare.tex').read_text()


def test_where_all_are_overstated_none_is_marked(nets, data):
    c = compare({k: Masked(net) for k, net in nets.items()}, data, [PGD(0.1, steps=5)], n=32)
    assert not c.table()[c.judged].str.contains('*', regex=False).any()
    assert sum(o.endswith('overstated: none is marked') for o in c.warnings) == 1


def test_exported_tables_of_a_report_carry_its_warnings(nets, data, tmp_path):
    rep = robust_report(Masked(nets.plain), data, [PGD(0.1, steps=5)], n=16, out=tmp_path)
    assert rep.overstated and Report.load(tmp_path).overstated == rep.overstated
    for o in rep.warnings:
        assert f'\n- {o}' in rep.to_markdown() and f'\n% warning: {o}\n' in rep.to_latex()


# --- the cost of a step
# ------------------------------------------------------------------------------------------------------------


class Interrupt(Callback):
    def after_pred(self):
        raise CancelFitException()


def test_counting_changes_nothing_and_leaves_nothing():
    weights = []
    for cbs in ([], [StepCost(batches=None)]):
        learn = synth_learner(cbs=[TRADES(PGD(0.05, steps=2)), *cbs])
        learn.fit(1, 1e-3)
        weights.append(torch.cat([p.flatten() for p in learn.model.parameters()]))
        assert 'one_batch' not in vars(learn)
    assert (weights[0] - weights[1]).abs().max() < 1e-4
    assert len(learn.step_cost.counted) == 4 and 9 < learn.step_cost.step < 12


def test_an_interrupted_fit_leaves_nothing():
    learn = synth_learner(cbs=[StepCost(), Interrupt()])
    learn.fit(1)
    learn.fit(1)
    assert 'one_batch' not in vars(learn) and learn.step_cost.step is None


# --- names, and the command line
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    "Folders of four and of five classes, and Learners: classes as in the folder, turned round, and with one more"
    d, src = tmp_path_factory.mktemp('photos'), embedded_fashion()
    x, y = src.splits['test']
    for name in ('Bag', 'Coat', 'Dress', 'Sandal'):
        (d / 'four' / name).mkdir(parents=True)
        for i in np.flatnonzero(y == FASHION.index(name))[:12]:
            Image.fromarray(x[i]).save(d / 'four' / name / f'{i}.png')
    shutil.copytree(d / 'four', d / 'five')
    (d / 'five' / 'Trouser').mkdir()
    for i in np.flatnonzero(y == 1)[:12]:
        Image.fromarray(x[i]).save(d / 'five' / 'Trouser' / f'{i}.png')
    four = ['Bag', 'Coat', 'Dress', 'Sandal']
    for file, folder, vocab in (
        ('straight', 'four', four),
        ('turned', 'four', four[::-1]),
        ('more', 'five', ['Trouser', *four[::-1]]),
    ):
        dls = image_dls(d / folder, size=28, mode='L', vocab=vocab, bs=8, num_workers=0, device='cpu')
        net = SomeOutputs(small_model('vit', data='fashion_mnist'), [FASHION.index(o) for o in vocab])
        Learner(dls, net, loss_func=nn.CrossEntropyLoss(), path=d).export(f'{file}.pkl')
    return d


def test_classes_in_another_order_are_found_by_name(photos):
    "The same network with its outputs in another order is the same model, for `robust-compare` as for `robust-eval`"
    s = eval_settings('smoke', data=str(photos / 'four'), eps=0.1, size=28, device='cpu')
    found = run_compare(s, [f'{k}={photos}/{k}.pkl' for k in ('straight', 'turned')], [FGSM(0.1)])
    assert found.df.loc['straight', 'clean'] > 0.8
    for column in ('clean', 'FGSM(0.1)'):
        d = found.difference('turned', column)
        assert (d.value, d.wins, d.losses) == (0, 0, 0)
    rep = run_eval(s, [FGSM(0.1)], checkpoint=photos / 'turned.pkl')
    assert rep.df.accuracy.tolist()[:2] == pytest.approx(found.df.loc['turned', ['clean', 'FGSM(0.1)']], abs=1e-5)


def test_a_part_of_the_classes_is_judged_alike_everywhere(photos):
    "Model d, c, b, a; images of a, b, c: every way keeps the three outputs, and none of them doubts the numbers"
    d = photos / 'three'
    for name in ('Bag', 'Coat', 'Dress'):
        shutil.copytree(photos / 'four' / name, d / name)
    dls = image_dls(d, size=28, mode='L', valid='only', bs=48, num_workers=0, device='cpu')
    x, y = dls.valid.one_batch()
    learn, s = load_learner(photos / 'turned.pkl'), eval_settings('smoke', data=str(d), eps=0.1, size=28, device='cpu')
    mine = SomeOutputs(learn.model, [3, 2, 1])
    raw = robust_report(mine, (x, y), [FGSM(0.1)]).df.accuracy
    python = compare(dict(turned=learn), dls.valid, [FGSM(0.1)])
    command = run_compare(s, [f'turned={photos}/turned.pkl'], [FGSM(0.1)])
    report = run_eval(s, [FGSM(0.1)], checkpoint=photos / 'turned.pkl')
    for found in (python.df, command.df):
        assert found.loc['turned', ['clean', 'FGSM(0.1)']].tolist() == pytest.approx(raw[:2].tolist(), abs=1e-5)
    assert report.df.accuracy[:2].tolist() == pytest.approx(raw[:2].tolist(), abs=1e-5) and raw[0] > 0.8
    for said in (python.warnings, command.warnings):
        assert not any('outputs, but the data names' in o for o in said)
        assert any('the 3 of its 4 outputs for these classes (not Sandal)' in o for o in said)


def test_numbers_as_names_are_taken_by_their_order_and_that_is_said():
    same, other = [synth_learner() for _ in range(2)]
    same.dls.vocab, other.dls.vocab = list('1234'), list('0123')
    data = same.dls.valid
    data.vocab = same.dls.vocab
    found = compare(dict(a=same, b=other), data, [])
    assert any(o.startswith('b: classes are taken by their order') and '0 (the images: 1)' in o for o in found.warnings)
    assert not any(o.startswith('a: ') and 'order' in o for o in found.warnings)


def test_a_surrogate_is_put_in_order_by_its_own_names_alone(photos):
    "A module has no names: as surrogate of a model that is turned it is refused, not turned too"
    dls = image_dls(photos / 'four', size=28, mode='L', valid='only', bs=48, num_workers=0, device='cpu')
    turned, straight = [load_learner(photos / f'{k}.pkl') for k in ('turned', 'straight')]
    with pytest.raises(ValueError, match='its surrogate has no class names: give surrogate= as a Learner'):
        compare(dict(a=Entry(turned, surrogate=straight.model)), dls.valid, [FGSM(0.1)])
    of_learner = compare(dict(a=Entry(turned, surrogate=straight)), dls.valid, [FGSM(0.1)])
    white = compare(dict(a=straight), dls.valid, [FGSM(0.1)])
    assert of_learner.df.loc['a', 'FGSM(0.1)'] == white.df.loc['a', 'FGSM(0.1)'] < of_learner.df.clean.a


def test_of_imagenets_outputs_those_of_the_images_are_kept_in_python_too(photos, tmp_path):
    for theirs, ours in {'Bag': 'tench', 'Coat': 'cassette_player'}.items():
        shutil.copytree(photos / 'four' / theirs, tmp_path / 'd' / ours)
    torch.manual_seed(0)
    torch.save(timm_model('resnet18').state_dict(), tmp_path / 'r.pth')
    dls = image_dls(tmp_path / 'd', size=32, mode='RGB', valid='only', bs=24, num_workers=0, device='cpu')
    found = compare(dict(r=f'resnet18@{tmp_path}/r.pth'), dls.valid, [FGSM(0.01)])
    x, y = dls.valid.one_batch()
    net = named_model(f'resnet18@{tmp_path}/r.pth').net
    assert found.df.clean.r == pytest.approx((net(x)[:, [482, 0]].argmax(1) == y).float().mean().item(), abs=1e-5)
    assert found.df.clean.r > 0.1 > (net(x).argmax(1) == y).float().mean()


def test_a_class_that_a_model_does_not_know_is_named(photos, tmp_path, capsys):
    "And two files are opened with one sentence about pickles"
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        with pytest.raises(SystemExit, match='straight: these classes of the images are not among .*: Trouser'):
            files = [f'{k}={photos}/{k}.pkl' for k in ('more', 'straight')]
            robust_compare(*files, data=str(photos / 'five'), size=28, profile='smoke', out=str(tmp_path / 'c'))
    assert capsys.readouterr().err.count('pickle') == 1


def test_the_command(tmp_path, capsys):
    run = lambda *models, **kw: robust_compare(*models, profile='smoke', n=16, attacks='fgsm', out=str(tmp_path), **kw)
    run('plain=fashion_mnist_vit', 'robust=fashion_mnist_vit_robust', corruptions='fog', severities='1')
    said = capsys.readouterr().out
    assert 'FGSM(0.1)' in said and 'n=16' in said and re.search(r'robust +white box', said)
    t = pd.read_csv(tmp_path / 'compare.csv', index_col='model')
    assert t.loc['robust', 'FGSM(0.1)'] > t.loc['plain', 'FGSM(0.1)']
    assert (tmp_path / 'plain' / 'corruptions' / 'report.json').exists()


@pytest.mark.parametrize(
    'models,says',
    [
        ([], 'which models'),
        (['fashion_mnist_vit', 'fashion_mnist_vit'], 'give each a label'),
    ],
)
def test_the_command_names_what_is_wrong(models, says, tmp_path):
    with pytest.raises(SystemExit, match=says):
        robust_compare(*models, profile='smoke', attacks='fgsm', out=str(tmp_path))


@pytest.mark.parametrize(
    'given,says',
    [
        (dict(corruptions='fog,fogg'), "no corruption 'fogg', there are: all, gaussian_noise"),
        (dict(severities='7'), 'from 1 to 5 between commas, got 7'),
        (dict(valid='nonsense'), "valid must be 'test', 'val', 'holdout' or 'only'"),
    ],
)
def test_options_are_checked_before_any_model_is_measured(given, says, tmp_path, capsys):
    with pytest.raises(SystemExit, match=says):
        robust_compare('fashion_mnist_vit', profile='smoke', attacks='fgsm', out=str(tmp_path / 'o'), **given)
    assert capsys.readouterr().out == '' and not (tmp_path / 'o').exists()


# --- what must match before two numbers are compared
# ------------------------------------------------------------------------------------------------------------


def darker(model, x, y=None, seed=0):
    return x * 0.5


def test_an_attack_on_the_survivors_of_others_is_not_paired_with_one_on_all_images(nets, data):
    weak, strong = ATTACKS
    data = data[0][:24], data[1][:24]
    alone, behind = [robust_report(nets.robust, data, o) for o in ([weak], [strong, weak])]
    with pytest.raises(ValueError, match='survivors of other attacks'):
        paired(alone, behind, attack=weak)
    each = [robust_report(nets.robust, data, o, cascade=False) for o in ([weak], [strong, weak])]
    assert paired(*each, attack=weak).value == 0
    with pytest.raises(ValueError, match='made in other ways'):
        paired(alone, each[0], attack=weak)


def test_of_random_predictions_the_worst_row_counts_and_no_minimum_over_draws():
    rep = robust_report(
        Dice(), (torch.rand(32, 1, 28, 28), torch.randint(0, 10, (32,))), ATTACKS, draws=4, cascade=False
    )
    lowest = rep.df.accuracy[1:3].min()
    assert report_verdicts(rep, None).mean() == pytest.approx(min(lowest, rep.df.accuracy[0]))


def test_images_that_another_version_corrupted_are_not_paired(nets, data, monkeypatch):
    now = corruption_report(nets.robust, data, corruptions=['fog'])
    monkeypatch.setattr(corruptions, 'corrupt', partial(corruptions.corrupt, floor=False))
    before = corruption_report(nets.robust, data, corruptions=['fog'])
    for row in (None, 'fog 5'):
        with pytest.raises(ValueError, match='corrupted in other ways'):
            paired(now, before, attack=row)


def test_an_attack_on_one_model_counts_in_its_worst_case_alone(nets, data):
    few, own = (data[0][:24], data[1][:24]), PGD(0.1, steps=5)
    found = compare(nets, few, [FGSM(0.1)], extra=dict(robust=[own]))
    assert found.columns == ['clean', 'FGSM(0.1)', repr(own), 'worst case']
    assert (
        found.df.loc['robust', 'worst case'] == found.df.loc['robust', repr(own)] <= found.df.loc['robust', 'FGSM(0.1)']
    )
    assert found.df.loc['plain', 'worst case'] == found.df.loc['plain', 'FGSM(0.1)']
    assert found.shown().set_index('model')['pgd5'].plain == '-' and found.difference('robust', repr(own)) is None
    assert found.warnings[0].startswith(f'robust is ranked by a worst case that counts {own!r} too')
    assert f'robust alone: {own!r}' in found.about


def test_attacks_on_one_model_are_checked(nets, data):
    for extra, says in (
        (dict(other=[FGSM(0.1)]), "'other', which is none"),
        (dict(plain=[FGSM(0.2)]), 'one threat model'),
    ):
        with pytest.raises(ValueError, match=says):
            compare(nets, data, ATTACKS, extra=extra)
    with pytest.raises(ValueError, match='give attacks= too'):
        compare(nets, data, [], extra=dict(plain=[FGSM(0.1)]))


def test_a_plain_function_is_an_attack_of_a_comparison(nets, data):
    assert compare(nets, data, [darker], n=8).df['darker'].notna().all()


def test_models_without_names_are_refused(data):
    for models, got in ((['fashion_mnist_vit'], 'a list'), ({}, 'none'), (nn.Linear(2, 2), 'a Linear')):
        with pytest.raises(ValueError, match=f'by name.*got {got}$'):
            compare(models, data, ATTACKS)


def test_a_learner_that_was_trained_on_the_images_is_never_the_best():
    "By a warning of its own, that its numbers are too high"
    from fastai.vision.all import Learner, nn

    dls = image_dls(embedded_fashion(), n_train=60, n_valid=20, mode='L', valid='holdout')
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))  # the same for both, so that they tie
    shown = image_dls(embedded_fashion(), n_train=60, n_valid=20, mode='L', valid='holdout').valid
    shown.dataset.keys[:3] = dls.train_ds.keys[:3]
    models = {'other': net, 'mine': Learner(dls, net, loss_func=nn.CrossEntropyLoss())}
    found = compare(models, shown, [FGSM(0.02)])
    assert [o for o in found.warnings if o.startswith('mine: the model was trained on 3 of these 20 images')]
    marks = found.table().set_index('model')[found.judged]
    assert '*' in marks['other'] and '*' not in marks['mine']
