"`robust_report` and `eps_curve`: rows by hand, worst cases, files, resumption, refusals (R05, R14, R26-R29, R31, R33)."

import json
import numpy as np, pandas as pd, pytest, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from fastai.vision.all import Normalize
from fastai.callback.schedule import *
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.adv_train import *
from robust_nbdev.evaluate import *
from robust_nbdev.eval_data import packed
from robust_nbdev.identity import fingerprint
from robust_nbdev.test_utils import *

E = 0.05
A = dict(fgsm=FGSM(E), pgd=PGD(E, steps=4), apgd=APGD(E, steps=5))


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
    x, y = zip(*[(x.as_subclass(torch.Tensor), y) for x, y in synth_dls(n=400, seed=9).valid_ds])
    # wrong from the start
    y = torch.stack([torch.as_tensor(int(o)) for o in y])
    y[:7] = (y[:7] + 1) % 4
    return torch.stack(x), y


def right(m, x, y, a, seed=0):
    return ((predict(m, a(m, x, y, seed=seed)) == y) & (predict(m, x) == y)).numpy()


def acc(rep, k):
    (r,) = [r for r in rep.rows if r['attack'] == (k if isinstance(k, str) else repr(k))]
    return r['accuracy']


# --- rows
# --------------------------------------------------------------------------------------------------------------------


def test_rows_by_hand(model, data):
    x, y = data
    rep = robust_report(model, data, list(A.values()), cascade=False)
    clean = (predict(model, x) == y).numpy()
    assert acc(rep, 'clean') == pytest.approx(clean.mean()) and clean.mean() <= 0.93 and rep.df.n.tolist() == [100] * 5
    each = [right(model, x, y, a) for a in A.values()]
    for a, ok in zip(A.values(), each):
        assert acc(rep, a) == pytest.approx(ok.mean()) and (rep.verdicts[repr(a)] == ok).all()
    worst = np.logical_and.reduce(each)
    assert acc(rep, 'worst case') == pytest.approx(worst.mean()) and 0 < worst.mean() < each[0].mean()
    # already wrong stays wrong
    assert not any(rep.verdicts[repr(a)][:7].any() for a in A.values())


def test_cascade_by_hand(model, data):
    x, y = data
    rep = robust_report(model, data, list(A.values()))
    stand = (predict(model, x) == y).numpy()
    for a in A.values():
        stand = stand & right(model, x, y, a)
        assert acc(rep, a) == pytest.approx(stand.mean())
    assert acc(rep, 'worst case') == pytest.approx(stand.mean())
    assert acc(robust_report(model, data, list(A.values()), cascade=False), 'worst case') == acc(rep, 'worst case')


def test_worst_case_is_never_above_a_row_and_never_mixes_threat_models(model, data):
    rep = robust_report(
        model, data, [A['fgsm'], A['pgd'], FGSM(0.6, norm='L2'), PGD(0.6, norm='L2', steps=4), FGSM(0.1)]
    )
    worst = {r['attack']: r for r in rep.rows if r['attack'].startswith('worst')}
    assert set(worst) == {f'worst case Linf {E}', 'worst case L2 0.6'}
    for w in worst.values():
        assert all(w['accuracy'] <= r['accuracy'] for r in rep.rows if (r['norm'], r['eps']) == (w['norm'], w['eps']))


def test_random_noise_does_not_raise_the_worst_case(model, data):
    "R26: a weak attack may be added, never averaged"
    weak = PGD(E, steps=0)
    a, b = [robust_report(model, data, o, cascade=c) for o, c in (([A['pgd']], False), ([weak, A['pgd']], False))]
    assert acc(b, 'worst case') <= acc(a, A['pgd'])


def test_eps_0_row_is_the_clean_row(model, data):
    rep = robust_report(model, data, [PGD(0), FGSM(0, norm='L2')])
    assert acc(rep, PGD(0)) == acc(rep, FGSM(0, norm='L2')) == acc(rep, 'clean')


def test_seed_reaches_the_attack(model, data):
    a = PGD(E, steps=1, alpha=0.0)
    one, two = robust_report(model, data, [A['pgd']], seed=3), robust_report(model, data, [A['pgd']], seed=3)
    assert (
        (one.verdicts[repr(A['pgd'])] == right(model, *data, A['pgd'], seed=3)).all()
        and (one.verdicts[repr(A['pgd'])] == two.verdicts[repr(A['pgd'])]).all()
        and one.rows[1]['seed'] == 3
    )


@pytest.mark.parametrize('bs', [1, 7, 64, 300])
def test_batch_size_changes_nothing(model, data, bs):
    m = model.double()
    d = (data[0].double(), data[1])
    try:
        a, b = robust_report(m, d, list(A.values())), robust_report(m, d, list(A.values()), bs=bs)
    finally:
        model.float()
    assert all((a.verdicts[k] == b.verdicts[k]).all() for k in a.verdicts)


def test_train_mode_is_reported_and_makes_no_difference(model, data):
    a = robust_report(model, data, [A['fgsm']])
    model.train()
    try:
        b = robust_report(model, data, [A['fgsm']])
        assert all(o.training for o in model.modules())
    finally:
        model.eval()
    assert (
        (a.verdicts[repr(A['fgsm'])] == b.verdicts[repr(A['fgsm'])]).all()
        and any('training mode' in o for o in b.warnings)
        and not any('training mode' in o for o in a.warnings)
    )


def test_interval_is_wilsons():
    "By hand: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)"
    for k, n in ((0, 10), (7, 10), (500, 1000)):
        p, z = k / n, 1.959963985
        mid, half, den = p + z * z / 2 / n, z * (p * (1 - p) / n + z * z / 4 / n / n) ** 0.5, 1 + z * z / n
        assert interval(k, n) == pytest.approx(((mid - half) / den, (mid + half) / den), abs=1e-4)


# --- data
# --------------------------------------------------------------------------------------------------------------------


def test_sources_agree(model, data, learn):
    x, y = data
    want = robust_report(model, data, [A['fgsm']]).verdicts[repr(A['fgsm'])]
    for src in (
        DataLoader(TensorDataset(x, y), batch_size=13),
        [(x[:60], y[:60]), (x[60:], y[60:])],
        (x, y.tolist()),
        (x.numpy(), y.numpy()),
        (x, y.to(torch.uint8)),
    ):
        assert (robust_report(model, src, [A['fgsm']]).verdicts[repr(A['fgsm'])] == want).all()


def test_labels_must_match_the_images_in_number(model, data):
    x, y = data
    for bad in (y[:64], torch.cat([y, y])):
        with pytest.raises(ValueError, match='labels'):
            robust_report(model, (x, bad), [], bs=32)


def test_fastai_loaders_are_read_in_order_and_to_the_end(learn):
    # shuffles, drops the last batch
    dl = learn.dls.train
    x, y = [torch.stack([torch.as_tensor(o[i]).as_subclass(torch.Tensor) for o in dl.dataset]) for i in (0, 1)]
    rep = robust_report(learn.model, dl.new(bs=30, shuffle=True, drop_last=True), [], bs=64)
    assert (rep.verdicts['clean'] == (predict(learn.model, x) == y).numpy()).all() and len(rep.verdicts['clean']) == 512


def test_torch_loader_that_drops_is_refused_or_completed(model, data):
    "R28: nothing is dropped without a word"
    dl = DataLoader(TensorDataset(*data), batch_size=64, drop_last=True)
    try:
        rep = robust_report(model, dl, [])
    except ValueError as e:
        assert 'drop_last' in str(e)
    else:
        assert rep.rows[0]['n'] == 100 or any('drop_last' in o for o in rep.warnings)


def test_shuffled_torch_loader_is_refused(model, data):
    with pytest.raises(ValueError, match='changed between two passes'):
        robust_report(model, DataLoader(TensorDataset(*data), batch_size=64, shuffle=True), [A['fgsm']])


def test_subset_and_too_many(model, data):
    assert robust_report(model, data, [A['fgsm']], n=30, bs=64).df.n.tolist() == [30, 30]
    assert (
        robust_report(model, data, [], n=70, bs=32).verdicts['clean']
        == robust_report(model, data, []).verdicts['clean'][:70]
    ).all()
    with pytest.raises(ValueError, match='asked for n=101 images, the data has 100'):
        robust_report(model, data, [], n=101)
    with pytest.raises(ValueError, match='empty'):
        robust_report(model, (data[0][:0], data[1][:0]), [])


def test_bad_batches_are_refused(model, data, learn):
    with pytest.raises(ValueError, match='of 3'):
        robust_report(model, [(data[0], data[1], data[1])], [])
    dls = synth_dls(n=16)
    dls.add_tfms([Normalize.from_stats([0.5], [0.5])], 'after_batch')
    with pytest.raises(ValueError, match='ends with Normalize'):
        robust_report(model, dls.valid, [])
    with pytest.raises(ValueError, match=r'\[0,1\]'):
        robust_report(model, (data[0] * 2, data[1]), [])


def test_packed_keeps_order_fills_batches_and_little_memory():
    live = [0]

    def src():
        for i in range(0, 200, 10):
            yield torch.arange(i, i + 10), torch.arange(i, i + 10.0)[:, None], torch.arange(i, i + 10)

    keep = torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.3
    bs = list(packed(src(), keep, 16))
    assert (
        [len(b[0]) for b in bs[:-1]] == [16] * (len(bs) - 1)
        and torch.equal(torch.cat([b[0] for b in bs]), keep.nonzero()[:, 0])
        and all(torch.equal(b[0], b[2]) and torch.equal(b[0].float(), b[1][:, 0]) for b in bs)
    )
    assert list(packed(src(), torch.zeros(200, dtype=torch.bool), 16)) == []


def test_packed_never_holds_more_than_two_batches():
    "While it yields, the images drawn from the source and not yet handed out are fewer than two batches"
    drawn, given, worst = 0, 0, 0

    def src():
        nonlocal drawn
        for i in range(0, 320, 16):
            drawn += 16
            yield torch.arange(i, i + 16), torch.rand(16, 1), torch.zeros(16)

    for b in packed(src(), torch.ones(320, dtype=torch.bool), 24):
        given += len(b[0])
        worst = max(worst, drawn - given)
    assert given == 320 and worst < 2 * 24


# --- models
# --------------------------------------------------------------------------------------------------------------------


def test_batch_norm_models_have_a_fingerprint():
    m = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 4)).eval()
    a = fingerprint(m)
    assert len(a) == 16
    with torch.no_grad():
        m[1].running_mean[0] += 1e-6
    assert fingerprint(m) != a
    robust_report(m, (torch.rand(4, 1, 6, 6), torch.arange(4)), [FGSM(0.1)])


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_fingerprint_of_any_type(dtype):
    assert len(fingerprint(nn.Linear(3, 3).to(dtype))) == 16


def test_functions_are_models(model, data):
    assert acc(robust_report(lambda x: model(x), data, [A['fgsm']]), A['fgsm']) == acc(
        robust_report(model, data, [A['fgsm']]), A['fgsm']
    )


@pytest.mark.parametrize(
    'f,words',
    [
        (lambda m, x: m(x).softmax(1), 'probabilities'),
        (lambda m, x: m(x.round()), 'exactly zero'),
        (lambda m, x: m(x + 0.2 * torch.randn_like(x)), 'random'),
    ],
)
def test_reports_carry_the_doubts(model, data, f, words):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = model

        def forward(self, x):
            return f(self.m, x)

    assert any(words in o for o in robust_report(M(), data, []).warnings)


def test_weak_to_strong_is_checked(model, data):
    rep = robust_report(model, data, [A['pgd'], PGD(E, steps=0)], cascade=False)
    assert any('stronger than' in o for o in rep.warnings) and any('100 images only' in o for o in rep.warnings)
    assert not any(
        'stronger than' in o for o in robust_report(model, data, [PGD(E, steps=0), A['pgd']], cascade=False).warnings
    )


def test_two_losses_of_one_name_are_two_attacks(model, data):
    "Verdicts of one attack are never shown for another"
    up, down = PGD(E, steps=3, loss=lambda z, y: ce(z, y)), PGD(E, steps=3, loss=lambda z, y: -ce(z, y))
    try:
        rep = robust_report(model, data, [up, down], cascade=False)
    except ValueError as e:
        assert 'print alike' in str(e)
    else:
        assert len([r for r in rep.rows if r['attack'].startswith('PGD')]) == 2


# --- files
# --------------------------------------------------------------------------------------------------------------------


def test_files_agree(model, data, tmp_path):
    rep = robust_report(model, data, list(A.values()), out=tmp_path / 'new' / 'folder')
    out = tmp_path / 'new' / 'folder'
    j, c = json.loads((out / 'report.json').read_text()), pd.read_csv(out / 'report.csv')
    assert sorted(p.name for p in out.iterdir()) == [
        'predictions.npz',
        'report.csv',
        'report.html',
        'report.json',
        'report.png',
        'verdicts.npz',
    ]
    assert [r['attack'] for r in j['rows']] == c.attack.tolist() == rep.df.attack.tolist() and [
        r['accuracy'] for r in j['rows']
    ] == c.accuracy.tolist()
    with np.load(out / 'verdicts.npz') as v:
        assert set(v) == {'clean', *map(repr, A.values())} and all(
            v[r['attack']].mean() == pytest.approx(r['accuracy']) and len(v[r['attack']]) == r['n']
            for r in j['rows']
            if r['attack'] in v
        )
    assert (
        j['warnings'] == rep.warnings
        and (j['meta']['seed'], j['meta']['n'], j['meta']['model']) == (0, 100, 'VisionTransformer')
        and j['meta']['torch'] == torch.__version__
    )
    assert repr(Report.load(out)) == repr(rep)


def test_text_and_html(model, data):
    rep = robust_report(model, data, [A['fgsm'], A['pgd']])
    assert (
        all(
            o in repr(rep)
            for o in (
                'clean',
                repr(A['fgsm']),
                repr(A['pgd']),
                'worst case',
                'warning: 100 images only',
                '95%',
                f'n=100',
                'seed=',
            )
        )
        and len(repr(rep).splitlines()) == 7
    )
    html = rep._repr_html_()
    assert (
        html.count('<tr') == 5
        and 'PGD(0.05, steps=4)' in html
        and '&lt;lambda&gt;' in robust_report(model, data, [FGSM(E, loss=lambda z, y: ce(z, y))])._repr_html_()
    )


def test_nothing_is_printed_unless_asked(model, data, capsys):
    robust_report(model, data, [A['fgsm']])
    o = capsys.readouterr()
    assert o.out == o.err == ''


class Counted:
    "An attack that counts its calls, and may fail"

    eps, norm = E, 'Linf'

    def __init__(self, a, name, fail=False):
        self.a, self.name, self.fail, self.n = a, name, fail, 0

    def __call__(self, model, x, y, seed=0):
        self.n += 1
        if self.fail:
            raise KeyboardInterrupt
        return self.a(model, x, y, seed=seed)

    def __repr__(self):
        return self.name


def test_resumed_after_a_kill_gives_the_same_table(model, data, tmp_path):
    mk = lambda fail: [Counted(A['fgsm'], 'one'), Counted(A['pgd'], 'two'), Counted(A['apgd'], 'three', fail)]
    first = mk(True)
    with pytest.raises(KeyboardInterrupt):
        robust_report(model, data, first, out=tmp_path)
    again = mk(False)
    rep = robust_report(model, data, again, out=tmp_path)
    assert [a.n > 0 for a in first] == [True] * 3 and [a.n for a in again[:2]] == [0, 0] and again[2].n > 0
    drop = lambda r: [{k: v for k, v in o.items() if k != 'seconds'} for o in r.rows]
    assert drop(rep) == drop(robust_report(model, data, mk(False))) and drop(Report.load(tmp_path)) == drop(rep)
    third = mk(False)
    assert drop(robust_report(model, data, third, out=tmp_path)) == drop(rep) and sum(a.n for a in third) == 0
    fresh = mk(False)
    robust_report(model, data, fresh, out=tmp_path, overwrite=True)
    assert all(a.n for a in fresh)


@pytest.mark.parametrize('when', ['predictions.npz', 'verdicts.npz', 'report.csv', 'report.json'])
def test_killed_while_writing(model, data, tmp_path, monkeypatch, when):
    "Whichever of the three files is the last one written, the resumed table is whole"
    import robust_nbdev.evaluate as ev

    atomic = ev._atomic
    robust_report(model, data, [A['fgsm']], out=tmp_path)

    def stop(path, write):
        if path.name == when:
            raise KeyboardInterrupt
        atomic(path, write)

    monkeypatch.setattr(ev, '_atomic', stop)
    with pytest.raises(KeyboardInterrupt):
        robust_report(model, data, [A['fgsm'], A['pgd']], out=tmp_path)
    monkeypatch.setattr(ev, '_atomic', atomic)
    rep = robust_report(model, data, [A['fgsm'], A['pgd']], out=tmp_path)
    assert (
        rep.df.attack.tolist() == ['clean', repr(A['fgsm']), repr(A['pgd']), 'worst case']
        and rep.df.accuracy.tolist() == robust_report(model, data, [A['fgsm'], A['pgd']]).df.accuracy.tolist()
    )


def test_another_list_of_attacks_gives_its_own_numbers(model, data, tmp_path):
    "R31: a row of the old list is used only where it means the same"
    robust_report(model, data, [A['apgd'], A['fgsm']], out=tmp_path)
    for attacks in ([A['fgsm']], [A['fgsm'], A['apgd']], [A['apgd'], A['pgd'], A['fgsm']]):
        got, want = robust_report(model, data, attacks, out=tmp_path), robust_report(model, data, attacks)
        for a in attacks:
            assert acc(got, a) == acc(want, a), (a, attacks)


def _other(model):
    import copy

    m = copy.deepcopy(model)
    with torch.no_grad():
        next(m.parameters())[0] += 1e-3
    return m


CHANGES = dict(
    model=lambda m, x, y: dict(model=_other(m)),
    images=lambda m, x, y: dict(data=(x * 0.99, y)),
    order=lambda m, x, y: dict(data=(x.flip(0), y.flip(0))),
    labels=lambda m, x, y: dict(data=(x, (y + 1) % 4)),
    seed=lambda m, x, y: dict(seed=1),
    n=lambda m, x, y: dict(n=50),
    cascade=lambda m, x, y: dict(cascade=False),
)


@pytest.mark.parametrize('what', CHANGES)
def test_a_report_of_something_else_is_refused(model, data, tmp_path, what):
    robust_report(model, data, [A['fgsm']], out=tmp_path)
    old = (tmp_path / 'report.json').read_text()
    kw = dict(model=model, data=data, seed=0) | CHANGES[what](model, *data)
    with pytest.raises(ValueError, match='overwrite=True'):
        robust_report(attacks=[A['fgsm']], out=tmp_path, **kw)
    assert (tmp_path / 'report.json').read_text() == old
    robust_report(attacks=[A['fgsm']], out=tmp_path, overwrite=True, **kw)


def test_a_function_cannot_be_recognised_and_is_not_resumed(model, data, tmp_path):
    f, g = (lambda x: model(x)), (lambda x: -model(x))
    robust_report(f, data, [A['fgsm']], out=tmp_path)
    try:
        got = robust_report(g, data, [A['fgsm']], out=tmp_path)
    except ValueError:
        return
    assert acc(got, A['fgsm']) == acc(robust_report(g, data, [A['fgsm']]), A['fgsm'])


def test_damaged_state_is_refused_in_words(model, data, tmp_path):
    robust_report(model, data, [A['fgsm']], out=tmp_path)
    (tmp_path / 'report.json').write_text('{"meta": ')
    with pytest.raises(ValueError, match=str(tmp_path)):
        robust_report(model, data, [A['fgsm']], out=tmp_path)


# --- of a Learner, and curves
# ------------------------------------------------------------------------------------------------------


def test_learner_verbs(learn, tmp_path):
    rep = learn.robust_report([None, A['fgsm']], out=tmp_path)
    x, y = [torch.cat([b[i].as_subclass(torch.Tensor) for b in learn.dls.valid]) for i in (0, 1)]
    assert (
        rep.rows[0]['n'] == len(learn.dls.valid_ds)
        and acc(rep, A['fgsm']) == pytest.approx(right(learn.model, x, y, A['fgsm']).mean())
        and rep.df.attack.tolist() == ['clean', repr(A['fgsm'])]
    )


def test_curve_by_hand(model, data):
    c = eps_curve(model, data, PGD(steps=3), [0, 0.02, E, 0.1])
    x, y = data
    assert c.df.accuracy.tolist() == pytest.approx(
        [
            (predict(model, x) == y).float().mean().item(),
            *(right(model, x, y, PGD(e, steps=3)).mean() for e in (0.02, E, 0.1)),
        ]
    )
    assert c.df.accuracy.is_monotonic_decreasing and not any('rises' in o for o in c.warnings) and 'pgd3' in repr(c)
    ax = c.plot(label='m')
    assert (
        ax.get_xlabel() == 'eps' and len(ax.lines) == 1 and ax.lines[0].get_ydata().tolist() == c.df.accuracy.tolist()
    )


def test_curve_of_any_iterable(model, data):
    assert (
        len(eps_curve(model, data, FGSM(), (e for e in (0.0, E))).df) == 2
        and len(eps_curve(model, data, FGSM(), np.array([0.0, E])).df) == 2
    )


def test_curve_sees_masked_gradients(model, data):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = model

        def forward(self, x):
            return self.m(x.detach() + 0 * x)

    c = eps_curve(M(), data, PGD(steps=3, rand=False), [0, 0.5, 1.0])
    assert any('any image can become grey' in o for o in c.warnings) and any('exactly zero' in o for o in c.warnings)


def test_curve_sees_an_attack_that_fails_at_large_eps(model, data):
    class Weak(PGD):
        def run(self, obj, x, seed):
            return super().run(obj, x, seed) if self.eps < 0.15 else x

    c = eps_curve(model, data, Weak(steps=3), [0.1, 0.2])
    assert any('accuracy rises' in o for o in c.warnings)


# --- found by a reviewer
# ----------------------------------------------------------------------------------------------------------


def test_one_output_is_refused():
    one = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    for y in (torch.zeros(8, 1), torch.zeros(8).long()):
        with pytest.raises((ValueError, TypeError), match='one output|one class per image'):
            robust_report(one, (torch.rand(8, 1, 8, 8), y), [FGSM(0.1)])


def test_several_classes_per_image_are_refused(model):
    with pytest.raises(ValueError, match='one class per image'):
        robust_report(model, (torch.rand(4, 1, 28, 28), torch.ones(4, 4)), [])


def test_data_that_can_be_read_once_is_refused(model, data):
    with pytest.raises(ValueError, match='only once'):
        robust_report(model, zip(data[0].split(50), data[1].split(50)), [A['fgsm']])


def test_resume_notices_a_model_that_acts_differently(model, data, tmp_path):
    from robust_nbdev.vit import attn_scale

    with attn_scale(model, 30.0):
        robust_report(model, data, [A['fgsm']], out=tmp_path)
    with pytest.raises(ValueError, match='clean predictions'):
        robust_report(model, data, [A['fgsm']], out=tmp_path)


def test_a_loss_of_ones_own_is_not_resumed(model, data, tmp_path):
    def mine(z, y):
        return -ce(z, y)

    a = robust_report(model, data, [PGD(E, steps=3, loss=mine)], out=tmp_path).df.accuracy[1]

    def mine(z, y):
        return ce(z, y)

    b = robust_report(model, data, [PGD(E, steps=3, loss=mine)], out=tmp_path).df.accuracy[1]
    assert b == robust_report(model, data, [PGD(E, steps=3, loss=mine)]).df.accuracy[1] < a


def test_worst_case_counts_the_rows_asked_for(model, data, tmp_path):
    robust_report(model, data, [A['fgsm'], A['pgd'], A['apgd']], out=tmp_path)
    d = robust_report(model, data, [A['fgsm'], A['apgd']], out=tmp_path).df
    assert d.accuracy.iloc[-1] <= d.accuracy.iloc[:-1].min() and d.attack.iloc[-1] == 'worst case' and len(d) == 4


def test_reports_leave_the_random_state(model, data):
    import random

    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    robust_report(model, data, [A['fgsm']])
    eps_curve(model, data, A['fgsm'], [0.0, 0.1])
    assert (
        torch.equal(before[0], torch.get_rng_state())
        and before[1] == random.getstate()
        and before[2] == np.random.get_state()[1].tolist()
    )


@pytest.mark.parametrize(
    'bad,words',
    [
        (PGD, 'PGD is a class'),
        (0.1, 'expected an attack'),
        ('pgd', 'expected an attack'),
        (lambda m, x, y: x, 'seed=0'),
    ],
)
def test_what_is_no_attack(bad, words, model, data):
    for f in (
        lambda: robust_report(model, data, [bad]),
        lambda: RobustAccuracy(bad),
        lambda: AdvValid(bad),
        lambda: AdvTrain(bad),
    ):
        with pytest.raises(TypeError, match=words):
            f()


def test_what_is_no_data_or_model(model, data):
    l = synth_learner()
    with pytest.raises(TypeError, match='dls.valid'):
        robust_report(model, l.dls, [])
    with pytest.raises(TypeError, match='learn.model'):
        robust_report(l, data, [])


def test_a_constant_answer_is_no_robustness(model, data):
    class Always(nn.Module):
        def forward(self, x):
            return torch.tensor([0.0, 9.0, 0.0, 0.0]).expand(len(x), -1) + 0 * x.sum()

    words = [o for o in robust_report(Always(), data, []).warnings if 'constant answer' in o]
    assert len(words) == 1 and 'class 1 for 100%' in words[0]
    one = torch.zeros_like(data[1]) + 1
    assert not [o for o in robust_report(Always(), (data[0], one), []).warnings if 'constant answer' in o]
