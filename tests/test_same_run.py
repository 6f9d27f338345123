"A row is taken from disk only if the same would be computed: by the attack, and by the model (R31)."

import json, os, warnings
import pytest, torch
from torch import nn
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.evaluate import *
from robust_nbdev.test_utils import *

E = 0.05


@pytest.fixture(scope='module')
def learn():
    l = synth_learner(dls=synth_dls(n=512, bs=32, seed=1))
    l.fit_one_cycle(5, 4e-3)
    l.model.eval()
    return l


@pytest.fixture(scope='module')
def data():
    x, y = zip(*[(x.as_subclass(torch.Tensor), int(y)) for x, y in synth_dls(n=320, seed=9).valid_ds])
    return torch.stack(x), torch.tensor(y)


class Masked(nn.Module):
    "Rounds its input, which has no gradient"

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net((x * 64).round() / 64)


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 64).round() / 64

    @staticmethod
    def backward(ctx, g):
        return g


class ByMode(Masked):
    "The same, with a backward that lets the gradient through (BPDA) or without: by a plain attribute"

    through = False

    def forward(self, x):
        return self.net(Round.apply(x) if self.through else (x * 64).round() / 64)


class Warm(Masked):
    t = 1.0

    def forward(self, x):
        return self.net(x) / self.t


def rows(rep):
    return [(r['attack'], r['accuracy']) for r in rep.rows]


def again(before, after, data, attacks, out, other=None):
    "The report on `after`, after one on `before` in the same folder; and what it should be"
    robust_report(before, data, attacks, out=out)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        rep = robust_report(after, data, other or attacks, out=out)
    return (
        rep,
        robust_report(after, data, other or attacks),
        [str(w.message) for w in heard if 'computed again' in str(w.message)],
    )


def by_mode(net, through):
    m = ByMode(net)
    m.through = through
    return m


def warm(net, t):
    m = Warm(net)
    m.t = t
    return m


MODELS = dict(
    attribute=lambda n: (by_mode(n, False), by_mode(n, True)),
    temperature=lambda n: (warm(n, 1.0), warm(n, 5.0)),
)
TOL = 0.05


@pytest.mark.parametrize('kind', MODELS)
def test_the_same_weights_behind_another_backward(learn, data, tmp_path, kind):
    data, (a, b) = (data[0][:40], data[1][:40]), MODELS[kind](learn.model)
    attacks = [PGD(E, steps=10, rand=False), APGD(E, steps=3)]
    got, want, says = again(a, b, data, attacks, tmp_path)
    assert rows(got) == rows(want)
    assert len(says) == 1
    assert '2 rows' in says[0]
    assert any('computed again' in w for w in got.warnings)
    if kind != 'temperature':
        assert want.rows[1]['accuracy'] < Report.load(tmp_path).rows[0]['accuracy'] - 0.2
    third = robust_report(b, data, attacks, out=tmp_path)
    assert [r['seconds'] for r in third.rows[1:]] == [r['seconds'] for r in got.rows[1:]]
    assert not any('computed again' in w for w in third.warnings)


def own(sign):
    return lambda z, y: sign * ce(z, y)


def surrogate(seed):
    return Transfer(tiny_vit(num_classes=4, seed=seed), PGD(0.3, steps=3))


ATTACKS = dict(
    closure=(lambda k: PGD(E, steps=3, loss=own(k)), -1, 1),
    surrogate=(surrogate, 0, 1),
)


@pytest.mark.parametrize('kind', ATTACKS)
def test_an_attack_that_has_changed_behind_its_name(learn, data, tmp_path, kind):
    data, (make, a, b) = (data[0][:40], data[1][:40]), ATTACKS[kind]
    below = FGSM(E)
    assert repr(make(a)) == repr(make(b))
    got, want, says = again(learn.model, learn.model, data, [make(a), below], tmp_path, [make(b), below])
    assert rows(got) == rows(want)
    assert len(says) == 1
    assert repr(make(b)) in says[0]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        same = robust_report(learn.model, data, [make(b), below], out=tmp_path)
    assert [r['seconds'] for r in same.rows[1:]] == [r['seconds'] for r in got.rows[1:]]


def test_a_row_that_was_cut_off_is_not_taken_from_another_attack(learn, data, tmp_path):
    make, a, b = ATTACKS['closure']

    class Stop(nn.Module):
        left = None

        def __init__(self):
            super().__init__()
            self.net = learn.model

        def forward(self, x):
            if Stop.left is not None:
                Stop.left -= 1
                if Stop.left < 0:
                    raise KeyboardInterrupt
            return self.net(x)

    Stop.left = 45
    with pytest.raises(KeyboardInterrupt):
        robust_report(Stop(), data, [make(a)], out=tmp_path, bs=4)
    Stop.left = None
    assert (
        robust_report(Stop(), data, [make(b)], out=tmp_path, bs=4).verdicts[repr(make(b))]
        == robust_report(Stop(), data, [make(b)], bs=4).verdicts[repr(make(b))]
    ).all()


def test_an_attack_that_is_given_twice_has_two_rows(learn, data):
    up = PGD(E, steps=3, loss=own(1))
    assert len(robust_report(learn.model, data, [up, up, FGSM(E), FGSM(E)]).rows) == 4


def test_a_folder_of_an_older_version_is_computed_again(learn, data, tmp_path):
    a = [FGSM(E), PGD(E, steps=3)]
    robust_report(learn.model, data, a, out=tmp_path)
    f = tmp_path / 'report.json'
    d = json.loads(f.read_text())
    del d['meta']['code'], d['meta']['look']
    for r in d['rows']:
        r.pop('identity', None)
        r['accuracy'] = 0.99
    f.write_text(json.dumps(d))
    with pytest.warns(UserWarning, match='an older version wrote them') as rec:
        rep = robust_report(learn.model, data, a, out=tmp_path)
    assert len(rec) == 1
    assert rows(rep) == rows(robust_report(learn.model, data, a))


def test_rounding_is_not_another_model(learn, data, tmp_path, monkeypatch):
    "As on another device, or with more threads"

    class Other(Masked):
        def forward(self, x):
            return self.net(x) * (1 + float(os.environ.get('ROUNDING', 0)))

    one = robust_report(Other(learn.model), data, [FGSM(E)], out=tmp_path)
    monkeypatch.setenv('ROUNDING', '1e-5')
    two = robust_report(Other(learn.model), data, [FGSM(E)], out=tmp_path)
    assert one.rows[1] == two.rows[1]
    assert not [o for o in two.warnings if 'again' in o]


def test_a_random_model_is_not_refused(learn, data, tmp_path):
    g = torch.Generator().manual_seed(0)

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = learn.model

        def forward(self, x):
            return self.net(x + 0.3 * torch.randn(x.shape, generator=g))

    robust_report(Noisy(), data, [FGSM(E)], out=tmp_path)
    with pytest.warns(UserWarning, match='computed again'):
        rep = robust_report(Noisy(), data, [FGSM(E)], out=tmp_path)
    assert len(rep.rows) == 2


def test_the_fingerprint_costs_nothing(learn, data):
    "The doubts look at the first batch anyway: a forward and a backward for each of two losses"
    m = Counted(learn.model)
    robust_report(m, data, [], bs=len(data[0]))
    n = len(data[0])
    assert m.forwards == 3 * n
    assert m.backwards == 2 * n


def test_nothing_else_is_computed_again(learn, data, tmp_path):
    att = [
        FGSM(E),
        PGD(E, steps=3),
        Transfer(tiny_vit(num_classes=4, seed=3), FGSM(E)),
        PGD(E, steps=3, loss=lambda z, y: ce(z, y)),
    ]
    a, b = [robust_report(learn.model, data, att, out=tmp_path) for _ in '12']
    assert [r['seconds'] for r in a.rows[1:]] == [r['seconds'] for r in b.rows[1:]]
    assert a.warnings == b.warnings


class Guarded(nn.Module):
    "Smooths images that were never 8-bit files: clean outputs and gradients say nothing of `tol`"

    def __init__(self, net, tol):
        super().__init__()
        self.net, self.n = net, 0
        self.set(tol)

    def forward(self, x):
        self.n += 1
        self.cache = torch.ones(self.n)
        off = (255 * x - (255 * x).round()).abs().amax((1, 2, 3)) > self.tol
        return torch.where(off[:, None], self.net(nn.functional.avg_pool2d(x.detach(), 3, 1, 1)), self.net(x))


class InBuffer(Guarded):
    def set(self, tol):
        self.register_buffer('tol', torch.tensor(tol), persistent=False)


class InGlobal(Guarded):
    def set(self, tol):
        globals().update(TOL=tol)

    tol = property(lambda self: TOL)


GUARDS = dict(buffer=InBuffer, global_=InGlobal)


@pytest.mark.parametrize('kind', GUARDS)
def test_what_a_model_holds_beside_its_weights(learn, data, tmp_path, kind):
    "Only attacked images tell the two models apart; counters and caches make nothing be computed again"
    x, y = (data[0][:32] * 255).round() / 255, data[1][:32]
    a = [PGD(0.1, steps=5)]
    m = GUARDS[kind]
    robust_report(m(learn.model, 0.05), (x, y), a, out=tmp_path)
    with pytest.warns(UserWarning, match='beside its weights'):
        got = robust_report(m(learn.model, 1.0), (x, y), a, out=tmp_path)
    net = m(learn.model, 1.0)
    net(x)
    net.register_forward_hook(lambda m, i, o: None).remove()
    net.train()
    same = robust_report(net, (x, y), a, out=tmp_path)
    assert rows(got) == rows(robust_report(m(learn.model, 1.0), (x, y), a))
    assert same.rows[1]['seconds'] == got.rows[1]['seconds']
    assert not any('computed again' in w for w in same.warnings)
