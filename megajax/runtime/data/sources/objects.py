"""The objects of JSON lines, and the rows of Parquet files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megajax.base.errors import ConfigError, Problem
from megajax.runtime.data.sources.inputs import Format, find_inputs
from megajax.runtime.data.sources.parquet import read_records
from megajax.runtime.data.sources.parse import lines, parse_object
from megajax.runtime.data.sources.pieces import Position
from megajax.runtime.data.sources.read import read_pieces


def read_objects(
    path: str | Path, format: Format | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object of each line that is not blank, or of each row, with its place.

    A place is 'a.jsonl:12'. If `format` is None, the suffix decides. Raises ConfigError with file
    and line.
    """
    (input,) = find_inputs([str(path)], format)
    if input.format == 'parquet':
        for row, value in enumerate(read_records(input), 1):
            yield f'{path}:{row}', value
        return
    for piece, _ in read_pieces([input], '', Position()):
        for line, place in lines(piece):
            found = parse_object(line, place, 'correct the line')
            if isinstance(found, Problem):
                raise ConfigError(found)
            yield place, found
