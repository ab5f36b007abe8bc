"""Print log messages on a terminal."""

import logging
import shutil

from megajax.base.render.text import folded, visible


class _Lines(logging.StreamHandler):
    def format(self, record: logging.LogRecord) -> str:
        text = visible(super().format(record))
        return folded(text, shutil.get_terminal_size().columns) if self.stream.isatty() else text


def log_to_terminal() -> None:
    """Log to stderr, unless the root logger already has handlers."""
    logging.basicConfig(format='%(message)s', handlers=[_Lines()])
