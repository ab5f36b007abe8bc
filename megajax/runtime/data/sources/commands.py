"""Shell commands that convert a corpus file, for messages; they read the file as it is stored."""

from megajax.base.render.text import typed
from megajax.runtime.data.sources.inputs import compression_of, format_of

# The programs that write a file without its compression, by suffix.
UNPACK = {'': 'cat', '.gz': 'gzip -dc', '.zst': 'zstd -dc', '.bz2': 'bzip2 -dc', '.xz': 'xz -dc'}
# The program that writes the rows of a Parquet file as JSON lines.
ROWS = (
    'python -c "import json, pyarrow.parquet as parquet; '
    '[print(json.dumps(row, default=str)) for rows in '
    "parquet.ParquetFile('OLD').iter_batches() for row in rows.to_pylist()]\""
)
# A column gives every object in it all keys.
WITHOUT_NULLS = 'del(.. | objects | .[] | nulls) | '


def jq(program: str, place: str) -> str:
    """Return the command that writes JSON lines by a jq program.

    It is for the file of a line or row, such as a.jsonl.gz:12, and names this file OLD.
    """
    path = place.rpartition(':')[0]
    if format_of(path) == 'parquet':
        return f'{ROWS} | jq -c {typed(WITHOUT_NULLS + program)} > NEW.jsonl'
    command = f'jq -c {typed(program)}'
    if compression := compression_of(path):
        return f'{UNPACK[compression]} OLD | {command} > NEW.jsonl'
    return f'{command} OLD > NEW.jsonl'
