"""Detect the kind of a corpus file by its first bytes, if its name is misleading."""

import codecs
import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megajax.base.errors import ConfigError, Problem
from megajax.base.files.pointers import POINTER
from megajax.base.render.text import typed
from megajax.runtime.data.sources.commands import UNPACK
from megajax.runtime.data.sources.inputs import Input, name_of

# maximum number of lines of a text that are parsed to tell whether it is JSON lines
MOST_LINES = 100
DOCUMENT_KEYS = {'text', 'messages', 'conversations', 'conversation', 'instruction', 'prompt'}

# The first bytes of a kind of file, its name, and what to do; {} is the file's path, quoted for a
# shell.
DATA = (
    (rb'PAR1', 'Parquet', 'rename it to {}.parquet'),
    (rb'ARROW1|\xff{4}', 'Arrow', "write it with datasets' to_parquet, and give that file"),
    (rb'\xff\xfe\0\0|\0\0\xfe\xff', 'UTF-32', 'convert it: iconv -f UTF-32 -t UTF-8 {} > NEW'),
    (rb'\xff\xfe|\xfe\xff', 'UTF-16', 'convert it: iconv -f UTF-16 -t UTF-8 {} > NEW'),
    (
        re.escape(POINTER),
        'a Git LFS pointer, not the file itself',
        'run git lfs pull in its repository',
    ),
)
OTHERS = (
    (rb'\x1f\x8b\x08', 'compressed by gzip', 'rename it to {}.gz'),
    (rb'\x28\xb5\x2f\xfd', 'compressed by zstd', 'rename it to {}.zst'),
    (rb'BZh[1-9]1AY&SY', 'compressed by bzip2', 'rename it to {}.bz2'),
    (rb'\xfd7zXZ\x00', 'compressed by xz', 'rename it to {}.xz'),
    (
        rb'PK\x03\x04',
        'a ZIP archive, as .docx and .xlsx are',
        'unpack it, or save the document as plain text',
    ),
    (rb'(?s).{257}ustar', 'a tar archive', 'unpack it'),
    (rb'%PDF-', 'PDF', 'convert it: pdftotext {} NEW.txt'),
    (rb'(?s).*?\x00', 'binary', 'give text, JSON lines or Parquet'),
)
# The program that writes the rows of a table from standard input as JSON lines; {} is the csv
# dialect.
SCRIPT = (
    "import csv, json, sys; sys.stdin.reconfigure(encoding='utf-8-sig', newline=''); "
    'csv.field_size_limit(2**30); '
    "[print(json.dumps(row)) for row in csv.DictReader(sys.stdin, dialect='{}')]"
)
PAGE = (
    rb'(?i)\s*<(!doctype html|html)[\s>]',
    'an HTML page, perhaps an error page',
    'download it again',
)


class NoTextError(ConfigError):
    """An error for a file that is not text, which is allowed in a folder of text."""


class JsonText(NamedTuple):
    """The JSON at the beginning of a text."""

    # one object per line, several objects in an array, or a single object
    kind: Literal['lines', 'array', 'object']
    first: dict[str, Any]
    lines: int  # number of lines that were parsed, if the text is JSON lines

    @property
    def is_documents(self) -> bool:
        """Whether these are documents, not the settings of a program."""
        return self.lines > 1 or not DOCUMENT_KEYS.isdisjoint(self.first)


def check_contents(input: Input, head: bytes, *, whole: bool, key: str = 'text') -> None:
    """Raise ConfigError, with the beginning of the file, if its content contradicts its name.

    `head` is the decompressed beginning of the file, in complete lines if it is text. `whole` says
    whether it is the entire file, and `key` is the key under which a line should have its text.
    Raises NoTextError for data that is not text in any encoding.
    """
    shown = head.removeprefix(codecs.BOM_UTF8)
    for signs, kind_of_error in ((DATA, ConfigError), (OTHERS, NoTextError)):
        for pattern, kind, fix in signs:
            if re.match(pattern, head):
                raise _mistake(input, kind, shown, fix, kind_of_error)
    pattern, kind, fix = PAGE
    may_be_page = input.format == 'text' and not input.table
    if (not may_be_page or _decompressed(input).suffix in ('', '.txt')) and re.match(
        pattern, shown
    ):
        raise _mistake(input, kind, shown, fix)
    if input.format == 'text' and input.given:
        return
    found = json_text(head, whole=whole)
    if found is None or (input.format == 'text' and not found.is_documents):
        if input.table and not input.given and shown:
            raise _mistake(input, 'CSV or TSV', shown, _fix_of_table(input, key))
        return
    if found.kind == 'lines':
        if input.format == 'jsonl':
            return
        jsonl = _decompressed(input).with_suffix(f'.jsonl{input.compression}')
        kind, fix = 'JSON lines', f'rename it to {typed(jsonl)}'
    elif found.kind == 'array':
        kind, fix = 'a JSON array', "write a line for each entry: jq -c '.[]' {} > NEW.jsonl"
    else:
        kind, fix = (
            'JSON over several lines',
            'write a line for each object: jq -c . {} > NEW.jsonl',
        )
    raise _mistake(input, kind, shown, fix)


def check_parquet(input: Input, head: bytes) -> None:
    """Raise ConfigError, showing the beginning of the file, if it is known not to be Parquet."""
    if not head.startswith(b'PAR1') and head:
        check_contents(input, head, whole=False)


def json_text(head: bytes, *, whole: bool) -> JsonText | None:
    """Return the JSON at the beginning of a text, or None if there is no JSON object."""
    text = head.removeprefix(codecs.BOM_UTF8).decode(errors='replace').lstrip()
    if not text.startswith(('{', '[')):
        return None
    lines = [line for line in text.split('\n') if line and not line.isspace()]
    complete = lines if whole or text.endswith('\n') else lines[:-1]
    objects = [_object(line) for line in complete[:MOST_LINES]]
    if objects and all(value is not None for value in objects):
        return JsonText('lines', objects[0] or {}, len(objects))
    try:
        first, _ = json.JSONDecoder().raw_decode(text.removeprefix('[').lstrip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(first, dict):
        return None
    if text.startswith('['):
        return JsonText('array', first, 0)
    # If the first line is a complete object, the text is not one object that spans lines.
    return None if _object(lines[0]) is not None else JsonText('object', first, 0)


def _object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _decompressed(input: Input) -> Path:
    path = Path(input.path)
    return path.with_suffix('') if input.compression else path


def _fix_of_table(input: Input, key: str) -> str:
    """Return the command that writes the rows as JSON lines, and how to train on the raw text."""
    path = Path(name_of(input.path))
    source = path.name if input.is_remote else str(path)
    plain = Path(source.removesuffix(path.suffix) if input.compression else source)
    text = f'{plain.with_suffix(".txt")}{input.compression}'
    script = SCRIPT.format('excel-tab' if plain.suffix.lower() == '.tsv' else 'excel')
    return (
        f'{"download it, and " * input.is_remote}write its rows as JSON lines, with the text in a '
        f'column named "{key or "text"}": {UNPACK[input.compression]} {typed(source)} | '
        f'python -c "{script}" > NEW.jsonl; or rename it to {typed(text)} to read it as one '
        'text'
    )


def _mistake(
    input: Input, kind: str, head: bytes, fix: str, error: type[ConfigError] = ConfigError
) -> ConfigError:
    first = head.lstrip(b'\r\n').split(b'\n', 1)[0][:80].decode(errors='backslashreplace').rstrip()
    name, download = input.path, ''
    if input.is_remote and (input.compression or not fix.startswith('rename')):
        name, download = Path(name_of(name)).name, 'download it, and '
    if '{}' in fix and input.compression:  # the commands read what the file contains
        plain = typed(name.removesuffix(Path(name).suffix))
        fix = f'unpack it: {UNPACK[input.compression]} {{}} > {plain}'
    fix = (download if '{}' in fix else '') + fix.replace('{}', typed(name))
    return error(Problem(input.path, f'is {kind} (its first line: {first}); {fix}'))
