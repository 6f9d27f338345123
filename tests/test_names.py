"Names that functions take from their module are there: linters cannot tell where modules are imported with a star."

import builtins, dis, importlib, pkgutil, types
from pathlib import Path

import pytest

import robust_nbdev

MODULES = [m.name for m in pkgutil.iter_modules(robust_nbdev.__path__) if m.name not in ('_modidx', '__main__')]


def globals_of(code):
    "The names that a code object, and those inside it, take from their module"
    names = {i.argval for i in dis.get_instructions(code) if i.opname == 'LOAD_GLOBAL'}
    inner = [o for o in code.co_consts if isinstance(o, types.CodeType)]
    return names.union(*map(globals_of, inner))


@pytest.mark.parametrize('name', MODULES)
def test_every_name_that_a_function_uses_is_defined(name):
    module = importlib.import_module(f'robust_nbdev.{name}')
    names = globals_of(compile(Path(module.__file__).read_text(), name, 'exec'))
    assert [n for n in sorted(names) if not (n in vars(module) or hasattr(builtins, n))] == []
