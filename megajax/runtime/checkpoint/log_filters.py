"""Filter out the hundreds of lines that Orbax and tensorstore log about a failed save.

`runtime/checkpoint/checkpoints.py` logs one line instead.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any


def leave_failed_saves_to_us() -> None:
    """Drop the tracebacks of failed saves in Orbax's threads; everything else is still logged."""
    for name in ('absl', 'asyncio'):
        logging.getLogger(name).addFilter(_is_told)
    if getattr(sys.unraisablehook, 'func', None) is not _tell:
        sys.unraisablehook = functools.partial(_tell, sys.unraisablehook)


def _is_told(record: logging.LogRecord) -> bool:
    is_of_save = (
        'orbax' in record.pathname or 'exception was never retrieved' in record.getMessage()
    )
    return record.levelno < logging.ERROR or not is_of_save


def _tell(others: Callable[[Any], object], unraisable: Any) -> None:
    # tensorstore's C++ code reports to the event loop of a save, which is already closed if one of
    # the save's writes has failed.
    if str(unraisable.exc_value) != 'Event loop is closed':
        others(unraisable)
