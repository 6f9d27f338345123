"""List what the API pages lack: a one-line docstring for every public symbol, a comment for every parameter and return.

interrogate counts docstrings only; pydoclint, numpydoc and ruff's D rules read docstring sections. None of them reads docments, the comments that nbdev's pages are made of.

Counted as described: what an override shares with the method of its base class, and what `@delegates` takes from another function."""
import ast, importlib, inspect, sys, textwrap
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from fastcore.docments import docments
from fastcore.utils import signature_ex
from nbdev.config import get_config

ROOT = Path(__file__).resolve().parents[1]
PKG = get_config(ROOT).lib_path.name
sys.path.insert(0, str(ROOT))                        # lint this checkout, not another one that pip knows

def function(o):
    "The function behind a method, property or decorated function; None for a class or a value"
    o = o.fget if isinstance(o, property) else o.func if isinstance(o, cached_property) else getattr(o, '__func__', o)
    return o if inspect.isfunction(o:=inspect.unwrap(o)) else None

def tree(f): return ast.parse(textwrap.dedent(inspect.getsource(f))).body[0]
def ours(o): return (getattr(o, '__module__', '') or '').split('.')[0]==PKG

def returns(f):
    "Whether `f` returns or yields a value (functions inside it do not count)"
    todo = list(tree(f).body)
    while todo:
        o = todo.pop()
        if isinstance(o, (ast.Return,ast.Yield,ast.YieldFrom)) and not (o.value is None or getattr(o.value,'value',...) is None): return True
        if not isinstance(o, (ast.FunctionDef,ast.ClassDef,ast.Lambda)): todo += ast.iter_child_nodes(o)
    return False

def wanted(f):
    "Names that need a comment: the parameters that `f` itself lists, and 'return' (not for a Transform's `encodes`: fastcore would read its annotation as a cast)"
    a,sig = tree(f).args,signature_ex(f).parameters
    names = [p.arg for p in [*a.posonlyargs,*a.args,a.vararg,*a.kwonlyargs,a.kwarg] if p]
    return [n for n in names if n in sig and n not in ('self','cls')]+['return']*(f.__name__ not in ('encodes','decodes') and returns(f))

def lacks(o, bases=()):
    "What symbol `o` lacks; `bases`: the same method in its class's bases, nearest first"
    if inspect.isclass(o):
        doc = vars(o).get('__doc__')
        names,docs = ([f.name for f in fields(o) if f.init and f.name in vars(o).get('__annotations__',{})],[docments(b) for b in o.__mro__ if is_dataclass(b)]) if is_dataclass(o) else (wanted(o.__init__),[docments(o.__init__, args_kwargs=True)]) if '__init__' in vars(o) else ([],[])
    elif f:=function(o):
        prop = isinstance(o, (property,cached_property))                     # its docstring says what it is
        fs = [f,*filter(None, map(function, bases))]
        if any(b.__doc__ and not ours(b) and b.__name__!='_forward_unimplemented' for b in fs[1:]): return []        # torch, timm or fastai says what it does
        doc,names,docs = next((b.__doc__ for b in fs if b.__doc__), None),[] if prop else wanted(f),[docments(b, args_kwargs=True) for b in fs if ours(b)]
    else: return []
    return ['no docstring' if not doc else 'docstring of several lines']*(not doc or '\n' in doc.strip())+[k for k in names if not any(d.get(k) for d in docs)]

def symbols():
    "Name and value of everything public that the modules define: functions, classes, their methods and what they patch on other classes; a method comes with its bases"
    for mod,syms in importlib.import_module(f'{PKG}._modidx').d['syms'].items():
        m = importlib.import_module(mod)
        for s in syms:
            path = s.removeprefix(f'{mod}.').split('.')
            if any(p.startswith('_') and p!='__call__' for p in path): continue
            cls = getattr(m, path[0]) if len(path)>1 else None
            if cls is None: yield s,getattr(m, path[0]),()
            elif path[1] in vars(cls): yield s,vars(cls)[path[1]],[vars(b)[path[1]] for b in cls.__mro__[1:] if path[1] in vars(b)]

def main():
    bad = {s:b for s,o,bases in symbols() if (b:=lacks(o, bases))}
    for s,b in bad.items(): print(f'{s.removeprefix(PKG+".")}: {", ".join(b)}')
    return bool(bad)

if __name__=='__main__': sys.exit(main())
