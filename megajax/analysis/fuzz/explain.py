"""Explain a finding: the smallest config that shows it, the compiler pass, and a folder of files.

Each attempt compiles and executes a step.
"""

import csv
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from megajax.analysis.fuzz.case import Case
from megajax.analysis.fuzz.draw import described
from megajax.analysis.fuzz.machine import is_of_machine
from megajax.analysis.fuzz.time_limit import PATIENCE, time_limit
from megajax.analysis.inspect.child import call_in_child
from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.analysis.inspect.minimize import smallest
from megajax.analysis.inspect.tolerances import has_16_bits
from megajax.core.config import Config, ConfigError, dump
from megajax.xla.emulate.bisect import Culprit, dump_options, first_wrong, modules
from megajax.xla.emulate.result import NOT_FOUND, culprit_line

PACKAGES = 'jax', 'jaxlib', 'jax-cuda12-plugin', 'jax-cuda13-plugin', 'megajax', 'flax', 'numpy'
CONFIG, SMALLEST, HLO = 'config.yaml', 'smallest.yaml', 'hlo'
REDUCING = 4 * PATIENCE  # seconds for the reducer, which compiles hundreds of parts of a program
Try = Callable[[Config], Case]


def explained(
    case: Case, execute: Try, folder: Path, say: Callable[[Case], None] = lambda case: None
) -> Case:
    """Return the finding with its smallest config and compiler pass; write `folder` anew.

    `execute` returns the case of a config, for the same target. `say` gets the finding each time
    that more is known about it, because what follows may end the process.
    """
    config = Config.model_validate(case.config, strict=False)
    tried = {config: case}

    def is_same(simpler: Config) -> bool:
        tried[simpler] = execute(simpler)
        return _is_same(tried[simpler], case)

    small = smallest(config, is_same)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes(dump(config).encode())
    (folder / SMALLEST).write_bytes(dump(small).encode())
    (folder / 'versions.json').write_text(json.dumps(versions(), indent=2) + '\n')
    found = case.model_copy(update={'smallest': described(small)})

    def tell(culprit: str) -> Case:
        told = found.model_copy(update={'culprit': culprit})
        (folder / 'README.md').write_text(_readme(told, tried[small], folder))
        say(told)
        return told

    culprit = ''
    told = tell(culprit)
    if case.verdict == 'wrong':
        for culprit in _write_wrong(small, case.target, folder, exact=_is_exact(case)):
            told = tell(culprit)
    return told


def versions() -> dict[str, str]:
    """Return the versions and XLA flags that a compiled program depends on."""
    found = {'python': platform.python_version(), 'XLA_FLAGS': os.environ.get('XLA_FLAGS', '')}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _is_same(tried: Case, case: Case) -> bool:
    """Return whether a simpler config has the same fault.

    A step that is wrong in fp32 stays so, and one that fails has the same type of error.
    """
    if tried.verdict != case.verdict:
        return False
    if case.verdict == 'wrong':
        worst = tried.exact if _is_exact(case) and tried.exact else tried.as_compiled
        return worst is not None and worst.wrong > 0
    return _error(tried) == _error(case)


def _is_exact(case: Case) -> bool:
    """Return whether a step is wrong with fp32 instead of 16-bit types too."""
    return case.exact is not None and case.exact.wrong > 0


def _error(case: Case) -> str:
    """Return the type of the error, which stays the same when shapes and names change."""
    last = case.message.strip().splitlines()[-1:]
    return last[0].split(':')[0] if last else ''


def _write_wrong(config: Config, target: str, folder: Path, *, exact: bool) -> Iterator[str]:
    """Write the modules and the results of a wrong step to `folder`.

    Yields the pass that made it wrong, or why none was found, before the program is reduced, which
    takes longest, and again when all files are written.
    """
    exact = exact and has_16_bits(config)
    with tempfile.TemporaryDirectory() as name:
        dumps = Path(name)
        with time_limit():
            step = EmulatedStep(config, target, dump_options(dumps))
            results = step.results(exact=exact)
        for path in dumps.glob('*jit_train_step*before_optimizations.txt'):
            shutil.copy(path, folder / 'before_optimizations.txt')
        (folder / 'after_optimizations.txt').write_text(step.program.text)
        with (folder / 'results.csv').open('w', newline='') as file:
            writer = csv.writer(file)
            writer.writerow(['result', 'error', 'limit', 'ok'])
            writer.writerows([each.name, each.error, each.limit, each.ok] for each in results)
        actual, expected = step.pair(results[0].name, exact=exact)
        np.savez(folder / 'worst_result.npz', actual=actual, expected=expected)

        def is_right(text: str) -> bool:
            with time_limit():
                return step.results(exact=exact, text=text)[0].ok

        try:
            culprit = first_wrong(modules(dumps), is_right)
        except (ValueError, RuntimeError) as error:
            if is_of_machine(error):
                raise
            yield f'{NOT_FOUND}{error}'
            return
        _copy_modules(culprit, folder)
        yield str(culprit)
        if culprit.before is not None:
            _reduce(dumps, folder / HLO, target, step.options)
            yield str(culprit)


def _reduce(dumps: Path, folder: Path, target: str, options: Mapping[str, object]) -> None:
    """Reduce the program in a process of its own, because XLA may crash on a part of it."""
    kept = {name: value for name, value in options.items() if not name.startswith('xla_dump')}
    given = dumps, folder, '--target', target, '--options', json.dumps(kept)
    try:
        call_in_child('megajax.xla.reduce', *given, target=target, seconds=REDUCING)
    except (RuntimeError, ConfigError) as error:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / 'error.txt').write_text(f'{error}\n')


def _copy_modules(culprit: Culprit, folder: Path) -> None:
    if culprit.before is not None:
        shutil.copy(culprit.before, folder / 'last_right_module.txt')
    shutil.copy(culprit.after, folder / 'first_wrong_module.txt')


def _readme(case: Case, small: Case, folder: Path) -> str:
    """Return the description of a finding; `small` is the case of its smallest config."""
    files = {
        CONFIG: 'the config that was drawn',
        SMALLEST: 'the smallest config that shows the same fault',
        'before_optimizations.txt': "the program that XLA's GPU compiler receives",
        'after_optimizations.txt': 'the program that was executed',
        'last_right_module.txt': 'the module before the pass, which is correct',
        'first_wrong_module.txt': 'the module after the pass, which is wrong',
        f'{HLO}/error.txt': 'why the program was not reduced',
        f'{HLO}/reduced.hlo': 'a few instructions that show the fault; `compile.py` compiles them',
        'results.csv': 'the error and the limit of each result',
        'worst_result.npz': 'the worst result and the expected one',
        'versions.json': 'versions and XLA flags',
    }
    worst = [worst for worst in (small.as_compiled, small.exact) if worst and worst.wrong]
    first = culprit_line(case.culprit, 'compiler pass ')
    lines = [
        f'# {case.verdict}: seed {case.seed}, step {case.number}, {case.target}',
        '',
        f'jax {jax.__version__}. Smallest config: `{case.smallest}`',
        '',
        *(f'{each.name} differs by {each.error} (limit {each.limit:.1e}).' for each in worst),
        *([f'{first[0].upper()}{first[1:]}.'] if case.culprit else []),
        *(['```', small.message, '```'] if small.message else []),
        '',
        '```',
        f'megajax inspect {SMALLEST} --target {case.target} --run --bisect',
        '```',
        '',
        *(f'- `{name}`: {what}' for name, what in files.items() if (folder / name).exists()),
    ]
    return '\n'.join(lines) + '\n'
