"""Compare what `tiny` learns with Muon and with AdamW in the same number of steps:
`python benchmarks/muon_learning.py OUT.md`.

Each optimizer trains at five learning rates with the first seed, and at the best of them with two
more seeds. A run takes up to three minutes on two idle cores. Runs that OUT.md has already are not
done again, and the last line has the means.
"""

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path

import megajax

RATES = 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2
SEEDS = 1, 2, 3
HEAD = '| optimizer | learning rate | seed | bits per byte |\n|---|---|---|---|\n'


def bits_per_byte(kind: str, rate: float, seed: int) -> float:
    """Train, and return the bits per byte of the validation text after the last step."""
    with tempfile.TemporaryDirectory() as folder:
        optim = [f'optim.kind={kind}', f'optim.lr={rate}', f'optim.min_lr={rate / 10}']
        fixed = ['mesh.data=1', 'mesh.model=1', 'train.sample_prompts=[]', f'run.dir={folder}/run']
        run = megajax.train(megajax.load('tiny', [*optim, *fixed, f'train.seed={seed}']))
        lines = map(json.loads, (run.folder / 'metrics.jsonl').read_text().splitlines())
        name = 'validation_bits_per_byte'
        return float([line[name] for line in lines if name in line][-1])


def measured(out: Path, kind: str, rate: float, seed: int) -> float:
    """Return the bits per byte of a run, from the file if it has the run."""
    begin = f'| {kind} | {rate:g} | {seed} | '
    if found := re.search(rf'^{re.escape(begin)}([\d.]+)', out.read_text(), re.MULTILINE):
        return float(found[1])
    value = bits_per_byte(kind, rate, seed)
    with out.open('a') as file:
        file.write(f'{begin}{value:.4f} |\n')
    return value


def main() -> None:
    """Train all runs that the file does not have, and write the means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    out = parser.parse_args().out
    if not out.exists():
        out.write_text(HEAD)
    means = []
    for kind in ('adamw', 'muon'):
        best = min(RATES, key=lambda rate: measured(out, kind, rate, SEEDS[0]))
        values = [measured(out, kind, best, seed) for seed in SEEDS]
        span = f'{min(values):.4f} to {max(values):.4f}'
        means.append(f'{kind} at {best:g}: {statistics.mean(values):.4f} ({span})')
    with out.open('a') as file:
        file.write(f'\nbits per byte on average over {len(SEEDS)} seeds: {"; ".join(means)}\n')


if __name__ == '__main__':
    main()
