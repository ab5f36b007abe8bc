"""A file that grows by whole pieces, or waits until it can."""

import contextlib
import os
from collections import deque
from pathlib import Path

LONGEST = 10_000  # pieces that wait; then the oldest are lost


class AppendedFile:
    """Appends to `path`, made if need be. A piece that does not fit, on a full disk, leaves no part of itself behind."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: deque[bytes] = deque(maxlen=LONGEST)
        self._file: int | None = None

    def append(self, piece: bytes) -> None:
        """Raises OSError if it is not in the file yet; it waits there, and is written before the next."""
        self.waiting.append(piece)
        self.flush()

    def flush(self) -> None:
        """Write what waits. Raises OSError if that cannot be."""
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
        """Keep the first `size` bytes of the file. Raises OSError if that cannot be."""
        os.ftruncate(self._opened(), size)

    def close(self) -> None:
        """Write what waits, and close. Raises OSError if that cannot be; it is closed all the same."""
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
