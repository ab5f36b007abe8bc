"""The identity of parts of megajax's source."""

import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@functools.cache
def source_digest(*parts: str, package: Path = PACKAGE) -> str:
    """Return a digest of files and folders of the package, such as 'xla/hlo'."""
    digest = hashlib.sha256()
    for part in parts:
        files = package / part
        for file in sorted(files.rglob('*')) if files.is_dir() else [files]:
            if file.suffix in ('.py', '.yaml'):
                digest.update(f'{file.relative_to(package)}\0'.encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
