"""Renamed keys. The old name works for one release, with a warning."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class Renamed(NamedTuple):
    """The new path of a key, and the new names of its values."""

    path: str
    values: Mapping[str, str]


RENAMED = {
    'train.xla': Renamed('train.overlap', {'default': 'auto', 'overlap': 'batch_split'}),
}


def current(path: str, value: Any, place: str | None = None) -> tuple[str, Any]:
    """Return the new names of a path and value; warn about old ones if `place` is given."""
    if path not in RENAMED:
        return path, value
    renamed = RENAMED[path]
    new = renamed.values.get(str(value), value)
    if place:
        logger.warning(
            '%s: %s=%s is now %s=%s; the old name works in this release only',
            place, path, value, renamed.path, new,
        )  # fmt: skip
    return renamed.path, new
