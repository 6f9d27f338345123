"`robust_report`, `Run` and the curves: rows by hand, data, files, resumption, refusals (R05, R14, R26-R29, R31, R33)."

import copy
import json
import random
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.schedule import *
from fastai.vision.all import Callback, Learner, Normalize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import robust_nbdev.evaluate as ev
from robust_nbdev.adv_train import *
from robust_nbdev.attacks import *
from robust_nbdev.core import *
from robust_nbdev.datasets import ImageSource, embedded_fashion, image_dls
from robust_nbdev.evaluate import *
from robust_nbdev.patch_attacks import RandomOcclusion
from robust_nbdev.test_utils import *

E = 0.05
FGSM_, PGD_, APGD_ = FGSM(E), PGD(E, steps=4), APGD(E, steps=5)
THREE = [FGSM_, PGD_, APGD_]


@pytest.fixture(scope='module')
def learn():
    l = synth_learner(dls=synth_dls(n=512, bs=32, seed=1))
    l.fit_one_cycle(5, 4e-3)
    l.model.eval()
    return l


@pytest.fixture(scope='module')
def model(learn):
    return learn.model


@pytest.fixture(scope='module')
def data():
    "100 images, of which the first seven are labelled wrongly"
    x, y = zip(*[(x.as_subclass(torch.Tensor), int(y)) for x, y in synth_dls(n=400, seed=9).valid_ds])
    y = torch.tensor(y)
    y[:7] = (y[:7] + 1) % 4
    return torch.stack(x), y


@pytest.fixture(scope='module')
def report(model, data):
    "The usual report, in a cascade"
    return robust_report(model, data, THREE)


class Of(nn.Module):
    "`f(model, x)` as a model"

    def __init__(self, model, f):
        super().__init__()
        self.model, self.f = model, f

    def forward(self, x):
        return self.f(self.model, x)


def right(m, x, y, a, seed=0):
    "Who is right without attack and under it, by the plain call"
    return ((predict(m, a(m, x, y, seed=seed)) == y) & (predict(m, x) == y)).numpy()


def acc(rep, row):
    name = row if isinstance(row, str) else repr(row)
    (found,) = [r for r in rep.rows if r['attack'] == name]
    return found['accuracy']


def verdicts(rep, a):
    return rep.verdicts[repr(a)].tolist()


def untimed(rep):
    return [{k: v for k, v in r.items() if k != 'seconds'} for r in rep.rows]


# --- rows ---


def test_rows_by_hand(model, data):
    rep = robust_report(model, data, THREE, cascade=False)
    clean = (predict(model, data[0]) == data[1]).numpy()
    each = [right(model, *data, a) for a in THREE]
    assert acc(rep, 'clean') == pytest.approx(clean.mean()) and rep.df.n.tolist() == [100] * 5
    assert [verdicts(rep, a) for a in THREE] == [ok.tolist() for ok in each]
    worst = np.logical_and.reduce(each)
    assert acc(rep, 'worst case') == pytest.approx(worst.mean()) and 0 < worst.mean() < each[0].mean()


def test_cascade_by_hand(model, data, report):
    left = (predict(model, data[0]) == data[1]).numpy()
    for a in THREE:
        left = left & right(model, *data, a)
        assert acc(report, a) == pytest.approx(left.mean())
    assert acc(report, 'worst case') == pytest.approx(left.mean())


def test_the_title_says_which_rows_share_their_survivors(model, data, tmp_path):
    "Attacks of another radius or budget start from all images that are right, and the title does not say otherwise"
    few = data[0][:16], data[1][:16]
    title = lambda *attacks, **kw: robust_report(model, few, [*attacks], **kw).meta['title']
    two = FGSM_, FGSM(2 * E)
    assert title(FGSM_, PGD_).endswith('seed=0, each attack on the images that survived the rows above')
    assert title(*two, out=tmp_path).endswith('survived the rows above with the same norm and eps')
    assert Report.load(tmp_path).meta['title'] == title(*two)
    assert title(FGSM_, RandomOcclusion(patch=7)).endswith('with the same norm and eps or budget')
    assert title(RandomOcclusion(patch=7), RandomOcclusion(share=0.2, patch=7)).endswith(
        'the rows above with the same budget'
    )
    assert title(*two, cascade=False).endswith('seed=0, each attack alone')


def test_the_seed_reaches_the_attack(model, data):
    rep = robust_report(model, data, [PGD_], seed=3)
    assert verdicts(rep, PGD_) == right(model, *data, PGD_, seed=3).tolist() and rep.rows[1]['seed'] == 3


def test_the_batch_size_changes_nothing(model, data):
    m, d = copy.deepcopy(model).double(), (data[0][:24].double(), data[1][:24])
    one, other = [robust_report(m, d, [FGSM_, APGD_], bs=o) for o in (64, 7)]
    assert all(verdicts(one, a) == verdicts(other, a) for a in (FGSM_, APGD_))


def test_reports_leave_the_random_state(model, data):
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    robust_report(model, data, [FGSM_])
    eps_curve(model, data, FGSM_, [0.0, 0.1])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


# --- one run ---


def test_a_run_refuses_another_attack_of_the_same_name(model, data):
    up, down = [PGD(E, steps=1, loss=lambda z, y, k=k: k * ce(z, y)) for k in (1, -1)]
    run = Run(model, data)
    run.measure(up)
    with pytest.raises(ValueError, match='print alike'):
        run.measure(down)


def test_rows_of_a_folder_wait_for_their_attack(model, data, report, tmp_path):
    "Rows that nobody has asked for yet are on disk still while the run goes on"
    robust_report(model, data, [FGSM_, PGD_], out=tmp_path)
    run = Run(model, data, out=tmp_path)
    run.measure(FGSM(E / 2))
    assert {repr(FGSM_), repr(PGD_)} <= {r['attack'] for r in Report.load(tmp_path).rows}
    run.measure(FGSM_)
    with pytest.warns(UserWarning, match='does not ask for'):
        rep = run.report()
    assert rep.df.attack.tolist() == ['clean', repr(FGSM(E / 2)), repr(FGSM_)]
    assert verdicts(rep, FGSM_) == verdicts(report, FGSM_)


# --- data ---

SOURCES = dict(
    torch=lambda x, y: DataLoader(TensorDataset(x, y), batch_size=13),
    batches=lambda x, y: [(x[:60], y[:60]), (x[60:], y[60:])],
    numpy=lambda x, y: (x.numpy(), y.numpy()),
    small_integers=lambda x, y: (x, y.to(torch.uint8)),
)


@pytest.mark.parametrize('kind', SOURCES)
def test_sources_agree(model, data, report, kind):
    assert verdicts(robust_report(model, SOURCES[kind](*data), [FGSM_]), FGSM_) == verdicts(report, FGSM_)


def test_fastai_loaders_are_read_in_order_and_to_the_end(learn):
    dl = learn.dls.train
    x, y = [torch.stack([torch.as_tensor(o[i]).as_subclass(torch.Tensor) for o in dl.dataset]) for i in (0, 1)]
    rep = robust_report(learn.model, dl.new(bs=30, shuffle=True, drop_last=True), [])
    assert rep.verdicts['clean'].tolist() == (predict(learn.model, x) == y).tolist() and len(y) == 512


def normalised(model, data):
    dls = synth_dls(n=16)
    dls.add_tfms([Normalize.from_stats([0.5], [0.5])], 'after_batch')
    return model, dls.valid


def loader(**kw):
    return lambda m, d: (m, DataLoader(TensorDataset(*d), batch_size=64, **kw))


one_output = nn.Sequential(nn.Flatten(), nn.Linear(784, 1))
REFUSED = {
    'fewer labels': (lambda m, d: (m, (d[0], d[1][:64])), 'labels'),
    'dropped': (loader(drop_last=True), 'drop_last'),
    'shuffled': (loader(shuffle=True), 'the DataLoader shuffles'),
    'read once': (lambda m, d: (m, zip(d[0].split(50), d[1].split(50))), 'only once'),
    'empty': (lambda m, d: (m, (d[0][:0], d[1][:0])), 'empty'),
    'three tensors': (lambda m, d: (m, [(d[0], d[1], d[1])]), 'of 3'),
    'Normalize': (normalised, 'ends with Normalize'),
    'range': (lambda m, d: (m, (d[0] * 2, d[1])), r'\[0,1\]'),
    'DataLoaders': (lambda m, d: (m, synth_dls(n=16)), 'dls.valid'),
    'Learner': (lambda m, d: (synth_learner(), d), 'learn.model'),
    'one output': (lambda m, d: (one_output, (d[0], 0 * d[1])), 'one output'),
}


@pytest.mark.parametrize('kind', REFUSED)
def test_what_is_no_data_or_no_model(model, data, kind):
    make, words = REFUSED[kind]
    with pytest.raises((TypeError, ValueError), match=words):
        robust_report(*make(model, data), [FGSM_])


NO_ATTACK = {
    'class': (PGD, 'PGD is a class'),
    'text': ('pgd', 'expected an attack'),
    'no seed': (lambda m, x, y: x, 'seed=0'),
}


@pytest.mark.parametrize('kind', NO_ATTACK)
def test_what_is_no_attack(model, data, kind):
    bad, words = NO_ATTACK[kind]
    run = Run(model, data, n=2)
    for f in (lambda a: robust_report(model, data, [a]), run.measure, RobustAccuracy, AdvValid, AdvTrain):
        with pytest.raises(TypeError, match=words):
            f(bad)


# --- warnings ---


def test_weak_to_strong_is_checked(model, data):
    weak = PGD(E, steps=0)
    wrong, correct = [robust_report(model, data, o, cascade=False).warnings for o in ([PGD_, weak], [weak, PGD_])]
    assert any('stronger than' in o for o in wrong) and not any('stronger than' in o for o in correct)


def test_a_difference_of_chance_is_no_wrong_order():
    from robust_nbdev.evaluate import _clearly_less

    of_48, of_4800 = [np.repeat([1.0, 0.0], [13 * k, 35 * k]) for k in (1, 100)]
    two_more, more = of_48.copy(), of_4800.copy()
    two_more[-2:] = more[-200:] = 1
    assert not _clearly_less(of_48, two_more) and _clearly_less(of_4800, more) and not _clearly_less(more, of_4800)


def test_a_constant_answer_is_no_robustness(data):
    x, y = data
    always = Of(None, lambda m, x: torch.tensor([0.0, 9.0, 0.0, 0.0]).expand(len(x), -1) + 0 * x.sum())
    (said,) = [o for o in robust_report(always, data, []).warnings if 'constant answer' in o]
    assert 'class 1 for 100%' in said
    assert not any('constant answer' in o for o in robust_report(always, (x, 0 * y + 1), []).warnings)


# --- files ---

FILES = ['predictions.npz', 'report.csv', 'report.html', 'report.json', 'report.png', 'verdicts.npz']


def test_files_agree(model, data, tmp_path):
    out = tmp_path / 'new' / 'folder'
    rep = robust_report(model, data, THREE, out=out)
    assert sorted(p.name for p in out.iterdir()) == FILES
    d, csv = json.loads((out / 'report.json').read_text()), pd.read_csv(out / 'report.csv')
    assert [(r['attack'], r['accuracy']) for r in d['rows']] == list(zip(csv.attack, csv.accuracy))
    assert (d['meta']['seed'], d['meta']['n'], d['meta']['torch']) == (0, 100, torch.__version__)
    assert d['warnings'] == rep.warnings and repr(Report.load(out)) == repr(rep)
    with np.load(out / 'verdicts.npz') as v:
        for a in THREE:
            assert v[repr(a)].mean() == pytest.approx(acc(rep, a))


def test_nothing_is_printed_unless_asked(model, data, capsys):
    robust_report(model, data, [FGSM_])
    o = capsys.readouterr()
    assert o.out == o.err == ''


class CountsCalls:
    "An attack that counts its calls, and may fail"

    eps, norm = E, 'Linf'

    def __init__(self, attack, name, fail=False):
        self.attack, self.name, self.fail, self.n = attack, name, fail, 0

    def __call__(self, model, x, y, seed=0):
        self.n += 1
        if self.fail:
            raise KeyboardInterrupt
        return self.attack(model, x, y, seed=seed)

    def __repr__(self):
        return self.name


def three(fail=False):
    return [CountsCalls(FGSM_, 'one'), CountsCalls(PGD_, 'two'), CountsCalls(APGD_, 'three', fail)]


def test_after_a_kill_only_what_is_missing_is_measured(model, data, tmp_path):
    data = data[0][:20], data[1][:20]
    with pytest.raises(KeyboardInterrupt):
        robust_report(model, data, three(fail=True), out=tmp_path)
    again = three()
    rep = robust_report(model, data, again, out=tmp_path)
    assert [a.n > 0 for a in again] == [False, False, True]
    assert untimed(rep) == untimed(robust_report(model, data, three())) == untimed(Report.load(tmp_path))


def test_a_finished_report_is_measured_again_only_to_overwrite_it(model, data, tmp_path):
    data = data[0][:20], data[1][:20]
    rep = robust_report(model, data, three(), out=tmp_path)
    done, fresh = three(), three()
    assert untimed(robust_report(model, data, done, out=tmp_path)) == untimed(rep)
    robust_report(model, data, fresh, out=tmp_path, overwrite=True)
    assert not any(a.n for a in done) and all(a.n for a in fresh)


@pytest.mark.parametrize('when', ['verdicts.npz', 'report.json'])
def test_killed_while_writing(model, data, report, tmp_path, monkeypatch, when):
    "Whichever of the files is the last one written, the resumed table is whole"
    atomic = ev._atomic

    def stop(path, write):
        if path.name == when:
            raise KeyboardInterrupt
        atomic(path, write)

    robust_report(model, data, [FGSM_], out=tmp_path)
    monkeypatch.setattr(ev, '_atomic', stop)
    with pytest.raises(KeyboardInterrupt):
        robust_report(model, data, THREE, out=tmp_path)
    monkeypatch.setattr(ev, '_atomic', atomic)
    assert untimed(robust_report(model, data, THREE, out=tmp_path)) == untimed(report)


def test_a_column_of_ones_own_stays_with_the_folder(model, data, tmp_path):
    "For the rows that are not measured again; it cannot take the place of what a row holds"
    rep = robust_report(model, data, [FGSM_], out=tmp_path)
    with pytest.raises(ValueError, match='already'):
        rep.add_column('threat', lambda *o: 0)
    rep.add_column('wrong', lambda row, ok, pred: int((~ok).sum())).save(tmp_path)
    assert 'wrong' not in rep.rows[1]
    again = robust_report(model, data, [FGSM_, PGD_], out=tmp_path)
    assert again.df.wrong[:2].tolist() == rep.df.wrong[:2].tolist() and again.df.wrong[2:].isna().all()


def moved(model):
    m = copy.deepcopy(model)
    with torch.no_grad():
        next(m.parameters())[0] += 1e-3
    return m


CHANGES = dict(
    model=lambda m, x, y: dict(model=moved(m)),
    order=lambda m, x, y: dict(data=(x.flip(0), y.flip(0))),
    labels=lambda m, x, y: dict(data=(x, (y + 1) % 4)),
    seed=lambda m, x, y: dict(seed=1),
    cascade=lambda m, x, y: dict(cascade=False),
)


@pytest.mark.parametrize('what', CHANGES)
def test_a_report_of_something_else_is_refused(model, data, tmp_path, what):
    data = data[0][:20], data[1][:20]
    robust_report(model, data, [FGSM_], out=tmp_path)
    old = (tmp_path / 'report.json').read_text()
    kw = dict(model=model, data=data, attacks=[FGSM_], out=tmp_path) | CHANGES[what](model, *data)
    with pytest.raises(ValueError, match='overwrite=True'):
        robust_report(**kw)
    assert (tmp_path / 'report.json').read_text() == old
    robust_report(**kw, overwrite=True)
    assert (tmp_path / 'report.json').read_text() != old


def test_the_same_weights_with_other_answers_are_refused(model, data, tmp_path):
    from robust_nbdev.vit import attn_scale

    with attn_scale(model, 30.0):
        robust_report(model, data, [FGSM_], out=tmp_path)
    with pytest.raises(ValueError, match='clean predictions'):
        robust_report(model, data, [FGSM_], out=tmp_path)


def test_a_function_cannot_be_recognised_and_is_not_resumed(model, data, tmp_path):
    robust_report(lambda x: model(x), data, [FGSM_], out=tmp_path)
    with pytest.raises(ValueError, match='plain function'):
        robust_report(lambda x: -model(x), data, [FGSM_], out=tmp_path)


@pytest.fixture
def added(monkeypatch):
    "How many images the batches had, one after another; each is saved. `stop_after` batches the run is interrupted"
    seen, real = SimpleNamespace(batches=[], stop_after=None), ev._Progress.add

    def add(self, i, found):
        real(self, i, found)
        seen.batches.append(len(i))
        if len(seen.batches) == seen.stop_after:
            raise KeyboardInterrupt

    monkeypatch.setattr(ev._Progress, 'every', -1)
    monkeypatch.setattr(ev._Progress, 'add', add)
    return seen


def begun(seen, model, data, out):
    "Interrupt a row after two batches of ten images"
    seen.stop_after = len(seen.batches) + 2
    with pytest.raises(KeyboardInterrupt):
        robust_report(model, data, [FGSM_], bs=10, out=out)
    seen.stop_after, seen.batches[:] = None, []


def test_a_begun_row_of_a_function_is_not_taken_up(model, data, added, tmp_path):
    "Two functions of one code, which differ in what they hold, and not on the first images"

    def by(sign):
        return lambda x: (
            torch.where(torch.isin(x.sum((1, 2, 3)), data[0][:20].sum((1, 2, 3)))[:, None], 1, sign) * model(x)
        )

    begun(added, by(1), data, tmp_path)
    rep = robust_report(by(-1), data, [FGSM_], out=tmp_path)
    assert acc(rep, FGSM_) == acc(robust_report(by(-1), data, [FGSM_]), FGSM_)


@pytest.mark.parametrize('bs', [4, 64])
def test_a_begun_row_goes_on_with_batches_of_another_size(bs, model, data, added, tmp_path):
    "What one does after running out of memory"
    begun(added, model, data, tmp_path)
    rep = robust_report(model, data, [FGSM_], bs=bs, out=tmp_path)
    rest, added.batches[:] = sum(added.batches), []
    fresh = robust_report(model, data, [FGSM_])
    assert acc(rep, FGSM_) == acc(fresh, FGSM_) and rest == sum(added.batches) - 20


def test_a_damaged_report_is_refused_in_words(model, data, tmp_path):
    robust_report(model, data, [FGSM_], out=tmp_path)
    (tmp_path / 'report.json').write_text('{"meta": ')
    with pytest.raises(ValueError, match=str(tmp_path)):
        robust_report(model, data, [FGSM_], out=tmp_path)


def test_a_file_is_no_folder(model, data, tmp_path):
    (tmp_path / 'f').touch()
    with pytest.raises(ValueError, match='must be a folder'):
        robust_report(model, data, [FGSM_], out=tmp_path / 'f')


def test_the_worst_case_counts_the_rows_asked_for(model, data, tmp_path):
    data = data[0][:20], data[1][:20]
    robust_report(model, data, THREE, out=tmp_path)
    d = robust_report(model, data, [FGSM_, APGD_], out=tmp_path).df
    assert d.attack.tolist() == ['clean', repr(FGSM_), repr(APGD_), 'worst case']
    assert d.accuracy.iloc[-1] == d.accuracy.iloc[:-1].min()


# --- of a Learner, and curves ---


def test_training_images_are_attacked_in_order_and_without_augmentation():
    "Flipped, shifted and shuffled in training; a report sees each once, as validation would show it"
    x, y = [np.random.default_rng(0).integers(0, hi, shape) for hi, shape in ((256, (40, 16, 16, 3)), (4, 40))]
    src = ImageSource(dict(train=(x.astype(np.uint8), y), test=(x[:8].astype(np.uint8), y[:8])), list('abcd'))
    dls = image_dls(src, bs=16, num_workers=0, device='cpu')
    learn = Learner(dls, tiny_vit(size=16, patch=4, in_chans=3, num_classes=4).model)
    pixels = torch.as_tensor(x).permute(0, 3, 1, 2) / 255
    by_hand = robust_report(learn.model, (pixels, torch.as_tensor(y)), [FGSM_], n=None)
    for given in (dict(dl=dls.train), dict(ds_idx=0)):
        rep = learn.robust_report([FGSM_], **given)
        assert rep.meta['data'] == by_hand.meta['data'] and verdicts(rep, FGSM_) == verdicts(by_hand, FGSM_)
    one, two = [dls.train.new(shuffle=False).one_batch()[0] for _ in range(2)]
    assert not torch.equal(one, two)  # the Learner's own loader augments as before


def test_the_report_of_a_learner(learn):
    rep = learn.robust_report([None, FGSM_])
    x, y = [torch.cat([b[i].as_subclass(torch.Tensor) for b in learn.dls.valid]) for i in (0, 1)]
    assert rep.df.attack.tolist() == ['clean', repr(FGSM_)] and rep.rows[0]['n'] == len(learn.dls.valid_ds)
    assert verdicts(rep, FGSM_) == right(learn.model, x, y, FGSM_).tolist()


def test_images_that_the_learner_was_trained_on_are_counted():
    "Five of these ten; and those of its own validation without a word"
    half = image_dls(embedded_fashion(), n_train=50, n_valid=10, mode='L', valid='holdout')
    mine = Learner(half, nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), loss_func=nn.CrossEntropyLoss())
    keys = half.train_ds.keys.copy()
    half.valid_ds.keys[:5] = keys[:5]
    rep = mine.robust_report([], dl=half.valid)
    assert [o for o in rep.warnings if 'trained on 5 of these 10 images' in o]
    assert not [o for o in mine.robust_report([]).warnings if 'trained' in o]


class Inverted(Callback):
    "What a defence may do to images before the model sees them"

    def before_batch(self):
        self.learn.xb = (1 - self.x,)


def test_a_callback_that_changes_what_is_predicted_is_named(learn, tmp_path):
    "The model alone is attacked, and the file says so too"
    mine = Learner(learn.dls, learn.model, loss_func=nn.CrossEntropyLoss(), cbs=Inverted())
    before = torch.get_rng_state()
    rep = mine.robust_report([], out=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    (said,) = [o for o in rep.warnings if 'callbacks of the Learner (Inverted) change what it predicts' in o]
    assert said in json.loads((tmp_path / 'report.json').read_text())['warnings']


class Counted(Inverted):
    def before_batch(self):
        self.seen = len(self.x)


class Away(Callback):
    "Other weights while it validates, as an average of weights may be written"

    def before_validate(self):
        self.was = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict({k: -v if v.is_floating_point() else v for k, v in self.was.items()})

    def after_validate(self):
        self.model.load_state_dict(self.was)


class Failing(Callback):
    def before_batch(self):
        raise KeyError('another callback')


def test_callbacks_are_looked_at_without_a_trace(learn):
    "Nothing that the Learner recorded is lost, its loss is not asked, and a callback that fails is no end"
    mine = Learner(learn.dls, copy.deepcopy(learn.model), loss_func=nn.CrossEntropyLoss(), cbs=[Away(), Inverted()])
    mine.fit(1, 0.0)
    mine.loss_func = None
    before = {k: v.clone() for k, v in mine.model.state_dict().items()}
    losses, values, seen = len(mine.recorder.losses), list(mine.recorder.values), {**vars(mine)}
    says = mine.robust_report([]).warnings
    assert any('(Away, Inverted) change what it predicts' in o for o in says)
    assert (len(mine.recorder.losses), mine.recorder.values) == (losses, values) and losses > 0
    assert [k for k, v in vars(mine).items() if v is not seen.get(k)] == []
    assert all(torch.equal(v, before[k]) for k, v in mine.model.state_dict().items())
    mine.add_cb(Failing())
    assert any('what they change is open (KeyError' in o for o in mine.robust_report([]).warnings)


def test_a_callback_that_changes_nothing_is_not_named(learn):
    mine = Learner(learn.dls, learn.model, loss_func=nn.CrossEntropyLoss(), cbs=Counted())
    assert not [o for o in mine.robust_report([]).warnings if 'callbacks' in o]


def test_a_model_that_is_no_better_than_guessing_is_named():
    "27 of 100 images of four classes may be luck, 60 are not"
    x, y = torch.rand(100, 1, 4, 4), torch.arange(100) % 4

    def knows(k):
        z = nn.functional.one_hot(torch.where(torch.arange(100) < k, y, (y + 1) % 4), 4).float()
        return lambda xs: torch.stack([z[int((x == o).flatten(1).all(1).nonzero()[0])] for o in xs])

    says = lambda k: [o for o in robust_report(knows(k), (x, y), []).warnings if 'told from guessing (25.0%)' in o]
    assert says(27) and not says(60)


def test_a_curve_by_hand(model, data, report):
    c = eps_curve(model, data, PGD(steps=3), [0, 0.02, E, 0.1])
    want = [right(model, *data, PGD(e, steps=3)).mean() for e in (0.02, E, 0.1)]
    assert c.df.accuracy.tolist() == pytest.approx([acc(report, 'clean'), *want])
    assert not any('rises' in o for o in c.warnings) and 'pgd3' in repr(c)


def test_a_curve_of_any_iterable(model, data):
    assert eps_curve(model, data, FGSM(), (e for e in (0.0, E))).df.eps.tolist() == [0, E]


def test_a_curve_sees_an_attack_that_fails_at_large_eps(model, data):
    class Weak(PGD):
        def __call__(self, model, x, y=None, **kw):
            return super().__call__(model, x, y, **kw) if self.eps < 0.15 else x

    c = eps_curve(model, data, Weak(steps=3), [0.1, 0.2])
    assert any('accuracy rises' in o for o in c.warnings)
