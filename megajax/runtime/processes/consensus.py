"""Collectives and barriers on the host, with which the processes of a run reach agreement."""

from collections.abc import Callable
from datetime import datetime, timedelta

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

FAILED_ELSEWHERE = 'another process could not write its part'


def from_all(*values: int) -> np.ndarray:
    """Return the values of all processes, [process, value]: an all-gather between hosts.

    All processes must call it.
    """
    mine = np.array(values, np.int32)
    return (
        np.asarray(multihost_utils.process_allgather(mine))
        if jax.process_count() > 1
        else mine[None]
    )


def gather(*values: float) -> list[list[float]]:
    """Return each process's values in fp32: an all-gather between hosts; all must call it."""
    mine = np.array(values, np.float32)
    if jax.process_count() == 1:
        return [mine.tolist()]
    return np.asarray(multihost_utils.process_allgather(mine)).tolist()


def all_are_here(where: str, seconds: float) -> bool:
    """Whether all processes reach the barrier `where` within `seconds`.

    Each name can be used only once.
    """
    if jax.process_count() == 1:
        return True
    try:
        multihost.get_jax_distributed_client().wait_at_barrier(
            f'megajax_{where}', int(1000 * seconds)
        )
    except jax.errors.JaxRuntimeError:
        return False
    return True


def from_first(*values: int) -> list[int]:
    """Return the first process's values: a broadcast between hosts; all processes must call it."""
    if jax.process_count() == 1:
        return [int(value) for value in values]
    return [
        int(value)
        for value in np.asarray(multihost_utils.broadcast_one_to_all(np.array(values, np.int32)))
    ]


def text_from_first(text: str) -> str:
    """Return the first process's text: a broadcast between hosts; all processes must call it."""
    if jax.process_count() == 1:
        return text
    data = np.frombuffer(text.encode(), np.uint8)
    (size,) = from_first(len(data))
    if not size:
        return ''
    sent = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(sent)).tobytes().decode()


def texts_from_all(text: str) -> list[str]:
    """Return each process's text: an all-gather between hosts; all processes must call it."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = from_all(len(data))[:, 0]
    if not sizes.any():
        return ['' for _ in sizes]
    padded = np.pad(data, (0, sizes.max() - len(data)))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def local_time() -> datetime:
    """Return the first process's local time in seconds, even if other hosts' time zones differ.

    All processes must call it.
    """
    local, epoch = datetime.now(), datetime(1970, 1, 1)
    days, seconds = from_first((local - epoch).days, (local - epoch).seconds)
    return epoch + timedelta(days=days, seconds=seconds)


class SaveBarrier:
    """A barrier between Orbax's threads in all processes that opens if one of them has failed.

    A thread that fails goes to the barrier at the end of a save and never reaches the earlier
    barriers, at which the other threads would wait for hours. Here, all threads wait in rounds, and
    in each round every thread publishes the barrier that it is at. If these differ, each thread
    that is not at the last barrier raises an error, which takes it to the last barrier as well.

    A thread that has written its process's part of a step calls `hash_part` before it waits, and
    publishes the result for the first process.
    """

    WRITTEN = 'async_write_complete'  # part of the key of the barrier after the writes of a save
    END = 'set_value'  # part of the keys of the last barriers of an Orbax save

    def __init__(self, hash_part: Callable[[], str]) -> None:
        self.hash_part = hash_part
        self.round = 0

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all processes have reached `key`; raise RuntimeError if one has skipped it."""
        if jax.process_count() == 1:
            return
        client, me = multihost.get_jax_distributed_client(), jax.process_index()
        part = self.hash_part() if self.WRITTEN in key else None
        while True:
            self.round += 1
            # An earlier run of the same processes has left the key of its last round.
            client.key_value_set(f'{self._keys(self.round)}{me}', key, allow_overwrite=True)
            if part is not None:
                client.key_value_set(f'{self._parts(self.round)}{me}', part)
            client.wait_at_barrier(f'megajax_save_{self.round}', timeout_ms)
            keys = {value for _, value in client.key_value_dir_get(self._keys(self.round))}
            if self.round > 1:
                # All processes have read the values of the last round; otherwise they would not be
                # in this round.
                client.key_value_delete(f'{self._keys(self.round - 1)}{me}')
                if me == 0:
                    client.key_value_delete(self._parts(self.round - 1))
            if keys == {key}:
                return
            if self.END not in key:
                raise RuntimeError(FAILED_ELSEWHERE)

    def parts(self) -> list[str]:
        """Return the results of `hash_part` in all processes, or none if there is one process.

        Only the first process may call it, between the barrier after the writes and the next one.
        """
        if jax.process_count() == 1:
            return []
        client = multihost.get_jax_distributed_client()
        return [part for _, part in client.key_value_dir_get(self._parts(self.round))]

    def _keys(self, number: int) -> str:
        return f'megajax_save_{number}/'

    def _parts(self, number: int) -> str:
        return f'megajax_parts_{number}/'
