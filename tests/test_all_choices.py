"Whoever takes the first n images of data that comes class by class takes all classes, or warns which were seen."

import inspect, tempfile, warnings
from pathlib import Path
from unittest import mock
import numpy as np, pytest, torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
import matplotlib.pyplot as plt
from PIL import Image
from package import everything as lib
from fastai.vision.all import Learner, CrossEntropyLossFlat, DataLoaders
from fastai.data.load import DataLoader as FastDataLoader
from robust_nbdev.core import Wrapper
from robust_nbdev.attacks import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.datasets import *
from robust_nbdev.evaluate import *
from robust_nbdev.eval_data import eval_batches, fair, few_classes, unfair
from robust_nbdev.test_utils import tiny_vit

C, N, NAMES = 4, 120, ['ant', 'bee', 'cat', 'dog']


def shifted(n=N, c=C, order=None):
    "Images whose class is in their first pixel, class by class"
    y = torch.arange(c).repeat_interleave(n // c) if order is None else torch.as_tensor(order)
    x = torch.rand(len(y), 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 0.5
    x[:, 0, 0, 0] = 0.5 + y / (2 * c)
    return x, y


class Seen(Wrapper):
    "A model that notes which classes it was shown"

    def __init__(self):
        super().__init__(tiny_vit(num_classes=C, seed=0))
        self.seen = []

    def forward(self, x):
        self.seen += ((x[:, 0, 0, 0].detach() - 0.5) * 2 * C).round().long().tolist()
        return self.model(x)


def classes(model):
    return {c for c in model.seen if 0 <= c < C}


class Plain(Dataset):
    "A dataset that says nothing about its labels"

    def __init__(self):
        self.x, self.y_ = shifted()

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], int(self.y_[i])


def source():
    x, y = shifted()
    return ImageSource({k: ((255 * x[:, 0]).byte().numpy(), y.numpy()) for k in ('train', 'test')}, NAMES)


SOURCES = dict(
    tensors=shifted,
    arrays=lambda: tuple(o.numpy() for o in shifted()),
    torch=lambda: DataLoader(TensorDataset(*shifted()), batch_size=16),
    subset=lambda: DataLoader(Subset(TensorDataset(*shifted()), range(N)), batch_size=16),
    concat=lambda: DataLoader(
        ConcatDataset([TensorDataset(*(o[i : i + 60] for o in shifted())) for i in (0, 60)]), batch_size=16
    ),
    pairs=lambda: DataLoader(list(zip(*shifted())), batch_size=16),
    fastai=lambda: FastDataLoader(list(zip(*shifted())), bs=16),
    targets=lambda: DataLoader(type('D', (Plain,), dict(targets=property(lambda s: s.y_.tolist())))(), batch_size=16),
)
ORDERS = dict(
    sorted=np.repeat(range(4), 30),
    blocks=np.repeat([2, 0, 3, 1], 30),
    down=np.repeat([3, 2, 1, 0], 30),
    tail=np.r_[np.repeat(range(4), 20), np.random.default_rng(0).permutation(np.repeat(range(4), 10))],
    twice=np.repeat([0, 1, 2, 3, 0, 1, 2, 3], 15),
    uneven=np.repeat(range(4), [60, 30, 20, 10]),
    halves=np.random.default_rng(0).permuted(np.repeat(range(4), 30).reshape(2, 60), axis=1).reshape(-1),
)


@pytest.mark.parametrize('kind', SOURCES)
def test_a_choice_is_balanced_and_says_where_it_is_from(kind):
    m = Seen()
    rep = robust_report(m, SOURCES[kind](), [FGSM(0.01)], n=20)
    assert np.bincount(rep.preds['label'], minlength=C).tolist() == [5] * C
    assert 'balanced' in rep.meta['title']
    assert (shifted()[1][rep.positions].numpy() == rep.preds['label']).all()
    assert len(set(rep.positions)) == 20
    assert rep.per_class().n.tolist() == [5] * C


@pytest.mark.parametrize('order', ORDERS)
def test_blocks_are_seen_in_any_order(order):
    y = torch.as_tensor(ORDERS[order])
    n = 16
    assert unfair(y, n)
    assert unfair(np.array(NAMES)[y], n)
    assert fair((torch.zeros(len(y), 1), y), n)[0][1].bincount().tolist() == [4] * 4


@pytest.mark.parametrize('c,n', [(2, 4), (10, 1000), (1000, 30)])
def test_any_other_order_is_left_alone(c, n):
    g = np.random.default_rng(c + n)
    for k in range(20):
        y = g.permutation(np.arange(20 * max(c, 100)) % c)
        assert not unfair(y, n)
        skew = g.choice(c, 2000, p=(w := 0.7 ** np.arange(min(c, 40)).repeat(-(-c // 40))[:c]) / w.sum())
        assert not unfair(skew, n)
    assert not unfair(np.arange(20 * c) % c, n)
    assert not unfair(np.zeros(100), 10)
    assert not unfair(y, len(y))


def test_class_sorted_imagenet():
    "1000 classes of 50: the first 1000 are of 20 classes, and the warning about few images is silent"
    y = np.repeat(range(1000), 50)
    i = fair((torch.zeros(50000, 1), y), 1000)[1]
    assert (np.bincount(y[i], minlength=1000) == 1).all()
    assert '20 of 1000' in few_classes(y[:1000], 1000)
    assert few_classes(np.random.default_rng(0).permutation(y)[:1000], 1000) == ''


def test_a_choice_is_seeded_and_its_first_batch_is_fair():
    (x, y), i = fair(shifted(), 60)
    j = fair(shifted(), 60)[1]
    assert (i == j).all()
    assert len(y[:16].unique()) == C
    assert (np.diff(i) < 0).any()


def test_what_cannot_be_chosen_is_said_with_names():
    data = DataLoader(type('D', (Plain,), dict(classes=NAMES))(), batch_size=16)
    rep = robust_report(Seen(), data, [], n=20)
    assert any('1 of 4 classes only (ant)' in o for o in rep.warnings)
    with pytest.warns(UserWarning, match='1 of 4 classes only'):
        list(eval_batches(data, 20))
    assert not any('classes only' in o for o in robust_report(Seen(), data, []).warnings)


def test_unreadable_labels_that_come_class_by_class_are_said():
    data = DataLoader(Plain(), batch_size=16)
    with pytest.warns(UserWarning, match='come class by class, 2 of them'):
        list(eval_batches(data, 50))
    with pytest.warns(UserWarning, match='2 of 10 classes'):
        list(eval_batches(data, 50, classes=10))
    mixed = DataLoader(
        type('D', (Plain,), dict(__getitem__=lambda s, i: (s.x[i * 31 % N], int(s.y_[i * 31 % N]))))(), batch_size=16
    )
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        list(eval_batches(mixed, 50)), list(eval_batches(mixed, 50, classes=C))


@pytest.mark.parametrize(
    'names,says',
    [
        ([str(i) for i in range(12) if i != 5], 'output 10 is class 11'),
        (['-1', '0', '1', '2'], 'output 0 is class -1'),
        (['0', '1', '2', '3'], ''),
        (NAMES, ''),
    ],
)
def test_classes_called_by_numbers_and_outputs_without_a_name_are_said(names, says):
    rep = robust_report(Seen(), DataLoader(type('D', (Plain,), dict(classes=names))(), batch_size=16), [])
    assert says in rep.meta['title']
    assert ('is class' in rep.meta['title']) == (says != '')
    assert any(f'4 outputs, but the data names {len(names)} classes' in o for o in rep.warnings) == (len(names) != 4)


def test_first_batches_of_whole_reports_are_fair(monkeypatch):
    import robust_nbdev.evaluate as ev

    got, look = [], ev._look
    monkeypatch.setattr(ev, '_look', lambda m, x, y: got.append(y) or look(m, x, y))
    for k in SOURCES:
        robust_report(Seen(), SOURCES[k](), [], bs=16)
    assert all(len(y.unique()) == C for y in got)
    assert len(got) == len(SOURCES)


@pytest.mark.parametrize('n', [0, 1.5, True])
def test_n_is_a_whole_number(n):
    for f in (
        lambda: robust_report(Seen(), shifted(), [], n=n),
        lambda: eps_curve(Seen(), shifted(), FGSM(), [0.1], n=n),
        lambda: steps_curve(Seen(), shifted(), PGD(), [1], n=n),
        lambda: list(eval_batches(shifted(), n)),
    ):
        with pytest.raises(ValueError, match='whole number >= 1'):
            f()


# --- every function of the library that takes n ---
# An entry calls the function with model `m` on data that comes class by class; it may return the labels used.


def drawn(f):
    f()
    plt.close('all')


def benched(m):
    "The first images of a copy in another order than the published one"
    with mock.patch('robust_nbdev.cli.find_images', lambda *a: source()):
        rep = lib.robust_bench(m, 'fashion_mnist', n=20, attacks=[FGSM(0.1)], eps=0.1, strict=False).report
    for o in rep.warnings:
        warnings.warn(o)


def learner(m):
    "Of sorted data that this library's own loaders have not mixed"
    dls = DataLoaders(*[FastDataLoader(list(zip(*shifted())), bs=16) for _ in range(2)])
    return Learner(dls, m, loss_func=CrossEntropyLossFlat())


class Read(Plain):
    "Images that note which of them were read"

    targets = property(lambda self: self.y_.tolist())

    def __init__(self):
        super().__init__()
        self.read = set()

    def __getitem__(self, i):
        self.read.add(int(self.y_[i]))
        return super().__getitem__(i)


def read_by(f):
    "The classes of the images that `f(loader of 20 a batch)` reads; perturbed ones no longer show their class"
    data = Read()
    f(FastDataLoader(data, bs=20))
    return list(data.read)


def flips(m):
    return read_by(lambda dl: lib.flip_report(m, dl, ['brightness'], n=20))


def learner_flips(m):
    data = Read()
    l = Learner(DataLoaders(*[FastDataLoader(data, bs=20) for _ in range(2)]), m, loss_func=CrossEntropyLossFlat())
    l.flip_report(names=['brightness'], n=20)
    return list(data.read)


def overfit_check(m):
    "The images that it keeps of an epoch whose batches come class by class"
    l, kept = learner(m), []
    cb = lib.CatchOverfit(PGD(steps=1), n=16)
    cb.acc = lambda attack, before: kept.append(cb.batch[1]) or 1.0
    l.add_cbs([lib.AdvTrain(FGSM(0.01)), cb])
    with l.no_bar(), l.no_logging():
        l.fit(1)
    return torch.cat(kept)


def effect_of_steps(m):
    l = learner(m)
    l.add_cb(lib.AttackEffect(0.01, steps=(1,), many=1, n=20))
    l.attack_effect.on, l.epoch = True, 0
    l.attack_effect.after_epoch()


def masks_shown(m):
    l = learner(m)
    l.add_cb(lib.AFAT(corruption=lib.PatchOcclusion((4, 4), (7, 7), in_chans=1)))
    drawn(lambda: l.afat.show_masks(max_n=8))


def gates_shown(m):
    lib.tora_vit(m)
    drawn(lambda: learner(m).show_gates(max_n=8))


def cifar_c(m):
    with tempfile.TemporaryDirectory() as d:
        np.save(Path(d) / 'labels.npy', np.tile(shifted()[1].numpy(), 5))
        return lib.CifarC(d, n=20).y


def folders(d, write):
    "A folder for each class, in which `write(path, colour)` makes ten files"
    for c, name in enumerate(NAMES):
        (Path(d) / name).mkdir(parents=True)
        for i in range(10):
            write(Path(d) / name / f'{i}', 60 * c)


def png(path, colour):
    Image.new('RGB', (32, 32), (colour,) * 3).save(f'{path}.png')


def frames(path, colour):
    path.mkdir()
    for i in range(2):
        png(path / f'{i}', colour)


def imagenet_p(m):
    with tempfile.TemporaryDirectory() as d:
        folders(Path(d) / 'tilt', frames)
        return [round(255 * v[0, 0, 0, 16, 16].item() / 60) for v in lib.ImageNetP(d, n=20).pick('tilt')]


def named_folders(m):
    with tempfile.TemporaryDirectory() as d:
        folders(d, png)
        dl = lib.wnid_images(d, classes=NAMES, n=20, size=32, num_workers=0)
        return torch.cat([y for _, y in dl])


ENTRIES = {
    'eval_batches': lambda m: torch.cat([y for _, _, y in eval_batches(shifted(), 20)]),
    'fair': lambda m: fair(shifted(), 20)[0][1],
    'robust_report': lambda m: robust_report(m, shifted(), [FGSM(0.01)], n=20).preds['label'],
    'Run.__init__': lambda m: Run(m, shifted(), n=20).preds['label'],
    'compare': lambda m: lib.compare({'m': m}, shifted(), [FGSM(0.01)], n=20) and None,
    'eps_curve': lambda m: drawn(lambda: eps_curve(m, shifted(), FGSM(), [0.01], n=20)),
    'steps_curve': lambda m: drawn(lambda: steps_curve(m, shifted(), PGD(0.01), [1], n=20)),
    'Learner.robust_report': lambda m: learner(m).robust_report([FGSM(0.01)], n=20).preds['label'],
    'Learner.eps_curve': lambda m: drawn(lambda: learner(m).eps_curve(FGSM(), [0.01], n=20)),
    'Learner.steps_curve': lambda m: drawn(lambda: learner(m).steps_curve(PGD(0.01), [1], n=20)),
    'Learner.show_adv': lambda m: drawn(lambda: learner(m).show_adv(FGSM(0.01))),
    'balanced': lambda m: shifted()[1][balanced(shifted()[1].numpy(), 20)],
    'choose_images': lambda m: source().labels('test')[choose_images(source(), n_valid=20)[1][1]],
    'image_dls': lambda m: [int(y) for _, y in image_dls(source(), n_valid=20, mode='L', valid='only').valid_ds],
    'robust_bench': lambda m: benched(m),
    'corruption_report': lambda m: drawn(lambda: lib.corruption_report(m, shifted(), ['brightness'], [1], n=20)),
    'Learner.corruption_report': lambda m: drawn(lambda: learner(m).corruption_report(['brightness'], [1], n=20)),
    'one_step_check': lambda m: drawn(lambda: lib.one_step_check(dict(m=m), shifted(), 0.01, 2, n=20)),
    'AAS.universal': lambda m: drawn(lambda: lib.AAS(PGD(0.01, steps=1), ascent=1).universal(m, shifted(), bs=20)),
    'AFAT.show_masks': masks_shown,
    'AttackEffect.__init__': effect_of_steps,
    'CatchOverfit.__init__': overfit_check,
    'CifarC.__init__': cifar_c,
    'ImageNetP.__init__': imagenet_p,
    'Learner.show_gates': gates_shown,
    'wnid_images': named_folders,
    'Corrupted.__init__': lambda m: torch.cat([y for _, y in lib.Corrupted(shifted(), 20).pick('brightness', 1)]),
    'mask_accuracy': lambda m: drawn(lambda: lib.mask_accuracy(m, shifted(), masks=1, n=20, share=0.25)),
    'scale_report': lambda m: drawn(lambda: lib.scale_report(m, shifted(), [lib.Scaled(FGSM(0.01), 2.0)], n=20)),
    'show_occlusion': lambda m: drawn(lambda: lib.show_occlusion(m, FGSM(0.01), shifted(), max_n=8)),
    'flip_report': flips,
    'Learner.flip_report': learner_flips,
}
# A number of something else (restarts, tokens, epochs), images that are made, those of a dataset, or without labels
OTHER = set(
    """Around.restart Around.eot Attack.restart Attack.eot AttackBase.eot AutoAttack.eot Wraps.eot AttnScales.__init__
    ExtraTokens.__init__ PatchFool.choose over_seeds
    RandomTokens.__init__ Replay.__init__ XcitRecipe.in_epochs add_tokens check_logits gaussian_images interval
    n_occluded planted_images random_keep sketch token_sets unfair camvid cifar10 cifar100 fashion_mnist imagenet
    imagenet100 imagenette find_source Difference.__init__ above_chance check_rows confirm_rows
    CifarP.__init__ Reading.divisor Reading.even Report.show_hardest Report.add_hardest""".split()
)


def takers():
    "Public functions of the library, methods among them, that take a number of images"
    for k in sorted(dir(lib)):
        o = getattr(lib, k)
        if not callable(o) or not (getattr(o, '__module__', None) or '').startswith('robust_nbdev.'):
            continue
        own = (
            {f'{k}.{a}': v for a, v in vars(o).items() if not a.startswith('_orig_')} if isinstance(o, type) else {k: o}
        )
        yield from own.items()  # without what `patch` keeps of a method that it replaces
    for a, f in vars(Learner).items():
        yield f'Learner.{a}', f


def takes_n(f):
    if (
        not inspect.isfunction(f)
        or not (f.__module__ or '').startswith('robust_nbdev.')
        or f.__name__.startswith('_')
        and f.__name__ != '__init__'
    ):
        return False
    ps = inspect.signature(f).parameters
    return (
        bool({'n', 'max_n', 'n_valid'} & set(ps))
        or (f.__doc__ or '').startswith('`')
        and 'of this Learner' in f.__doc__
    )


NAMED = sorted(k for k, f in takers() if takes_n(f))


@pytest.mark.parametrize('name', sorted({*NAMED, *ENTRIES} - OTHER))
def test_every_function_that_takes_n_sees_all_classes(name):
    "A new function fails here until it has an entry above"
    m = Seen().eval()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        y = ENTRIES[name](m)
    said = any('classes only' in str(w.message) for w in heard)
    seen = classes(m) if y is None else set(np.asarray(y).tolist())
    assert said or seen == set(range(C))
