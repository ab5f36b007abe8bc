"""Checks of the output files of a command, made before it computes anything."""

import os
from collections.abc import Iterator
from pathlib import Path

from megajax.config.errors import ConfigError


def check_outputs(*paths: Path | None) -> None:
    """Raise ConfigError with each of these files that cannot be written; None is skipped."""
    if problems := [*output_problems(*paths)]:
        raise ConfigError(*problems)


def output_problems(*paths: Path | None) -> Iterator[str]:
    """Yield a message for each file that cannot be written; None is skipped."""
    for path in filter(None, paths):
        if path.is_dir():
            yield f'{path} is a folder: give the name of a file in it'
        elif not path.parent.is_dir():
            yield f'{path}: there is no folder {path.parent}: create it first'
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            yield f'{path} is not writable: change its permissions, or choose another file'
