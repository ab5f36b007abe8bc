"""Trace some steps, and store their program and config, for XProf and `megajax profile`."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import jax
from jax.stages import Compiled

from megajax.base.render.text import typed
from megajax.core.config import Config, dump
from megajax.core.config.load import CONFIG
from megajax.core.config.overrides import typed_override
from megajax.core.hardware.targets import is_nvidia
from megajax.runtime.processes.consensus import all_are_here
from megajax.runtime.run.saved_step import PROGRAM, compressed
from megajax.xla.hlo.text import program_text

FOLDER = 'profile'
PROCESS = 'process_{}'
STEP = 'train'  # the name of a step's event
WARM = 10  # the number of a start's steps, if there are enough, before those to trace
WRITTEN = 600.0  # seconds within which the first process must have written the program

# XLA drops the events of a process's GPUs beyond this number, 2**21 unless it is set. A step of a
# large model has a million on 8 GPUs.
MAX_GPU_EVENTS = 2**26

logger = logging.getLogger(__name__)


def options_for(device: jax.Device) -> jax.profiler.ProfileOptions:
    """Return the options of a trace: without Python frames, which take time, but all kernels."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    if is_nvidia(device):
        options.advanced_configuration = {'gpu_max_activity_api_events': MAX_GPU_EVENTS}
    return options


def how_to_trace(run: Path, config: Config, *, done: int, steps: int = 3) -> str:
    """Return a command that traces steps of a run directory whose newest checkpoint is `done`.

    If all steps are done, the command begins another run with the same config.
    """
    total = config.train.steps
    has_ended = done >= total
    first = 0 if has_ended else done
    steps = min(steps, total - first)
    start = first + min(WARM, total - first - steps)
    profile = f'train.profile={{start: {start}, steps: {steps}}}'
    if not has_ended:
        return f'megajax train {typed_override("run.dir", run)} {typed(profile)}'
    other = f'{run}_traced'
    return (
        f'megajax train {typed(run / CONFIG)} {typed_override("run.dir", other)} {typed(profile)}, '
        f'and stop it after step {start + steps}'
    )


class Profiler:
    """A tracer of the steps that `train.profile` names, into `folder`/profile.

    With several processes, each has its own subfolder. Next to the trace, process 0 writes the text
    of `compiled`, the program of the steps, and the config. If a trace cannot be taken or written,
    a warning is logged. If the context is left during a trace, the unfinished trace is written. A
    run that resumes after `done` steps traces the named steps that are left, and logs which are
    done.
    """

    compiled: Compiled | None = None

    def __init__(self, folder: Path, config: Config, *, done: int = 0):
        self._config, self._program_folder = config, folder / FOLDER
        self.folder = self._program_folder
        # files are named after the host, which several processes may share
        if jax.process_count() > 1:
            self.folder /= PROCESS.format(jax.process_index())
        profile = config.train.profile
        self._first, self._last = (
            (0, 0) if profile is None else (profile.start + 1, profile.start + profile.steps)
        )
        self._tracing = False
        if 0 < self._first <= done:
            self._leave_out(folder, done)

    def _leave_out(self, folder: Path, done: int) -> None:
        """Trace no step up to `done`, and say so; a warning unless there is a trace already."""
        first, last = self._first, min(done, self._last)
        steps = f'steps {first} to {last} are' if first < last else f'step {first} is'
        how = how_to_trace(folder, self._config, done=done, steps=self._last - first + 1)
        fix = f'for others: {how}'
        self._first = 0
        if done < self._last:
            self._first, fix = done + 1, f'the trace begins with step {done + 1}'
        if jax.process_index() == 0:
            level = logging.INFO if self._program_folder.exists() else logging.WARNING
            logger.log(level, 'train.profile: %s already done; %s', steps, fix)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Mark step `step` in the trace, which starts before the first requested step."""
        if step == self._first:
            self._start()
        if not self._tracing:
            yield
            return
        with jax.profiler.StepTraceAnnotation(STEP, step_num=step):
            yield

    def end(self, step: int) -> None:
        """Write the trace if `step` was the last requested step.

        This takes seconds, so it is called after the time of the step has been taken.
        """
        if self._tracing and step == self._last:
            self._stop()

    def covers(self, step: int) -> bool:
        """Whether step `step` is, or will be, in the trace."""
        return self._tracing or 0 < self._first <= step <= self._last

    def _start(self) -> None:
        """Start the trace in all processes, once the first one has written the program."""
        self._first = 0  # do not trace this step again after a rollback
        try:
            if jax.process_index() == 0:
                self._write_program()
            jax.profiler.start_trace(
                self.folder, profiler_options=options_for(jax.local_devices()[0])
            )
            self._tracing = True
        except Exception as error:
            logger.warning('the trace could not be started: %s', error)
        # Otherwise the others' first traced step would contain their wait for the first process.
        all_are_here('trace', WRITTEN)

    def _write_program(self) -> None:
        assert self.compiled is not None
        self._program_folder.mkdir(parents=True, exist_ok=True)
        text = program_text(self.compiled)
        (self._program_folder / PROGRAM).write_bytes(compressed(text))
        (self._program_folder / CONFIG).write_bytes(dump(self._config).encode())

    def _stop(self) -> None:
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            logger.warning('the trace could not be written to %s: %s', self.folder, error)
        else:
            logger.info('profile    %s', self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracing:
            self._stop()
