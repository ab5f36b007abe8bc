"""A trace of some steps, for XProf."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from megajax.config import ProfileConfig

FOLDER = 'profile'

logger = logging.getLogger(__name__)


class Profiler:
    """A tracer of the steps that `profile` names, into `folder`/profile.

    With several processes each has a folder of its own there. If a trace cannot be taken or
    written, a warning is logged. Leaving this as a context writes an unfinished trace.
    """

    def __init__(self, folder: Path, profile: ProfileConfig | None):
        self.folder = folder / FOLDER
        if jax.process_count() > 1:  # the files are named after the host, which they may share
            self.folder /= f'process_{jax.process_index()}'
        self._first, self._last = (
            (0, 0) if profile is None else (profile.start + 1, profile.start + profile.steps)
        )
        self._tracing = False

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Mark step `step` in the trace; the trace starts and stops around the requested steps."""
        if step == self._first:
            self._start()
        if not self._tracing:
            yield
            return
        with jax.profiler.StepTraceAnnotation('train', step_num=step):
            yield
        if step == self._last:
            self._stop()

    def covers(self, step: int) -> bool:
        """Whether step `step` is, or will be, in the trace."""
        return self._tracing or 0 < self._first <= step <= self._last

    def _start(self) -> None:
        self._first = 0  # a run that is rolled back takes this step again
        try:
            jax.profiler.start_trace(self.folder)
            self._tracing = True
        except Exception as error:
            logger.warning('the trace could not be started: %s', error)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tracing:
            self._stop()
