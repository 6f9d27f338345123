"""What `test_distributed` runs in one process and, by torchrun, in two: trainings, their averages, reports.

`python distributed_job.py out few` writes `out/res{rank}.json`; `all` instead of `few` trains with more methods."""

import json, os, sys, warnings
from contextlib import nullcontext
import torch.distributed as dist
from fastai.vision.all import *
from fastai.distributed import *
from robust_nbdev.all import *
from robust_nbdev.adv_train import OnAverage, SaveEMA
from robust_nbdev.test_utils import tiny_vit

RANK, WORLD, OUT = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1)), Path(sys.argv[1])
FEW = sys.argv[2] == 'few'


def broadcast_on_the_cpu(self, t, rank):
    "fastai's own moves the tensor to a GPU"
    v = LongTensor(t)
    dist.broadcast(v, rank)
    return v.tolist()


DistributedDL._broadcast = broadcast_on_the_cpu
if WORLD > 1:
    dist.init_process_group('gloo')
set_seed(0)
x, y = torch.rand(64 + 37, 1, 28, 28), torch.randint(0, 4, (64 + 37,))
for i, label in enumerate(y.tolist()):
    x[i, :, 7 * label : 7 * label + 7] += 0.5
x = x.clamp(0, 1)
# One process gets in each batch of 16 what two get in theirs of 8
JOINED = [r * 32 + i for t in range(0, 32, 8) for r in range(2) for i in range(t, t + 8)]
ORDER = range(64) if WORLD > 1 else JOINED
ATTACK, PGD2 = PGD(0.05, steps=3), PGD(0.02, steps=2)


def split(idx, bs):
    return DataLoader([(x[i], y[i]) for i in idx], bs=bs, shuffle=False, device=torch.device('cpu'))


def together(learn):
    return learn.distrib_ctx(sync_bn=False) if WORLD > 1 else nullcontext()


class Step(Callback):
    "Keeps the loss of every step"

    order = 80

    def before_fit(self):
        self.losses = []

    def after_batch(self):
        if self.training:
            self.losses.append(self.learn.loss.item())


def fit(cbs, metrics=(), epochs=2, path=None):
    dls = DataLoaders(split(ORDER, 16 // WORLD), split(range(64, 101), 8), device='cpu')
    kw = dict(loss_func=CrossEntropyLossFlat(), metrics=list(metrics), cbs=[*cbs, Step()], opt_func=SGD)
    learn = Learner(dls, tiny_vit(num_classes=4), path=path or OUT, **kw)
    with together(learn), learn.no_bar(), learn.no_logging(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        learn.fit(epochs, 1e-2)
    learn.heard = [str(w.message) for w in heard if 'catastrophic' in str(w.message)]
    return learn


def state(m):
    return [o.double().sum().item() for o in m.state_dict().values()]


def told(learn, **kw):
    values = [list(v) for v in learn.recorder.values]
    return dict(
        losses=learn.step.losses,
        values=values,
        weights=state(learn.model),
        rows=len(values),
        heard=learn.heard,
        **kw,
    )


def untimed(o):
    return {k: v for k, v in o.items() if k not in ('seconds', 'parts')}


def table(rep):
    return [untimed(r) | dict(parts=[untimed(p) for p in r.get('parts', [])]) for r in rep.rows]


METHODS = dict(mart=lambda: [MART(PGD2)], ema=lambda: [AdvTrain(PGD2), EMA(0.9)])
MORE = dict(trades=lambda: [TRADES(PGD2)], gat=lambda: [GAT(BernoulliFGSM(0.02))])
ONLY_OF_TWO = dict(mart_awp=lambda: [MART(PGD2), AWP(0.01), GradientAccumulation(16)])
MORE_OF_TWO = dict(
    awp=lambda: [TRADES(PGD2), AWP(0.01), EMA(0.9)],
    free=lambda: [FreeAT(FGSM(0.02), replay=2)],
    some=lambda: [AdvTrain(PGD2, clean_images=0.5)],
)
if not FEW:
    METHODS, ONLY_OF_TWO = METHODS | MORE, ONLY_OF_TWO | MORE_OF_TWO
res = {}
for name, cbs in (METHODS | ONLY_OF_TWO if WORLD > 1 else METHODS).items():
    learn = fit(cbs(), [RobustAccuracy(ATTACK)])
    res[name] = told(learn, ema=state(learn.ema.avg.module) if name in ('ema', 'awp') else None)

weak = PGD(0.3, steps=0, rand=False)
for then in ['stop'] if FEW else ['stop', PGD(steps=2)]:
    catch = CatchOverfit(PGD(steps=5), gap=0.01, then=then)
    learn = fit([AdvTrain(weak), catch], epochs=3)
    res[f'catch_{then}'] = told(learn, df=catch.df.values.tolist())

acc = RobustAccuracy(ATTACK)
learn = fit([AdvTrain(PGD2), EMA(0.5)], [acc, OnAverage(acc)], path=OUT / 'save', epochs=3)
best = [SaveEMA(monitor='ema_pgd3_acc', fname='avg'), SaveModelCallback(monitor='pgd3_acc', fname='own')]
with together(learn), learn.no_bar(), learn.no_logging():
    learn.fit(2, 1e-2, cbs=best)
    valid, under = learn.validate(), learn.validate(cbs=AdvValid(ATTACK))
res['save'] = told(learn, valid=list(valid), under=list(under))

learn.model.load_state_dict(tiny_vit(num_classes=4).state_dict())
attacks = [FGSM(0.05), ATTACK, AutoAttack(0.05, attacks=[APGD(0.05, steps=5), Square(0.05, queries=20)])]
for name, kw in dict(sharded=dict(shard=True), whole={}).items():
    rep = learn.robust_report(attacks, out=OUT / name, **kw)
    verdicts = {k: v.astype(int).tolist() for k, v in rep.verdicts.items()}
    preds = {k: v.tolist() for k, v in rep.preds.items()}
    res[name] = dict(rows=table(rep), verdicts=verdicts, preds=preds, warnings=rep.warnings)
if WORLD > 1:
    dist.barrier()
more = learn.robust_report([*attacks, PGD(0.05, steps=4)], out=OUT / 'sharded', shard=True)  # goes on
res['more'] = dict(rows=table(more), seconds=[o['seconds'] for o in more.rows])
(OUT / f'res{RANK}.json').write_text(json.dumps(res))
if WORLD > 1:
    dist.destroy_process_group()
