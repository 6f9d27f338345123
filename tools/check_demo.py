"What README promises of `robust-demo`, checked on a folder that it wrote"

import json, sys
from pathlib import Path


def accuracy(model, attack):
    rows = json.loads((Path(sys.argv[1]) / model / 'report.json').read_text())['rows']
    return next(r['accuracy'] for r in rows if r['attack'].startswith(attack))


claims = {
    'plain, PGD-20, at most 5%': accuracy('plain', 'PGD') <= 0.05,
    'robust, PGD-20, at least 50%': accuracy('robust', 'PGD') >= 0.5,
    'robust, clean, at least 60%': accuracy('robust', 'clean') >= 0.6,
}
for claim, holds in claims.items():
    print('holds' if holds else 'FAILS', claim)
sys.exit(not all(claims.values()))
