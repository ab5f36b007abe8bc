"""The processes of one run keep a line to process 0, by which each hears at once when another ends early.

jax notices a dead process when its heartbeats stop, and then aborts with a stack dump. The kernel closes the connections of a process
that dies, however it dies, and its keepalive probes find a host that is gone; neither needs the process itself, so a long compilation
is not mistaken for death. Messages are lines of JSON. Imports no jax.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

RETRY = 75  # the exit code of a run that another attempt may finish, EX_TEMPFAIL
LONGEST = 1 << 16  # bytes of a line; more is no line of ours
KEEPALIVE = {
    'TCP_KEEPIDLE': 2,
    'TCP_KEEPINTVL': 1,
    'TCP_KEEPCNT': 3,
}  # seconds, seconds, probes: a silent host is lost after 5 s
OWN_ERROR = (
    1.0  # seconds in which a process may fail by its own error after another has told of one
)

Message = dict[str, Any]


class Link:
    """A connection to another process: `done` once that has told that it may close it, `closed` once it has."""

    def __init__(self, connection: socket.socket, name: str):
        self.socket, self.name, self.done, self.closed = connection, name, False, False
        self._pending, self._lock = b'', threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, **message: Any) -> None:
        """One message; a broken connection is heard of in `receive`."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b'\n')

    def receive(self) -> list[Message]:
        """The messages that have come, after waiting for some bytes; 'closed' is the last of all.

        Raises TimeoutError after the socket's timeout, and ValueError for what is no message.
        """
        try:
            received = self.socket.recv(LONGEST)
        except OSError as error:
            if (
                isinstance(error, TimeoutError) and error.errno is None
            ):  # the socket's own, not that of the keepalive probes
                raise
            received = b''
        self.closed = not received
        *lines, self._pending = (self._pending + received).split(b'\n')
        messages = [json.loads(line) for line in lines]
        if len(self._pending) > LONGEST or not all(
            isinstance(message, dict) and 'event' in message for message in messages
        ):
            raise ValueError('no message')
        return [*messages, {'event': 'closed'}] if self.closed else messages


class Peers:
    """The other processes: process 0 has a link to each, and each has one to process 0, which passes on what it hears."""

    def __init__(self, index: int, links: Sequence[Link]):
        self.index, self.links = index, links
        self._told = threading.Event()  # of the end of another process
        self._failing = False
        self._watcher = threading.Thread(target=self._watch, daemon=True, name='megajax-peers')

    def watch(self, heard: Sequence[Message] = ()) -> None:
        """Start listening, in a thread that ends this process when another ends early; `heard` came from the first link already."""
        for message in heard:
            self._hear(self.links[0], message)
        self._watcher.start()

    def done(self) -> None:
        """Tell that this process has done its part and may end."""
        self._tell(event='done')

    def failed(self, why: str, *, own: bool) -> None:
        """Tell why this process ends early; where the error is not surely its `own` and another told of one, it ends here with 75."""
        if not own and self._told.wait(OWN_ERROR):
            self._watcher.join()
        self._failing = True
        self._tell(event='failed', why=why)

    def wait(self, seconds: float) -> None:
        """In process 0, until the others have ended: jax aborts those that outlive it."""
        if self.index == 0:
            self._watcher.join(seconds)

    def _tell(self, **message: Any) -> None:
        for link in self.links:
            link.send(**message)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self.links:
                selector.register(link.socket, selectors.EVENT_READ, link)
            while selector.get_map():
                for key, _ in selector.select():
                    for message in key.data.receive():
                        self._hear(key.data, message)
                    if key.data.closed:
                        selector.unregister(key.fileobj)

    def _hear(self, link: Link, message: Message) -> None:
        match message['event']:
            case 'done':
                link.done = True
            case 'closed' if not link.done:
                self._leave(
                    f'{link.name} was lost, so this process ends too: start the run again to go on from its last checkpoint',
                    0,
                )
            case 'failed':
                link.done = True
                self._leave(
                    f'{link.name} failed ({message["why"]}), so this process ends too: see what that one printed',
                    OWN_ERROR,
                )
            case 'other':
                self._leave(message['what'], message['patience'])

    def _leave(self, what: str, patience: float) -> None:
        """End this process because of another, unless it is failing itself, or does so while we have patience."""
        if self._failing:
            return
        if self.index == 0:
            self._tell(event='other', what=what, patience=patience)
        self._told.set()
        time.sleep(patience)
        if not self._failing:
            end(what)


def end(line: str) -> NoReturn:
    """End this process at once, with 75: jax's own way out waits for processes that are gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(f'error: {line}', file=sys.stderr, flush=True)
    os._exit(RETRY)
