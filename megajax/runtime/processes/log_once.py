"""Log a line that is equal in all processes of a run once, not hundreds of times."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from megajax.runtime.processes.consensus import text_from_first

# The loggers of what a process learns about its own host, or about the other processes, while it
# works. Their lines may say why it never comes to the end of a block.
OF_HOST = (
    'megajax.base.files',
    'megajax.runtime.data.sources',
    'megajax.runtime.data.text_tokens',
    'megajax.runtime.processes',
)


@contextmanager
def logged_once() -> Iterator[None]:
    """Log each warning of a block in the first process, or else in the processes that have it.

    All processes must call this. The first process logs its warnings at once. The others log theirs
    at the end of the block, without those that the first process has logged, or all of them if the
    block raises an error. Other levels, and the loggers OF_HOST, are not affected.
    """
    if jax.process_count() == 1:
        yield
        return
    logger, of_first = logging.getLogger('megajax'), set[str]()
    warnings = _Warnings(logger, held=jax.process_index() > 0)
    logger.handlers, logger.propagate = [warnings], False
    try:
        yield
        messages = [record.getMessage() for record in warnings.records]
        of_first = {*json.loads(text_from_first(json.dumps(messages)))}
    finally:
        logger.handlers, logger.propagate = warnings.after.handlers, warnings.after.propagate
        for record in warnings.records if warnings.held else []:
            if record.getMessage() not in of_first:
                logger.handle(record)


class _Warnings(logging.Handler):
    """The warnings of a logger, which are `held` or go to the handlers that it had before."""

    def __init__(self, logger: logging.Logger, *, held: bool):
        super().__init__()
        self.held, self.records = held, list[logging.LogRecord]()
        self.after = logging.Logger(logger.name)
        self.after.handlers, self.after.propagate = logger.handlers, logger.propagate
        self.after.parent = logger.parent

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING and not record.name.startswith(OF_HOST):
            self.records.append(record)
            if self.held:
                return
        self.after.handle(record)
