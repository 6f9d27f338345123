"`evaluate`: the metric, the callback, predictions and self-checks (R05, R14, R15, R22)."

import re, warnings
import numpy as np, pytest, torch
from torch import nn
from fastai.vision.all import Learner, accuracy
from fastai.callback.schedule import *
from fastai.callback.progress import *
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.eval_data import Feed, few_classes, unfair
from robust_nbdev.evaluate import *
from robust_nbdev.evaluate import _Progress
from robust_nbdev.test_utils import *

ADV = PGD(0.1, steps=3)


@pytest.fixture(scope='module')
def learn():
    "Half-way trained: some images fall, some stand"
    l = synth_learner(dls=synth_dls(n=512, bs=32, seed=1), metrics=accuracy)
    l.fit_one_cycle(5, 4e-3)
    return l


EPS = 0.05


def valid(l):
    return [torch.cat([b[i].as_subclass(torch.Tensor) for b in l.dls.valid]) for i in (0, 1)]


def by_hand(m, x, y, a, **kw):
    return (predict(m, a(m, x, y, **kw)) == y).float().mean().item()


def validate(l, metrics, cbs=None):
    "With other metrics for one call"
    l2 = Learner(l.dls, l.model, loss_func=l.loss_func, metrics=metrics)
    with l2.no_bar(), l2.no_logging():
        return l2.validate(cbs=cbs)


# --- metric ---


def test_robust_accuracy_is_the_number_by_hand(learn):
    (x, y), a = valid(learn), PGD(0.6, norm='L2', steps=3)
    got = validate(learn, [accuracy, RobustAccuracy(a)])
    assert got[1] == pytest.approx(1.0, abs=0.02)
    assert got[2] == pytest.approx(by_hand(learn.model, x, y, a), abs=1e-6)
    assert got[2] < got[1]


@pytest.mark.parametrize(
    'a,name', [(PGD(0.1, norm='L2', steps=50), 'pgd50_l2_acc'), (APGD(0.1, loss=dlr), 'apgd100_dlr_acc')]
)
def test_column_names(a, name):
    assert RobustAccuracy(a).name == name


def test_different_attacks_have_different_columns():
    "Rule 16: equal names give columns that cannot be told apart, so there is a warning, and a way out"
    attacks = [PGD(4 / 255), PGD(8 / 255)]
    l = synth_learner(metrics=[RobustAccuracy(a) for a in attacks])
    with pytest.warns(UserWarning, match='two columns are called pgd10_acc'):
        l.validate()
    l.metrics = [RobustAccuracy(a, name=f'{a}_acc') for a in attacks]
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        l.validate()


@pytest.mark.parametrize('how', [lambda a: dict(metrics=RobustAccuracy(a)), lambda a: dict(cbs=AdvValid(a))])
def test_no_training_batch_is_attacked(how):
    n = []
    l = synth_learner(**how(lambda m, x, y, seed=0: n.append(len(x)) or x))
    l.fit(1, 1e-3)
    assert sum(n) == len(l.dls.valid_ds)


# --- AdvValid ---


def test_every_metric_is_under_attack(learn):
    x, y = valid(learn)
    a = PGD(EPS, steps=3)
    loss, acc = learn.validate(cbs=AdvValid(a))
    adv = a(learn.model, x, y)
    with torch.no_grad():
        z = learn.model(adv)
    assert acc == pytest.approx((z.argmax(1) == y).float().mean().item(), abs=1e-6)
    assert loss == pytest.approx(nn.functional.cross_entropy(z, y).item(), abs=1e-4)
    assert learn.validate()[1] > acc
    assert not hasattr(learn, 'adv_valid')


def test_seed_of_adv_valid(learn):
    x, y = valid(learn)
    a = PGD(EPS, steps=1, alpha=0.0)
    p = learn.get_preds(cbs=AdvValid(a, seed=7))[0]
    with torch.no_grad():
        assert torch.allclose(p, learn.model(a(learn.model, x, y, seed=7)).softmax(1), atol=1e-5)


def test_no_attack_leaves_the_images_clean(learn):
    assert learn.validate(cbs=AdvValid(None)) == learn.validate()


def test_the_metric_starts_from_clean_images_under_adv_valid(learn):
    "Rule 15: AdvValid and RobustAccuracy together"
    x, y = valid(learn)
    a, strong = PGD(EPS, steps=3), FGSM(0.3)
    got = validate(learn, [accuracy, RobustAccuracy(a)], cbs=AdvValid(strong))
    assert got[2] == pytest.approx(by_hand(learn.model, x, y, a), abs=1e-6)
    assert got[1] == pytest.approx(by_hand(learn.model, x, y, strong), abs=1e-6)


# --- predict and self_check ---


def test_predict_is_in_evaluation_mode_and_restores():
    m = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3), nn.Dropout(0.9)).train()
    m[2].eval()
    x, state = torch.rand(7, 1, 6, 6), state_of(m)
    p = predict(m, x)
    assert state_of(m) == state
    assert torch.equal(torch.cat([predict(m, x[i : i + 1]) for i in range(7)]), p)
    assert torch.equal(p, m.eval()(x).argmax(1))


class Net(nn.Module):
    def __init__(self, f=lambda m, x: m(x)):
        super().__init__()
        self.m, self.f = tiny_vit(num_classes=4), f

    def forward(self, x):
        return self.f(self.m, x)


FAULTS = dict(
    quantised=(lambda m, x: m((x * 255).round() / 255), 'gradient is exactly zero'),
    nan=(lambda m, x: m(x) + (x.flatten(1).sum(1) * 0).sqrt()[:, None] * torch.arange(4), 'not finite for 100%'),
    confident=(lambda m, x: m(x) * 1e5, 'cross-entropy underflows'),
)


@pytest.mark.parametrize('k', FAULTS)
def test_planted_faults_are_named(k):
    f, words = FAULTS[k]
    x = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    says = self_check(Net(f), x, torch.arange(16) % 4)
    assert len(says) == 1
    assert words in says[0]


def test_log_probabilities_are_logits():
    "Cross-entropy and margin of log_softmax(z) are those of z: nothing to warn of"
    assert self_check(Net(lambda m, x: m(x).log_softmax(1)), torch.rand(16, 1, 28, 28), torch.arange(16) % 4) == []


def test_outputs_that_are_no_numbers_count_as_wrong():
    net, x = Net(lambda m, x: m(x) * float('nan')), torch.rand(16, 1, 28, 28)
    assert (predict(net, x) == -1).all()
    assert any('not a number for 100%' in o for o in self_check(net, x, torch.zeros(16).long()))


def test_self_check_names_batchnorm_without_statistics_of_its_own():
    x, y = torch.rand(16, 1, 28, 28), torch.arange(16) % 4
    norms = [nn.BatchNorm2d(1, track_running_stats=o) for o in (False, True)]
    said = [self_check(nn.Sequential(o, nn.Flatten(), nn.Linear(784, 4)), x, y) for o in norms]
    assert 'other images of its batch' in said[0][0] and said[1] == []


def test_few_zero_gradients_are_no_fault_and_many_are():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(100, 1, 28, 28, generator=g) * 0.5

    def f(m, x):
        return m(torch.where(x.detach().amax((1, 2, 3), keepdim=True) > 0.9, x.detach(), x))

    for n in (4, 6):
        z = x.clone()
        z[:n, 0, 0, 0] = 1.0
        assert bool(self_check(Net(f), z, torch.arange(100) % 4)) == (n == 6)


def test_dropout_left_on_is_no_fault():
    assert (
        self_check(tiny_vit(num_classes=4, proj_drop_rate=0.5).train(), torch.rand(8, 1, 28, 28), torch.arange(8) % 4)
        == []
    )


def test_honest_models_get_no_remark(learn):
    x, y = valid(learn)
    for m in (
        learn.model,
        Net(),
        Net(lambda m, x: m(x) * 100),
        Net(lambda m, x: m(x) - 50),
        Net(lambda m, x: m(x).abs()),
    ):
        assert self_check(m, x[:32], y[:32]) == []


# --- pictures ---


def test_show_adv_says_what_a_wrong_clean_image_is(learn):
    import matplotlib.pyplot as plt

    x, y = valid(learn)
    p = predict(learn.model, x)
    x, p = x[:2], p[:2]
    for m, i in (('model', 0), ('learner', 0)):
        y = torch.stack([p[0], (p[1] + 1) % 4])  # the first is right, the second is not
        show_adv(learn.model, x, y, FGSM(0.0), vocab='abcd') if m == 'model' else learn.show_adv(
            FGSM(0.0), dl=(x, y), max_n=2
        )
        t = [(a.get_title(), a.title.get_color()) for a in plt.gcf().axes]
        n = (lambda k: 'abcd'[k]) if m == 'model' else (lambda k: f'quarter {k}')
        assert t[0] == t[2] == (n(int(p[0])), 'green')
        assert t[3] == (f'{n(int(p[1]))}, not {n(int(y[1]))}', 'red')
        assert t[5] == (n(int(p[1])), 'red')
        plt.close('all')


@pytest.mark.parametrize(
    'f',
    [
        lambda l, **k: l.robust_report([FGSM(EPS)], **k),
        lambda l, **k: l.show_adv(FGSM(EPS), **k),
        lambda l, **k: l.steps_curve(PGD(EPS), [0, 1], **k),
    ],
    ids=['report', 'show', 'steps'],
)
def test_a_loaded_learner_takes_images_and_checks_their_classes(learn, f, tmp_path):
    "After `load_learner` there are no images; a folder without some class would number the others anew"
    from fastai.learner import load_learner
    from robust_nbdev.datasets import image_dls
    import matplotlib.pyplot as plt
    from PIL import Image

    for i in range(12):
        d = tmp_path / 'all' / 'abc'[i % 3]
        d.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (28, 28), dtype=np.uint8)).save(d / f'{i}.png')
    for k in 'bc':
        (tmp_path / 'part').mkdir(exist_ok=True)
        (tmp_path / 'part' / k).symlink_to(tmp_path / 'all' / k)
    l = Learner(image_dls(tmp_path / 'all', mode='L', bs=4, n_valid=3), tiny_vit(num_classes=3), path=tmp_path)
    l.export('l.pkl')
    n = load_learner(tmp_path / 'l.pkl')
    with pytest.raises(ValueError, match='no images.*dl='):
        f(n)
    part = image_dls(tmp_path / 'part', mode='L', bs=4, valid='only').valid
    with pytest.raises(ValueError, match='b is class 1 of the Learner, but class 0 of dl'):
        f(n, dl=part)
    f(n, dl=image_dls(tmp_path / 'all', mode='L', bs=4, n_valid=3).valid)
    plt.close('all')


def test_confusion_is_in_the_order_of_the_classes():
    i = np.arange(12)
    rep = Report(dict(n=12), preds=dict(label=i, clean=i, pgd=i[::-1]))
    d = rep.confusion(vocab=list(map(str, i)))
    assert d.index.tolist() == d.columns.tolist() == list(map(str, i))


# --- labels that are no class numbers ---


def right_under_attack(m, x, y, how):
    t = run_attack(m, ADV, [(torch.arange(len(x)), x, y)], _Progress(np.ones(len(x), bool)), how)
    return t.found.share.tolist()


VERDICTS = dict(
    report=lambda m, x, y: robust_report(m, (x, y), [ADV]).df.accuracy.tolist(),
    eps=lambda m, x, y: eps_curve(m, (x, y), ADV, [EPS]).df.accuracy.tolist(),
    steps=lambda m, x, y: steps_curve(m, (x, y), ADV, [1]).df.accuracy.tolist(),
    run=lambda m, x, y: right_under_attack(m, x, y, How()),
    draws=lambda m, x, y: right_under_attack(m, x, y, How(draws=2)),
    shown=lambda m, x, y: show_adv(m, x, y, ADV),
    checked=lambda m, x, y: self_check(m, x, y),
    target=lambda m, x, y: choose_target(m, x, y).tolist(),
    few=lambda m, x, y: few_classes(y, 90),
    unfair=lambda m, x, y: unfair(y, 2),
)


LABELS = ['one-hot', 'integers', 'several classes', 'a column']


@pytest.mark.parametrize('verdict,labels', [*zip(VERDICTS, 3 * LABELS), *zip(['report'] * 3, LABELS[1:])])
def test_labels_mean_their_class_or_are_refused_in_words(verdict, labels):
    "As many images as classes, so that a comparison of [B] with [B,C] would go through"
    x, y = torch.rand(4, 1, 28, 28), torch.tensor([0, 1, 3, 3])
    rows = nn.functional.one_hot(y, 4)
    given = {
        'one-hot': rows.float(),
        'integers': rows,
        'several classes': (rows + rows.roll(1, 1)).float(),
        'a column': torch.ones(4, 1),
    }[labels]
    m, verdict = tiny_vit(num_classes=4), VERDICTS[verdict]
    try:
        got = verdict(m, x, given)
    except (TypeError, ValueError) as e:
        assert re.search('one class per image|class numbers|one-hot|one number or name', str(e)), e
    else:
        assert labels == 'one-hot' and got == verdict(m, x, y)


def test_soft_labels_count_as_their_largest_entry_in_every_number(learn):
    x, y = [o[:40] for o in valid(learn)]
    soft = 0.8 * nn.functional.one_hot(y, 4) + 0.05
    a, b = [robust_report(learn.model, (x, o), [PGD(EPS, steps=3)]) for o in (y, soft)]
    assert a.df.accuracy.tolist() == b.df.accuracy.tolist()


@pytest.mark.parametrize('bs', [0, True])
def test_a_batch_size_of_nothing_is_refused(bs):
    "Else no image would be attacked, and all would count as wrong"
    m, (x, y) = tiny_vit(num_classes=4), next(iter(synth_dls().valid))
    batches = [(torch.arange(len(x)), x, y)]
    for measure in (
        lambda: robust_report(m, synth_dls().valid, [ADV], bs=bs),
        lambda: eps_curve(m, (x, y), ADV, [EPS], bs=bs),
        lambda: How(bs),
        lambda: list(hunt(ADV, m, Feed(batches, np.ones(len(x), bool)), None, bs)),
    ):
        with pytest.raises(ValueError, match='bs must be a whole number >= 1'):
            measure()


def test_numbers_of_steps_are_not_rounded():
    with pytest.raises(ValueError, match='steps must be a whole number >= 0, got 2.7'):
        steps_curve(tiny_vit(num_classes=4), (torch.rand(2, 1, 28, 28), torch.tensor([0, 1])), ADV, [2.7])
