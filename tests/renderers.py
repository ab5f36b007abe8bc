"""Processes that render chat templates, forked from one that has imported jinja2.

To import it takes longer than to render most templates.
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from megajax.runtime.data.image_text import chat

# It answers `fork`, which comes with the ends of two pipes, with the number of the new process, and
# such a number with the status with which that process has ended.
SERVER = """
import os, socket, sys
sys.path.insert(0, sys.argv[2])
import render_worker
asked = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, ends, *_ = socket.recv_fds(asked, 64, 2)
    if not message:
        break
    if message != b'fork':
        asked.send(b'%d' % os.waitpid(int(message), 0)[1])
        continue
    if not (number := os.fork()):
        asked.close()
        os.setpgid(0, 0)
        sys.stdout = open(ends[1], 'w', encoding='utf-8')
        render_worker.serve(open(ends[0], encoding='utf-8'))
        os._exit(0)
    for end in ends:
        os.close(end)
    asked.send(b'%d' % number)
"""


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair()
    folder = Path(chat.__file__).parent
    command = [sys.executable, '-P', '-c', SERVER, str(theirs.fileno()), str(folder)]
    subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
    theirs.close()
    return ours


ASKING = threading.Lock()  # the server answers one question at a time


def _ask(question: bytes, ends: tuple[int, ...] = ()) -> int:
    with ASKING:
        socket.send_fds(_server(), [question], ends)
        return int(_server().recv(64))


class Renderer:
    """To `TemplateChat`, what `subprocess.Popen` is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        (read, self_write), (self_read, write) = os.pipe(), os.pipe()
        self._number, self._code = _ask(b'fork', (read, write)), None
        for end in (read, write):
            os.close(end)
        self.stdin = open(self_write, 'w', encoding='utf-8')  # noqa: SIM115
        self.stdout = open(self_read, encoding='utf-8')  # noqa: SIM115

    def kill(self) -> None:
        """End the process, unless it has ended."""
        if self._code is None:
            os.kill(self._number, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; return its exit code."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(_ask(b'%d' % self._number))
        return self._code

    def communicate(self) -> None:
        """Wait for its end, and close its pipes."""
        self.wait()
        self.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # a question was left
            self.stdin.close()
