"""Compare what `tiny` and `tiny_moe` learn in the same number of steps:
`python benchmarks/experts_learning.py OUT.md`.

A token uses as many parameters of one as of the other, except for the router's. Each preset trains
with three seeds; a run takes up to two minutes on two idle cores. Runs that OUT.md has already are
not done again, and the last line has the means.
"""

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path

import megajax
from megajax.core.counts.parameters import num_parameters

PRESETS = 'tiny', 'tiny_moe'
SEEDS = 1, 2, 3
HEAD = '| preset | parameters | used by a token | seed | bits per byte |\n|---|---|---|---|---|\n'
MESH = 'mesh.data=1', 'mesh.model=1', 'mesh.experts=1'


def bits_per_byte(preset: str, seed: int) -> float:
    """Train, and return the bits per byte of the validation text after the last step."""
    with tempfile.TemporaryDirectory() as folder:
        own = ['train.sample_prompts=[]', f'run.dir={folder}/run', f'train.seed={seed}']
        run = megajax.train(megajax.load(preset, [*MESH, *own]))
        lines = map(json.loads, (run.folder / 'metrics.jsonl').read_text().splitlines())
        name = 'validation_bits_per_byte'
        return float([line[name] for line in lines if name in line][-1])


def measured(out: Path, preset: str, seed: int) -> float:
    """Return the bits per byte of a run, from the file if it has the run."""
    model = megajax.load(preset).model
    counts = num_parameters(model), num_parameters(model, active=True)
    begin = f'| {preset} | {counts[0]:,} | {counts[1]:,} | {seed} | '
    if found := re.search(rf'^{re.escape(begin)}([\d.]+)', out.read_text(), re.MULTILINE):
        return float(found[1])
    value = bits_per_byte(preset, seed)
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
    runs = [{preset: measured(out, preset, seed) for preset in PRESETS} for seed in SEEDS]
    means = []
    for preset in PRESETS:
        values = [run[preset] for run in runs]
        span = f'{min(values):.4f} to {max(values):.4f}'
        means.append(f'{preset}: {statistics.mean(values):.4f} ({span})')
    with out.open('a') as file:
        file.write(f'\nbits per byte on average over {len(SEEDS)} seeds: {"; ".join(means)}\n')


if __name__ == '__main__':
    main()
