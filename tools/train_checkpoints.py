"""Train, measure and describe the small checkpoints in robust_nbdev/data.

python tools/train_checkpoints.py cifar10_vit --minutes 75
python tools/train_checkpoints.py cifar10_vit_robust --epochs 30
python tools/train_checkpoints.py cifar10_vit,cifar10_vit_robust --measure --n 1000"""

import hashlib, json, platform, sys, time
from types import SimpleNamespace as Row
from fastcore.script import call_parse
from safetensors.torch import load_file, save_file
from robust_nbdev.all import *
from robust_nbdev.adv_train import OnAverage
from robust_nbdev.datasets import CropFlip
from robust_nbdev.vit import no_decay_split
from robust_nbdev.models import _DATA, _NETS, half_weights, small_model

sys.path.insert(0, str(Path(__file__).resolve().parent))
from teacher import Distilled, NextView, teach

DATA = Path(__file__).resolve().parents[1] / 'robust_nbdev' / 'data'
adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
pgd = {'cifar10': PGD(8 / 255, steps=2, alpha=6 / 255), 'fashion_mnist': PGD(0.1, steps=3, alpha=0.05)}
erase = lambda: RandomErasing(p=0.25, sl=0.0, sh=0.2, max_count=1)

# One row per checkpoint. start: the file whose weights it begins with. lr: the top of one cycle. mix: MixUp's alpha
ROWS = {
    'cifar10_vit': Row(lr=2e-3, bs=512, epochs=40, mix=0.2, smooth=0.1),
    'cifar10_xcit': Row(lr=2e-3, bs=512, epochs=30, mix=0.2, smooth=0.1),
    'cifar10_vit_reg4': Row(lr=5e-4, bs=128, epochs=4, mix=0.2, smooth=0.1, start='cifar10_vit'),
    'cifar10_vit_robust': Row(lr=1.5e-3, bs=512, epochs=15, start='cifar10_vit'),
    'cifar10_xcit_robust': Row(lr=1.5e-3, bs=512, epochs=12, start='cifar10_xcit'),
    'fashion_mnist_vit': Row(lr=1e-3, bs=128, epochs=34, mix=0.2, smooth=0.1),
    'fashion_mnist_xcit': Row(lr=2e-3, bs=512, epochs=12, mix=0.2, smooth=0.1),
    'fashion_mnist_vit_robust': Row(lr=1e-3, bs=128, epochs=14, start='fashion_mnist_vit'),
    'fashion_mnist_xcit_robust': Row(lr=2e-3, bs=512, epochs=15, start='fashion_mnist_xcit'),
}


def parts(key):
    "Dataset, name and robustness of a checkpoint"
    data = first(d for d in _DATA if key.startswith(d))
    return data, key[len(data) + 1 :].removesuffix('_robust'), key.endswith('_robust')


def loaders(key, row, seed):
    """All training images but 1000, shifted and mirrored; plain models get erased rectangles too, a teacher's pupils
    its views"""
    data, _, robust = parts(key)
    tfms = [CropFlip(4 if data == 'cifar10' else 2)] + ([] if robust else [erase()])
    kw = dict(full=True) if data == 'fashion_mnist' else {}
    teacher = getattr(row, 'teacher', None)
    dls = dataset(data, bs=row.bs, valid='holdout', n_valid=1000, seed=seed, batch_tfms=[] if teacher else tfms, **kw)
    return teach(dls, teacher) if teacher else dls


def file_of(key, out):
    "The newest file of a checkpoint: of this run, else of the package"
    f = first(d / f'{key}.safetensors' for d in (out, DATA) if (d / f'{key}.safetensors').exists())
    if f is None:
        raise FileNotFoundError(f'{key}.safetensors is neither in {out} nor in {DATA}: train it first')
    return f


def sha256(f):
    return hashlib.sha256(f.read_bytes()).hexdigest()


def weights(key, out):
    return {k: v.float() if v.is_floating_point() else v for k, v in load_file(file_of(key, out)).items()}


def without_class_position(state):
    "The position of the class token added to the token itself, as in timm's models with registers: the same function"
    pos = state['pos_embed']
    return {**state, 'pos_embed': pos[:, 1:], 'cls_token': state['cls_token'] + pos[:, :1]}


def learner(key, row, out, seed, dls):
    "The model, its data and its callbacks"
    data, name, robust = parts(key)
    set_seed(seed)
    dls.train.rng = random.Random(seed)
    model = small_model(name, data=data, weights=False)
    if hasattr(row, 'start'):
        old = weights(row.start, out)
        if name == 'vit_reg4':
            old = without_class_position(old)
        new = model.model.load_state_dict(old, strict=False)
        if new.unexpected_keys or set(new.missing_keys) - {'reg_token'}:
            raise ValueError(f'{row.start} does not fit {key}: {new}')
    cbs = [EMA(0.998), GradientClip(1.0)]
    teacher = getattr(row, 'teacher', None)
    if robust:
        cbs += [AdvTrain(pgd[data], eps=warmup(pgd[data].eps, pct=0.1), alpha=pgd[data].alpha)]
    else:
        cbs += [NextView() if teacher else MixUp(row.mix)]
    loss = Distilled() if teacher else CrossEntropyLossFlat(label_smoothing=getattr(row, 'smooth', 0.0))
    learn = Learner(
        dls,
        model,
        loss,
        opt_func=adamw,
        splitter=no_decay_split,
        wd=[0.05, 0.0],
        metrics=[accuracy, OnAverage(accuracy)]
        + ([OnAverage(RobustAccuracy(pgd[data].but(steps=10, alpha=None)))] if robust else []),
        cbs=cbs,
        path=out,
        model_dir=f'{key}_epochs',
    )
    return learn.to_bf16() if dls.device.type == 'cuda' else learn


def epochs_in(minutes, make):
    "How many epochs fit: a tenth of an epoch to warm up, a tenth that is timed, 15% in reserve"
    t0, learn = time.perf_counter(), make()

    def tenth():
        t = time.perf_counter()
        with learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-5, cbs=ShortEpochCallback(0.1, short_valid=True))
        return time.perf_counter() - t

    tenth()
    per = 10 * tenth()
    return max(1, int((0.85 * 60 * minutes - (time.perf_counter() - t0)) / per))


def holdout(learn):
    "The metrics in the last row of the table"
    return dict(zip(learn.recorder.metric_names[3:-1], [round(float(o), 4) for o in learn.recorder.values[-1][2:]]))


class SaveState(SaveRun):
    "`SaveRun`, with the time so far and the metrics"

    def __init__(self, fname, every, about, begun):
        super().__init__(fname=fname, every=every, about=about)
        self.begun = begun

    def state(self):
        return {**super().state(), 'seconds': time.perf_counter() - self.begun, 'holdout': holdout(self.learn)}


def go_on(learn, n, about):
    "Load the last complete state of a run of `n` epochs: the next epoch, the seconds so far, the metrics"
    epoch, state = learn.last_run(str(n), about)
    if state is None:
        return 0, 0.0, None
    learn.resume(str(n), about)
    print(f'{learn.model_dir}: goes on after epoch {epoch}')
    return epoch + 1, state['seconds'], state['holdout']


def changed(key, start, teacher, lr):
    "The row of a checkpoint, with what the command line says instead"
    if teacher and (parts(key)[0] != 'cifar10' or parts(key)[2]):
        raise ValueError(f'the teacher knows plain CIFAR-10 images, {key} is trained on others')
    return Row(**{**vars(ROWS[key]), **{k: v for k, v in dict(start=start, teacher=teacher, lr=lr).items() if v}})


def train(key, row, minutes, epochs, out, seed, every=1):  # noqa: PLR0913
    "One checkpoint, from its row to its file"
    t = time.perf_counter()
    begun = dict(start_sha256=sha256(file_of(row.start, out))) if hasattr(row, 'start') else {}
    make = partial(learner, key, row, out, seed, loaders(key, row, seed))
    n = epochs or (epochs_in(minutes - (time.perf_counter() - t) / 60, make) if minutes else row.epochs)
    learn = make()
    about = json.dumps(dict(row=vars(row), **begun, seed=seed, attack=repr(pgd[parts(key)[0]])))
    start, before, held = go_on(learn, n, about)
    t -= before
    if start < n:
        with learn.no_bar():
            learn.fit_one_cycle(n, row.lr, pct_start=0.1, start_epoch=start, cbs=SaveState(str(n), every, about, t))
        held = holdout(learn)
    with learn.ema.averaged():
        save_file(half_weights(unwrap(get_model(learn.model))), out / f'{key}.safetensors')
    card = dict(
        recipe={k: v for k, v in vars(row).items() if k != 'epochs'},
        **begun,
        augment=(
            "the teacher's views"
            if hasattr(row, 'teacher')
            else 'CropFlip' + ', RandomErasing, MixUp' * (not parts(key)[2])
        ),
        attack=repr(pgd[parts(key)[0]]) if parts(key)[2] else None,
        epochs=n,
        minutes=round((time.perf_counter() - t) / 60, 1),
        seed=seed,
        n_train=learn.dls.train.n,
        command=f'python tools/train_checkpoints.py {key} --epochs {n} --seed {seed}',
        machine=machine(learn.dls.device),
        holdout=held,
    )
    (out / f'{key}.json').write_text(json.dumps(card))
    print(key, card, flush=True)


def machine(device):
    return (
        torch.cuda.get_device_name()
        if device.type == 'cuda'
        else f'{platform.machine()} CPU, {torch.get_num_threads()} threads'
    )


def measured(key, out, n, n_aa, bs, device):
    "What a finished file can do, on test images; its card"
    data, name, robust = parts(key)
    model = small_model(name, data=data, weights=False)
    model.model.load_state_dict(weights(key, out))
    model.eval().to(device)
    dls = dataset(data, bs=bs, batch_tfms=None, device=device, **(dict(full=True) if data == 'fashion_mnist' else {}))
    few = dataset(
        data, n_valid=n, bs=bs, batch_tfms=None, device=device, **(dict(full=True) if data == 'fashion_mnist' else {})
    )
    eps = pgd[data].eps
    clean = robust_report(model, dls.valid, [None], bs=bs).rows[0]['accuracy']
    rows = robust_report(model, few.valid, [PGD(eps, steps=50)], bs=bs).rows
    aa = robust_report(model, few.valid, [AutoAttack(eps)], n=n_aa, bs=bs).rows[-1] if n_aa else {}
    x = few.valid.one_batch()[0][:1]
    return dict(
        robust=robust,
        data=data,
        eps=eps,
        clean=round(clean, 4),
        clean_n=dls.valid.n,
        pgd50=rows[1]['accuracy'],
        pgd50_n=rows[1]['n'],
        aa=aa.get('accuracy'),
        aa_n=aa.get('n'),
        params=sum(p.numel() for p in model.parameters()),
        flops=round(multiply_adds(model, x.as_subclass(Tensor))),
    )


def describe(key, out, got):
    "File and card into the package"
    f, cards = out / f'{key}.safetensors', DATA / 'models.json'
    old = json.loads(cards.read_text()) if cards.exists() else {}
    made = json.loads((out / f'{key}.json').read_text()) if (out / f'{key}.json').exists() else old.get(key, {})
    if f.exists():
        (DATA / f.name).write_bytes(f.read_bytes())
    old[key] = {**made, **got, 'sha256': sha256(DATA / f.name)}
    cards.write_text(json.dumps({k: old[k] for k in ROWS if k in old}, indent=1) + '\n')


@call_parse
def main(  # noqa: PLR0913
    names: str,  # Checkpoints, or `all`
    minutes: float = None,  # Time for each; the number of epochs follows from a measured step
    epochs: int = None,  # Number of epochs; default: the row's
    out: str = 'robust_out/checkpoints',  # Where training is kept
    measure: bool = False,  # Measure finished files and write their cards
    n: int = 1000,  # Test images for PGD-50
    aa: int = 500,  # Test images for AutoAttack; 0: none
    bs: int = 250,  # Batch size of measurements
    seed: int = 42,  # Of data, weights and training
    start: str = None,  # Checkpoint whose weights it begins with; default: the row's
    teacher: str = None,  # Folder of `tools/teacher.py`; default: none
    lr: float = None,  # Highest learning rate; default: the row's
    device: str = None,  # Default: a GPU where there is one
):
    "Train small checkpoints, or measure them"
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    keys = list(ROWS) if names == 'all' else names.split(',')
    if bad := [o for o in keys if o not in ROWS]:
        sys.exit(f'no checkpoint {bad[0]!r}, there are: {", ".join(ROWS)}')
    for key in keys:
        if not measure:
            train(key, changed(key, start, teacher, lr), minutes, epochs, out, seed)
        else:
            describe(key, out, measured(key, out, n, aa, bs, device or default_device()))
