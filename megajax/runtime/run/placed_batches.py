"""Prefetch the batches of a run; each process reads its own sequences."""

import logging
from collections.abc import Callable
from itertools import chain
from typing import Any, Self, SupportsInt

import jax

from megajax.base.errors import UnreachableError
from megajax.core.config import ConfigError, RunError
from megajax.core.train.feed import Batch, local_rows, place_batch
from megajax.runtime.data import Batch as HostBatch
from megajax.runtime.data import Batches
from megajax.runtime.data.streams import Place
from megajax.runtime.processes.consensus import from_all

logger = logging.getLogger(__name__)


class PlacedBatches:
    """The batches of steps `first` up to `last` on the current mesh, prefetched.

    Each process reads its own sequences. With one process, a read error is raised at once. With
    several processes, a process that cannot read its sequences must still take part in the common
    step, because the others would wait forever: it feeds sequences whose loss is NaN. All processes
    call `check` when they get such a loss, and `check` raises in every process.
    """

    def __init__(
        self,
        batches: Batches,
        first: int,
        last: int,
        *,
        prepare: Callable[[HostBatch], HostBatch] = lambda batch: batch,
    ):
        self._batches, self._prepare, self._rows = batches, prepare, local_rows(batches.batch_size)
        self._read = batches.read_ahead(first, last, self._rows)
        self._error: Exception | None = None
        self._peeked: Batch | None = None

    def __iter__(self) -> Self:
        return self

    def peek(self) -> Batch:
        """Return the next batch, which the iteration then returns again."""
        self._peeked = next(self)
        return self._peeked

    def __next__(self) -> Batch:
        if (peeked := self._peeked) is not None:
            self._peeked = None
            return peeked
        try:
            # After an error, every later batch counts as unreadable, too: the next step may be
            # dispatched before the failure is known, and it must not change anything either.
            batch = next(self._read) if self._error is None else self._unreadable()
        except StopIteration:
            raise
        except Exception as error:
            if jax.process_count() == 1:
                raise
            # Log the error now, because other processes may end this process before it reports the
            # error.
            if not isinstance(error, RunError):
                logger.exception('this process could not read its part of a batch')
            self._error = self._error or error
            batch = self._unreadable()
        return place_batch(self._prepare(batch), batch_size=self._batches.batch_size)

    def _unreadable(self) -> HostBatch:
        return self._batches.unreadable(self._rows.stop - self._rows.start)

    def place(self, step: SupportsInt) -> dict[str, Any]:
        """Return the position before the batch of `step`, as a checkpoint records it.

        It contains the streams of all processes, which must all call this.
        """
        place = self._batches.place(step)
        if (streams := place.get('streams')) is None:
            return place
        unknown = Place(-1, -1, -1)
        # an all-gather between hosts
        found = from_all(*chain(*(mine or unknown for mine in streams)))
        of_stream = found.reshape(-1, len(streams), len(unknown)).swapaxes(0, 1)
        places = [max(Place(*map(int, each)) for each in known) for known in of_stream]
        assert unknown not in places  # each stream is read by the processes with its sequences
        return {**place, 'streams': places}

    def check(self) -> None:
        """Raise in all processes if one could not read its sequences; all must call this."""
        if jax.process_count() == 1:
            return
        unreachable = isinstance(self._error, UnreachableError)
        failed, retry = from_all(self._error is not None, unreachable).T
        if self._error is not None:
            raise self._error
        if failed.any():
            kind = UnreachableError if (failed == retry).all() else ConfigError
            raise kind(
                f'process {int(failed.argmax())} could not read its part of a batch: see its output'
            )
