"""JSON from a file that anyone may have written: one error for all that is wrong with it."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if it is none, or nested deeper than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError('too many objects and lists within each other') from None
