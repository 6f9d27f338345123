"""`hunt`, `run_attack`, `robust_report`: verdicts against the plain call, costs, resumption, planted faults, files
(R26, R27, R29, R31-R33, R42)."""

import os, shutil, signal, subprocess, sys, time, warnings
from functools import partial
import numpy as np, pytest, torch, torch.nn.functional as F
from torch import nn
from fastai.callback.schedule import *
import robust_nbdev.evaluate as ev
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.evaluate import *
from robust_nbdev.eval_data import Feed, eval_batches
from robust_nbdev.evaluate import How, _judge, _Progress, hunt, run_attack
from robust_nbdev.test_utils import *
import test_verdicts

C, H, W, N = 4, 6, 7, 41
Dense = partial(test_verdicts.Dense, dtype=torch.float64)


class Stop(nn.Module):
    """`m`, which counts its calls and images, and raises at call number `at`: all in one counter, which is no part of
    the model"""

    def __init__(self, m, at=None):
        super().__init__()
        self.m, self.k = m, dict(at=at, calls=0, images=0)

    calls, images = [property(lambda self, k=k: self.k[k]) for k in ('calls', 'images')]

    def forward(self, x):
        self.k['calls'] += 1
        self.k['images'] += len(x)
        if self.k['at'] is not None and self.calls >= self.k['at']:
            raise KeyboardInterrupt('stop')
        return self.m(x)


def images(b, seed=0, dtype=torch.float64, shape=(1, H, W)):
    return (torch.rand(b, *shape, generator=torch.Generator().manual_seed(seed)) * 1.4 - 0.2).clamp(0, 1).to(dtype)


@pytest.fixture(scope='module')
def net():
    return Dense()


@pytest.fixture(scope='module')
def data(net):
    x = images(N)
    y = predict(net, x)
    y[:5] = (y[:5] + 1) % C  # wrong from the start
    return x, y


EPS = dict(Linf=0.03, L2=0.14)
ZOO = dict(
    pgd=lambda e, n: PGD(e, norm=n, steps=6),
    pgd_far=lambda e, n: PGD(e, norm=n, steps=6, alpha=2 * e if n == 'L2' else 1.7 * e),
    fgsm=lambda e, n: FGSM(e, norm=n),
    gamafw=lambda e, n: GAMAFW(e, norm=n, steps=8),
    apgd=lambda e, n: APGD(e, norm=n, steps=9),
    pgd_kl=lambda e, n: PGD(e, norm=n, steps=5, loss=kl),
    pgd_restarts=lambda e, n: PGD(e, norm=n, steps=2, restarts=4),
    gama_restarts=lambda e, n: GAMAPGD(e, norm=n, steps=4, restarts=2),
    mifgsm_restarts=lambda e, n: MIFGSM(e, norm=n, steps=3, rand=True, restarts=3),
    apgd_restarts=lambda e, n: APGD(e, norm=n, steps=3, restarts=3),
    apgdt=lambda e, n: APGDT(e, norm=n, steps=4, targets=3, restarts=2),
)
# the norms take turns; the rounds of APGDT stop at another point than its call
EACH = [(k, list(EPS)[i % 2]) for i, k in enumerate(ZOO) if k != 'apgdt']


def make(kind, norm):
    return ZOO[kind](EPS[norm], norm)


def ran(m, a, batches, left, bs=64):
    "`run_attack` on the images that are left"
    return run_attack(m, a, batches, _Progress(left), How(bs, 0))


def all_found(a, m, batches, n, judge, bs):
    "What a hunt finds, image by image"
    found = Found.empty(n)
    for i, some in hunt(a, m, Feed(batches, np.ones(n, bool)), judge, bs):
        found.put(i, some)
    return found


def hunted(m, x, y, a, bs=64):
    "[N] bool: right, by `hunt`"
    parts = eval_batches((x, y), bs=13)
    return torch.as_tensor(ran(m, a, parts, np.ones(len(x), bool), bs).found.share > 0)


def plain(m, x, y, a):
    return predict(m, a(m, x, y)) == y


# --- verdicts
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind,norm', EACH, ids=lambda o: o)
def test_right_under_the_hunt_means_right_under_the_plain_call(net, data, kind, norm):
    x, y = data
    a = make(kind, norm)
    h, p = hunted(net, x, y, a), plain(net, x, y, a)
    assert not (h & ~p).any() and 0 < h.sum() < N - 5
    if 'apgd' in kind:
        assert torch.equal(h, p)  # keeps the first fooling point itself


class Band(nn.Module):
    "Wrong where the mean lies in a narrow band: a walk may step in and out of it"

    def forward(self, x):
        s = x.flatten(1).mean(1)
        return torch.stack([0.1 * s, ((s - 0.53).abs() < 0.012) * 1.0 - 0.5 + s], 1)


def test_pgd_survives_the_hunt_if_every_point_on_its_way_is_right(bs=5):
    x = (
        torch.rand(40, generator=torch.Generator().manual_seed(0)).double()[:, None, None, None].expand(-1, 1, 4, 4)
        * 0.1
        + 0.44
    )
    y = torch.zeros(40).long()
    a, seen = PGD(0.09, steps=5, alpha=0.02, rand=False), []

    class Seen(nn.Module):
        def forward(self, v):
            z = Band()(v)
            seen.append(z.argmax(1) == y)
            return z

    end = plain(Seen(), x, y, a)
    way = torch.stack(seen).all(0)
    assert torch.equal(hunted(Band(), x, y, a, bs), way) and way.sum() < end.sum() and not (way & ~end).any()


@pytest.mark.parametrize(
    'kind,norm,bs', [('pgd', 'Linf', 1), *((k, 'L2', 7) for k in ('apgd_restarts', 'gama_restarts', 'apgdt'))]
)
def test_batch_size_and_order_change_no_verdict(net, data, kind, norm, bs):
    x, y = data
    a, want = make(kind, norm), hunted(net, x, y, make(kind, norm))
    assert torch.equal(hunted(net, x, y, a, bs), want)
    p = torch.randperm(N, generator=torch.Generator().manual_seed(bs))
    assert torch.equal(hunted(net, x[p], y[p], a, bs), want[p])


def test_every_judged_image_is_inside_the_ball(net, data):
    "And the classes that are recorded are those of the image that was judged (R27)"
    x, y = data
    for a in (make('apgd', 'Linf'), make('pgd_restarts', 'L2'), make('gama_restarts', 'Linf')):
        seen = {}

        def judge(v, y):
            found = _judge(net, v, y)
            assert v.min() >= 0 and v.max() <= 1
            near = (v[:, None] - x[None]).flatten(2)
            near = near.abs().amax(2) if a.norm == 'Linf' else near.norm(dim=2)
            assert (near.amin(1) <= a.eps + 1e-9).all()
            for k, o in zip(near.argmin(1).tolist(), found.pred.tolist()):
                seen[k] = o
            return found

        with attack_mode(net):
            found = all_found(a, net, eval_batches((x, y), bs=9), N, judge, 8)
        assert all(seen[i] == c for i, c in enumerate(found.pred.tolist()))
        assert ((found.share > 0) == (found.pred == y.numpy())).all()


def test_cascades_have_the_same_worst_case(net, data):
    att = [make('fgsm', 'Linf'), WorstCase([APGDT(0.03, steps=4, targets=3), Square(0.03, queries=20)])]
    a, b = robust_report(net, data, att, bs=16, cascade=False), robust_report(net, data, att, bs=64)
    assert (
        np.minimum.reduce([a.verdicts[repr(o)] for o in att]) == np.minimum.reduce([b.verdicts[repr(o)] for o in att])
    ).all()
    assert all((b.verdicts[repr(o)] <= b.verdicts[repr(p)]).all() for p, o in zip(att, att[1:]))


# --- loaders, costs, memory
# -------------------------------------------------------------------------------------------------------


class Never(nn.Module):
    "Right whatever happens, with a gradient"

    def forward(self, x):
        s = x.flatten(1).mean(1)
        return torch.stack([s + 9, s * 0.1, -s, s * 0], 1)


@pytest.mark.parametrize(
    'a,want',
    [
        (PGD(0.1, steps=5, restarts=3), 3 * (2 * 5 + 1)),
        (APGD(0.1, steps=6), 2 * 6 + 1),
        (PGD(0.1, steps=3, draws=4), 4 * 2 * 3 + 1),
        (APGDT(0.1, steps=4, targets=2), 1 + 2 * (2 * 4 + 1)),
        (GAMAPGD(0.1, steps=6), 1 + 2 * 6 + 1),
    ],
    ids=repr,
)
def test_passes_of_a_model_that_never_falls(a, want, bs=3):
    x, y = images(8), torch.zeros(8).long()
    t = ran(Never(), a, eval_batches((x, y), bs=5), np.ones(8, bool), bs)
    assert t.found.share.all() and t.passes == 8 * want


def test_the_hunt_holds_few_images_and_batches_stay_full():
    "Drawn from the source and neither out nor in the batch: less than two batches; all calls but the last few are full"
    drawn, worst, sizes, m = 0, 0, [], Dense()
    x = images(200)
    y = predict(m, x)

    def src():
        nonlocal drawn
        for i in range(0, 200, 11):
            drawn += min(11, 200 - i)
            yield torch.arange(i, min(i + 11, 200)), x[i : i + 11], y[i : i + 11]

    class See(nn.Module):
        def forward(self, v):
            sizes.append(len(v))
            return m(v)

    out = 0
    with attack_mode(m):
        for i, _ in hunt(PGD(0.03, steps=6), See(), Feed(src(), np.ones(200, bool)), partial(_judge, m), 16):
            out += len(i)
            worst = max(worst, drawn - out)
    assert out == 200 and worst <= 3 * 16 and max(sizes) == 16 and np.mean(np.array(sizes) >= 10) > 0.85


# --- resumption
# ----------------------------------------------------------------------------------------------------------------------

drop = lambda rep: [{k: v for k, v in r.items() if k not in ('seconds', 'passes', 'parts')} for r in rep.rows]


def same(a, b):
    return (
        drop(a) == drop(b)
        and a.verdicts.keys() == b.verdicts.keys()
        and all((a.verdicts[k] == b.verdicts[k]).all() for k in a.verdicts)
        and all((a.preds[k] == b.preds[k]).all() for k in a.preds)
    )


def killed(m, data, attacks, out, at, **kw):
    s = Stop(m, at)
    with pytest.raises(KeyboardInterrupt):
        robust_report(s, data, attacks, out=out, **kw)
    return s


ROWS = [PGD(0.01, steps=3), APGD(0.01, steps=5, restarts=2)]


def test_killed_in_the_middle_of_a_row(net, data, tmp_path, share=0.6, bs=8):
    whole = Stop(net)
    want = robust_report(whole, data, ROWS, bs=bs)
    killed(net, data, ROWS, tmp_path, int(share * whole.calls), bs=bs)
    again = Stop(net)
    got = robust_report(again, data, ROWS, out=tmp_path, bs=bs)
    assert same(got, want) and not (tmp_path / 'running.npz').exists()
    # the first pass and the images under way are lost
    assert again.images < 0.8 * whole.images
    third = Stop(net)
    assert same(robust_report(third, data, ROWS, out=tmp_path, bs=bs), want) and third.images <= 2 * N + 64


def test_a_damaged_state_is_ignored(net, data, tmp_path):
    want = robust_report(net, data, ROWS[:1], bs=4)
    killed(net, data, ROWS[:1], tmp_path / 'killed', 20, bs=4)
    state = (tmp_path / 'killed' / 'running.npz').read_bytes()
    for name, junk in dict(zip=b'PK\x03\x04', cut=state[: len(state) // 2]).items():
        shutil.copytree(tmp_path / 'killed', tmp_path / name)
        (tmp_path / name / 'running.npz').write_bytes(junk)
        assert same(robust_report(net, data, ROWS[:1], out=tmp_path / name, bs=4), want)


@pytest.mark.parametrize('what', ['seed', 'model', 'order'])
def test_a_state_begun_on_something_else_is_not_taken(tmp_path, what):
    "Killed in the first row there is no report.json yet that could refuse"
    att, x, whole = [PGD(0.01, steps=1, alpha=0.005)], images(31), Stop(Dense())
    # all right, so that the set that stands is the same
    d = x, predict(Dense(), x)
    robust_report(whole, d, att, bs=4)
    killed(Dense(), d, att, tmp_path, int(whole.calls * 0.7), bs=4)
    assert (tmp_path / 'running.npz').exists()
    m = Dense(seed=7 if what == 'model' else 0)
    x = x.flip(0) if what == 'order' else x
    d, kw = (x, predict(m, x)), dict(bs=4, seed=5 if what == 'seed' else 0)
    got, want = robust_report(Stop(m), d, att, out=tmp_path, **kw), robust_report(Stop(m), d, att, **kw)
    assert same(got, want)


def test_an_ensemble_goes_on_where_it_was_killed(net, data, tmp_path):
    a = [WorstCase([PGD(0.01, steps=4), APGD(0.01, steps=4)])]
    whole = Stop(net)
    want = robust_report(whole, data, a, bs=4)
    killed(net, data, a, tmp_path, int(0.9 * whole.calls), bs=4)
    again = Stop(net)
    assert same(robust_report(again, data, a, out=tmp_path, bs=4), want) and again.images < 0.6 * whole.images


def test_attacks_added_before_and_after(net, data, tmp_path):
    a, b, c = make('fgsm', 'Linf'), make('pgd', 'Linf'), make('apgd', 'Linf')
    robust_report(net, data, [b, c], out=tmp_path)
    att = [PGD(0.1, norm='L2', steps=2), a, c, b]
    got, want = robust_report(net, data, att, out=tmp_path), robust_report(net, data, att)
    assert all((got.verdicts[repr(o)] == want.verdicts[repr(o)]).all() for o in att)


class Slow(nn.Module):
    "Takes its time where the environment says so: the same model, and the same code, in both processes"

    def __init__(self, m):
        super().__init__()
        self.m = m

    def forward(self, v):
        time.sleep(float(os.environ.get('SLOW', 0)))
        return self.m(v)


SCRIPT = '''
import sys, time, torch, numpy as np
import robust_nbdev.evaluate as ev
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.patch_attacks import *
from robust_nbdev.core import *
sys.path.insert(0, sys.argv[2])
from test_hunting import Dense, Slow, images, predict
ev._Progress.every = .05
x = images(61); m = Dense(); y = predict(m, x)
print('go', flush=True)
ev.robust_report(Slow(m), (x,y), [PGD(.01, steps=5), APGD(.01, steps=8, restarts=2)], bs=4, out=sys.argv[1])
print('end', flush=True)
'''


@pytest.mark.slow
def test_a_real_kill(tmp_path, monkeypatch, wait=0.6):
    "kill -9 of another process; what it left is continued in this one"
    p = subprocess.Popen(
        [sys.executable, '-c', SCRIPT, str(tmp_path / 'out'), os.path.dirname(__file__)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, 'SLOW': '.004'},
    )
    assert p.stdout.readline() == 'go\n'
    t = time.time()
    while not (tmp_path / 'out').exists() and time.time() - t < 60:
        time.sleep(0.01)
    time.sleep(wait)
    p.send_signal(signal.SIGKILL)
    p.wait()
    rest = p.stdout.read()
    assert 'end' not in rest and p.returncode == -9
    x = images(61)
    m = Dense()
    y = predict(m, x)
    calls = []
    # counts the calls of the model, and leaves its code as it is
    monkeypatch.setattr(time, 'sleep', calls.append)
    want = robust_report(Slow(m), (x, y), ROWS, bs=4)
    whole = len(calls)
    got = robust_report(Slow(m), (x, y), ROWS, bs=4, out=tmp_path / 'out')
    again = len(calls) - whole
    assert same(got, want) and again < whole - 5


# --- R26, R29
# ----------------------------------------------------------------------------------------------------------------------


def test_no_number_mixes_threat_models(net, data):
    sur = Dense(seed=3)
    att = [
        PGD(0.03, steps=3),
        PGD(0.1, norm='L2', steps=3),
        PGD(0.05, steps=3),
        Transfer(sur, PGD(0.03, steps=3)),
        APGD(0.1, norm='L2', steps=4),
        lambda m, x, y, seed=0: x,
    ]
    rep = robust_report(net, data, att)
    worst = {r['attack']: r for r in rep.rows if r['attack'].startswith('worst')}
    assert set(worst) == {'worst case Linf 0.03', 'worst case L2 0.1'} and (
        worst['worst case L2 0.1']['norm'],
        worst['worst case L2 0.1']['eps'],
    ) == ('L2', 0.1)
    for w, rows in (('worst case Linf 0.03', (0, 3)), ('worst case L2 0.1', (1, 4))):
        assert worst[w]['accuracy'] == pytest.approx(
            np.minimum.reduce([rep.verdicts[repr(att[i])] for i in rows]).mean(), abs=1e-6
        )


class Noisy(nn.Module):
    def __init__(self, m, s=0.3):
        super().__init__()
        self.m, self.s = m, s

    def forward(self, x):
        return self.m((x + self.s * torch.randn_like(x)))


def test_random_models_are_averaged(net, data):
    "R29"
    m, x, y = Noisy(net), *data
    a = PGD(0.03, steps=3).eot(3)
    many = robust_report(m, data, [a], draws=12)
    torch.manual_seed(0)
    truth = torch.stack([predict(m, x) == y for _ in range(200)]).float().mean(0)
    assert (
        abs(many.rows[0]['accuracy'] - truth.mean()) < 0.03
        and np.abs(many.verdicts['clean'] - truth.numpy()).mean() < 0.15
    )
    assert many.rows[0]['passes'] == 12 * N and many.rows[1]['accuracy'] <= many.rows[0]['accuracy'] + 0.05


def test_random_state_does_not_steer_a_random_model(net, data):
    "Reports seed their own draws and put the state back"
    m = Noisy(net)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = robust_report(m, data, [FGSM(0.03)])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    b = robust_report(m, data, [FGSM(0.03)])
    assert all((a.verdicts[k] == b.verdicts[k]).all() for k in a.verdicts)


# --- R32
# ----------------------------------------------------------------------------------------------------------------------


def test_saved_images_stay_in_the_ball_and_are_scored_as_they_come_back(tmp_path, norm='L2', eps=0.3):
    from PIL import Image

    m = Dense(dtype=torch.float32)
    x = (images(30, dtype=torch.float32) * 255).round() / 255
    y = predict(m, x)
    a, out = PGD(eps, norm=norm, steps=5), tmp_path / 'new' / 'dir'
    got = save_adv(m, x, y, a, out, seed=3)
    pngs = torch.stack([torch.as_tensor(np.array(Image.open(out / f'{i:05d}.png')))[None] / 255 for i in range(30)])
    with np.load(out / 'adv.npz') as f:
        assert (f['x_adv'] == a(m, x, y, seed=3).numpy()).all() and (f['y'] == y.numpy()).all()
    assert a.ball.size(pngs - x).max() <= eps + 1e-6
    assert got['clean'] == 1 and got['png'] == pytest.approx((predict(m, pngs) == y).float().mean().item())
    assert got['exact'] <= got['png']


# --- R33: faults, and none
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def honest():
    "An adversarially trained small model, and 300 images"
    from robust_nbdev.adv_train import AdvTrain

    l = synth_learner(dls=synth_dls(n=512, bs=32, seed=1), bar=False)
    l.fit_one_cycle(4, 4e-3)
    l.add_cb(AdvTrain(PGD(0.05, steps=2)))
    l.fit_one_cycle(2, 2e-3)
    x, y = [
        torch.stack([torch.as_tensor(o[i]).as_subclass(torch.Tensor) for o in synth_dls(n=1200, seed=9).valid_ds])
        for i in (0, 1)
    ]
    x = (x + 0.55 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)  # not too easy
    return l.model.eval(), x, y.long().flatten()


LIST = [FGSM(0.05), PGD(0.05, steps=10), APGD(0.05, steps=15), Square(0.05, queries=20)]


def test_an_honest_model_gets_no_warning_but_that_of_few_images(honest):
    m, x, y = honest
    rep = robust_report(m, (x[:100], y[:100]), LIST, bs=100)
    assert len(rep.warnings) == 1 and '100 images only' in rep.warnings[0]
    assert 0.3 < rep.rows[2]['accuracy'] < rep.rows[0]['accuracy'] < 1


def test_gradients_hidden_from_all_but_a_black_box_attack_are_named():
    class Rounds(nn.Module):
        "The mean of rounded pixels, above one half or not"

        def forward(self, x):
            s = (x * 16).round().flatten(1).mean(1) / 16 - 0.5
            return torch.stack([s, -s], 1)

    x, y = 0.5 + 0.1 * images(60, dtype=torch.float32), torch.zeros(60).long()
    rep = robust_report(Rounds(), (x, y), [PGD(0.3), Square(0.3, queries=10)])
    assert any('hiding its gradients' in o for o in rep.warnings), rep.df


def test_batch_norm_left_in_training_mode(honest):
    x = honest[1]
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 5, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 4)
    m = nn.Sequential(*layers)
    m[1].running_mean.fill_(-0.2)
    y = predict(m, x)
    stats = {k: v.clone() for k, v in m.state_dict().items()}
    a = [robust_report(m, (x[:20], y[:20]), LIST[:2], bs=bs) for bs in (1, 64)]
    assert all(o.training for o in m.modules()) and all(torch.equal(v, stats[k]) for k, v in m.state_dict().items())
    b = robust_report(m.eval(), (x[:20], y[:20]), LIST[:2])
    for o in a:
        assert any('training mode' in w for w in o.warnings) and all(
            abs(int(o.verdicts[k].sum()) - int(b.verdicts[k].sum())) <= 1 for k in b.verdicts
        )
    assert b.verdicts['clean'].all() and not any('training mode' in w for w in b.warnings)


def test_images_whose_gradient_was_zero_once_are_not_called_stuck():
    "A gradient that is zero at one point of the way is no attack whose every gradient was zero"
    calls = []

    class Once(nn.Module):
        "No gradient at every third call"

        def forward(self, x):
            calls.extend([1] * x.requires_grad)
            s = x.flatten(1).mean(1)
            s = s if len(calls) % 3 else s.detach() + 0 * s
            return torch.stack([9 - s, s * 0.1, s, s * 0], 1)

    rep = robust_report(Once(), (images(20), torch.zeros(20).long()), [PGD(0.01, steps=7)])
    assert rep.rows[1]['accuracy'] == 1 and not any('every gradient was exactly zero' in o for o in rep.warnings)


# --- precision
# ----------------------------------------------------------------------------------------------------------------------


def test_half_precision_hunts_stay_in_the_ball():
    m, eps = Dense(dtype=torch.bfloat16), 3 / 255
    x = images(40, dtype=torch.bfloat16) * 0.9 + 0.05
    y = predict(m, x)
    far = []

    def judge(v, y):
        far.append((v.double()[:, None] - x.double()[None]).flatten(2).abs().amax(2).amin(1).max().item())
        return _judge(m, v.bfloat16(), y)

    with attack_mode(m):
        all_found(PGD(eps, steps=5, rand=False), m, [(torch.arange(40), x, y)], 40, judge, 64)
    assert max(far) <= eps + 1e-9


def test_fast_attacks_are_judged_by_the_model_itself(honest, monkeypatch):
    m, x, y = honest
    monkeypatch.setattr(ev, 'Fast', lambda m: Fast(m, compile=False))
    a, b = [robust_report(m, (x[:30], y[:30]), LIST[1:2], fast=f) for f in (False, True)]
    assert (
        (a.verdicts['clean'] == b.verdicts['clean']).all()
        and all(abs(int(a.verdicts[k].sum()) - int(b.verdicts[k].sum())) <= 4 for k in a.verdicts)
        and b.meta['fast']
    )


def test_the_last_point_is_judged_even_where_the_attacked_copy_was_wrong_about_the_point_before():
    """fast=True: the copy in low precision says fooled, the model says right; the plain call would judge the end of the
    way"""

    class Two(nn.Module):
        "Wrong above mean .55"

        def forward(self, x):
            s = x.flatten(1).mean(1)
            return torch.stack([0.55 - s, s - 0.55], 1)

    m = Two()
    copy_ = lambda x: torch.stack([0.53 - x.flatten(1).mean(1), x.flatten(1).mean(1) - 0.53], 1)  # a little off
    x, y, a = torch.full((4, 1, 4, 4), 0.5), torch.zeros(4).long(), PGD(0.06, steps=2, alpha=0.04, rand=False)
    assert (predict(m, a(copy_, x, y)) != y).all()
    assert not all_found(a, copy_, [(torch.arange(4), x, y)], 4, partial(_judge, m), 4).share.any()


# --- R42
# ----------------------------------------------------------------------------------------------------------------------


def test_perceptual_distance():
    lpips = pytest.importorskip('lpips')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        net = lpips.LPIPS(net='alex', pnet_rand=True, verbose=False).train()
    a, b = [images(3, s, torch.float32, (1, 28, 42)) for s in (0, 1)]
    big = [F.interpolate(o, size=(64, 64), mode='bilinear').repeat(1, 3, 1, 1) for o in (a, b)]
    state = state_of(net)
    got = lpips_dist(a, b, net)
    assert state_of(net) == state and not got.requires_grad and (got > 0).all()
    assert all(torch.allclose(got, lpips_dist(*o, net), rtol=1e-4) for o in ((a.double(), b), big))


# --- the report as an object
# ----------------------------------------------------------------------------------------------------------------------


def test_pages_escape_what_they_show(net, data, tmp_path):
    def evil(z, y):
        return ce(z, y)

    evil.__name__ = '<script>x</script>'
    rep = robust_report(net, data, [PGD(0.03, steps=2, loss=evil)])
    rep.warnings.append('<b>&')
    rep.meta['note'] = '<i>'
    rep.save(tmp_path)
    page = (tmp_path / 'report.html').read_text()
    for bad in ('<script>x', '<b>&<', '<i>'):
        assert bad not in page
    assert '&lt;script&gt;' in page and '&lt;i&gt;' in page and 'data:image/png;base64,' in page


# --- found by a reviewer
# ----------------------------------------------------------------------------------------------------------------------


def test_an_attack_of_ones_own_is_run_as_it_is_written(net, data):
    class Call(PGD):
        def __call__(self, model, x, y=None, **kw):
            return x

    class Run(PGD):
        def run(self, obj, x, seed):
            return x

    for cls in (Call, Run):
        rep = robust_report(net, data, [cls(0.5, steps=5)])
        assert rep.df.accuracy.iloc[1] == rep.df.accuracy.iloc[0]


def test_patch_attacks_of_other_budgets_stand_alone(honest):
    m, x, y = honest
    d, a, b = (x[:24], y[:24]), RandomOcclusion(share=1.0), RandomOcclusion(share=0.1)
    rep = robust_report(m, d, [a, b])
    assert (rep.verdicts[repr(b)] == robust_report(m, d, [b]).verdicts[repr(b)]).all() and not any(
        'worst' in o for o in rep.df.attack
    )
    with pytest.raises(ValueError, match='threat models'):
        WorstCase([a, b])


def test_short_steps_are_scaled_with_the_probe(honest):
    m, x, y = honest
    d = (x[:60], y[:60])
    assert not any('weak' in o for o in robust_report(m, d, [PGD(8 / 255, steps=10, alpha=2 / 255)]).warnings)
    assert any('cannot cross' in o for o in robust_report(m, d, [PGD(8 / 255, steps=10, alpha=0.1 / 255)]).warnings)


def test_weights_and_images_of_other_types_are_refused_in_words(data):
    with pytest.raises(ValueError, match='float'):
        robust_report(Dense(dtype=torch.bfloat16), data, [FGSM(0.03)])
