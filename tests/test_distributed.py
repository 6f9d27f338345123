"""Two processes on the CPU (gloo), started by torchrun and run by fastai's `distrib_ctx`: they train what one process
trains on the joined batch, and measure what it measures (R24)."""

import json, os, re, subprocess, sys
import pytest

pytest.importorskip('accelerate')
from concurrent.futures import ThreadPoolExecutor

SCRIPT = '''
import json, os, sys, copy, warnings, torch, torch.distributed as dist
from contextlib import nullcontext
from fastai.vision.all import *
from fastai.distributed import *
from robust_nbdev.all import *
from robust_nbdev.test_utils import tiny_vit
rank,world,out = int(os.environ.get('RANK',0)),int(os.environ.get('WORLD_SIZE',1)),Path(sys.argv[1])
DistributedDL._broadcast = lambda self,t,rank: (lambda v: (dist.broadcast(v, rank), v.tolist())[1])(LongTensor(t))     # fastai's own moves it to a GPU
if world>1: dist.init_process_group('gloo')
set_seed(0)
x,y = torch.rand(64+37,1,28,28),torch.randint(0,4,(64+37,))
for i in range(len(x)): x[i,:,7*int(y[i]):7*int(y[i])+7] += .5
x = x.clamp(0,1)
joined = [r*32+i for t in range(0,32,8) for r in range(2) for i in range(t,t+8)]        # one process gets in each batch of 16 what two get in theirs of 8
order = list(range(64)) if world>1 else joined
split = lambda idx,bs: DataLoader([(x[i],y[i]) for i in idx], bs=bs, shuffle=False, device=torch.device('cpu'))
attack,p2 = PGD(.05, steps=3),PGD(.02, steps=2)
class Step(Callback):
    order = 80
    def before_fit(self): self.losses = []
    def after_batch(self):
        if self.training: self.losses.append(self.learn.loss.item())
def fit(cbs, metrics=(), epochs=2, path=None, **kw):
    learn = Learner(DataLoaders(split(order, 16//world), split(range(64,101), 8), device='cpu'), tiny_vit(num_classes=4), loss_func=CrossEntropyLossFlat(), metrics=list(metrics), cbs=[*cbs, Step()], opt_func=SGD, path=path or out)
    with learn.distrib_ctx(sync_bn=False) if world>1 else nullcontext():
        with learn.no_bar(), learn.no_logging(), warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter('always')
            learn.fit(epochs, 1e-2, **kw)
    learn.heard = [str(w.message) for w in heard if 'catastrophic' in str(w.message)]
    return learn
def state(m): return [o.double().sum().item() for o in m.state_dict().values()]
def told(learn, **kw): return dict(losses=learn.step.losses, values=[list(v) for v in learn.recorder.values], weights=state(learn.model), rows=len(learn.recorder.values), heard=learn.heard, **kw)
res = {}
METHODS = dict(at=lambda: [AdvTrain(p2)], trades=lambda: [TRADES(p2)], mart=lambda: [MART(p2)], gat=lambda: [GAT(BernoulliFGSM(.02))], ema=lambda: [AdvTrain(p2), EMA(.9)])
for k,f in METHODS.items():
    learn = fit(f(), [RobustAccuracy(attack)])
    res[k] = told(learn, ema=state(learn.ema.avg.module) if k=='ema' else None)
together = dict(awp=lambda: [TRADES(p2), AWP(.01), EMA(.9)], mart_awp=lambda: [MART(p2), AWP(.01), GradientAccumulation(16)], free=lambda: [FreeAT(FGSM(.02), replay=2)], some=lambda: [AdvTrain(p2, clean_images=.5)])
if world>1: res |= {k:told(l := fit(f(), [RobustAccuracy(attack)]), ema=state(l.ema.avg.module) if 'awp'==k else None) for k,f in together.items()}

weak = PGD(.3, steps=0, rand=False)
for then in ('stop', PGD(steps=2)):
    c = CatchOverfit(PGD(steps=5), gap=.01, then=then); learn = fit([AdvTrain(weak), c], epochs=3)
    res[f'catch_{then}'] = told(learn, df=c.df.values.tolist())
acc = RobustAccuracy(attack)
learn = fit([AdvTrain(p2), EMA(.5)], [acc, OnAverage(acc)], path=out/'save', epochs=3)
with learn.distrib_ctx(sync_bn=False) if world>1 else nullcontext():
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, 1e-2, cbs=[SaveEMA(monitor='ema_pgd3_acc', fname='avg'), SaveModelCallback(monitor='pgd3_acc', fname='own')])
        valid,under = learn.validate(),learn.validate(cbs=AdvValid(attack))
        preds,_ = learn.get_preds(cbs=AdvValid(attack), dl=split(range(64,101), 8)) if world==1 else (None,None)
res['save'] = told(learn, valid=list(valid), under=list(under))
sure = tiny_vit(num_classes=4)
learn.model.load_state_dict(sure.state_dict())
aa = AutoAttack(.05, attacks=[APGD(.05, steps=5), Square(.05, queries=20)])
def table(r): return [{k:v for k,v in o.items() if k not in ('seconds','parts')}|dict(parts=[{k:v for k,v in p.items() if k!='seconds'} for p in o.get('parts',[])]) for o in r.rows]
for name,kw in dict(sharded=dict(shard=True), whole={}).items():
    r = learn.robust_report([FGSM(.05), attack, aa], out=out/name, **kw)
    res[name] = dict(rows=table(r), verdicts={k:v.astype(int).tolist() for k,v in r.verdicts.items()}, preds={k:v.tolist() for k,v in r.preds.items()}, warnings=r.warnings)
if world>1: dist.barrier()
more = learn.robust_report([FGSM(.05), attack, aa, PGD(.05, steps=4)], out=out/'sharded', shard=True)          # continues
res['more'] = dict(rows=table(more), seconds=[o['seconds'] for o in more.rows])
(out/f'res{rank}.json').write_text(json.dumps(res))
if world>1: dist.destroy_process_group()
'''
ENV = dict(OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore', ACCELERATE_USE_CPU='true', CUDA_VISIBLE_DEVICES='')


def launch(d, world):
    (d / 'script.py').write_text(SCRIPT)
    (d / 'out').mkdir()
    how = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(world)] if world > 1 else []
    env = {k: v for k, v in os.environ.items() if k not in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT')} | ENV
    r = subprocess.run(
        [sys.executable, *how, 'script.py', 'out'], cwd=d, env=env, capture_output=True, text=True, timeout=300
    )
    assert r.returncode == 0, r.stdout + r.stderr
    return [json.loads((d / 'out' / f'res{i}.json').read_text()) for i in range(world)], d / 'out'


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "(results of one process, [of rank 0, of rank 1], the folder that the two wrote to)"
    ds = [tmp_path_factory.mktemp(k) for k in ('one', 'two')]
    with ThreadPoolExecutor() as ex:
        (one, _), (two, out) = ex.map(launch, ds, (1, 2))
    return one[0], two, out


@pytest.mark.parametrize('method', ['at', 'trades', 'mart', 'gat'])
def test_the_loss_curve_is_that_of_one_process_with_the_joined_batch(runs, method):
    one, (a, b), _ = runs
    mean = [(u + v) / 2 for u, v in zip(a[method]['losses'], b[method]['losses'])]
    assert (
        len(mean) == 8
        and mean == pytest.approx(one[method]['losses'], abs=1e-5)
        and a[method]['losses'] != b[method]['losses']
    )
    assert a[method]['weights'] == pytest.approx(one[method]['weights'], abs=1e-4)
    assert max(one[method]['losses']) - min(one[method]['losses']) > 0.02  # it trains


@pytest.mark.parametrize(
    'method',
    [
        'at',
        'trades',
        'mart',
        'gat',
        'ema',
        'awp',
        'mart_awp',
        'free',
        'some',
        'catch_stop',
        'catch_PGD(8/255, steps=2)',
        'save',
    ],
)
def test_ranks_stay_one_model(runs, method):
    "Moved weights, replayed batches, averages and all: bit for bit"
    a, b = (o[method] for o in runs[1])
    assert (
        a['weights'] == b['weights']
        and a.get('ema') == b.get('ema')
        and a['rows'] == b['rows']
        and len(a['losses']) == len(b['losses'])
    )
    # metrics are those of all
    assert [v[2:] for v in a['values']] == [v[2:] for v in b['values']]


def test_average_is_that_of_one_process(runs):
    one, (a, _), _ = runs
    assert a['ema']['ema'] == pytest.approx(one['ema']['ema'], abs=1e-4) and one['ema']['ema'] != one['ema']['weights']


def test_metrics_are_those_of_one_process(runs):
    "37 images: the last batch is uneven and padded, and padding must not count"
    one, (a, b), _ = runs
    for method in ('at', 'trades', 'mart', 'gat'):
        assert [v[2] for v in a[method]['values']] == pytest.approx([v[2] for v in one[method]['values']])


def test_validation_under_attack_is_that_of_one_process(runs):
    one, (a, b), _ = runs
    assert a['save']['valid'][1:] == b['save']['valid'][1:] and a['save']['under'][1:] == b['save']['under'][1:]
    assert a['save']['valid'][1] == a['save']['under'][1] < 1 and a['save']['valid'][1] == pytest.approx(
        one['save']['valid'][1], abs=0.03
    )


def test_overfitting_is_caught_by_all_or_none(runs):
    "Each sees other images; the accuracies are those of all, and one speaks"
    one, (a, b), _ = runs
    for k in ('catch_stop', 'catch_PGD(8/255, steps=2)'):
        assert a[k]['df'] == b[k]['df'] and len(a[k]['heard']) > 0 == len(b[k]['heard']), k
        assert [r[:2] for r in a[k]['df']] == [r[:2] for r in one[k]['df']] and a[k]['df'][0][2:] == pytest.approx(
            one[k]['df'][0][2:], abs=1e-6
        )


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


@pytest.mark.parametrize('kind', ['sharded', 'whole'])
def test_a_report_is_that_of_one_process(runs, kind):
    one, two, _ = runs
    for o in two:
        assert o[kind] == one['whole'] == one['sharded']
    assert one['whole']['rows'][1]['attacked'] > 5 and len(one['whole']['rows']) == 5


def test_a_sharded_report_goes_on(runs):
    one, (a, b), _ = runs
    assert a['more'] == b['more'] and a['more']['rows'] == one['more']['rows'] and len(a['more']['rows']) == 6


def test_sharing_needs_processes_that_know_each_other(monkeypatch):
    import torch
    from robust_nbdev.evaluate import robust_report
    from robust_nbdev.attacks import FGSM
    from robust_nbdev.test_utils import tiny_vit

    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(RuntimeError, match='init_process_group'):
        robust_report(tiny_vit(), (torch.rand(4, 1, 28, 28), torch.zeros(4).long()), [FGSM(0.1)], shard=True)
