"`help(f)` shows what each parameter means."

import inspect
import pydoc
from types import FunctionType

from fastai.vision.all import Learner
from fastcore.docments import docments

from package import everything
from robust_nbdev.docstrings import *
from robust_nbdev.docstrings import _of_call, _ours

FUNCTIONS = {k: f for k, f in vars(everything).items() if isinstance(f, FunctionType) and _ours(f.__module__)}
CLASSES = {k: c for k, c in vars(everything).items() if isinstance(c, type) and _ours(c.__module__)}
METHODS = {
    f'{k}.{m}': f
    for k, c in {**CLASSES, 'Learner': Learner}.items()
    for m, f in vars(c).items()
    if isinstance(f, FunctionType) and not m.startswith('_') and _ours(f.__module__)
}


def test_help_says_what_parameters_mean():
    text = pydoc.render_doc(everything.robust_report, renderer=pydoc.plaintext)
    assert 'seed: Of the attacks\' random starts' in text and 'A row per attack, and the worst case' in text
    text = pydoc.render_doc(everything.PGD, renderer=pydoc.plaintext)
    assert 'eps: Radius in pixel units of [0,1]' in text and 'steps: Iterations' in text
    assert 'data: A DataLoader' not in inspect.getdoc(Learner.robust_report)
    assert 'ds_idx: 0: training images' in inspect.getdoc(Learner.robust_report)
    assert 'crop_mode: What is cut away' in inspect.getdoc(everything.cifar10), 'through two delegates'


def test_the_comments_are_those_that_fastcore_reads():
    "Where it reads one of a parameter; it mistakes a linter's remark for one, and looks into functions inside"
    sources, n = Sources(), 0
    for name, f in {**FUNCTIONS, **METHODS}.items():
        inner = inspect.unwrap(f)
        known = {'return', *inspect.signature(inner).parameters} - {'self', 'cls'}
        given = vars(inner).get('__delwrap__')
        if given is not None and not _ours(given.__module__):  # what fastai says of its own parameters
            known &= {*sources.of_function(inner)}
        want = {k: ' '.join(v.split()) for k, v in docments(f).items() if v and k in known}
        got = _of_call(inner, sources)
        assert {k: got.get(k) for k in want} == want, name
        n += len(want)
    assert n > 1000


def test_every_public_function_with_comments_has_them_in_its_docstring():
    without = [k for k, f in FUNCTIONS.items() if docments(f).get('return') and 'Returns' not in (f.__doc__ or '')]
    assert without == []


def test_documenting_twice_changes_nothing():
    before = {k: f.__doc__ for k, f in FUNCTIONS.items()}
    document(vars(everything))
    assert {k: f.__doc__ for k, f in FUNCTIONS.items()} == before
    assert everything.PGD.__doc__.count('Parameters\n') == 1


def test_what_identifies_code_does_not_change():
    "A docstring is no code: rows on disk stay those of the same attack"
    from robust_nbdev.identity import identity

    f = everything.interval
    before, doc = identity(f), f.__doc__
    try:
        f.__doc__ = 'another'
        assert identity(f) == before
    finally:
        f.__doc__ = doc
