"""Look up files that a user names; one that this user must not look up is an error, not missing."""

import errno
import os
import stat
from pathlib import Path

from megajax.base.errors import ConfigError, Problem

MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def exists(path: str | Path, key: str = '') -> bool:
    """Whether a file or folder exists.

    Raises ConfigError if that cannot be looked up, for example without permission to enter its
    folder. The error names `key`, the key or option that gives the path.
    """
    return _mode(path, key) != 0


def is_file(path: str | Path, key: str = '') -> bool:
    """Whether a path is an existing file, which is no folder, pipe or device; see `exists`."""
    return stat.S_ISREG(_mode(path, key))


def is_folder(path: str | Path, key: str = '') -> bool:
    """Whether a path is an existing folder; see `exists`."""
    return stat.S_ISDIR(_mode(path, key))


def _mode(path: str | Path, key: str) -> int:
    """Return the type and permissions of a file or folder, 0 if there is none."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in MISSING:
            return 0
        message = f'cannot be read: {error.strerror}; make it readable, or give another path'
        raise ConfigError(
            Problem(key, f'{path} {message}') if key else Problem(str(path), message)
        ) from error
