#!/usr/bin/env bash
# The whole benchmark on one GPU in at most eight minutes; every line and section is written as soon as it is known
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
timeout -k 5 200 "${PYTHON:-python}" benchmarks/training.py --device cuda --out "${OUT:-bench_out}" --batch 64 --steps 4 --rounds 3 --minutes 2.5
timeout -k 5 270 "${PYTHON:-python}" benchmarks/attacks.py --device cuda --out "${OUT:-bench_out}" --n 300 --bs 300 --parts 1 --batch 64 --rounds 3 --minutes 4
