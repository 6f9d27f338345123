"A copy of the checkout to build or to export in, without what git, builds and runs leave behind"

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_BEHIND = """.git build dist *.egg-info __pycache__ _docs _proc .venv .pytest_cache .hypothesis robust_out
bench_out""".split()


def copy_checkout(to, *without):
    "Copy the checkout to the folder `to`, which must not exist yet; links stay links"
    shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND, *without))
