"""Check that every token id in a pair of files is in the model's vocabulary.

The whole file is read once, by all processes of a run together, and the range of its ids is cached.
"""

import json
import os
from hashlib import sha256
from pathlib import Path

import numpy as np

from megajax.base.errors import ConfigError, mistake
from megajax.base.files.json_file import parse_json
from megajax.base.files.outputs import replace_file
from megajax.runtime.data.tokens.indexed import Sequences, TokenIds, paths

CHUNK = 1 << 24  # number of tokens read at a time
NO_ID = 2**31 - 1  # no vocabulary has so many ids


def check_token_ids(sequences: Sequences, vocab_size: int, known: tuple[int, int]) -> None:
    """Raise ConfigError unless all ids are at least 0 and below `vocab_size`.

    The error names the first bad id and its byte. `known` are the smallest and the largest id.
    """
    if not len(sequences.tokens):
        return
    low, high = known
    if low < 0 or high >= vocab_size:
        raise _out_of_range(sequences, vocab_size, high)


def token_range(
    sequences: Sequences, share: int = 0, shares: int = 1, *, anew: bool = False
) -> tuple[int, int]:
    """Return the smallest and the largest id of a share of the file; 0 and -1 if it has none.

    The file is read only once, unless its size or modification time changes or `anew` is set.
    """
    bin_path, _ = paths(sequences.name)
    part = '' if shares == 1 else f'.{share}-of-{shares}'
    note = _notes() / f'{_fingerprint(bin_path)}{part}.json'
    found = None if anew else _recall(note)
    if found is None:
        found = _read_range(sequences.tokens, share, shares)
        _remember(note, found)
    return found


def first_bad(ids: np.ndarray, vocab_size: int) -> int | None:
    """Return the index of the first id that is negative or not below `vocab_size`, if any."""
    any_negative = ids.dtype.kind == 'i' and ids.min(initial=0) < 0
    if not any_negative and ids.max(initial=0) < vocab_size:
        return None
    return int(((ids < 0) | (ids >= vocab_size)).argmax())


def _read_range(tokens: TokenIds, share: int, shares: int) -> tuple[int, int]:
    ranges = []
    for start in range(share * CHUNK, len(tokens), shares * CHUNK):
        chunk = tokens[start : start + CHUNK]
        ranges.append((int(chunk.min()), int(chunk.max())))
    lows, highs = zip(*ranges, strict=True) if ranges else ((0,), (-1,))
    return min(lows), max(highs)


def _out_of_range(sequences: Sequences, vocab_size: int, high: int) -> ConfigError:
    tokens = sequences.tokens
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        if (bad := first_bad(chunk, vocab_size)) is not None:
            token, bad_id = start + bad, chunk[bad]
            break
    else:
        path = paths(sequences.name)[0]
        message = 'was written to while its ids were checked; start again when it is complete'
        return mistake(path, message)
    place = f'{paths(sequences.name)[0]}: at byte {token * tokens.itemsize}'
    message = f'{vocab_size} ids end below {bad_id}, which is token {token} of {sequences.name}'
    fix = f'use {high + 1} or more' if bad_id >= 0 and high < NO_ID else 'build the files again'
    return mistake(
        'model.vocab_size', f'{message}; {fix}', 'data.corpus', 'data.blend', place=place
    )


def _notes() -> Path:
    return (
        Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser()
        / 'megajax'
        / 'token_ranges'
    )


def _fingerprint(path: Path) -> str:
    status = path.resolve().stat()
    file = f'{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}'
    return sha256(file.encode(errors='surrogateescape')).hexdigest()


def _recall(note: Path) -> tuple[int, int] | None:
    try:
        low, high = map(int, parse_json(note.read_bytes()))
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    return low, high


def _remember(note: Path, low_high: tuple[int, int]) -> None:
    try:
        replace_file(note, json.dumps(low_high).encode())
    except OSError:
        return  # if the home directory is not writable, the file is read again next time
