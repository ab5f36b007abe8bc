"""Write a reduced module to a folder, with all that somebody needs to reproduce the fault."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.core.hardware.records import hardware
from megajax.core.hardware.targets import WITHOUT_GPU, target_description
from megajax.xla.emulate.bisect import Culprit, dump_options, first_wrong, modules
from megajax.xla.emulate.last_module import dumped
from megajax.xla.hlo.errors import HloError
from megajax.xla.reduce.cut import count, without_shardings
from megajax.xla.reduce.execute import (
    FAILURES,
    PARTITIONER,
    Compiler,
    Differs,
    Execution,
    Values,
    is_sharded,
)
from megajax.xla.reduce.search import IsFaulty, reduced

REDUCED, BEFORE, AFTER = 'reduced.hlo', 'before_pass.hlo', 'after_pass.hlo'
SUMMARY, SCRIPT, VALUES, GPU = 'reduced.json', 'compile.py', 'values.npz', 'target.txtpb'
Summary = dict[str, Any]


def reduce_dumps(
    dumps: Path,
    folder: Path,
    compiler: Compiler,
    *,
    is_faulty: IsFaulty | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Summary | None:
    """Reduce the program whose dumps are in `dumps`, and write `folder`; None if no part is faulty.

    `is_faulty` decides whether the text of a module shows the fault. By default, it does if the
    compiler's last module gives other results on random inputs.
    """
    for text in starts(dumps):
        if small := reduced(text, is_faulty or Differs(compiler, say), say):
            folder.mkdir(parents=True, exist_ok=True)
            summary = {'original_instructions': count(text), **_write(small, folder, compiler)}
            (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + '\n')
            return summary
    return None


def starts(dumps: Path) -> Iterator[str]:
    """Yield the modules before and after the partitioner: StableHLO cannot express later ones."""
    first = modules(dumps)[0]
    program = '.'.join(first.name.split('.')[:2])
    for path in dumps.glob(f'{program}.*.before_{PARTITIONER}.txt'):
        if is_sharded(text := dumped(path)):
            yield text
    yield without_shardings(dumped(first))


def _write(small: str, folder: Path, compiler: Compiler) -> Summary:
    """Write the module, a script that compiles it, its values, and the pass that breaks it."""
    with tempfile.TemporaryDirectory() as name:
        dumps = Path(name)
        last = compiler.optimized(small, dump_options(dumps))
        (folder / REDUCED).write_text(small)
        (folder / GPU).write_text(target_description(hardware(compiler.target)))
        shutil.copy(Path(__file__).with_name('compile_hlo.py'), folder / SCRIPT)
        summary: Summary = {
            'instructions': count(small),
            'devices': compiler.num_devices,
            'target': compiler.target,
            'options': {**WITHOUT_GPU, **compiler.options_for(small)},
            'jax': jax.__version__,
            'error': None,
            'pass': None,
        }
        try:
            execution = Execution(small, compiler.num_devices)
            summary['error'] = max(execution.errors(last), default=0.0)
            if execution.is_wrong(last):
                _write_values(folder / VALUES, execution, last)
                summary['pass'] = str(_culprit(dumps, execution, folder))
        except FAILURES as failure:
            summary['not_executed'] = str(failure).splitlines()[0][:200]
        return summary


def _culprit(dumps: Path, execution: Execution, folder: Path) -> Culprit:
    def is_right(text: str) -> bool:
        try:
            return not execution.is_wrong(text)
        except FAILURES as failure:
            raise HloError(str(failure)) from failure

    culprit = first_wrong(modules(dumps), is_right)
    if culprit.before is not None:
        (folder / BEFORE).write_text(dumped(culprit.before))
    (folder / AFTER).write_text(dumped(culprit.after))
    return culprit


def _write_values(path: Path, execution: Execution, last: str) -> None:
    """Write each device's inputs and both results, with names such as `input0_device1`."""
    groups: Mapping[str, Values] = {
        'input': execution.inputs,
        'expected': execution.expected,
        'actual': execution.actual(last),
    }
    arrays: dict[str, Any] = {
        f'{kind}{number}_device{device}': piece
        for kind, values in groups.items()
        for number, pieces in enumerate(values)
        for device, piece in enumerate(pieces)
    }
    np.savez(path, **arrays)
