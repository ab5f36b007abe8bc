"""The keys in which two configs differ."""

from collections.abc import Mapping
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]


def differences(before: Sections, after: Sections) -> dict[str, tuple[Any, Any]]:
    """Return both values of each key that differs, by `section.key`, sorted."""
    old, new = flat(before), flat(after)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return {key: (old.get(key), new.get(key)) for key in keys}


def flat(sections: Sections) -> dict[str, Any]:
    """Return the values by `section.key`."""
    return {
        f'{section}.{key}': value
        for section, keys in sections.items()
        for key, value in keys.items()
    }
