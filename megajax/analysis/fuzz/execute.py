"""Execute random steps in a child process, which prints lines before and after each.

`megajax.analysis.fuzz.run` starts it. A compiler that crashes or hangs ends only this process.
"""

import gc
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from megajax.analysis.fuzz.case import Case, Worst
from megajax.analysis.fuzz.draw import LAYOUTS, MOST_DEVICES, draw
from megajax.analysis.fuzz.explain import explained
from megajax.analysis.fuzz.machine import is_of_machine
from megajax.analysis.fuzz.time_limit import time_limit
from megajax.analysis.inspect.child import NO_CUDNN
from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.analysis.inspect.result import Compared
from megajax.analysis.inspect.tolerances import has_16_bits
from megajax.base.errors import reason
from megajax.core.config import Config, ConfigError
from megajax.core.hardware.records import check_dtype, hardware

MOST_LINES = 12  # most lines of a traceback
OBJECTS = 100_000  # new objects after which Python collects; tracing a step makes many
# Other steps use the other cores: waiting for the compiler's threads costs CPU time.
ONE_THREAD = {'xla_gpu_force_compilation_parallelism': 1}
# These precede a number, a Case as JSON that is not fully explained yet, the final Case, and the
# reason why this machine cannot execute steps.
BEGUN, FOUND, DONE, UNABLE = 'begun ', 'found ', 'done ', 'unable '


def executed(config: Config, target: str) -> dict[str, Worst]:
    """Compile and execute a step; in 16 bits, execute it a second time with fp32 instead.

    Raises ConfigError if the target does not compute in the step's dtype.
    """
    check_dtype(config.train.dtype, hardware(target))
    step = EmulatedStep(config, target, ONE_THREAD)
    found = {'as_compiled': _worst(step.results())}
    if has_16_bits(config):
        found['exact'] = _worst(step.results(exact=True))
    return found


def case(config: Config, told: Mapping[str, object], target: str) -> Case:
    """Execute the step of a config and return its case; `told` has the fields already known.

    Raises the error if the machine is at fault: too little memory or disk space, or no cuDNN.
    """
    start, cpu = time.perf_counter(), time.process_time()
    found: dict[str, object] = {'target': target, 'jax_version': jax.__version__}
    found['config'] = config.model_dump(mode='json', exclude_unset=True)
    try:
        results = executed(config, target)
        is_right = all(worst.wrong == 0 for worst in results.values())
        found |= results | {'verdict': 'right' if is_right else 'wrong'}
    except ConfigError as error:
        found |= {'verdict': 'rejected', 'message': str(error)}
    except Exception as error:
        if is_of_machine(error) or NO_CUDNN in str(error):
            raise
        lines = traceback.format_exc().splitlines()[-MOST_LINES:]
        found |= {'verdict': 'failed', 'message': '\n'.join(line[:500] for line in lines)}
    spent = {'seconds': time.perf_counter() - start, 'cpu_seconds': time.process_time() - cpu}
    return Case.model_validate({**told, **found, **{key: round(x, 1) for key, x in spent.items()}})


def _worst(results: list[Compared]) -> Worst:
    first = results[0]
    is_number = abs(first.error) < float('inf')
    return Worst(
        name=first.name,
        error=first.error if is_number else None,
        limit=first.limit,
        wrong=sum(not result.ok for result in results),
        results=len(results),
    )


def _main(about: Mapping[str, object], numbers: Iterable[int], reports: str | None) -> None:
    jax.config.update('jax_num_cpu_devices', MOST_DEVICES)
    # By default, ten Python frames of each operation go through all passes over a program.
    jax.config.update('jax_traceback_in_locations_limit', 1)
    # The default action also works inside a compiler, where Python runs no handler.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()  # the collector need not visit modules
    gc.set_threshold(OBJECTS)
    _execute_all(about, numbers, reports)


def _execute_all(about: Mapping[str, object], numbers: Iterable[int], reports: str | None) -> None:
    for _, layouts in itertools.groupby(numbers, lambda number: number // LAYOUTS):
        for number in layouts:
            print(f'{BEGUN}{number}', flush=True)
            try:
                found = _executed_or_explained({**about, 'number': number}, reports)
            except Exception as error:
                if is_of_machine(error):
                    print(f'{UNABLE}{reason(error)}', flush=True)
                raise
            print(f'{DONE}{found.model_dump_json()}', flush=True)
        jax.clear_caches()


def _executed_or_explained(told: Mapping[str, Any], reports: str | None) -> Case:
    def say(found: Case) -> None:
        print(f'{FOUND}{found.model_dump_json()}', flush=True)

    def execute(config: Config) -> Case:
        with time_limit():
            return case(config, told, told['target'])

    try:
        config = draw(told['seed'], told['number'], told['fixed'])
    except ConfigError as error:
        rejected = {'config': {}, 'verdict': 'rejected', 'message': str(error)}
        return Case.model_validate({**told, **rejected})
    found = execute(config)
    if reports is not None and found.is_finding:
        say(found)
        found = explained(found, execute, Path(reports, found.name), say)
    return found


if __name__ == '__main__':
    task = Path(sys.argv[1])
    # The parent removes this folder, also if a signal ends this process.
    os.environ['TMPDIR'], tempfile.tempdir = str(task.parent), None
    _main(**json.loads(task.read_text()))
