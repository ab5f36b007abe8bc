"""Convert pieces of raw bytes to texts and objects; bad lines become problems."""

import codecs
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from megajax.base.errors import Problem
from megajax.runtime.data.sources.image_keys import MARKER, count_images
from megajax.runtime.data.sources.pieces import InputPiece
from megajax.runtime.data.sources.shapes import as_messages


class Fixes(NamedTuple):
    """The advice about lines that cannot be used."""

    bad: str = 'fix it, or skip such lines with --skip-bad'
    no_key: str = 'set --json-key to one of them, or use --skip-bad'
    messages: str = 'set data.corpus to the file: megajax train and eval read messages as they are'
    images: str = (
        'set data.corpus to the file to train a model with a vision section, or remove the images'
    )


FIXES = Fixes()
# The keys of a line's text, and of the files of the images in it.
TEXT, IMAGES = 'text', 'images'


def parse(piece: InputPiece, key: str, fixes: Fixes = FIXES) -> Iterator[str | Problem]:
    """Yield the texts of a piece in order, with a Problem in place of each bad one.

    A byte order mark at the beginning of a file is not part of its text.
    """
    path = piece.input.path
    if isinstance(piece.data, list):
        for row, text in enumerate(piece.data):
            place = f'{path}: row {piece.line + row}'
            if text is None:
                yield Problem(place, f'{key!r} is null, not text; {fixes.bad}')
            elif images := piece.images.get(row):
                yield _with_images(place, images, fixes)
            else:
                yield _decode(text, place, fixes.bad)
    elif piece.input.format == 'text':
        data = piece.data if piece.offset else piece.data.removeprefix(codecs.BOM_UTF8)
        fix = 'convert it, for example with iconv, or leave it out'
        yield _decode(data, path, fix, piece.offset + len(piece.data) - len(data))
    else:
        for line, place in lines(piece):
            yield _parse_line(line, key, place, fixes)


def places(piece: InputPiece) -> Iterator[str]:
    """Yield the file and line, or row, of each text or Problem that `parse` yields."""
    path = piece.input.path
    if isinstance(piece.data, list):
        yield from (f'{path}: row {piece.line + row}' for row in range(len(piece.data)))
    elif piece.input.format == 'text':
        yield f'{path}:{piece.line}'
    else:
        yield from (place for _, place in lines(piece))


def lines(piece: InputPiece) -> Iterator[tuple[bytes, str]]:
    """Yield the lines of a piece of JSON lines, except blank ones, with file and number.

    If the piece does not know its first line, the byte at which a line begins replaces the number.
    """
    assert isinstance(piece.data, bytes)
    data = piece.data if piece.offset else piece.data.removeprefix(codecs.BOM_UTF8)
    begin = piece.offset
    for number, line in enumerate(data.split(b'\n'), piece.line):
        if line and not line.isspace():
            yield line, f'{piece.input.path}:{number if piece.line else f" byte {begin}"}'
        begin += len(line) + 1


def parse_object(line: bytes, place: str, fix: str) -> dict[str, Any] | Problem:
    """Return the object of a line of JSON, or a Problem if the line has none."""
    decoded = _decode(line, place, fix)
    if isinstance(decoded, Problem):
        return decoded
    try:
        value = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        return Problem(place, f'is not JSON ({error}): {_short(decoded)}; {fix}')
    if isinstance(value, dict):
        return value
    return Problem(place, f'is {type(value).__name__}, not a JSON object: {_short(decoded)}; {fix}')


def _decode(data: bytes, path: str, fix: str, offset: int = 0) -> str | Problem:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return Problem(
            path, f'is not UTF-8 at byte {offset + error.start} (0x{data[error.start]:02x}); {fix}'
        )


def _parse_line(line: bytes, key: str, place: str, fixes: Fixes) -> str | Problem:
    document = parse_object(line, place, fixes.bad)
    if isinstance(document, Problem):
        return document
    if key not in document:
        keys = _short(', '.join(document) or 'none')
        fix = as_messages(document, place) or fixes.no_key
        if 'messages' in document:
            fix = fixes.messages
        return Problem(place, f'has no key {key!r} (its keys: {keys}); {fix}')
    text = document[key]
    if not isinstance(text, str):
        return Problem(place, f'{key!r} is {_short(json.dumps(text))}, not text; {fixes.bad}')
    images = document.get(IMAGES)
    if key == TEXT and isinstance(images, list) and images:
        return _with_images(place, len(images), fixes)
    if key == TEXT and MARKER in text and (count := count_images(document)):
        return _with_images(place, count, fixes)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return Problem(
                place, f'{key!r} has an unpaired surrogate at character {error.start}; {fixes.bad}'
            )
    return text


def _with_images(place: str, count: int, fixes: Fixes) -> Problem:
    """Return the Problem of a line or row whose images would be lost."""
    return Problem(place, f'has {count} images, but only the text is read; {fixes.images}')


def _short(value: str) -> str:
    return value if len(value) <= 60 else f'{value[:60]}...'
