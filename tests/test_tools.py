"The two checks of the documentation: what they find, and that there is nothing to find"
import importlib.util
from dataclasses import dataclass
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT/'tools'/f'{name}.py')
    m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m); return m

@pytest.fixture(scope='module')
def lint():
    pytest.importorskip('nbdev')
    return tool('docs_lint')

def test_every_public_symbol_is_described(lint, capsys):
    assert not lint.main(), capsys.readouterr().out

def good(
    x, # Anything
    *args, # More
    **kw # Named
)->int: # Zero
    "One line"
    def inner(): return 1
    return 0

def bare(x, y=1): return x

def nothing(x): # Anything
    "Returns no value"
    def inner(): return 1
    if x: return
    return None

def two_lines(
    x, # Anything
):
    """Two
    lines"""

def stream(
    n:int, # How many
):
    "Numbers"
    yield from range(n)

class Base:
    "A base"
    def __init__(self, x): # Anything
        self.x = x
    def f(self,
        x, # Anything
    )->int: # One
        "Says one"
        return 1
    @property
    def p(self):
        "A property needs no more than this"
        return 1
    @property
    def q(self): return 1

class Child(Base):
    def f(self, x): return 2
    def g(self, x): return 2

@dataclass
class Fields:
    "Some fields"
    a:int # The first
    b:int=0

@pytest.mark.parametrize('o,bad', [(good,[]), (bare,['docstring','x','y','return']), (nothing,[]), (two_lines,['docstring of one line']), (stream,['return']),
    (Base,[]), (Base.f,[]), (Base.p,[]), (Base.q,['docstring']), (Child,['docstring']), (Child.g,['docstring','x','return']), (Fields,['b'])], ids=lambda o: getattr(o,'__name__',None) or (o.fget.__name__ if isinstance(o,property) else ''))
def test_lint_finds(lint, monkeypatch, o, bad):
    monkeypatch.setattr(lint, 'PKG', __name__.split('.')[0])
    assert lint.lacks(o)==bad

def test_an_override_says_what_its_base_says(lint, monkeypatch):
    monkeypatch.setattr(lint, 'PKG', __name__.split('.')[0])
    assert lint.lacks(Child.f, [Base.f])==[] and lint.lacks(Child.f)==['docstring','x','return']

def test_methods_of_other_libraries_are_described_there_but_not_what_forward_takes(lint, monkeypatch):
    from torch import nn
    monkeypatch.setattr(lint, 'PKG', __name__.split('.')[0])
    class M(nn.Module):
        def forward(self, x): return x
        def extra_repr(self): return ''
    assert lint.lacks(M.extra_repr, [nn.Module.extra_repr])==[]
    assert lint.lacks(M.forward, [nn.Module.forward])==['docstring of one line','x','return']

def test_everything_that_nbdev_has_indexed_is_looked_at(lint):
    seen = {s for s,_,_ in lint.symbols()}
    assert {'robust_nbdev.core.Linf.project','robust_nbdev.evaluate.Learner.robust_report','robust_nbdev.attacks.WorstCase.__call__','robust_nbdev.core.eps_str'}<=seen and len(seen)>500
