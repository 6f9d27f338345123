"What makes two attacks, losses or models the same: their code and what they hold, never their printed name."

import copy, functools, importlib, os, subprocess, sys, types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from robust_nbdev.attacks import *
from robust_nbdev.identity import alike, beside_weights, changed, fingerprint, identity, sketch, steady
from robust_nbdev.test_utils import *

KNOWN = dict(torch=torch, nn=nn, np=np, functools=functools, dataclass=dataclass, PGD=PGD, ce=ce, Attack=Attack)


def made(src, name='made'):
    "What a notebook cell with this source defines as `A`"
    names = dict(KNOWN, __name__=name)
    exec(src, names)
    return names['A']


# --- code and values ---

BACKWARD = '''class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return {}
def A(m, x, y): return m(F.apply(x))'''
HANDLER = 'def A(x):\n try:\n  g(x)\n{}\n return 1'
# A source with a gap, and what stands in the gap before and after a change
CHANGES = dict(
    update=('class A(PGD):\n def update(self, x, s, g, v, i): return {}\nA = A(.1)', 's', '{**s}'),
    base_class=('class B(PGD):\n def run(self, obj, x, seed): return {}\nclass A(B): pass\nA = A(.1)', 'x', 'x+0'),
    class_attribute=('class A(PGD): k = {}\nA = A(.1)', '1', '2'),
    property=('class A(PGD):\n @property\n def width(self): return {}\nA = A(.1)', '.1', '.2'),
    staticmethod=('class A(PGD):\n @staticmethod\n def f(): return {}\nA = A(.1)', '.1', '.2'),
    helper=('def h(z): return {}\ndef f(z, y): return ce(h(z), y)\nA = PGD(.1, loss=f)', 'z', '2*z'),
    default=('A = PGD(.1, loss=lambda z, y, t={}: ce(z/t, y))', '1', '2'),
    keyword=('def A(z, y, *, t={}): return ce(z/t, y)', '1', '2'),
    closure=('def g(t): return lambda z, y: ce(z/t, y)\nA = PGD(.1, loss=g({}))', '1', '2'),
    inner_function=('def g():\n def h(z): return {}\n return lambda z, y: ce(h(z), y)\nA = g()', 'z', '3*z'),
    partial=('def f(z, y, t): return ce(z/t, y)\nA = PGD(.1, loss=functools.partial(f, t={}))', '1', '2'),
    callable=('class F:\n def __call__(self, z, y): return {}\nA = PGD(.1, loss=F())', 'ce(z, y)', '-ce(z, y)'),
    attribute=('class F:\n def __init__(self): self.t = {}\nA = F()', '1', '2'),
    slot=("class F:\n __slots__ = ('t',)\nA = F()\nA.t = {}", '1', '2'),
    bound_method=('class F:\n t = {}\n def f(self, z, y): return ce(z/self.t, y)\nA = F().f', '1', '2'),
    wrapped=('def w(f):\n @functools.wraps(f)\n def g(z, y): return {}\n return g\nA = w(ce)', 'f(z, y)', '-f(z, y)'),
    no_grad=('@torch.no_grad()\ndef A(m, x, y, seed=0): return {}', 'x', 'x+0'),
    cached=('@functools.lru_cache\ndef A(m): return {}', '1', '2'),
    tensor=('A = functools.partial(ce, t=torch.{}(3))', 'zeros', 'ones'),
    array=('A = [np.{}(3)]', 'zeros', 'ones'),
    numpy_generator=('A = [np.random.default_rng({})]', '0', '1'),
    torch_generator=('A = torch.Generator().manual_seed({})', '0', '1'),
    function_attribute=('def A(z, y): return z\nA.clean = {}', 'True', 'False'),
    backward=(BACKWARD, 'g', '0*g'),
    handler=(HANDLER, ' except ValueError: return 2\n h(x)', '  h(x)\n except ValueError: return 2'),
    factory=('from collections import defaultdict\nA = defaultdict(lambda: {})', '1', '2'),
    subclass_of_float=('class F(float):\n def __neg__(self): return {}\nA = F(1)', '1', '2'),
    attribute_of_a_list=('class B(list): pass\nA = B()\nA.t = {}', '1', '2'),
    private_slot=("class F:\n __slots__ = ('__t',)\n def __init__(self): self.__t = {}\nA = F()", '1', '2'),
    whom_a_loop_is_to=('def A(x): return x and f(x)\ndef f(x): return g(x)\ndef g(x): return {}(x)', 'f', 'A'),
    seventh_digit=('A = PGD({})', '.1000001', '.1000002'),
)


@pytest.mark.parametrize('kind', CHANGES)
def test_a_change_is_seen_and_a_repetition_is_not(kind):
    src, before, after = CHANGES[kind]
    old, again, new = [identity(made(src.replace('{}', o, 1))) for o in (before, before, after)]
    assert old == again != new and '' not in (old, new)


def test_state_that_neither_equality_nor_print_shows_is_seen():
    class Scale:
        def __init__(self, k):
            self.k = k

        def __repr__(self):
            return 'Scale'

        def __eq__(self, o):
            return True

        def __hash__(self):
            return 1

    assert Scale(0) == Scale(1) and repr(Scale(0)) == repr(Scale(1))
    assert identity(Scale(0)) != identity(Scale(1)) == identity(Scale(1))


SURROGATE_CHANGES = dict(
    weight=lambda m: m[0].weight.data.add_(1),
    unsaved_buffer=lambda m: m.register_buffer('b', torch.ones(1), persistent=False),
    attribute=lambda m: setattr(m, 'k', 2),
    hook=lambda m: m.register_forward_hook(lambda m, i, o: 2 * o),
    forward=lambda m: setattr(m, 'forward', lambda x: x),
)


@pytest.mark.parametrize('kind', SURROGATE_CHANGES)
def test_the_surrogate_of_a_transfer_counts(kind):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(2, 2))
    before = identity(Transfer(m, PGD(0.1)))
    assert identity(Transfer(copy.deepcopy(m), PGD(0.1))) == before
    SURROGATE_CHANGES[kind](m)
    assert identity(Transfer(m, PGD(0.1))) != before


def test_a_patched_method_of_the_library_is_seen(monkeypatch):
    before = identity(PGD(0.1))
    monkeypatch.setattr(PGD, 'step_at', lambda self, i: 0.01)
    assert identity(PGD(0.1)) != before


def test_copying_an_object_changes_nothing():
    "Python notes on a class how its objects are copied"
    a = made('class F:\n def __init__(self): self.t = 1\nA = F()')
    before = identity(a)
    copy.copy(a)
    assert identity(a) == before


MODULE_USES = dict(
    outside='import helpers_of_mine\ndef A(z, y): return helpers_of_mine.f(z)',
    inside='def A(z, y):\n import helpers_of_mine\n return helpers_of_mine.f(z)',
)


@pytest.mark.parametrize('where', MODULE_USES)
def test_a_module_of_ones_own_counts(where, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def with_body(body):
        (tmp_path / 'helpers_of_mine.py').write_text(f'def f(z): return {body}\n')
        sys.modules.pop('helpers_of_mine', None)
        if where == 'outside':
            m = types.ModuleType('helpers_of_mine')
            exec((tmp_path / 'helpers_of_mine.py').read_text(), m.__dict__)
            monkeypatch.setitem(sys.modules, 'helpers_of_mine', m)
        return identity(made(MODULE_USES[where]))

    one, two = with_body('z'), with_body('2*z')
    assert '' not in (one, two) and one != two


def test_what_cannot_be_read_has_no_identity():
    class A(PGD):
        pass

    a = A(0.1)
    with open(__file__) as f:
        object.__setattr__(a, 'log', f)
        assert identity(a) == ''


def test_another_process_that_imports_less_gives_the_same(tmp_path):
    "The order of a set changes with the process, and so do addresses"
    importlib.import_module('robust_nbdev.all')
    src = 'S = {"a", "b", "c"}\ndef f(z, y): return ce(z, y) if S else z\nA = PGD(.1, loss=f)\n'
    imports = 'from robust_nbdev.attacks import *\nfrom robust_nbdev.identity import identity\n'
    (tmp_path / 's.py').write_text(imports + src + 'print(identity(A), identity(FGSM(.1)))')
    cmd, env = [sys.executable, str(tmp_path / 's.py')], {**os.environ, 'PYTHONHASHSEED': '7'}
    out = subprocess.run(cmd, env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == [identity(made(src, '__main__')), identity(FGSM(0.1))]


# --- models ---

COUNTING = '''class A(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.Linear(2,2); self.n = 0
    def forward(self, x): self.n += 1; return self.l(x){}
A = A()'''


def code(m):
    return identity(m, data=False)


def test_the_code_of_a_model_without_its_values():
    "Weights, counters and caches have other witnesses"
    a, b, c = [made(COUNTING.format(o)) for o in ('', '', '+0')]
    b.cache = torch.ones(3)
    assert code(a) == code(b) != code(c)
    assert code(nn.Sequential(a)) != code(a)


def test_hooks_and_replaced_methods_are_code_of_a_model():
    a = made(COUNTING.format(''))
    hooked, replaced, same = [copy.deepcopy(a) for _ in range(3)]
    hooked.register_forward_hook(lambda m, i, o: o)
    replaced.forward = lambda x: x
    assert code(same) == code(a) and code(a) not in (code(hooked), code(replaced))


def test_wrappers_of_torch_can_be_read():
    a = made(COUNTING.format(''))
    assert '' not in (code(nn.DataParallel(a)), code(torch.compile(a)))


def test_a_fingerprint_sees_buffers_of_any_type():
    m = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).bfloat16()
    before = fingerprint(m)
    with torch.no_grad():
        m[1].running_mean[0] += 1e-6
    assert fingerprint(m) != before


def test_settings_that_cannot_be_read_count_as_changed():
    class Logged(nn.Module):
        def forward(self, x):
            return x

    m = Logged()
    with open(__file__) as f:
        m.log = f
        held = beside_weights(m)
    assert held['test_settings_that_cannot_be_read_count_as_changed.<locals>.Logged.log'] == ''
    assert len(changed(steady(held, held), steady(held, held))) == 1


# --- outputs up to rounding ---

OTHER = dict(
    negative=lambda t: -t,
    order=lambda t: t.flip(0),
    shifted=lambda t: t.roll(1, -1),
    nan=lambda t: torch.full_like(t, float('nan')),
    corner=lambda t: torch.cat([0 * t[..., :3], t[..., 3:]], -1),
)


@pytest.fixture(scope='module')
def outputs_():
    return torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('kind', OTHER)
def test_sketches_differ_by_more_than_rounding(outputs_, kind):
    assert not alike(sketch(outputs_), sketch(OTHER[kind](outputs_)))


def test_sketches_forgive_rounding_and_fewer_images(outputs_):
    s = sketch(outputs_)
    assert alike(s, sketch(outputs_ * (1 + 1e-5))) and alike(s, sketch(outputs_[:3])) and not alike(s, None)
    assert alike(sketch(0 * outputs_), sketch(0 * outputs_))


# --- the process does not matter ---


@pytest.mark.parametrize('attack', [PGD(0.1, loss=kl), APGD(0.1, steps=5, loss=dlr)], ids=repr)
def test_use_leaves_the_identity_as_it_was(attack):
    "Also what the library has looked up on the way, such as the form of a loss"
    before = identity(attack)
    attack(tiny_vit(), torch.rand(2, 1, 28, 28), torch.tensor([0, 1]))
    assert identity(attack) == before


def test_a_case_that_a_user_registers_is_part_of_the_code():
    src = (
        '@functools.singledispatch\ndef how(x): return 0\n@how.register(int)\ndef _(x): return {}\nA = lambda x: how(x)'
    )
    assert identity(made(src.format(1))) != identity(made(src.format(2)))


def test_data_that_an_attack_holds_is_part_of_it():
    one, two = [torch.utils.data.TensorDataset(torch.full((1, 4), o)) for o in (0.1, 0.2)]
    assert identity(one) != identity(two) and identity(one, data=False) == identity(two, data=False)
