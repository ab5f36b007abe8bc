"""Read JSON from untrusted files, with limits on size and depth. Imports no jax."""

import json
from pathlib import Path
from typing import Any

from megajax.base.errors import ConfigError
from megajax.base.render.text import shorten

MAX_BYTES = 100_000_000  # the index file of 100,000 tensors has 10,000,000 bytes
MAX_DEPTH = 50  # nested objects and lists


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if it is not JSON, or nested deeper than Python supports.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError('too many nested objects and lists') from None


def read_json(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises ConfigError if the file cannot be read, is not a JSON object, or is larger or more deeply
    nested than any file that describes a model.
    """
    try:
        with file.open('rb') as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f'{file}: more than {MAX_BYTES:,} bytes')
        keys = json.loads(data)
        if _is_deep(keys):
            raise RecursionError
    except OSError as error:
        raise ConfigError(f'{file}: cannot be read: {error.strerror}') from error
    except RecursionError:
        message = f'{file}: more than {MAX_DEPTH} nested objects and lists'
        raise ConfigError(message) from None
    except ValueError as error:
        raise ConfigError(f'{file}: not JSON: {shorten(str(error), 200)}') from error
    if not isinstance(keys, dict):
        raise ConfigError(f'{file}: not a JSON object')
    return keys


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        groups = [x.values() if isinstance(x, dict) else x for x in level if _is_group(x)]
        level = [x for group in groups for x in group]
    return any(map(_is_group, level))


def _is_group(value: Any) -> bool:
    return isinstance(value, (dict, list))
