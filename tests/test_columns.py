"Columns of robust accuracy: their names, one definition with the report, and models that change their input in place."

import numpy as np, pytest, torch
from torch import nn
from copy import deepcopy
import matplotlib.pyplot as plt
from fastai.vision.all import (
    Learner,
    CrossEntropyLossFlat,
    L,
    Callback,
    DataLoaders,
    ProgressCallback,
    SaveModelCallback,
    EarlyStoppingCallback,
    ReduceLROnPlateau,
    accuracy,
    noop,
)
from fastai.callback.tracker import TrackerCallback
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.evaluate import *
from robust_nbdev.test_utils import *

E = 0.05


@pytest.fixture(scope='module')
def learn():
    l = synth_learner(dls=synth_dls(n=512, bs=32, seed=1))
    l.fit_one_cycle(4, 4e-3)
    return l


def held(dls, model, metrics, cbs=()):
    l = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=L(metrics), cbs=L(cbs))
    l.remove_cb(ProgressCallback)
    l.logger = noop
    return l


# --- names ---


def my_loss(z, y):
    return ce(z, y)


class LossPGD(PGD):
    pass


class Own:
    name = 'lossy_error'

    def __call__(self, model, x, y, seed=0):
        return x


NAMED = dict(
    loss=PGD(E, loss=my_loss),
    class_=LossPGD(E),
    error=type('ErrorOriented', (PGD,), {})(E),
    own=Own(),
    worst=WorstCase([PGD(E, loss=my_loss), FGSM(E)]),
    transfer=Transfer(tiny_vit(num_classes=4), PGD(E, loss=my_loss)),
)


@pytest.mark.parametrize('kind', NAMED)
def test_fastai_keeps_the_highest_value_of_every_column(kind):
    m = RobustAccuracy(NAMED[kind])
    assert m.name.endswith('_acc') and TrackerCallback(monitor=m.name).comp is np.greater


def test_names_that_a_user_gives():
    for bad in ('my_loss', 'robust_error', 'lossless'):
        with pytest.raises(ValueError, match='lowest accuracy'):
            RobustAccuracy(PGD(E), name=bad)
    assert RobustAccuracy(PGD(E, loss=my_loss), name='robust').name == 'robust'


def test_two_columns_alike_behind_a_wrapper_are_noticed(learn):
    two = [OnAverage(RobustAccuracy(FGSM(e))) for e in (0.02, 0.2)]
    with pytest.warns(UserWarning, match='ema_fgsm_acc'):
        held(synth_dls(16), learn.model, two, EMA()).validate()


class Script(Callback):
    "Weights by epoch"

    order = 100

    def __init__(self, states):
        self.states = states

    def after_train(self):
        self.model.load_state_dict(self.states[self.epoch])


def test_the_best_epoch_is_kept(learn, tmp_path):
    best = {k: v.clone() for k, v in learn.model.state_dict().items()}
    zero = {k: v * 0 for k, v in best.items()}
    m = RobustAccuracy(PGD(E, steps=1, loss=my_loss))
    dls = DataLoaders(synth_dls(16).train, learn.dls.valid)
    l = held(dls, deepcopy(learn.model), [m], [Script([zero, best, zero, zero])])
    l.path = tmp_path
    stop, plateau = (
        EarlyStoppingCallback(monitor=m.name, patience=2),
        ReduceLROnPlateau(monitor=m.name, patience=1, factor=10.0),
    )
    l.fit(6, 1e-5, cbs=[SaveModelCallback(monitor=m.name), stop, plateau])
    values = [o[-1] for o in l.recorder.values]
    assert values[1] > 0.05 > values[0] == values[2] == values[3]
    assert len(values) == 4
    assert stop.best == values[1] == plateau.best
    assert all(torch.equal(v, best[k]) for k, v in l.model.state_dict().items())


# --- one definition ---


class Repair:
    "Turns every image into one that the model knows: what was wrong becomes right"

    name = 'repair'

    def __init__(self, x, y):
        self.at = {int(c): x[y == c][0] for c in y.unique()}

    def __call__(self, model, x, y, seed=0):
        return torch.stack([self.at[int(c)] for c in y]).as_subclass(type(x))

    def __repr__(self):
        return 'Repair'


@pytest.fixture(scope='module')
def repair(learn):
    x, y = [torch.cat([b[i].as_subclass(torch.Tensor) for b in learn.dls.valid]) for i in (0, 1)]
    ok = predict(learn.model, x) == y
    assert len(y[ok].unique()) == 4
    assert 0 < (~ok).sum()
    return Repair(x[ok], y[ok])


def shares(learn, a, **kw):
    rep = learn.robust_report([a], progress=False, **kw)
    return rep.rows[0]['accuracy'], rep.rows[1]['accuracy']


@pytest.mark.parametrize('kind', ['repair', 'pgd'])
def test_the_column_is_the_row(learn, repair, kind):
    a = dict(repair=repair, pgd=PGD(E, steps=2))[kind]
    clean, want = shares(learn, a)
    col = lambda l: l.validate()[-1]
    if kind == 'repair':
        assert want == clean < 1
    l = held(learn.dls, learn.model, [RobustAccuracy(a)])
    assert col(l) == pytest.approx(want, abs=1e-6)
    for under in (FGSM(0.2), a):
        assert l.validate(cbs=[AdvValid(under)])[-1] == pytest.approx(want, abs=1e-6)
    assert shares(learn, a, draws=2)[1] == pytest.approx(want, abs=1e-6)


def test_curves_rows_and_files_share_the_definition(learn, repair, tmp_path):
    x, y = [torch.cat([b[i].as_subclass(torch.Tensor) for b in learn.dls.valid]) for i in (0, 1)]
    right = (predict(learn.model, x) == y).float().mean().item()
    got = save_adv(learn.model, x, y, repair, tmp_path)
    assert got['clean'] == pytest.approx(right)
    assert got['exact'] == pytest.approx(right)
    assert got['png'] <= right
    rep = learn.robust_report([repair], progress=False)
    assert (rep.per_class()['Repair'] <= rep.per_class()['clean']).all()


def test_the_column_costs_no_second_look_at_clean_images(learn):
    n = []

    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = learn.model

        def forward(self, x):
            n.append(len(x))
            return self.net(x)

    held(learn.dls, Count(), [RobustAccuracy(FGSM(E))]).validate()
    assert sum(n) == 3 * len(learn.dls.valid_ds)  # fastai's own, the gradient, the verdict


# --- models that change their input in place ---


class Pure(nn.Module):
    def __init__(self, net, k):
        super().__init__()
        self.net, self.k = net, k

    def forward(self, x):
        return self.net((x - 0.4) / self.k + 0.4)


class InPlace(Pure):
    def forward(self, x):
        return self.net(x.sub_(0.4).div_(self.k).add_(0.4))


@pytest.fixture
def pair(learn):
    return Pure(learn.model, 2.0).eval(), InPlace(learn.model, 2.0).eval()


@pytest.fixture
def data(learn):
    return tuple(torch.cat([b[i].as_subclass(torch.Tensor) for b in learn.dls.valid])[:32] for i in (0, 1))


USES = dict(
    report=lambda m, x, y: [
        robust_report(
            m, (x, y), [PGD(E, steps=2), Square(E, queries=10), RandomOcclusion(patch=7)]
        ).df.accuracy.tolist()
    ],
    eps=lambda m, x, y: eps_curve(m, (x, y), PGD(steps=2), [0, E]).df.accuracy.tolist(),
    check=lambda m, x, y: self_check(m, x, y),
    loader=lambda m, x, y: robust_report(
        m, [(x[:20], y[:20]), (x[20:], y[20:])], [PGD(E, steps=2)]
    ).df.accuracy.tolist(),
    ensemble=lambda m, x, y: robust_report(
        m, (x, y), [AutoAttack(E, attacks=[APGD(E, steps=3), Square(E, queries=5)])]
    ).df.accuracy.tolist(),
)


@pytest.mark.parametrize('use', USES)
def test_numbers_are_those_of_the_pure_model(pair, data, use):
    x, y = data
    kept = x.clone()
    pure, moves = pair
    want = USES[use](pure, x, y)
    assert USES[use](moves, x, y) == want
    assert torch.equal(x, kept)


def test_files_and_pictures_of_an_in_place_model(pair, data, tmp_path):
    x, y = data[0][:8], data[1][:8]
    kept = x.clone()
    pure, moves = pair
    assert save_adv(moves, x, y, FGSM(E), tmp_path / 'a') == save_adv(pure, x, y, FGSM(E), tmp_path / 'b')
    show_adv(moves, x, y, FGSM(E))
    plt.close('all')
    assert torch.equal(x, kept)


def test_columns_of_an_in_place_model(pair, learn):
    "fastai hands the model its batch itself, so the clean images are gone afterwards, unless a callback keeps them"
    pure, moves = pair
    a = PGD(E, steps=2)
    col = lambda m, *cbs: list(held(learn.dls, m, [accuracy, RobustAccuracy(a)]).validate(cbs=L(cbs)))
    want = col(pure)
    for m in (pure, moves):
        assert col(m, AdvValid(None)) == pytest.approx(want, abs=1e-6)
        assert col(m, AdvValid(a))[2] == pytest.approx(want[2], abs=1e-6)
    with pytest.raises(ValueError, match='changes its input in place'):
        col(moves)


# --- timm models without their statistics ---


def test_statistics_that_nothing_applies_are_noticed(data):
    import timm
    from robust_nbdev.core import Normalized, Logits

    m = timm.create_model(
        'vit_tiny_patch16_224', img_size=28, patch_size=7, in_chans=1, num_classes=4, depth=1, embed_dim=24, num_heads=2
    ).eval()

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = m

        def forward(self, x):
            return self.net((x - 0.5) / 0.5)

    says = lambda net: [o for o in robust_report(net, data, []).warnings if 'Normalized(model)' in o]
    assert len(says(m)) == 1
    assert 'mean=(0.5' in says(m)[0]
    assert 'unless its forward normalises' in says(m)[0]
    assert (
        says(Normalized(m))
        == says(Logits(Normalized(m), 0).model)
        == says(Inside())
        == says(nn.Sequential(nn.Flatten(), nn.Linear(784, 4)))
        == []
    )


class OneBuffer(nn.Module):
    "Writes every output of evaluation where the last one is"

    def __init__(self, model):
        super().__init__()
        self.model, self.memory = model, None

    def forward(self, x):
        z = self.model(x)
        if z.requires_grad:
            return z
        self.memory = torch.empty_like(z) if self.memory is None or len(self.memory) != len(z) else self.memory
        return self.memory.copy_(z)


def test_columns_after_an_attack_are_of_the_clean_images(learn):
    learn.metrics = [RobustAccuracy(PGD(0.3, steps=2)), accuracy]
    with learn.no_bar(), learn.no_logging():
        right = learn.validate()
        learn.model = OneBuffer(learn.model)
        assert learn.validate() == right and right[2] > right[1] + 0.1
