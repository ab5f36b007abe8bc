"""The worker of a build as a thread: a process would import its modules for 0.3 s."""

import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

from megajax.corpus import encode
from megajax.corpus.encode import Workers, serve


class _Thread:
    """To `Workers`, what `subprocess.Popen` is."""

    returncode = 1  # only that of a worker that failed is asked for

    def __init__(self, *_: Any, pass_fds: list[int], **__: Any) -> None:
        self._thread = threading.Thread(target=serve, args=(os.dup(pass_fds[0]),), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Do nothing: it ends when its pipe is closed."""

    def wait(self) -> None:
        """Wait for its end."""
        self._thread.join()


class OneThread(Workers):
    """`Workers` of which a single one is a thread; several are processes."""

    def __enter__(self) -> Self:
        threads = SimpleNamespace(Popen=_Thread, DEVNULL=None)
        is_one = self._count == 1
        with mock.patch.object(encode, 'subprocess', threads) if is_one else nullcontext():
            return super().__enter__()
