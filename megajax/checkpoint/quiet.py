"""Orbax's and tensorstore's own account of a save that failed is hundreds of lines; that of `checkpoint/checkpoints.py` is one."""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any


def leave_failed_saves_to_us() -> None:
    """Drop the tracebacks of saves that Orbax's threads log or leave behind; everything else is told as before."""
    for name in ('absl', 'asyncio'):
        logging.getLogger(name).addFilter(_is_told)
    if getattr(sys.unraisablehook, 'func', None) is not _tell:
        sys.unraisablehook = functools.partial(_tell, sys.unraisablehook)


def _is_told(record: logging.LogRecord) -> bool:
    of_a_save = 'orbax' in record.pathname or 'exception was never retrieved' in record.getMessage()
    return record.levelno < logging.ERROR or not of_a_save


def _tell(others: Callable[[Any], object], unraisable: Any) -> None:
    # tensorstore, in C++, reports to the event loop of a save, which is closed when the first of its writes has failed
    if str(unraisable.exc_value) != 'Event loop is closed':
        others(unraisable)
