"""The time after which a compiler counts as hanging."""

import contextlib
import signal
from collections.abc import Iterator

PATIENCE = 1800  # seconds for a step, even on a busy machine


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Send SIGALRM to this process if the block takes longer than PATIENCE."""
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
