"Our attacks against others' code: pyautoattack, torchattacks, foolbox; the protocol for few classes (R06, R30)."

import importlib.util, logging, sys, warnings
from contextlib import contextmanager
from pathlib import Path
import numpy as np, pytest, torch
from robust_nbdev.core import *
from robust_nbdev.attacks import *
from robust_nbdev.autoattack import *
from robust_nbdev.adv_train import *
from robust_nbdev.datasets import *
from robust_nbdev.datasets import canonical, find_images, open_image
from robust_nbdev.evaluate import *
from robust_nbdev.test_utils import *
from test_verdicts import Dense, images, inside

aa = pytest.importorskip('pyautoattack')
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from pyautoattack.fab_pt import FABAttack_PT


@contextmanager
def apart():
    "The package seeds torch and may leave a tracer"
    trace = sys.gettrace()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            yield
        finally:
            sys.settrace(trace)


def left(m, x, y):
    return predict(m, x) == y


def theirs(m, x, y, kind, eps, norm='Linf', steps=20, targets=9, seed=0):
    "[N] bool: still right after the package's own attack"
    with apart(), attack_mode(m):
        if kind == 'ce':
            a = APGDAttack(
                m,
                n_iter=steps,
                norm=norm,
                n_restarts=1,
                eps=eps,
                loss='ce',
                device='cpu',
                seed=seed,
                rho=0.75,
                eot_iter=1,
            )
        else:
            a = APGDAttack_targeted(
                m,
                n_iter=steps,
                norm=norm,
                n_restarts=1,
                eps=eps,
                device='cpu',
                seed=seed,
                rho=0.75,
                eot_iter=1,
                n_target_classes=targets,
            )
        return left(m, a.perturb(x.clone(), y.clone()), y)


def ours(m, x, y, kind, eps, norm='Linf', steps=20, targets=9, seed=0):
    return left(
        m,
        (APGD(eps, norm=norm, steps=steps) if kind == 'ce' else APGDT(eps, norm=norm, steps=steps, targets=targets))(
            m, x, y, seed=seed
        ),
        y,
    )


# --- the CIFAR-10 network in the package
# -----------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def cifar():
    "The ResNet-18 of pyautoattack's examples (images in [0,1], no normalisation), and test images that it gets right"
    d = Path(aa.__file__).parent / 'examples'
    if not (d / 'model_test.pt').exists():
        pytest.skip(
            'this pyautoattack ships no model; the tests on embedded Fashion-MNIST below compare the same attacks'
        )
    try:
        src = canonical(find_images('cifar10', download=False), 'cifar10')
    except (FileNotFoundError, ValueError) as e:
        pytest.skip(f'no CIFAR-10 here; the tests on embedded Fashion-MNIST below compare the same attacks ({e})'[:200])
    spec = importlib.util.spec_from_file_location('aa_resnet', d / 'resnet.py')
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    m = mod.ResNet18()
    m.load_state_dict(torch.load(d / 'model_test.pt', map_location='cpu', weights_only=True))
    m.eval()
    x, y = src.take('test', np.arange(120))
    x, y = (
        torch.stack([torch.as_tensor(np.array(open_image(o))).permute(2, 0, 1) / 255 for o in x]),
        torch.as_tensor(np.asarray(y)),
    )
    ok = predict(m, x) == y
    assert ok.float().mean() > 0.85
    return m, x[ok][:100], y[ok][:100]


@pytest.mark.slow
@pytest.mark.parametrize('eps,want', [(0.5 / 255, 77), (1 / 255, 42), (2 / 255, 5)])
def test_apgd_ce_on_100_cifar_images(cifar, eps, want):
    m, x, y = cifar
    a, b = ours(m, x, y, 'ce', eps), theirs(m, x, y, 'ce', eps)
    assert len(x) == 100 and abs(int(b.sum()) - want) <= 1 and abs(int(a.sum()) - int(b.sum())) <= 1


@pytest.mark.slow
def test_apgd_t_on_100_cifar_images(cifar):
    m, x, y = cifar
    a, b = ours(m, x, y, 't', 1 / 255), theirs(m, x, y, 't', 1 / 255)
    assert abs(int(a.sum()) - int(b.sum())) <= 1
    rep = robust_report(m, (x, y), [APGDT(1 / 255, steps=20)])
    assert abs(rep.verdicts[repr(APGDT(1 / 255, steps=20))].sum() - int(b.sum())) <= 1


@pytest.mark.slow
def test_standard_autoattack_on_cifar_images(cifar):
    "The whole suite as it is published, ours, and the package as a whole"
    m, x, y = cifar[0], cifar[1][:20], cifar[2][:20]
    with apart(), attack_mode(m):
        adv, _ = aa.AutoAttack(m, norm='Linf', eps=1 / 255, seed=0, version='standard').run_standard_evaluation(
            x, y, batch_size=20
        )
    own, ref = [AutoAttack(1 / 255, reference=r)(m, x, y) for r in (False, True)]
    assert (
        torch.equal(left(m, adv, y), left(m, ref, y))
        and abs(int(left(m, own, y).sum()) - int(left(m, adv, y).sum())) <= 1
    )


# --- PGD, FGSM, MI-FGSM: step for step
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def small():
    x = images(40, torch.float64, seed=4)
    m = Dense(torch.float64)
    return m, x, predict(m, x)


def close(a, b):
    assert (a - b).abs().max() <= 1e-6 and (a - b).abs().max() < 0.01 * (b - b.mean()).abs().max()


@pytest.mark.parametrize(
    'norm,eps,alpha,steps',
    [('Linf', 0.2, 0.05, 10), ('L2', 1.0, 0.4, 10)],
)
@pytest.mark.parametrize('margin_', [False, True], ids=['ce', 'cw'])
def test_foolbox(small, norm, eps, alpha, steps, margin_):
    fb, ep = pytest.importorskip('foolbox'), pytest.importorskip('eagerpy')
    m, x, y = small
    f = fb.PyTorchModel(m, bounds=(0, 1), device='cpu')
    P = getattr(fb.attacks, f'{norm}ProjectedGradientDescentAttack')
    if margin_:

        class P(P):
            def get_loss_fn(self, model, labels):
                return lambda v: ep.astensor(margin(m(v.raw), y).sum())

    _, got, _ = P(abs_stepsize=alpha, steps=steps, random_start=False)(f, x, y, epsilons=eps)
    close(
        PGD(eps, norm=norm, steps=steps, alpha=alpha, rand=False, **(dict(loss=margin) if margin_ else {}))(m, x, y),
        got,
    )
    G = getattr(fb.attacks, f'{norm}FastGradientAttack')
    if not margin_:
        close(FGSM(eps, norm=norm)(m, x, y), G(random_start=False)(f, x, y, epsilons=eps)[1])


# --- FAB and Square
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('norm,eps,targets', [('Linf', 0.03, 3), ('L2', 0.2, 0)])
def test_fab_is_the_package(norm, eps, targets):
    m, x = Dense(), images(30, seed=4)
    y = predict(m, x)
    a = FAB(eps, norm=norm, steps=8, targets=targets)
    with apart(), attack_mode(m):
        want = FABAttack_PT(
            m,
            norm=norm,
            n_restarts=1,
            n_iter=8,
            eps=eps,
            seed=0,
            targeted=targets > 0,
            n_target_classes=max(targets, 1),
            device='cpu',
        ).perturb(x.clone(), y.clone())
    got = a(m, x, y)
    inside(got, x, norm, eps)
    assert (
        torch.equal(left(m, got, y), left(m, want, y))
        and torch.allclose(got, want, atol=1e-6)
        and 2 < left(m, got, y).sum() < 28
    )


# --- AutoAttack
# ----------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def package(m, x, y, eps, norm, names, targets=9, quick=True):
    "The package's AutoAttack, made short through its attributes"
    with apart(), attack_mode(m):
        a = aa.AutoAttack(lambda v: m(v).clone(), norm=norm, eps=eps, seed=0, version='custom', attacks=list(names))
        a.apgd.n_restarts = a.fab.n_restarts = 1
        if quick:
            a.apgd.n_iter = a.apgd_targeted.n_iter = 10
            a.fab.n_iter = 5
            a.square.n_queries = 30
        a.apgd_targeted.n_target_classes = a.fab.n_target_classes = targets
        return a.run_standard_evaluation(x.clone(), y.clone(), batch_size=len(x))[0]


def short(eps, norm, c, names):
    make = {
        'apgd-ce': APGD(eps, norm=norm, steps=10),
        'apgd-t': (
            APGDT(eps, norm=norm, steps=10, targets=min(c - 1, 9))
            if c > 2
            else APGD(eps, norm=norm, steps=10, loss=margin)
        ),
        'fab-t': FAB(eps, norm=norm, steps=5, targets=min(c - 1, 9)),
        'square': Square(eps, norm=norm, queries=30),
    }
    return AutoAttack(eps, norm=norm, attacks=[make[n] for n in names])


@pytest.mark.parametrize('c,norm,eps', [(10, 'Linf', 0.03), (3, 'L2', 0.15), (2, 'Linf', 0.03)])
def test_the_suite_is_as_strong_as_the_package_with_few_classes(c, norm, eps):
    "Where the package has no targeted DLR (fewer than four classes) ours must be at least as strong as the rest of it"
    m, x = Dense(c=c), images(100, seed=6)
    y = predict(m, x)
    names = ['apgd-ce', 'apgd-t', 'fab-t', 'square']
    can = names if c > 3 else [n for n in names if n != 'apgd-t']
    us, them = (
        left(m, short(eps, norm, c, names)(m, x, y), y),
        left(m, package(m, x, y, eps, norm, can, min(c - 1, 9)), y),
    )
    assert (
        int(us.sum()) - int(them.sum()) <= 1 and (c == 3 or int(them.sum()) - int(us.sum()) <= 2) and 3 < us.sum() < 97
    )
    rep = robust_report(m, (x, y), [short(eps, norm, c, names)])
    assert abs(int(rep.rows[1]['accuracy'] * 100 + 0.5) - int(us.sum())) <= 1 and len(rep.rows[1]['parts']) == 4


@pytest.mark.parametrize('norm,eps', [('Linf', 0.03)])
def test_reference_is_the_package_itself(norm, eps):
    m, x = Dense(), images(60, seed=6)
    y = predict(m, x)
    got, want = (
        AutoAttack(eps, norm=norm, attacks='apgd-ce', reference=True)(m, x, y),
        package(m, x, y, eps, norm, ['apgd-ce'], quick=False),
    )
    assert (
        torch.equal(left(m, got, y), left(m, want, y))
        and torch.allclose(got, want, atol=1e-6)
        and 5 < left(m, got, y).sum() < 55
    )
    inside(got, x, norm, eps)


@pytest.mark.parametrize('c', [4, 2])
def test_reference_with_few_classes_works_or_is_refused_in_words(c):
    m, x = Dense(c=c), images(20, seed=6)
    y = predict(m, x)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            got = AutoAttack(0.03, attacks=('apgd-ce', 'apgd-t'), reference=True)(m, x, y)
        except ValueError as e:
            assert 'class' in str(e)
        else:
            assert 0 < left(m, got, y).sum() < 20


def test_warnings_of_the_package_are_passed_on():
    m, x = Dense(c=4), images(10, seed=6)
    y = predict(m, x)
    logger = logging.getLogger('auto-attack')
    before = list(logger.handlers), logger.propagate
    soft = lambda v: m(v).softmax(1)
    with pytest.warns(UserWarning, match='AutoAttack'):
        AutoAttack(0.03, attacks='apgd-ce', reference=True)(soft, x, y)
    assert (list(logger.handlers), logger.propagate) == before
