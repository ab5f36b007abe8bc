"""Find images that a line names under a key that is not read, and convert the line."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from megajax.runtime.data.sources.commands import images_to_files, jq

MARKER = '<image>'  # the image placeholder in a text
# The suffixes of the images that are read.
SUFFIXES = frozenset(
    {'.png', '.jpg', '.jpeg', '.webp', '.gif', '.bmp', '.tif', '.tiff', '.avif', '.jp2'}
)
KEYS = 'image', 'file_name'  # parts of keys under which other programs name the images of a text


def is_image(name: str) -> bool:
    """Whether a name belongs to an image file, and is not a URL."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES and '://' not in name


def image_keys(line: Mapping[str, Any]) -> list[str]:
    """Return the keys of a line, except "text" and "images", whose values name images.

    A value is the name of a file, an object with only its bytes or path, as in Hugging Face
    datasets, or a list of these.
    """
    return [
        key
        for key, value in line.items()
        if key not in ('text', 'images') and _names_image(_first(value))
    ]


def is_for_images(key: str) -> bool:
    """Whether other programs name the images of a text under a key, such as file_name."""
    return any(word in key.lower() for word in KEYS) and key != 'images'


def count_images(line: Mapping[str, Any]) -> int:
    """Return the number of images under the keys of a line other than "images".

    Images are objects as in Hugging Face datasets, and names under keys that are for images: next
    to a text without images, the name of an image can be a title or a source.
    """
    values = (
        line[key]
        for key in image_keys(line)
        if isinstance(_first(line[key]), Mapping) or is_for_images(key)
    )
    return sum(len(value) if isinstance(value, list) else 1 for value in values)


def contains_images(line: Mapping[str, Any]) -> bool:
    """Whether a key of a line contains images themselves, as tables of Hugging Face datasets do."""
    return any(
        isinstance(first, Mapping) and _names_image(first) for first in map(_first, line.values())
    )


def has_files(line: Mapping[str, Any], keys: Sequence[str], folder: Path) -> bool:
    """Whether a key of a line has an image itself, or the name of a file that is in a folder."""
    firsts = [_first(line[key]) for key in keys]
    return any(not isinstance(first, str) or _is_file(folder / first) for first in firsts)


def as_images(line: Mapping[str, Any], keys: Sequence[str], place: str) -> str:
    """Return the fix for a line with a text and the names of its images under `keys`.

    It is for the file of the line or row at a place.
    """
    if contains_images({key: line[key] for key in keys}):
        return images_to_files(place)
    text = '.text' if MARKER in line['text'] else f'("{MARKER}" * (.images | length) + .text)'
    program = f'.images = {listed(line, keys)} | {{text: {text}, images}}'
    return f'write "images": {jq(program, place)}'


def listed(line: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the jq program for the list of the values of keys, each a value or a list of them."""
    values = (
        f'(.[{json.dumps(key)}] // [])[]'
        if isinstance(line[key], list)
        else f'.[{json.dumps(key)}] // empty'
        for key in keys
    )
    return f'[{", ".join(values)}]'


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _names_image(value: object) -> bool:
    if isinstance(value, str):
        return is_image(value)
    if not isinstance(value, Mapping) or not value.keys() <= {'bytes', 'path'}:
        return False
    data, path = value.get('bytes'), value.get('path')
    if not data:
        return isinstance(path, str) and is_image(path)
    kinds = {'', *SUFFIXES}
    return isinstance(data, (str, bytes)) and PurePosixPath(path or '').suffix.lower() in kinds


def _is_file(path: Path) -> bool:
    with suppress(OSError, ValueError):  # a name that is too long, or has a NUL
        return path.is_file()
    return False
