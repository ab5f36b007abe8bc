"""Compare what `tiny` learns with Muon and with AdamW in the same number of steps:
`python benchmarks/muon_learning.py OUT.md [OVERRIDES]`.

Seed 1 chooses the learning rate of each optimizer: it trains at five rates, and while the best one
is the lowest or the highest, at the next one too. Seeds 2, 3 and 4, which chose nothing, are
compared at the best rate. A run takes up to three minutes on two idle cores. Runs that OUT.md has
already are not done again, and the last line has the means.
"""

from collections.abc import Sequence
from pathlib import Path

from learning import finish, mean, measured, table

RATES = 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2
CHOOSES, COMPARED = 1, (2, 3, 4)  # seeds
HEAD = '| optimizer | learning rate | seed | bits per byte |\n|---|---|---|---|\n'
MESH = 'mesh.data=1', 'mesh.model=1'


def run(out: Path, kind: str, rate: float, seed: int, overrides: Sequence[str]) -> float:
    """Return the bits per byte of `tiny` with an optimizer, a learning rate and a seed."""
    optim = f'optim.kind={kind}', f'optim.lr={rate}', f'optim.min_lr={rate / 10}'
    begin = f'| {kind} | {rate:g} | {seed} | '
    return measured(out, begin, 'tiny', [*optim, *MESH, f'train.seed={seed}', *overrides])


def best_rate(out: Path, kind: str, overrides: Sequence[str]) -> float:
    """Return the learning rate at which the first seed learns most; worse ones surround it."""
    found = {rate: run(out, kind, rate, CHOOSES, overrides) for rate in RATES}
    while True:
        rates = sorted(found)
        best = min(found, key=lambda rate: found[rate])
        if rates[0] < best < rates[-1]:
            return best
        rate = best / 2 if best == rates[0] else best * 2
        found[rate] = run(out, kind, rate, CHOOSES, overrides)


def main() -> None:
    """Train all runs that the file does not have, and write the means."""
    (out, overrides), means = table(__doc__, HEAD), []
    for kind in ('adamw', 'muon'):
        best = best_rate(out, kind, overrides)
        values = [run(out, kind, best, seed, overrides) for seed in COMPARED]
        means.append(mean(f'{kind} at {best:g}', values))
    finish(out, means, COMPARED)


if __name__ == '__main__':
    main()
