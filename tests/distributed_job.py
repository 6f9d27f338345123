"""What `test_distributed` runs in one process and in two: trainings, their averages, reports.

`python distributed_job.py few` writes `out/res{rank}.json`; `all` instead of `few` trains with more methods."""

import json, sys, warnings
from contextlib import nullcontext
import torch.distributed as dist
from fastai.vision.all import *
from fastai.distributed import *
from robust_nbdev.all import *
from robust_nbdev.adv_train import OnAverage, SaveEMA
from robust_nbdev.test_utils import tiny_vit
from two_processes import as_two

# One process gets in each batch of 16 what two get in theirs of 8
JOINED = [r * 32 + i for t in range(0, 32, 8) for r in range(2) for i in range(t, t + 8)]
ATTACK, PGD2 = PGD(0.05, steps=3), PGD(0.02, steps=2)
METHODS = dict(mart=lambda: [MART(PGD2)])
MORE = dict(trades=lambda: [TRADES(PGD2)], gat=lambda: [GAT(BernoulliFGSM(0.02))])
ONLY_OF_TWO = dict(mart_awp=lambda: [MART(PGD2), AWP(0.01), GradientAccumulation(16)])
MORE_OF_TWO = dict(
    awp=lambda: [TRADES(PGD2), AWP(0.01), EMA(0.9)],
    free=lambda: [FreeAT(FGSM(0.02), replay=2)],
    some=lambda: [AdvTrain(PGD2, clean_images=0.5)],
)


class Step(Callback):
    "Keeps the loss of every step"

    order = 80

    def before_fit(self):
        self.losses = []

    def after_batch(self):
        if self.training:
            self.losses.append(self.learn.loss.item())


def state(m):
    return [o.double().sum().item() for o in m.state_dict().values()]


def told(learn, **kw):
    values = [list(v) for v in learn.recorder.values]
    return dict(losses=learn.step.losses, values=values, weights=state(learn.model), rows=len(values), **kw)


def untimed(o):
    return {k: v for k, v in o.items() if k not in ('seconds', 'parts')}


def table(rep):
    return [untimed(r) | dict(parts=[untimed(p) for p in r.get('parts', [])]) for r in rep.rows]


def results(out, which, world=1):
    "All that is compared; files are written under `out`"
    set_seed(0)
    x, y = torch.rand(64 + 37, 1, 28, 28), torch.randint(0, 4, (64 + 37,))
    for i, label in enumerate(y.tolist()):
        x[i, :, 7 * label : 7 * label + 7] += 0.5
    x, few, res = x.clamp(0, 1), which == 'few', {}

    def split(idx, bs):
        return DataLoader([(x[i], y[i]) for i in idx], bs=bs, shuffle=False, device=torch.device('cpu'))

    def fit(learn, epochs, cbs=()):
        "The warnings of catastrophic overfitting"
        together = learn.distrib_ctx(sync_bn=False) if world > 1 else nullcontext()
        with together, learn.no_bar(), learn.no_logging(), warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter('always')
            learn.fit(epochs, 1e-2, cbs=cbs)
        return [str(w.message) for w in heard if 'catastrophic' in str(w.message)]

    def learner(cbs, metrics=(), path=out):
        order = range(64) if world > 1 else JOINED
        dls = DataLoaders(split(order, 16 // world), split(range(64, 101), 8), device='cpu')
        kw = dict(loss_func=CrossEntropyLossFlat(), metrics=list(metrics), cbs=[*cbs, Step()], opt_func=SGD)
        return Learner(dls, tiny_vit(num_classes=4), path=path, **kw)

    acc = RobustAccuracy(ATTACK)
    methods = METHODS | (ONLY_OF_TWO if world > 1 else {})
    if not few:
        methods |= MORE | (MORE_OF_TWO if world > 1 else {})
    for name, cbs in methods.items():
        fit(learn := learner(cbs(), [acc]), 2)
        res[name] = told(learn, ema=state(learn.ema.avg.module) if name == 'awp' else None)

    for then in ['stop'] if few else ['stop', PGD(steps=2)]:
        catch = CatchOverfit(PGD(steps=5), gap=0.01, then=then)
        heard = fit(learn := learner([AdvTrain(PGD(0.3, steps=0, rand=False)), catch]), 3)
        res[f'catch_{then}'] = told(learn, df=catch.df.values.tolist(), heard=heard)

    learn = learner([AdvTrain(PGD2), EMA(0.9)], [acc, OnAverage(acc)], out / 'save')
    fit(learn, 2)
    res['ema'] = told(learn, ema=state(learn.ema.avg.module))
    best = [SaveEMA(monitor='ema_pgd3_acc', fname='avg'), SaveModelCallback(monitor='pgd3_acc', fname='own')]
    fit(learn, 1, best)
    with learn.distrib_ctx(sync_bn=False) if world > 1 else nullcontext(), learn.no_bar(), learn.no_logging():
        valid, under = learn.validate(), learn.validate(cbs=AdvValid(ATTACK))
    res['save'] = told(learn, valid=list(valid), under=list(under))

    learn.model.load_state_dict(tiny_vit(num_classes=4).state_dict())
    attacks = [FGSM(0.05), ATTACK, AutoAttack(0.05, attacks=[APGD(0.05, steps=3), Square(0.05, queries=10)])]
    for name, kw in dict(sharded=dict(shard=True), whole={}).items():
        rep = learn.robust_report(attacks, out=out / name, progress=False, **kw)
        verdicts = {k: v.astype(int).tolist() for k, v in rep.verdicts.items()}
        preds = {k: v.tolist() for k, v in rep.preds.items()}
        res[name] = dict(rows=table(rep), verdicts=verdicts, preds=preds, warnings=rep.warnings)
    if world > 1:
        dist.barrier()
    more = learn.robust_report([*attacks, PGD(0.05, steps=4)], out=out / 'sharded', shard=True, progress=False)
    res['more'] = dict(rows=table(more), seconds=[o['seconds'] for o in more.rows])  # it goes on
    return res


if __name__ == '__main__':
    with as_two() as rank:
        Path('out', f'res{rank}.json').write_text(json.dumps(results(Path('out'), sys.argv[1], 2)))
