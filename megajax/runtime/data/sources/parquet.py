"""Read rows of Parquet files in pieces."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megajax.base.errors import mistake
from megajax.runtime.data.sources.contents import check_parquet
from megajax.runtime.data.sources.decompress import open_input
from megajax.runtime.data.sources.image_keys import MARKER, is_for_images, is_image
from megajax.runtime.data.sources.inputs import Input, optional, unreadable
from megajax.runtime.data.sources.parse import IMAGES, TEXT, Fixes
from megajax.runtime.data.sources.pieces import UNIT, InputPiece, Position

SIGNS = 1 << 10  # number of bytes that are read to tell what else a file may be


def read_rows(
    input: Input, key: str, here: Position, unit: int, fixes: Fixes | None = None
) -> Iterator[tuple[InputPiece, bool, int]]:
    """Yield pieces of rows of a Parquet file.

    Each piece comes with whether it is the last of the file, and with the bytes of the file read so
    far, estimated from the number of rows. Raises ConfigError with the advice of `fixes`, by
    default a build's, if there is no column of texts.
    """
    with _open(input) as file:
        fix = _advice(key, file.schema_arrow.names, fixes) if fixes else None
        _check_column(input, key, file.schema_arrow, fix)
        total, row = file.metadata.num_rows, here.offset
        rows: list[bytes | None] = []
        images: dict[int, int] = {}
        weight = 0
        for text, count in _texts(file, key, row):
            if count:
                images[len(rows)] = count
            rows.append(text)
            weight += len(text or b'') + 10
            if weight >= unit or row + len(rows) == total:
                piece = InputPiece(input=input, offset=row, line=row + 1, data=rows, images=images)
                row, rows, images, weight = row + len(rows), [], {}, 0
                yield piece, row == total, input.size * row // total


def group_sizes(input: Input, key: str, fixes: Fixes) -> list[int]:
    """Return the number of rows of each row group of a Parquet file.

    Raises ConfigError with the advice of `fixes` if it has no column of texts.
    """
    with _open(input) as file:
        schema = file.schema_arrow
        _check_column(input, key, schema, _advice(key, schema.names, fixes))
        return [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]


def read_records(input: Input) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, each with all columns.

    Nulls are left out inside the values: every struct has all fields of its column.
    """
    with _open(input) as file:
        for batch in file.iter_batches(batch_size=256, use_threads=False):
            for row in batch.to_pylist():
                yield {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(x) for key, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


@contextmanager
def _open(input: Input) -> Iterator[Any]:
    """Open the file; raise a ConfigError that names it if it cannot be read."""
    parquet, arrow = optional('pyarrow.parquet', input.path), optional('pyarrow', input.path)
    # The name of a column may not be valid UTF-8.
    errors = arrow.ArrowException, OSError, EOFError, UnicodeDecodeError
    try:
        with (
            _source(input) as source,
            parquet.ParquetFile(source, pre_buffer=False, buffer_size=UNIT) as file,
        ):
            yield file
    except errors as error:
        raise unreadable(input, error) from error


@contextmanager
def _source(input: Input) -> Iterator[Any]:
    if input.is_remote:
        with open_input(input, at_any_place=True) as source:
            check_parquet(input, source.read(SIGNS))
            source.seek(0)
            yield source
    else:
        with open(input.path, 'rb') as source:
            check_parquet(input, source.read(SIGNS))
        yield input.path


def _texts(file: Any, key: str, start: int) -> Iterator[tuple[bytes | None, int]]:
    """Yield the texts from a row on, each with the number of images of its row."""
    first = 0
    columns = [key, IMAGES] if key == TEXT and _lists_images(file.schema_arrow) else [key]
    named, has_images = _images_of(file.schema_arrow) if key == TEXT else ([], False)
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if start < first + rows:
            for batch in file.iter_batches(
                batch_size=256, row_groups=[group], columns=[*columns, *named], use_threads=False
            ):
                found = dict(zip(batch.schema.names, batch.columns, strict=True))
                texts, *names = (_bytes_of(found[name]) for name in (key, *named))
                counts = [0] * len(texts)
                if IMAGES in columns:
                    counts = found[IMAGES].value_lengths().fill_null(0).to_pylist()
                elif named or has_images:
                    by_row = list(zip(*names, strict=True)) or [()] * len(texts)
                    counts = [
                        _count(text, each, has_images=has_images)
                        for text, each in zip(texts, by_row, strict=True)
                    ]
                yield from list(zip(texts, counts, strict=True))[max(start - first, 0) :]
                first += len(texts)
        else:
            first += rows


def _lists_images(schema: Any) -> bool:
    """Whether a Parquet file has a column with the images of each row."""
    types = optional('pyarrow', IMAGES).types
    kind = schema.field(IMAGES).type if schema.names.count(IMAGES) == 1 else None
    return kind is not None and (types.is_list(kind) or types.is_large_list(kind))


def _images_of(schema: Any) -> tuple[list[str], bool]:
    """Return the columns that may name images, and whether a column contains the images.

    It contains them in the form of Hugging Face datasets.
    """
    types = optional('pyarrow', IMAGES).types

    def is_bytes(kind: Any) -> bool:
        return types.is_binary(kind) or types.is_large_binary(kind) or types.is_null(kind)

    def contains(kind: Any) -> bool:
        if types.is_list(kind) or types.is_large_list(kind):
            return contains(kind.value_type)
        fields = {field.name: field.type for field in kind} if types.is_struct(kind) else {}
        return {'bytes'} <= fields.keys() <= {'bytes', 'path'} and is_bytes(fields['bytes'])

    named = [x.name for x in schema if is_for_images(x.name) and _is_text(x.type)]
    return named, any(contains(field.type) for field in schema)


def _bytes_of(column: Any) -> list[bytes | None]:
    """Return texts as bytes, so that the worker can report which row is not UTF-8."""
    found: list[bytes | None] = column.cast('large_string').cast('large_binary').to_pylist()
    return found


def _count(text: bytes | None, names: Sequence[bytes | None], *, has_images: bool) -> int:
    """Return the number of images of a row; at least 1 if its placeholder has one in a column."""
    if MARKER.encode() not in (text or b''):
        return 0
    return sum(is_image((name or b'').decode(errors='replace')) for name in names) or int(
        has_images
    )


def _advice(key: str, names: Sequence[str], fixes: Fixes) -> str:
    fix = fixes.messages if 'messages' in names else fixes.no_key
    if key in names:
        fix = f'name a column of strings {key!r}'
    return f'its columns: {", ".join(names)}; {fix}'


def _check_column(input: Input, key: str, schema: Any, fix: str | None = None) -> None:
    if key not in schema.names:
        fix = fix or f'set --json-key to one of {", ".join(schema.names)}'
        raise mistake(input.path, f'has no column {key!r}; {fix}')
    if (count := schema.names.count(key)) > 1:
        raise mistake(
            input.path, f'has {count} columns {key!r}; leave only one of them in the file'
        )
    kind = schema.field(key).type
    if not _is_text(kind):
        fix = fix or 'set --json-key to a column of strings'
        raise mistake(input.path, f'column {key!r} is {kind}, not text; {fix}')


def _is_text(kind: Any) -> bool:
    types = optional('pyarrow', IMAGES).types
    texts = kind.value_type if types.is_dictionary(kind) else kind
    return str(texts) in ('string', 'large_string', 'string_view')
