"""Warnings and notes of the logging module on a terminal."""

import logging

from megajax.render.text import visible


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_to_terminal() -> None:
    """Print what is logged to stderr, unless the root logger has handlers already."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Visible('%(message)s'))
    logging.basicConfig(handlers=[handler])
