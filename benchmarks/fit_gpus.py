"""Efficiencies of GPUs and dies, and slowdowns of programs, from published rates of training:
`python benchmarks/fit_gpus.py [NAME...] [--write]`.

Prints what the rows that are not held out say, and with --write puts the efficiencies into the
files; slowdowns are constants of `programs.py` in `megajax/analysis/plan` and its `published`. At
most three efficiencies a GPU, four a die; `python benchmarks/plan_tables.py` then shows the rows
that are held out.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megajax.analysis.plan.published.fit import (
    Fitted,
    fit,
    mean_error,
    residuals,
    with_efficiency,
)
from megajax.analysis.plan.published.predictions import predicted
from megajax.analysis.plan.published.rates import PublishedRate
from megajax.analysis.plan.published.tables import rows_to_fit
from megajax.core.hardware.dies import Efficiency, Fit, die
from megajax.core.hardware.records import hardware

__all__ = ['FITTED', 'OF_DIE', 'mean_error']
FOLDER = Path(__file__).parents[1] / 'megajax/core/hardware'


class Stage(NamedTuple):
    """Numbers that are fitted together, and the programs whose rows tell them; none: all rows."""

    names: tuple[str, ...]
    programs: tuple[str, ...] = ()


def _slowdowns(*programs: str) -> tuple[Stage, ...]:
    return tuple(Stage(('slowdown',), (program,)) for program in programs)


# The stages of each GPU or die. Only NVIDIA's rows of the H100 have cuDNN's attention, so half_size
# of Blackwell is Hopper's twice over, and megajax's rows of the H200 alone tell Hopper's.
FITTED: dict[str, tuple[Stage, ...]] = {
    'v100': (Stage(('matmul',)),),
    'a100': (Stage(('matmul', 'half_size', 'flash_2')),),
    'a100_40gb': (Stage(('matmul', 'half_size', 'flash_2')),),
    'hopper': (
        Stage(('matmul', 'half_size'), ('megajax',)),
        Stage(('fp8',), ('megatron',)),
        Stage(('flash_2', 'slowdown'), ('fsdp 2023',)),
        *_slowdowns('megatron 2024', 'maxtext 2024', 'maxtext', 'torchtitan'),
    ),
    'blackwell': (
        Stage(('matmul', 'flash'), ('megatron',)),
        *_slowdowns('megatron without overlap'),
    ),
    'blackwell_ultra': (Stage(('matmul', 'flash'), ('megatron',)),),
}
# Which GPUs have a die.
OF_DIE = {
    'hopper': ('h100', 'h100_96gb', 'h200'),
    'blackwell': ('b200', 'gb200'),
    'blackwell_ultra': ('b300', 'gb300'),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('names', nargs='*', metavar='NAME', default=sorted(FITTED))
    parser.add_argument('--write', action='store_true')
    arguments = parser.parse_args()
    for name in arguments.names:
        efficiency, slowdowns = fitted(name)
        found = residuals_of(name, efficiency)
        print(name, *lines(efficiency, found), sep='\n  ')
        for program, slowdown in slowdowns.items():
            print(f'  {program}: slowdown {slowdown:.2f}')
        if arguments.write:
            write(path(name), efficiency, found)


def path(name: str) -> Path:
    """The file of a GPU or die."""
    return FOLDER / ('dies' if name in OF_DIE else 'gpus') / f'{name}.yaml'


def rows_of(name: str) -> list[PublishedRate]:
    """The rows of a GPU or die that are not held out."""
    return rows_to_fit(*OF_DIE.get(name, (name,)))


def start(name: str) -> Efficiency:
    """The efficiencies in the file of a GPU or die."""
    return die(name).efficiency if name in OF_DIE else hardware(name).efficiency


def fitted(name: str) -> tuple[Efficiency, dict[str, float]]:
    """The efficiencies of a GPU or die, and the slowdowns of programs on it."""
    efficiency, slowdowns = start(name), dict[str, float]()
    for stage in FITTED[name]:
        rows = in_stage(rows_of(name), stage)
        found = fit_of_stage(efficiency, rows, stage)
        efficiency = rounded(found.efficiency)
        if 'slowdown' in stage.names:
            slowdowns[stage.programs[0]] = round(found.slowdown, 2)
    return efficiency, slowdowns


def in_stage(rows: Sequence[PublishedRate], stage: Stage) -> list[PublishedRate]:
    """The rows of the programs of a stage."""
    return [row for row in rows if not stage.programs or row.program.name in stage.programs]


def fit_of_stage(efficiency: Efficiency, rows: Sequence[PublishedRate], stage: Stage) -> Fitted:
    """The fit of a stage, which begins with the slowdown of the first row's program."""
    return fit(efficiency, rows, stage.names, rows[0].program.slowdown)


def residuals_of(name: str, efficiency: Efficiency) -> Fit:
    """The residuals of all rows of a GPU or die with these efficiencies."""
    numbers = sum(len(stage.names) for stage in FITTED[name])
    found = [
        predicted(row, with_efficiency(hardware(row.gpu), efficiency)) for row in rows_of(name)
    ]
    return residuals(found, numbers)


def rounded(efficiency: Efficiency) -> Efficiency:
    """To what a file has."""
    return efficiency.model_copy(
        update={
            name: value if name == 'half_size' else round(value, 3)
            for name, value in efficiency.model_dump(exclude_none=True).items()
        }
    )


def lines(efficiency: Efficiency, found: Fit) -> tuple[str, str]:
    """As a file has them."""
    shares = ', '.join(
        f'{name}: {value:g}'
        for name, value in efficiency.model_dump(exclude_none=True, exclude_defaults=True).items()
    )
    programs = [
        f'    {name}: {{rows: {seen.rows}, band: {seen.band:.3f}, gpus: {seen.gpus}, '
        f'dtypes: [{", ".join(seen.dtypes)}]}}'
        for name, seen in found.programs.items()
    ]
    return (
        f'efficiency: {{{shares}}}',
        '\n'.join(
            [
                'fit:',
                f'  rows: {found.rows}',
                f'  mean: {found.mean:.3f}',
                f'  band: {found.band:.3f}',
                '  programs:',
                *programs,
            ]
        ),
    )


def write(path: Path, efficiency: Efficiency, found: Fit) -> None:
    """Replace both lines of a file."""
    text = path.read_text(encoding='utf-8')
    for line in lines(efficiency, found):
        key = line.partition(':')[0]
        text, count = re.subn(rf'^{key}:.*\n(?:  .*\n)*', f'{line}\n', text, flags=re.MULTILINE)
        assert count == 1, f'{path} has {count} lines of {key}'
    path.write_text(text, encoding='utf-8')


if __name__ == '__main__':
    main()
