"Two processes on the CPU (gloo) train what one trains on the joined batch, and measure what it measures (R24)."

import json
import pytest
from two_processes import running

pytest.importorskip('accelerate')


@pytest.fixture(scope='module', params=['few', pytest.param('all', marks=pytest.mark.slow)])
def runs(request, tmp_path_factory):
    "(results of one process, [of rank 0, of rank 1], the folder that the two wrote to)"
    import distributed_job

    one, two = [tmp_path_factory.mktemp(k) for k in ('one', 'two')]
    out = two / 'out'
    out.mkdir()
    with running(distributed_job.__file__, two, request.param):
        res = json.loads(json.dumps(distributed_job.results(one, request.param)))
    return res, [json.loads((out / f'res{i}.json').read_text()) for i in range(2)], out


TRAINED = ('mart', 'ema', 'trades', 'gat')


def test_the_loss_curve_is_that_of_one_process_with_the_joined_batch(runs):
    one, (a, b), _ = runs
    for k in [k for k in TRAINED if k in one]:
        mean = [(u + v) / 2 for u, v in zip(a[k]['losses'], b[k]['losses'])]
        assert len(mean) == 8 and mean == pytest.approx(one[k]['losses'], abs=1e-5), k
        assert a[k]['losses'] != b[k]['losses']
        assert a[k]['weights'] == pytest.approx(one[k]['weights'], abs=1e-4), k
        assert max(one[k]['losses']) - min(one[k]['losses']) > 0.02  # it trains


def test_ranks_stay_one_model(runs):
    "Moved weights, replayed batches, averages and all: bit for bit"
    a, b = runs[1]
    trainings = [k for k in a if 'losses' in a[k]]
    assert {'mart', 'ema', 'mart_awp', 'catch_stop', 'save'} <= {*trainings}
    for k in trainings:
        assert a[k]['weights'] == b[k]['weights'] and a[k].get('ema') == b[k].get('ema'), k
        assert a[k]['rows'] == b[k]['rows'] and len(a[k]['losses']) == len(b[k]['losses']), k
        assert [v[2:] for v in a[k]['values']] == [v[2:] for v in b[k]['values']], k  # metrics are those of all


def test_average_is_that_of_one_process(runs):
    one, (a, _), _ = runs
    assert a['ema']['ema'] == pytest.approx(one['ema']['ema'], abs=1e-4)
    assert one['ema']['ema'] != one['ema']['weights']


def test_metrics_are_those_of_one_process(runs):
    "37 images: the last batch is uneven and padded, and padding must not count"
    one, (a, b), _ = runs
    for method in [k for k in TRAINED if k in one]:
        assert [v[2] for v in a[method]['values']] == pytest.approx([v[2] for v in one[method]['values']])


def test_validation_under_attack_is_that_of_one_process(runs):
    one, (a, b), _ = runs
    assert a['save']['valid'][1:] == b['save']['valid'][1:]
    assert a['save']['under'][1:] == b['save']['under'][1:]
    assert a['save']['valid'][1] == a['save']['under'][1] < 1
    assert a['save']['valid'][1] == pytest.approx(one['save']['valid'][1], abs=0.03)


def test_overfitting_is_caught_by_all_or_none(runs):
    "Each sees other images; the accuracies are those of all, and one speaks"
    one, (a, b), _ = runs
    for k in [k for k in one if k.startswith('catch')]:
        assert a[k]['df'] == b[k]['df'] and len(a[k]['heard']) > 0 == len(b[k]['heard']), k
        assert [r[:2] for r in a[k]['df']] == [r[:2] for r in one[k]['df']]
        assert a[k]['df'][0][2:] == pytest.approx(one[k]['df'][0][2:], abs=1e-6)


def test_one_rank_writes(runs):
    _, _, out = runs
    files = {p.relative_to(out).as_posix() for p in out.rglob('*') if p.is_file()}
    report = {
        f'{k}/{f}'
        for k in ('sharded', 'whole')
        for f in ('report.json', 'report.csv', 'report.html', 'report.png', 'verdicts.npz', 'predictions.npz')
    }
    assert files == {'res0.json', 'res1.json', 'save/models/avg.pth', 'save/models/own.pth'} | report
    assert json.loads((out / 'sharded' / 'report.json').read_text())['meta']['processes'] == 2


def test_a_report_is_that_of_one_process(runs):
    one, two, _ = runs
    for o in two:
        assert o['sharded'] == o['whole'] == one['whole'] == one['sharded']
    assert one['whole']['rows'][1]['attacked'] > 5
    assert len(one['whole']['rows']) == 5


def test_a_sharded_report_goes_on(runs):
    one, (a, b), _ = runs
    assert a['more'] == b['more']
    assert a['more']['rows'] == one['more']['rows']
    assert len(a['more']['rows']) == 6


def test_sharing_needs_processes_that_know_each_other(monkeypatch):
    import torch
    from robust_nbdev.evaluate import robust_report
    from robust_nbdev.attacks import FGSM
    from robust_nbdev.test_utils import tiny_vit

    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(RuntimeError, match='init_process_group'):
        robust_report(tiny_vit(), (torch.rand(4, 1, 28, 28), torch.zeros(4).long()), [FGSM(0.1)], shard=True)
