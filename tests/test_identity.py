"What makes two attacks, losses or models the same: their code and what they hold, never their printed name."

import copy, functools, os, subprocess, sys, types
import numpy as np, pytest, torch
from dataclasses import dataclass
from torch import nn
from robust_nbdev.attacks import *
from robust_nbdev.evaluate import identity, sketch, alike
from robust_nbdev.test_utils import *


def made(src, name='made', **more):
    "What a notebook cell with this source defines as `A`"
    g = dict(
        __name__=name,
        torch=torch,
        nn=nn,
        PGD=PGD,
        ce=ce,
        Attack=Attack,
        dataclass=dataclass,
        functools=functools,
        np=np,
        **more,
    )
    exec(src, g)
    return g['A']


class Scale:
    def __init__(self, k):
        self.k = k

    def __call__(self, model, x, y, seed=0):
        return x

    def __repr__(self):
        return 'Scale'

    def __eq__(self, o):
        return type(o) is Scale

    def __hash__(self):
        return 1


PAIRS = dict(
    update=[
        "class A(PGD):\n def update(self, x, s, g, v, i): return s\nA = A(.1)",
        "class A(PGD):\n def update(self, x, s, g, v, i): return {**s}\nA = A(.1)",
    ],
    base=[
        "class B(PGD):\n k = 1\n def run(self, obj, x, seed): return x\nclass A(B): pass\nA = A(.1)",
        "class B(PGD):\n k = 1\n def run(self, obj, x, seed): return x+0\nclass A(B): pass\nA = A(.1)",
    ],
    attribute=["class A(PGD): k = 1\nA = A(.1)", "class A(PGD): k = 2\nA = A(.1)"],
    property_=[
        "class A(PGD):\n @property\n def step_size(self): return .1\nA = A(.1)",
        "class A(PGD):\n @property\n def step_size(self): return .2\nA = A(.1)",
    ],
    static=[
        "class A(PGD):\n @staticmethod\n def f(): return .1\nA = A(.1)",
        "class A(PGD):\n @staticmethod\n def f(): return .2\nA = A(.1)",
    ],
    loss=["def f(z,y): return ce(z,y)\nA = PGD(.1, loss=f)", "def f(z,y): return -ce(z,y)\nA = PGD(.1, loss=f)"],
    helper=[
        "def h(z): return z\ndef f(z,y): return ce(h(z),y)\nA = PGD(.1, loss=f)",
        "def h(z): return 2*z\ndef f(z,y): return ce(h(z),y)\nA = PGD(.1, loss=f)",
    ],
    global_=[
        "T = 1.\ndef f(z,y): return ce(z/T,y)\nA = PGD(.1, loss=f)",
        "T = 2.\ndef f(z,y): return ce(z/T,y)\nA = PGD(.1, loss=f)",
    ],
    default=["A = PGD(.1, loss=lambda z,y,t=1: ce(z/t,y))", "A = PGD(.1, loss=lambda z,y,t=2: ce(z/t,y))"],
    keyword=["def f(z,y,*,t=1): return ce(z/t,y)\nA = f", "def f(z,y,*,t=2): return ce(z/t,y)\nA = f"],
    closure=[
        "def g(t): return lambda z,y: ce(z/t,y)\nA = PGD(.1, loss=g(1))",
        "def g(t): return lambda z,y: ce(z/t,y)\nA = PGD(.1, loss=g(2))",
    ],
    inner=[
        "def g():\n def h(z): return z\n return lambda z,y: ce(h(z),y)\nA = g()",
        "def g():\n def h(z): return 3*z\n return lambda z,y: ce(h(z),y)\nA = g()",
    ],
    partial=[
        "def f(z,y,t): return ce(z/t,y)\nA = PGD(.1, loss=functools.partial(f, t=1))",
        "def f(z,y,t): return ce(z/t,y)\nA = PGD(.1, loss=functools.partial(f, t=2))",
    ],
    callable_=[
        "class F:\n def __call__(self, z, y): return ce(z,y)\nA = PGD(.1, loss=F())",
        "class F:\n def __call__(self, z, y): return -ce(z,y)\nA = PGD(.1, loss=F())",
    ],
    state=[
        "class F:\n def __init__(self): self.t = 1\n def __call__(self, z, y): return ce(z/self.t,y)\nA = F()",
        "class F:\n def __init__(self): self.t = 2\n def __call__(self, z, y): return ce(z/self.t,y)\nA = F()",
    ],
    slots=["class F:\n __slots__ = ('t',)\nA = F(); A.t = 1", "class F:\n __slots__ = ('t',)\nA = F(); A.t = 2"],
    method=[
        "class F:\n t = 1\n def f(self, z, y): return ce(z/self.t,y)\nA = F().f",
        "class F:\n t = 2\n def f(self, z, y): return ce(z/self.t,y)\nA = F().f",
    ],
    wrapped=[
        "def w(f):\n @functools.wraps(f)\n def g(z,y): return f(z,y)\n return g\nA = w(ce)",
        "def w(f):\n @functools.wraps(f)\n def g(z,y): return -f(z,y)\n return g\nA = w(ce)",
    ],
    no_grad=[
        "@torch.no_grad()\ndef A(m, x, y, seed=0): return x",
        "@torch.no_grad()\ndef A(m, x, y, seed=0): return x+0",
    ],
    cached=["@functools.lru_cache\ndef A(m): return 1", "@functools.lru_cache\ndef A(m): return 2"],
    tensor=["A = functools.partial(ce, t=torch.zeros(3))", "A = functools.partial(ce, t=torch.ones(3))"],
    array=["A = [np.zeros(3)]", "A = [np.ones(3)]"],
    rng=["A = [np.random.default_rng(0)]", "A = [np.random.default_rng(1)]"],
    torch_rng=["A = torch.Generator().manual_seed(0)", "A = torch.Generator().manual_seed(1)"],
    function_attribute=["def A(z,y): return z\nA.clean = True", "def A(z,y): return z\nA.clean = False"],
    backward=[
        (
            "class F(torch.autograd.Function):\n @staticmethod\n def forward(ctx, x): return x.clone()\n"
            " @staticmethod\n def backward(ctx, g): return g\ndef A(m, x, y): return m(F.apply(x))"
        ),
        (
            "class F(torch.autograd.Function):\n @staticmethod\n def forward(ctx, x): return x.clone()\n"
            " @staticmethod\n def backward(ctx, g): return 0*g\ndef A(m, x, y): return m(F.apply(x))"
        ),
    ],
    decimals=["A = PGD(.1000001)", "A = PGD(.1000002)"],
)


@pytest.mark.parametrize('kind', PAIRS)
def test_a_change_is_seen_and_a_repetition_is_not(kind):
    a, b = PAIRS[kind]
    assert identity(made(a)) == identity(made(a)) != ''
    assert identity(made(a)) != identity(made(b)) != ''


def test_hidden_state_is_seen():
    assert (
        Scale(0) == Scale(1)
        and repr(Scale(0)) == repr(Scale(1))
        and identity(Scale(0)) != identity(Scale(1)) == identity(Scale(1))
    )


@pytest.mark.parametrize(
    'change',
    [
        lambda m: m[0].weight.data.add_(1),
        lambda m: m.register_buffer('b', torch.ones(1), persistent=False),
        lambda m: setattr(m, 'k', 2),
        lambda m: m.register_forward_hook(lambda m, i, o: 2 * o),
        lambda m: setattr(m, 'forward', lambda x: x),
    ],
)
def test_a_surrogate_is_looked_into(change):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(2, 2))
    a = identity(Transfer(m, PGD(0.1)))
    assert identity(Transfer(copy.deepcopy(m), PGD(0.1))) == a
    change(m)
    assert identity(Transfer(m, PGD(0.1))) != a


def test_a_patched_method_of_the_library_is_seen(monkeypatch):
    a = identity(PGD(0.1))
    monkeypatch.setattr(PGD, 'update', lambda self, x, s, g, v, i: s)
    assert identity(PGD(0.1)) != a


def test_copying_an_object_leaves_its_class_alone():
    "Python notes on a class how its objects are copied"
    a = made("class F:\n def __init__(self): self.t = 1\nA = F()")
    before = identity(a)
    copy.copy(a)
    assert identity(a) == before


def test_comments_lines_and_names_of_files_are_no_code():
    a, b = "def f(z,y): return ce(z,y)\nA = f", "\n\n# a comment\ndef f(z,y):\n    # another\n    return ce(z,y)\nA = f"
    assert identity(made(a)) == identity(made(b))


def test_a_module_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    f = tmp_path / 'helpers_of_mine.py'
    src = {
        'module': "import helpers_of_mine\ndef A(z,y): return helpers_of_mine.f(z)",
        'inside': "def A(z,y):\n import helpers_of_mine\n return helpers_of_mine.f(z)",
    }
    got = []
    for body in ('z', '2*z'):
        f.write_text(f'def f(z): return {body}\n')
        sys.modules.pop('helpers_of_mine', None)
        sys.modules['helpers_of_mine'] = m = types.ModuleType('helpers_of_mine')
        exec(f.read_text(), m.__dict__)
        m.__spec__ = None
        got.append([identity(made(src['module']))])
        del sys.modules['helpers_of_mine']
        got[-1].append(identity(made(src['inside'])))
    assert '' not in got[0] + got[1] and got[0][0] != got[1][0] and got[0][1] != got[1][1]


def test_models_by_their_code_alone():
    "Weights, counters and caches have other witnesses; the code of a layer, of a hook and of the backward has none"
    src = (
        "class A(nn.Module):\n def __init__(self): super().__init__(); self.l = nn.Linear(2,2); self.n = 0\n def"
        " forward(self, x): self.n += 1; return self.l(x){}\nA = A()"
    )
    code = lambda m: identity(m, data=False)
    a, b, c = made(src.format('')), made(src.format('')), made(src.format('+0'))
    b(torch.zeros(1, 2))
    b.cache = torch.ones(3)
    assert code(a) == code(b) != code(c) and code(nn.Sequential(a)) != code(a)
    b.register_forward_hook(lambda m, i, o: o)
    assert code(b) != code(a)
    c, d = copy.deepcopy(a), copy.deepcopy(a)
    c.forward = lambda x: x
    assert code(c) != code(d) == code(a)
    assert code(nn.DataParallel(a)) != '' and code(torch.compile(a)) != ''


def test_what_cannot_be_read_is_like_nothing():
    class A(PGD):
        pass

    a = A(0.1)
    object.__setattr__(a, 'log', open(__file__))
    with a.log:
        assert identity(a) == ''


def test_another_process_gives_the_same(tmp_path):
    "The order of a set changes with the process, and so do addresses"
    src = 'S = {"a","b","c"}\ndef f(z, y): return ce(z, y) if S else z\nA = PGD(.1, loss=f)\n'
    (tmp_path / 's.py').write_text(
        'from robust_nbdev.attacks import *\nfrom robust_nbdev.evaluate import identity\n' + src + 'print(identity(A))'
    )
    out = subprocess.run(
        [sys.executable, str(tmp_path / 's.py')],
        env={**os.environ, 'PYTHONHASHSEED': '7'},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.strip() == identity(made(src, '__main__')) != ''


def test_sketches_differ_by_more_than_rounding():
    g = torch.Generator().manual_seed(0)
    t = torch.randn(20, 3, 8, 8, generator=g)
    s = sketch(t)
    assert (
        len(s) == 16
        and len(s[0]) == 4
        and alike(s, sketch(t))
        and alike(s, sketch(t * (1 + 1e-5)))
        and alike(s, sketch(t[:3]))
    )
    cut = t.clone()
    cut[:, :, :3, :3] = 0
    for other in (1.05 * t, -t, t.flip(0), 0 * t, cut, t.roll(1, -1), torch.full_like(t, float('nan'))):
        assert not alike(s, sketch(other))
    assert (
        alike(sketch(0 * t), sketch(0 * t))
        and not alike(s, None)
        and not alike(sketch(torch.full_like(t, float('nan'))), s)
    )
