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
# The program that writes the rows of a Parquet file as JSON lines, and the images in it to files.
# The hash of an image names its file, so that several tables can be converted in one folder.
IMAGES_OF_ROWS = (
    'python -c "import hashlib, json, os, pyarrow.parquet as parquet; '
    "folder = os.path.dirname('NEW.jsonl'); "
    "os.makedirs(os.path.join(folder, 'images'), exist_ok=True); "
    'name = lambda data, path: '
    "'images/' + hashlib.sha256(data).hexdigest() + (os.path.splitext(path)[1] or '.png'); "
    "save = lambda data, name: [open(os.path.join(folder, name), 'wb').write(data), name][1]; "
    "walk = lambda x: (save(x['bytes'], name(x['bytes'], x.get('path') or '')) "
    "if isinstance(x.get('bytes'), bytes) and x.keys() <= {'bytes', 'path'} else "
    "x['path'] if x == {'bytes': None, 'path': x.get('path')} else "
    '{key: walk(y) for key, y in x.items()}) '
    'if isinstance(x, dict) else list(map(walk, x)) if isinstance(x, list) else x; '
    '[print(json.dumps(walk(row), default=str)) for rows in '
    "parquet.ParquetFile('OLD').iter_batches(64) for row in rows.to_pylist()]\""
)


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


def images_to_files(place: str) -> str:
    """Return how to write the images inside the lines of a file to files that the lines name.

    It is for the file of the line or row at a place.
    """
    if format_of(place.rpartition(':')[0]) != 'parquet':
        return 'write the images to files, and the names of these files in place of them'
    clean = f'jq -c {typed(WITHOUT_NULLS + ".")}'
    return f'write the images to files: {IMAGES_OF_ROWS} | {clean} > NEW.jsonl'
