"""Parse JSON from an untrusted file, with one kind of error for anything wrong with it."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if it is not JSON, or nested deeper than Python supports.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError('too many nested objects and lists') from None
