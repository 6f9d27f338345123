"""`AdvTrain` with everything else that fastai offers, and after everything that can go wrong (style rules 2-20;
R14-R16, R20-R23)."""

import copy, threading, random, warnings
from dataclasses import dataclass
import numpy as np, pytest, torch, torch.nn.functional as F
from torch import nn
from fastai.vision.all import (
    BCEWithLogitsLossFlat,
    Callback,
    CancelFitException,
    MixUp,
    Normalize,
    set_seed,
)
import fastai.callback.fp16 as fp16
from fastai.callback.schedule import *
from fastai.callback.training import *
from fastai.callback.tracker import *
from robust_nbdev import attacks, core
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.evaluate import *
from robust_nbdev.test_utils import *
from test_at_methods import KeepClean, same, weights

ADV = PGD(0.1, steps=2)


class Seen(Callback):
    "What the model is trained on: the images after every other `before_batch`"

    order = 100

    def before_fit(self):
        self.dist = []

    def before_batch(self):
        if self.training:
            self.dist.append((self.x.as_subclass(torch.Tensor) - self.keep_clean.seen[-1]).abs().max().item())


class MixedPrecision(fp16.MixedPrecision):
    "fastai's own mixed precision on the CPU: it asks for 'cuda' by name"

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def before_fit(self):
        self.kwargs['enabled'] = False
        super().before_fit()
        self.autocast = torch.autocast('cpu', dtype=self.dtype)


def noisy_vit(**kw):
    return tiny_vit(num_classes=4, proj_drop_rate=0.2, attn_drop_rate=0.2, drop_path_rate=0.3, drop_rate=0.2, **kw)


# --- what an attack returns is checked, once
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Brighter(AttackBase):
    "An attack of one's own, checked by the call that it inherits"

    by: float = 0.1
    norm, eps = 'Linf', 0.1

    def make(self, model, x, y, target, seed):
        return (x + self.by).clamp(0, 1)


@dataclass(frozen=True, repr=False)
class Called(Brighter):
    "An attack with a call of its own, which checks nothing"

    def __call__(self, model, x, y=None, *, target=None, targeted=False, seed=0):
        return (x + self.by).clamp(0, 1)


def brighten(model, x, y, seed=0):
    return x.add_(0.1).clamp_(0, 1)


@pytest.mark.parametrize('attack', [ADV, Brighter(), Called(), brighten], ids=['pgd', 'make', 'call', 'function'])
def test_each_training_step_checks_its_images_once(attack, monkeypatch):
    checked = []

    def counted(x_adv, x, attack, check=core.check_result):
        checked.append(attack)
        return check(x_adv, x, attack)

    for module in (core, attacks):
        monkeypatch.setattr(module, 'check_result', counted)
    synth_learner(cbs=AdvTrain(attack, clean_images=0.5)).fit(1, 1e-3)
    assert len(checked) == 4  # one for each training batch


@pytest.mark.parametrize('attack', [Brighter(0.2), Called(0.2)], ids=['make', 'call'])
def test_no_step_trains_on_images_outside_the_ball(attack):
    with pytest.raises(ValueError, match='out of its ball'):
        synth_learner(cbs=AdvTrain(attack, clean_images=0.5)).fit(1, 1e-3)


def test_a_function_that_works_in_place_leaves_the_clean_images_alone():
    "Else both halves of a joint batch would be adversarial"
    halves = []

    class Halves(Callback):
        order = AdvTrain.order + 1

        def before_batch(self):
            halves[:] = [self.keep_clean.seen[-1], *self.x.as_subclass(torch.Tensor).chunk(2)]
            raise CancelFitException()

    synth_learner(cbs=[KeepClean(), TRADES(brighten), Halves()]).fit(1, 1e-3)
    given, clean, adversarial = halves
    assert torch.equal(given, clean) and not torch.equal(clean, adversarial)


def relabels(model, x, y, seed=0):
    y.fill_(0)
    return x


@dataclass(frozen=True, repr=False)
class Relabels(AttackBase):
    def make(self, model, x, y, target, seed):
        return relabels(model, x, y)


@pytest.mark.parametrize('attack', [relabels, Relabels()], ids=['function', 'make'])
def test_an_attack_that_writes_into_its_labels_changes_no_others(attack):
    "Neither those that the model is trained on, nor those of a report"
    seen = []
    learn = synth_learner(cbs=[AdvTrain(attack), Callback(after_loss=lambda self: seen.append(self.y.clone()))])
    learn.fit(1, 0.0)
    assert torch.cat(seen[:4]).unique().tolist() == [0, 1, 2, 3]
    x, y = torch.rand(8, 1, 28, 28), torch.arange(8) % 4
    robust_report(learn.model, (x, y), [attack])
    assert y.tolist() == [0, 1, 2, 3] * 2


# --- the point of it
# ------------------------------------------------------------------------------------------------------


def test_it_trains_on_what_the_attack_makes():
    "By hand: the gradient of the first step is that of the loss on attack(model, x, y)"
    seen = []

    class Grab(Callback):
        order = 5

        def before_batch(self):
            seen.append((self.x.as_subclass(torch.Tensor).clone(), self.y.clone(), copy.deepcopy(self.model)))

    learn = synth_learner(cbs=[KeepClean(), AdvTrain(ADV), Grab(), GetGrads()])
    seed = torch.initial_seed() % 2**62
    learn.fit(1, 1e-3)
    (x_adv, y, m), x = seen[0], learn.keep_clean.seen[0]
    want = ADV(m, x, y, seed=seed)
    assert torch.equal(x_adv, want) and (x_adv - x).abs().max() > 0.05
    m.zero_grad()
    F.cross_entropy(m.train()(want), y.as_subclass(torch.Tensor)).backward()
    assert torch.allclose(torch.cat([p.grad.flatten() for p in m.parameters()]), learn.get_grads.grads[0], atol=1e-6)


def test_attack_leaves_the_random_state_of_training_alone():
    "Same dropout masks with and without an attack: the states after training are equal"
    states = []
    for cbs in (None, AdvTrain(ADV)):
        l = synth_learner(cbs=cbs, model=noisy_vit())
        l.fit(1, 1e-3)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_batch_norm_statistics_see_each_batch_once():
    ns = []
    for cbs in (None, AdvTrain(PGD(0.1, steps=5))):
        m = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 13 * 13, 4))
        l = synth_learner(cbs=cbs, model=m)
        l.fit(1, 1e-3)
        ns.append(m[1].num_batches_tracked.item())
    assert ns == [4, 4]


# --- together with fastai
# -----------------------------------------------------------------------------------------------------


def test_the_learners_loss_is_what_the_attack_climbs():
    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, p, y):
            self.n += 1
            return F.cross_entropy(p, y)

    c = Count()
    l = synth_learner(cbs=AdvTrain(PGD(0.1, steps=3)), loss_func=c)
    l.fit(1, 1e-3)
    assert c.n == 4 * (3 + 1) + 1 * len(l.dls.valid) and l.loss_func is c


def test_an_attacks_own_loss_is_kept():
    used = []

    def mine(z, y):
        used.append(1)
        return ce(z, y)

    synth_learner(cbs=AdvTrain(PGD(0.1, steps=3, loss=mine))).fit(1, 1e-3)
    assert len(used) == 12


def test_soft_labels_of_many_classes():
    "Multi-label training: float targets [B,C]"
    dls = synth_dls(n=32)

    class Hot(Callback):
        order = -5

        def before_batch(self):
            self.learn.yb = (F.one_hot(self.y.as_subclass(torch.Tensor), 4).float(),)

    l = synth_learner(dls=dls, cbs=[Hot(), KeepClean(), AdvTrain(FGSM(0.1)), Seen()], loss_func=BCEWithLogitsLossFlat())
    l.fit(1, 1e-3)
    assert l.seen.dist == pytest.approx([0.1] * 2, abs=1e-6)


def test_autocast_on_the_cpu():
    "The attack runs in the half type, closes its scope, and training differs from float32 by rounding only"
    types, scopes, dtype = [], [], torch.bfloat16

    class Look(Callback):
        order = AdvTrain.order + 0.5

        def before_batch(self):
            scopes.append(torch.is_autocast_enabled('cpu'))

    m = tiny_vit(num_classes=4)
    m.model.head.register_forward_hook(lambda _, i, o: types.append(o.dtype))
    l = synth_learner(cbs=[KeepClean(), AdvTrain(ADV), MixedPrecision(dtype), Look(), Seen()], model=m)
    l.fit(1, 1e-3)
    assert set(types) == {dtype} and not any(scopes) and not torch.is_autocast_enabled('cpu')
    assert all(0.05 < d <= 0.1 + 1e-6 for d in l.seen.dist)
    full = synth_learner(cbs=AdvTrain(ADV))
    full.fit(1, 1e-3)
    assert abs(l.recorder.values[0][0] - full.recorder.values[0][0]) < 0.02 and all(
        p.dtype == torch.float32 for p in l.model.parameters()
    )


def test_get_preds_and_predictions_are_clean():
    l = synth_learner(cbs=AdvTrain(ADV))
    l.fit(1, 1e-3)
    p, t = l.get_preds()
    x = torch.stack([o.as_subclass(torch.Tensor) for o, _ in l.dls.valid_ds])
    with torch.no_grad():
        assert torch.allclose(p, l.model.eval()(x).softmax(1), atol=1e-6)


# --- data that cannot be attacked
# ------------------------------------------------------------------------------------------------------


def test_normalize_in_the_dls_is_refused():
    words = r'ends with Normalize.*Normalized\(model'
    for cbs, run in (
        (AdvTrain(ADV), lambda l: l.fit(1, 1e-3)),
        (AdvTrain(ADV), lambda l: l.validate()),
        (None, lambda l: l.validate(cbs=AdvValid(ADV))),
        (AdvTrain(ADV), lambda l: l.get_preds()),
    ):
        l = synth_learner(cbs=cbs)
        l.dls.add_tfms([Normalize.from_stats([0.5], [0.5])], 'after_batch')
        with pytest.raises(ValueError, match=words):
            run(l)


@pytest.mark.parametrize('run', [lambda l: l.validate(), lambda l: l.get_preds()], ids=['validate', 'get_preds'])
def test_a_refusal_does_not_lock_the_learner(run):
    """fastai's validation takes a lock before `before_fit` and frees it only if `before_fit` returns: refuse later, or
    the next call waits for ever"""
    l = synth_learner(cbs=AdvTrain(ADV))
    l.dls.add_tfms([Normalize.from_stats([0.5], [0.5])], 'after_batch')
    with pytest.raises(ValueError, match='ends with Normalize'):
        run(l)
    done = []
    l.remove_cb(AdvTrain)
    t = threading.Thread(target=lambda: done.append(run(l)), daemon=True)
    t.start()
    t.join(5)
    assert done, 'the second call hangs'


class Gives(Callback):
    "Other inputs than those of the data"

    order = -5

    def __init__(self, give):
        self.give = give

    def before_batch(self):
        self.learn.xb = self.give(self.x)


@pytest.mark.parametrize(
    'give,says',
    [
        (lambda x: (x * 2 - 1,), r'must lie in \[0,1\], got values from -'),
        (lambda x: (x, x), 'one input tensor, this batch has 2'),
    ],
    ids=['range', 'two'],
)
def test_inputs_that_cannot_be_attacked_are_refused_in_the_fit(give, says):
    with pytest.raises(ValueError, match=says):
        synth_learner(cbs=[AdvTrain(ADV), Gives(give)]).fit(1, 1e-3)


# --- found by a reviewer
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('mix,attack', [(MixUp, APGD(0.1, steps=3)), (None, PGD(0.1, steps=1, restarts=2))])
def test_attacks_that_need_a_loss_per_image(mix, attack):
    l = synth_learner(cbs=[AdvTrain(attack)] + ([mix()] if mix else []))
    lf = l.loss_func
    l.fit(1, 1e-3)
    assert l.loss_func is lf and lf.reduction == 'mean'


def test_layers_that_merge_weights_on_eval_are_unmerged():
    class Merge(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    m = nn.Sequential(nn.Flatten(), Merge(784, 4)).train()
    x = torch.rand(2, 1, 28, 28)
    PGD(0.1, steps=1)(m, x, torch.tensor([0, 1]))
    assert m[1].training and not m[1].merged


class Counts(AdvCallback):
    "A callback with a state of its own"

    n = 0

    def after_step(self):
        self.n += 1

    def state_dict(self):
        return dict(n=self.n)

    def load_state_dict(self, state):
        self.n = state['n']


def test_a_resumed_run_gives_callbacks_their_state_and_the_epochs_lived(tmp_path):
    def learner():
        set_seed(0)
        learn = synth_learner(cbs=[Counts(), EMA(0.9)])
        learn.path = tmp_path
        return learn

    with (learn := learner()).no_bar(), learn.no_logging():
        learn.fit(1)
        learn.fit(3, cbs=[SaveRun('r'), CancelAt(1)])
    again = learner()
    assert (
        again.resume('r') == 1
        and again.counts.n == 2 * len(again.dls.train)
        and again.epochs_lived.now == 1
        and again.ema.n == len(again.dls.train)
    )


class CancelAt(Callback):
    def __init__(self, epoch):
        self.at = epoch

    def before_epoch(self):
        if self.epoch == self.at:
            raise CancelFitException()


# --- which state is gone on with
# ---------------------------------------------------------------------------------------------


def saved(path, fits, fname='run', seed=0, lr=1e-3, about=''):
    "A Learner after fits of four epochs, each of which is stopped behind this many; every epoch is saved"
    learn = synth_learner(path=path, seed=seed)
    for n in fits:
        learn.fit(4, lr, cbs=[SaveRun(fname, about=about), CancelAt(n)])
    return learn


def test_a_run_goes_on_from_the_state_that_was_saved_last(tmp_path):
    "Not from that of the highest epoch, which may be of an older fit or of an older run"
    new, again = saved(tmp_path, [3, 1]), synth_learner(path=tmp_path)
    assert again.resume() == 1 and same(weights(again), weights(new))
    other = saved(tmp_path, [1], seed=1)
    again = synth_learner(path=tmp_path)
    assert again.resume() == 1 and same(weights(again), weights(other))
    assert sorted(f.name for f in (tmp_path / 'models').iterdir()) == ['average_run_0.pth', 'run_0.pth']


def test_a_fit_leaves_the_states_of_another_training_alone(tmp_path):
    saved(tmp_path, [3], about='a')
    saved(tmp_path, [1], about='b')
    assert synth_learner(path=tmp_path).resume(about='a') == 3 and synth_learner(path=tmp_path).resume(about='b') == 1


def test_a_state_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    saved(tmp_path, [3])
    (tmp_path / 'models' / 'average_run_2.pth').unlink()
    assert synth_learner(path=tmp_path).resume() == 2 and synth_learner(path=tmp_path).resume('run2') == 0


def test_a_fit_that_dies_while_it_saves_leaves_no_mixture(tmp_path, monkeypatch):
    "New weights beside an old average"
    saved(tmp_path, [1])

    def dies(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(SaveRun, 'state', dies)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, [1], seed=1)
    assert synth_learner(path=tmp_path).resume() == 0


@pytest.mark.parametrize('names', [['run', 'run_b'], ['run_b', 'run']])
def test_a_run_is_found_by_its_whole_name(tmp_path, names):
    made = {o: saved(tmp_path, [i + 1], o, seed=i) for i, o in enumerate(names)}
    again = synth_learner(path=tmp_path)
    assert again.resume() == names.index('run') + 1 and same(weights(again), weights(made['run']))


class Draws(Callback):
    "One number of each of the generators per batch"

    run_valid = False

    def __init__(self):
        self.seen = []

    def before_batch(self):
        self.seen.append((random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()))


def test_a_resumed_run_draws_on(tmp_path):
    "Python's and numpy's numbers as well as torch's"

    def trained(path, *cbs):
        set_seed(0)
        learn = synth_learner(path=path, cbs=Draws())
        learn.fit(3, start_epoch=learn.resume(), cbs=[SaveRun(), *cbs])
        return learn.draws.seen

    whole, first = trained(tmp_path / 'a'), trained(tmp_path / 'b', CancelAt(1))
    assert first + trained(tmp_path / 'b') == whole and len(set(whole)) == len(whole)


def test_a_run_resumed_with_a_loss_of_another_body_is_noticed(tmp_path):
    def one(z, y, z0=None):
        return F.cross_entropy(z, y, reduction='none')

    def other(z, y, z0=None):
        return -z.gather(1, y[:, None])[:, 0]

    one.__qualname__ = other.__qualname__ = one.__name__ = other.__name__ = 'loss'
    synth_learner(path=tmp_path, cbs=AdvTrain(PGD(0.1, steps=1, loss=one))).fit(1, cbs=SaveRun())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        synth_learner(path=tmp_path, cbs=AdvTrain(PGD(0.1, steps=1, loss=one))).resume()
    assert not [o for o in said if 'same training' in str(o.message)]
    with pytest.warns(UserWarning, match='other code'):
        synth_learner(path=tmp_path, cbs=AdvTrain(PGD(0.1, steps=1, loss=other))).resume()


def test_a_resumed_run_goes_on_with_what_catch_overfit_put_in_place(tmp_path):
    eps = warmup(0.1, pct=0.3)

    def learner(path):
        set_seed(0)
        return synth_learner(
            dls=synth_dls(16, bs=8),
            path=path,
            cbs=[AdvTrain(FGSM(0.1), eps=eps), CatchOverfit(gap=-1.0, then=PGD(steps=2), n=8)],
        )

    whole, killed = learner(tmp_path / 'a'), learner(tmp_path / 'b')
    whole.fit(3, 1e-3)
    killed.fit(3, 1e-3, cbs=[SaveRun(), CancelAt(2)])
    again = learner(tmp_path / 'b')
    again.fit(3, 1e-3, start_epoch=again.resume())
    assert again.catch_overfit.df.equals(whole.catch_overfit.df) and same(weights(again), weights(whole))
    assert again.catch_overfit.df.attack[0] != again.catch_overfit.df.attack[2]


def test_the_state_of_catch_overfit_without_a_case():
    learn = synth_learner(cbs=[AdvTrain(FGSM(0.1)), CatchOverfit(gap=1.0, then=PGD(steps=2), n=16)])
    learn.fit(1, 0.0)
    state = learn.catch_overfit.state_dict()
    other = synth_learner(cbs=[AdvTrain(FGSM(0.1)), CatchOverfit(then=PGD(steps=2))])
    other.catch_overfit.load_state_dict(state)
    assert other.adv_train.instead is None and len(other.catch_overfit.df) == 1


def test_a_state_of_other_callbacks_is_noticed(tmp_path):
    "Without `about`, which says what the training is"
    schedule = lambda pct: 0.1 * pct
    synth_learner(path=tmp_path, cbs=AdvTrain(FGSM(0.1), eps=schedule)).fit(
        1, cbs=[SaveRun(), SaveRun('told', about='x')]
    )
    for cb in (AdvTrain(FGSM(0.2)), []):
        with pytest.warns(UserWarning, match='about='):
            assert synth_learner(path=tmp_path, cbs=cb).resume() == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        assert synth_learner(path=tmp_path, cbs=AdvTrain(FGSM(0.1), eps=schedule)).resume() == 1
        assert synth_learner(path=tmp_path, cbs=TRADES(PGD(0.3))).resume('told', 'x') == 1


def test_a_radius_in_another_norm_is_refused():
    with pytest.raises(ValueError, match='another norm'):
        AdvTrain(PGD(0.1, steps=1), eps=L2(0.5))
    assert all(AdvTrain(PGD(0.1, steps=1), eps=o).scheduled().eps == 0.05 for o in (0.05, Linf(0.05)))
    assert AdvTrain(PGD(L2(1.0)), eps=L2(0.5)).scheduled().eps == 0.5 and warmup(L2(2.0), pct=0)(0) == 2.0
    with pytest.raises(ValueError, match='8/255'):
        AdvTrain(PGD(0.1), eps=8)


def test_a_function_that_returns_a_graph_changes_no_gradient_of_the_weights():
    def tied(model, x, y, seed=0):
        return (x + 0.1 * torch.tanh(model(x).sum(1)).view(-1, 1, 1, 1)).clamp(0, 1)

    def cut(model, x, y, seed=0):
        return tied(model, x, y).detach()

    def grads(attack):
        learn = synth_learner(cbs=[AdvTrain(attack), GetGrads()])
        learn.fit(1, 1e-3)
        return learn.get_grads.grads[0]

    assert torch.equal(grads(tied), grads(cut))


def test_a_half_type_is_not_trained_on():
    with pytest.raises(ValueError, match='returned torch.float16 on cpu for images of torch.float32'):
        synth_learner(cbs=AdvTrain(lambda model, x, y, seed=0: x.half())).fit(1)


@pytest.mark.parametrize('then', [False, True])
def test_catch_overfit_refuses_what_names_no_ball_before_the_first_step(then):
    steps = []
    catch = CatchOverfit(then=brighten) if then else CatchOverfit(brighten)
    learn = synth_learner(cbs=[AdvTrain(FGSM(0.1)), catch, Callback(after_step=lambda self: steps.append(1))])
    with pytest.raises(TypeError, match='brighten names no ball'):
        learn.fit(1)
    assert not steps
