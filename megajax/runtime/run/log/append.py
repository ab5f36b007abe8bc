"""A file that grows by complete pieces; pieces that cannot be written wait."""

import contextlib
import os
from collections import deque
from pathlib import Path

# maximum number of waiting pieces; if there are more, the oldest ones are lost
MAX_WAITING = 10_000


class AppendedFile:
    """The end of the file `path`, which is created if it does not exist.

    If a piece does not fit on a full disk, no part of it is left in the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._file: int | None = None

    def append(self, piece: bytes) -> None:
        """Append a piece.

        Raises OSError if the piece cannot be written; it then waits, and is written before the next
        piece.
        """
        self.waiting.append(piece)
        self.flush()

    def flush(self) -> None:
        """Write the waiting pieces; raise OSError if that fails."""
        if not self.waiting:
            return
        file, rest = self._opened(), memoryview(b''.join(self.waiting))
        end = os.fstat(file).st_size
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, end)
            raise
        self.waiting.clear()

    def truncate(self, size: int) -> None:
        """Truncate the file to its first `size` bytes; raise OSError if that fails."""
        os.ftruncate(self._opened(), size)

    def close(self) -> None:
        """Write the waiting pieces and close the file, even if writing raises OSError."""
        try:
            self.flush()
        finally:
            if self._file is not None:
                file, self._file = self._file, None
                os.close(file)

    def _opened(self) -> int:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        return self._file
