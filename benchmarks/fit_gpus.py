"""Efficiencies of GPUs from published rates of training:
`python benchmarks/fit_gpus.py [GPU...] [--write]`.

Prints what the rows that are not held out say, and with --write puts it into the GPUs' files. At
most three numbers a GPU; `python benchmarks/plan_tables.py` then shows the rows that are held out.
"""

import argparse
import re
from pathlib import Path

from megajax.analysis.plan.published.fit import Residuals, fit, residuals
from megajax.analysis.plan.published.predictions import predicted
from megajax.analysis.plan.published.tables import rows_to_fit
from megajax.core.hardware.records import Efficiency, hardware

FOLDER = Path(__file__).parents[1] / 'megajax/core/hardware/gpus'
# What each GPU's rows can tell. Only NVIDIA's rows of the H100 have cuDNN's attention, so half_size
# is there that of the A100; those of the B200 say little of attention.
FITTED = {
    'v100': ('matmul',),
    'a100': ('matmul', 'half_size', 'flash_2'),
    'a100_40gb': ('matmul', 'half_size', 'flash_2'),
    'h100': ('matmul', 'flash', 'flash_2'),
    'h200': ('matmul', 'half_size'),
    'b200': ('matmul',),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('gpus', nargs='*', metavar='GPU', default=sorted(FITTED))
    parser.add_argument('--write', action='store_true')
    arguments = parser.parse_args()
    for name in arguments.gpus:
        gpu, rows = hardware(name), rows_to_fit(name)
        efficiency = rounded(fit(gpu, rows, FITTED[name]))
        found = residuals(
            [predicted(row, gpu.model_copy(update={'efficiency': efficiency})) for row in rows]
        )
        print(name, *lines(efficiency, found), sep='\n  ')
        if arguments.write:
            write(FOLDER / f'{name}.yaml', efficiency, found)


def rounded(efficiency: Efficiency) -> Efficiency:
    """To what a file has."""
    return efficiency.model_copy(
        update={
            name: value if name == 'half_size' else round(value, 3)
            for name, value in efficiency.model_dump(exclude_none=True).items()
        }
    )


def lines(efficiency: Efficiency, found: Residuals) -> tuple[str, str]:
    """As a file has them."""
    shares = ', '.join(
        f'{name}: {value:g}' for name, value in efficiency.model_dump(exclude_none=True).items()
    )
    return (
        f'efficiency: {{{shares}}}',
        f'fit: {{rows: {found.rows}, mean: {found.mean:.3f}, band: {found.band:.3f}}}',
    )


def write(path: Path, efficiency: Efficiency, found: Residuals) -> None:
    """Replace both lines of a GPU's file."""
    text = path.read_text(encoding='utf-8')
    for line in lines(efficiency, found):
        key = line.partition(':')[0]
        text, count = re.subn(rf'^{key}: .*$', line, text, flags=re.MULTILINE)
        assert count == 1, f'{path} has {count} lines of {key}'
    path.write_text(text, encoding='utf-8')


if __name__ == '__main__':
    main()
