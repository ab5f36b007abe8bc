"""Orbax's and tensorstore's own account of a save that failed is hundreds of lines; that of `train/checkpoint.py` is one."""

import logging
import sys
from typing import Any


def leave_failed_saves_to_us() -> None:
    """Drop the tracebacks of saves that Orbax's threads log or leave behind; everything else is told as before."""
    for name in ('absl', 'asyncio'):
        logging.getLogger(name).addFilter(_is_told)
    if sys.unraisablehook is not _tell:
        _hooks.append(sys.unraisablehook)
        sys.unraisablehook = _tell


_hooks = [sys.__unraisablehook__]


def _is_told(record: logging.LogRecord) -> bool:
    of_a_save = 'orbax' in record.pathname or 'exception was never retrieved' in record.getMessage()
    return record.levelno < logging.ERROR or not of_a_save


def _tell(unraisable: Any) -> None:
    # tensorstore, in C++, reports to the event loop of a save, which is closed when the first of its writes has failed
    if str(unraisable.exc_value) != 'Event loop is closed':
        _hooks[-1](unraisable)
