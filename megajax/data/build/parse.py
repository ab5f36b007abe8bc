"""Conversion of pieces of raw bytes to texts; bad lines become problems."""

import codecs
import json
from collections.abc import Iterator

from megajax.config.errors import Problem
from megajax.data.build.pieces import InputPiece

OR_SKIP = 'fix it, or skip such lines with --skip-bad'


def parse(piece: InputPiece, key: str) -> Iterator[str | Problem]:
    """Yield the texts of a piece in order, and a Problem in place of each bad one."""
    path = piece.input.path
    if isinstance(piece.data, list):
        for row, text in enumerate(piece.data, piece.line):
            place = f'{path}: row {row}'
            yield (
                _decode(text, place)
                if text is not None
                else Problem(path=place, message=f'{key!r} is null, not text; {OR_SKIP}')
            )
    elif piece.input.format == 'text':
        yield _decode(
            piece.data,
            path,
            piece.offset,
            fix='convert it, for example with iconv, or leave it out',
        )
    else:
        data = piece.data if piece.offset else piece.data.removeprefix(codecs.BOM_UTF8)
        for number, line in enumerate(data.split(b'\n'), piece.line):
            if line and not line.isspace():
                yield _parse_line(line, key, f'{path}:{number}')


def _decode(data: bytes, path: str, offset: int = 0, fix: str = OR_SKIP) -> str | Problem:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return Problem(
            path=path,
            message=f'is not UTF-8 at byte {offset + error.start} '
            f'(0x{data[error.start]:02x}); {fix}',
        )


def _parse_line(line: bytes, key: str, place: str) -> str | Problem:
    if isinstance(decoded := _decode(line, place), Problem):
        return decoded
    try:
        document = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        return Problem(path=place, message=f'is not JSON ({error}): {_short(decoded)}; {OR_SKIP}')
    if not isinstance(document, dict):
        return Problem(
            path=place,
            message=f'is {type(document).__name__}, not a JSON object: '
            f'{_short(decoded)}; {OR_SKIP}',
        )
    if key not in document:
        keys = ', '.join(document) or 'none'
        return Problem(
            path=place,
            message=f'has no key {key!r} (its keys: {_short(keys)}); '
            'give --json-key one of them, or --skip-bad',
        )
    text = document[key]
    if not isinstance(text, str):
        return Problem(
            path=place, message=f'{key!r} is {_short(json.dumps(text))}, not text; {OR_SKIP}'
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return Problem(
                path=place,
                message=f'{key!r} has an unpaired surrogate at character {error.start}; {OR_SKIP}',
            )
    return text


def _short(value: str) -> str:
    return value if len(value) <= 60 else f'{value[:60]}...'
