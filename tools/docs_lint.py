"""List what the API pages lack: a docstring of one paragraph for every public symbol, a comment for every parameter and
return.

interrogate counts docstrings only; pydoclint, numpydoc and ruff's D rules read docstring sections: none reads
docments, the comments that nbdev's pages are made of.

Counts as described: what an override shares with the method of its base class, and what `@delegates` takes from
another function."""

import ast, importlib, inspect, re, sys, textwrap
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# lint this checkout, not another one that pip knows
if __name__ == '__main__':
    sys.path.insert(0, str(ROOT))
from fastcore.docments import docments
from fastcore.utils import signature_ex
from nbdev.config import get_config

PKG = get_config(ROOT).lib_path.name


def is_prop(o):
    return isinstance(o, (property, cached_property))


def ours(o):
    return (getattr(o, '__module__', '') or '').split('.')[0] == PKG


def tree(f):
    return ast.parse(textwrap.dedent(inspect.getsource(f))).body[0]


def function(o):
    "The function behind a method, property or decorated function; None for a class or a value"
    o = inspect.unwrap(
        o.fget if isinstance(o, property) else o.func if isinstance(o, cached_property) else getattr(o, '__func__', o)
    )
    return o if inspect.isfunction(o) else None


def returns(f):
    "Does `f` return or yield a value? (Functions inside it do not count)"
    todo = list(tree(f).body)
    while todo:
        o = todo.pop()
        if isinstance(o, (ast.Return, ast.Yield, ast.YieldFrom)) and not (
            o.value is None or getattr(o.value, 'value', ...) is None
        ):
            return True
        if not isinstance(o, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            todo += ast.iter_child_nodes(o)
    return False


def wanted(f):
    """Names that need a comment: the parameters that `f` itself lists, and 'return' (not for a Transform's `encodes`:
    fastcore would read its annotation as a cast)"""
    a, sig = tree(f).args, signature_ex(f).parameters
    names = [p.arg for p in [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg] if p]
    return [n for n in names if n in sig and n not in ('self', 'cls')] + ['return'] * (
        f.__name__ not in ('encodes', 'decodes') and returns(f)
    )


def class_parts(o):
    "Docstring, parameters, and where these may be described"
    doc = vars(o).get('__doc__')
    if is_dataclass(o):
        return (
            doc,
            [f.name for f in fields(o) if f.init and f.name in vars(o).get('__annotations__', {})],
            [docments(b) for b in o.__mro__ if is_dataclass(b)],
        )
    return (
        (doc, wanted(o.__init__), [docments(o.__init__, args_kwargs=True)]) if '__init__' in vars(o) else (doc, [], [])
    )


def function_parts(o, bases):
    """The same for a function or method; a property's docstring says what it is, and other libraries say what their
    methods do"""
    fs = [function(o), *filter(None, map(function, bases))]
    theirs = any(b.__doc__ and not ours(b) and b.__name__ != '_forward_unimplemented' for b in fs[1:])
    doc = '.' if theirs else next((b.__doc__ for b in fs if b.__doc__), None)
    return doc, [] if theirs or is_prop(o) else wanted(fs[0]), [docments(b, args_kwargs=True) for b in fs if ours(b)]


def own(doc):
    "A docstring without the list of parameters that the package adds to it for `help`"
    return re.split(r'\n\n(?:Parameters|Returns)\n', doc or '')[0]


def lacks(o, bases=()):
    "What symbol `o` lacks; `bases`: the same method in its class's bases, nearest first"
    if not (inspect.isclass(o) or function(o)):
        return []
    doc, names, docs = class_parts(o) if inspect.isclass(o) else function_parts(o, bases)
    doc = own(doc)
    bad = [] if doc and '\n\n' not in doc.strip() else ['docstring of one paragraph'] if doc else ['docstring']
    return bad + [k for k in names if not any(d.get(k) for d in docs)]


def symbols():
    """Name, value and bases of everything public that nbdev has indexed: functions, classes, their methods, and methods
    patched on other classes"""
    for mod, syms in importlib.import_module(f'{PKG}._modidx').d['syms'].items():
        m = importlib.import_module(mod)
        for s in syms:
            top, *meth = s.removeprefix(f'{mod}.').split('.')
            if any(p.startswith('_') and p != '__call__' for p in (top, *meth)):
                continue
            o = getattr(m, top)
            if not meth:
                yield s, o, ()
            elif len(meth) == 1 and meth[0] in vars(o):
                yield s, vars(o)[meth[0]], [vars(b)[meth[0]] for b in o.__mro__[1:] if meth[0] in vars(b)]


def main():
    bad = {s: b for s, o, bases in symbols() if (b := lacks(o, bases))}
    for s, b in bad.items():
        print(f'{s.removeprefix(PKG + ".")}: {", ".join(b)}')
    return bool(bad)


if __name__ == '__main__':
    sys.exit(main())
