#!/usr/bin/env bash
# The whole benchmark on one GPU in at most five minutes; every line and section is written as soon as it is known
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
timeout -k 5 290 "${PYTHON:-python}" benchmarks/attacks.py --device cuda --out "${OUT:-bench_out}" --n 300 --bs 300 --parts 1 --batch 64 --rounds 3 --minutes 4
