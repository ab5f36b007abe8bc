"""Efficiencies of GPUs and dies, and slowdowns of programs, from published rates of training:
`python benchmarks/fit_gpus.py [NAME...] [--write]`.

Prints what the rows that are not held out say, and with --write puts the efficiencies into the
files; slowdowns are constants of `programs.py` in `megajax/analysis/plan` and its `published`. At
most three efficiencies a GPU, four a die; `python benchmarks/plan_tables.py` then shows the rows
that are held out.

The fitted numbers have the least mean error on their rows. The share of the memory's bandwidth that
a step's kernels reach is not fitted, because a few rows cannot distinguish it from the cost of
matmuls' sizes.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from megajax.analysis.plan.published.predictions import Prediction, predicted
from megajax.analysis.plan.published.rates import PublishedRate
from megajax.analysis.plan.published.tables import TABLES, rows
from megajax.core.hardware.dies import Efficiency, Fit, Seen, die
from megajax.core.hardware.records import Hardware, hardware

FOLDER = Path(__file__).parents[1] / 'megajax/core/hardware'
# The first step of each number; it is halved five times.
STEPS = {
    **dict.fromkeys(('matmul', 'flash', 'flash_2', 'fp8', 'slowdown'), 0.04),
    'half_size': 64.0,
}
LEAST = {**dict.fromkeys(STEPS, 0.05), 'half_size': 0.0, 'slowdown': 1.0}
MOST = {**dict.fromkeys(STEPS, 1.0), 'half_size': 1024.0, 'fp8': 1.3, 'slowdown': 2.0}


class Fitted(NamedTuple):
    """The efficiencies of a GPU or die, and the slowdown of a program on it."""

    efficiency: Efficiency
    slowdown: float


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
    gpus = OF_DIE.get(name, (name,))
    return [row for table in TABLES for row in rows(table) if row.gpu in gpus and not row.held_out]


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


def fit(
    start: Efficiency, rows: Sequence[PublishedRate], names: Sequence[str], slowdown: float = 1.0
) -> Fitted:
    """Fit the named efficiencies, and the slowdown of the rows' program, to the rows.

    The efficiencies are changed one at a time, by smaller and smaller steps, while the mean error
    falls.
    """
    values: dict[str, float] = {**start.model_dump(), 'slowdown': slowdown}
    least = _mean_error(values, rows)
    for halvings in range(6):
        improved = True
        while improved:
            improved = False
            for name in names:
                for sign in (1, -1):
                    value = values[name] + sign * STEPS[name] / 2**halvings
                    if not LEAST[name] <= value <= MOST[name]:
                        continue
                    candidate = {**values, name: value}
                    error = _mean_error(candidate, rows)
                    if error < least - 1e-9:
                        values, least, improved = candidate, error, True
    slowdown = values.pop('slowdown')
    return Fitted(start.model_copy(update=values), slowdown)


def with_efficiency(gpu: Hardware, efficiency: Efficiency) -> Hardware:
    """Return a GPU whose die has these efficiencies, at the clock of the GPU's power limit."""
    if gpu.die:
        clock = die(gpu.die).clock(gpu.power, gpu.peak_flops['bfloat16'])
        efficiency = efficiency.at_clock(clock)
    return gpu.model_copy(update={'efficiency': efficiency})


def residuals(predictions: Sequence[Prediction], numbers: int) -> Fit:
    """Return the absolute relative errors of fitted rows, for all programs and for each program.

    `numbers` is the count of fitted numbers, of which at most two belong to one program.
    """
    programs = dict.fromkeys(one.row.program.name for one in predictions)
    by_program = {
        name: [one for one in predictions if one.row.program.name == name] for name in programs
    }
    return Fit(
        rows=len(predictions),
        mean=round(fmean(abs(one.error) for one in predictions), 3),
        band=_band(predictions, numbers),
        programs={name: _seen(found, min(numbers, 2)) for name, found in by_program.items()},
    )


def _seen(predictions: Sequence[Prediction], numbers: int) -> Seen:
    return Seen(
        rows=len(predictions),
        band=_band(predictions, numbers),
        gpus=max(one.row.num_gpus for one in predictions),
        dtypes=tuple(sorted({one.row.config.train.dtype for one in predictions})),
    )


def _band(predictions: Sequence[Prediction], numbers: int) -> float:
    """Return the error that 90% of the rows that were not fitted should not exceed.

    It is the error of rank 0.9 (n + 1) among the n fitted rows (Vovk et al., 2005, conformal
    prediction), enlarged because fitted rows are closer: by sqrt((n + p) / (n - p)) for p numbers
    (Akaike, 1970, final prediction error).
    """
    errors = sorted(abs(one.error) for one in predictions)
    count = len(errors)
    rank = min(count, math.ceil(0.9 * (count + 1)))
    left = max(1, count - numbers)
    return round(errors[rank - 1] * math.sqrt((count + numbers) / left), 3)


def mean_error(efficiency: Efficiency, rows: Sequence[PublishedRate], slowdown: float) -> float:
    """Return the mean error of rows on GPUs with these efficiencies, with a program's slowdown."""
    errors = []
    for row in rows:
        program = dataclasses.replace(row.program, slowdown=slowdown)
        gpu = with_efficiency(hardware(row.gpu), efficiency)
        errors.append(abs(predicted(dataclasses.replace(row, program=program), gpu).error))
    return fmean(errors)


def _mean_error(values: dict[str, float], rows: Sequence[PublishedRate]) -> float:
    numbers = dict(values)
    slowdown = numbers.pop('slowdown')
    return mean_error(Efficiency.model_validate(numbers), rows, slowdown)


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
