"""Tests run at the smoke profile, headless, one thread each, on up to four cores (`-n 0`: in one process), and skip
`slow` ones unless --slow is given"""

import os

os.environ.setdefault('ROBUST_PROFILE', 'smoke')
os.environ.setdefault('MPLBACKEND', 'agg')
# read when torch is imported, by workers and by the processes that tests start
os.environ.setdefault('OMP_NUM_THREADS', '1')
from pathlib import Path
import pytest


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='run tests marked slow, and slow notebook cells')


def pytest_configure(config):
    if config.getoption('--slow'):
        os.environ.setdefault('NB_FLAGS', 'slow')


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """As many workers as cores, at most four (each takes about 1.5 GB); none for single tests, which would only wait
    for the workers to start"""
    if os.environ.get('PYTEST_XDIST_AUTO_NUM_WORKERS'):
        return None  # xdist reads it itself
    if any('::' in a for a in config.args):
        return 0
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1)


HERE = Path(__file__).parent
# files whose fixtures of module scope are made once, by one worker
TOGETHER = {p.name for p in HERE.glob('test_*.py') if "scope='module'" in p.read_text()}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    "Tests of a file in TOGETHER go to one worker; xdist's own groups are not seen by pytest 9.2"
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition('::')[0]
            return file if Path(file).name in TOGETHER else nodeid

    return ByFile(config, log)


# the longest: no worker begins one when the others are done
FIRST = 'test_notebooks test_cli test_packaging test_distributed test_hunting test_verdicts'.split()


@pytest.fixture(autouse=True)
def seeded():
    "Each test draws the same numbers alone, in any order and in any worker"
    from fastai.torch_core import set_seed

    set_seed(0)


def pytest_collection_modifyitems(config, items):
    from fastai.torch_core import defaults

    # no DataLoader workers by default: a fork of a process with threads can abort, and costs more than it brings here
    defaults.cpus = 0
    for o in items:
        if 'slow' in o.keywords and not config.getoption('--slow'):
            o.add_marker(pytest.mark.skip(reason='slow: run with --slow'))

    def rank(o):
        return (*[o.module.__name__ != m for m in FIRST], o.path.name not in TOGETHER)

    items.sort(key=rank)
