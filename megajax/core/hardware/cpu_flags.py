"""Settings of XLA for simulated CPU devices: a time limit and threads. Imports no jax."""

import contextlib
import os
from collections.abc import Iterator

from megajax.base.cores import usable_cores

LIMIT = '--xla_cpu_collective_call_terminate_timeout_seconds'
SECONDS = 600
THREADS = 'NPROC'  # XLA reads it when it makes the devices


def with_collective_limit(flags: str) -> str:
    """Return XLA_FLAGS that let a collective of CPU devices take SECONDS, unless they set a limit.

    Simulated devices wait for each other at each collective. On a busy machine one may be late, and
    XLA would end the process after 40 s.
    """
    return flags if LIMIT in flags else f'{flags} {LIMIT}={SECONDS}'.strip()


@contextlib.contextmanager
def two_threads_each(devices: int) -> Iterator[None]:
    """Let XLA have two threads for each simulated device; jax must make its devices in the block.

    Afterwards other threads may read the environment, which must no longer change.

    By default, XLA has one thread per core, or per device if there are more devices. With jax 0.10,
    a thread that starts the 33rd unfinished program of its device blocks. If all other threads wait
    for that device in the collective of an earlier program, none of them ever continues.
    """
    if THREADS in os.environ:
        yield
        return
    os.environ[THREADS] = str(max(2 * devices, usable_cores()))
    try:
        yield
    finally:
        del os.environ[THREADS]
