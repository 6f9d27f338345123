"Tests run at the smoke profile, headless, and skip `slow` ones unless --slow is given"
import os
os.environ.setdefault('ROBUST_PROFILE', 'smoke')
os.environ.setdefault('MPLBACKEND', 'agg')
import pytest

def pytest_addoption(parser): parser.addoption('--slow', action='store_true', help='run tests marked slow, and slow notebook cells')

def pytest_configure(config):
    if config.getoption('--slow'): os.environ.setdefault('NB_FLAGS', 'slow')

def pytest_collection_modifyitems(config, items):
    if config.getoption('--slow'): return
    for o in items:
        if 'slow' in o.keywords: o.add_marker(pytest.mark.skip(reason='slow: run with --slow'))
