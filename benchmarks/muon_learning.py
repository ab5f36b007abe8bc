"""Compare what `tiny` learns with Muon and with AdamW in the same number of steps:
`python benchmarks/muon_learning.py OUT.md`.

Each optimizer trains at five learning rates with the first seed, and at the best of them with two
more seeds. A run takes up to three minutes on two idle cores. Runs that OUT.md has already are not
done again, and the last line has the means.
"""

from pathlib import Path

from learning import SEEDS, finish, mean, measured, table

RATES = 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2
HEAD = '| optimizer | learning rate | seed | bits per byte |\n|---|---|---|---|\n'
MESH = 'mesh.data=1', 'mesh.model=1'


def run(out: Path, kind: str, rate: float, seed: int) -> float:
    """Return the bits per byte of `tiny` with an optimizer, a learning rate and a seed."""
    optim = f'optim.kind={kind}', f'optim.lr={rate}', f'optim.min_lr={rate / 10}'
    begin = f'| {kind} | {rate:g} | {seed} | '
    return measured(out, begin, 'tiny', [*optim, *MESH, f'train.seed={seed}'])


def main() -> None:
    """Train all runs that the file does not have, and write the means."""
    out, means = table(__doc__, HEAD), []
    for kind in ('adamw', 'muon'):
        best = min(RATES, key=lambda rate: run(out, kind, rate, SEEDS[0]))
        means.append(mean(f'{kind} at {best:g}', [run(out, kind, best, seed) for seed in SEEDS]))
    finish(out, means)


if __name__ == '__main__':
    main()
