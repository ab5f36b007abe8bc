"""The bits per byte that a preset learns, kept in a table of runs that are not done again."""

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import megajax

SEEDS = 1, 2, 3


def table(description: str | None, head: str) -> tuple[Path, list[str]]:
    """Return the file and the overrides of all runs that the command line gives.

    A new file gets the head of a table.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    parser.add_argument('overrides', nargs='*', help='for example train.steps=300')
    args = parser.parse_args()
    if not args.out.exists():
        args.out.write_text(head)
    return args.out, args.overrides


def measured(out: Path, begin: str, preset: str, overrides: Sequence[str]) -> float:
    """Return the bits per byte of the run in the line that begins so; without one, train."""
    if found := re.search(rf'^{re.escape(begin)}([\d.]+)', out.read_text(), re.MULTILINE):
        return float(found[1])
    value = bits_per_byte(preset, overrides)
    with out.open('a') as file:
        file.write(f'{begin}{value:.4f} |\n')
    return value


def bits_per_byte(preset: str, overrides: Sequence[str]) -> float:
    """Train, and return the bits per byte of the validation text after the last step."""
    with tempfile.TemporaryDirectory() as folder:
        own = ['train.sample_prompts=[]', f'run.dir={folder}/run']
        run = megajax.train(megajax.load(preset, [*overrides, *own]))
        lines = map(json.loads, (run.folder / 'metrics.jsonl').read_text().splitlines())
        name = 'validation_bits_per_byte'
        return float([line[name] for line in lines if name in line][-1])


def mean(name: str, values: Sequence[float]) -> str:
    """Return the mean of some runs and their span, as text."""
    return f'{name}: {statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})'


def finish(out: Path, means: Sequence[str], seeds: Sequence[int] = SEEDS) -> None:
    """Write the means below the table."""
    with out.open('a') as file:
        file.write(f'\nbits per byte on average over {len(seeds)} seeds: {"; ".join(means)}\n')
