"""Connections of a run's processes to process 0, which tell all of them when one ends early.

jax notices a dead process when its heartbeats stop, and then aborts with a stack dump. The kernel
closes the connections of a process that dies for any reason, and those to a host that acknowledges
nothing for five seconds. Neither needs the process itself, so a process that compiles for a long
time is not mistaken for dead. The connections of a frozen process stay open. When its signs of life
stop, the other processes name it, but they do not end: a Python thread may be late although its
process is not frozen. Only jax ends them, later. Messages are lines of JSON. Imports no jax.
"""

import contextlib
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from megajax.base.render.text import visible

logger = logging.getLogger(__name__)

RETRY = 75  # exit code EX_TEMPFAIL, of a run that may succeed if it is started again
# Exit codes of permanent errors, whichever process they occur in. The other processes exit with
# them too, because a scheduler may see only the highest code of all processes.
FINAL = range(2, 6)
# Set by `launch`, which must tell the process that failed first from the others. Their code is
# therefore 75, or FOLLOWS plus a code in FINAL, and `launch` exits with the latter.
LAUNCHED = 'MEGAJAX_LAUNCHED'
FOLLOWS = 80
MAX_MESSAGE_BYTES = 1 << 16  # maximum message length in bytes
# Values in seconds, seconds, probes and milliseconds: a silent host counts as lost after 5 s. The
# kernel sends no probes while a message is unacknowledged; the last value limits that time.
LOST_HOST = {
    'TCP_KEEPIDLE': 2,
    'TCP_KEEPINTVL': 1,
    'TCP_KEEPCNT': 3,
    'TCP_USER_TIMEOUT': 5000,
}
# Seconds for which a process waits for its own error after a peer has reported one.
OWN_ERROR = 1.0
BEAT = 2.0  # seconds between two signs of life that a process sends
SILENCE = 8.0  # seconds without a sign of life, after which a process is named
# Set once this process is ending with its own error and has not announced it yet.
LEAVING = threading.Event()

Message = dict[str, Any]


class Connection:
    """A connection to a peer process.

    `done` is true once the peer has announced that it may close the connection, and `closed` once
    the connection is closed. `heard` is the time of the peer's last message, and `silent` is
    whether that time is too long ago.
    """

    def __init__(self, connection: socket.socket, name: str):
        self.socket, self.name, self.done, self.closed = connection, name, False, False
        self.heard, self.silent = time.monotonic(), False
        self._pending, self._lock = b'', threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in LOST_HOST.items():
            if hasattr(socket, option):  # not defined on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, **message: Any) -> None:
        """Send one message; a broken connection is reported by `receive`."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b'\n')

    def receive(self) -> list[Message]:
        """Wait for some bytes and return the messages that are complete; the last one is 'closed'.

        Raises TimeoutError after the socket's timeout, and ValueError for an invalid message.
        """
        try:
            received = self.socket.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            # The socket's own timeout has no errno; a lost host's timeout has one.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            received = b''
        self.closed = not received
        *lines, self._pending = (self._pending + received).split(b'\n')
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError('not a message: nested too deeply') from error
        if len(self._pending) > MAX_MESSAGE_BYTES or not all(
            isinstance(message, dict) and 'event' in message for message in messages
        ):
            raise ValueError('not a message')
        return [*messages, {'event': 'closed'}] if self.closed else messages


class Peers:
    """The other processes of a run.

    Process 0 has a link to each of the others. Each of the others has a link to process 0, which
    forwards messages.
    """

    def __init__(self, index: int, links: Sequence[Connection]):
        self.index, self.links = index, links
        self._told = threading.Event()  # set once a peer is known to have ended
        self._failing = False
        LEAVING.clear()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name='megajax-peers')

    def watch(self, heard: Sequence[Message] = ()) -> None:
        """Start a thread that listens to the peers, and ends this process when one ends early.

        `heard` are messages that have already been received on the first link.
        """
        for message in heard:
            self._hear(self.links[0], message)
        self._watcher.start()

    def done(self) -> None:
        """Announce that this process has done its part and may end."""
        self._tell(event='done')

    def failed(self, why: str, *, own: bool, code: int = RETRY) -> None:
        """Announce why this process ends early, and its exit code.

        If `own` is false, the error may be the result of a peer's error; if a peer has then
        reported an error, this process exits here.
        """
        if not own and self._told.wait(OWN_ERROR):
            self._watcher.join()
        self._failing = True
        self._tell(event='failed', why=why, code=code)

    def wait(self, seconds: float) -> None:
        """Wait, in process 0, until its peers have ended; jax aborts peers that outlive it."""
        if self.index == 0:
            self._watcher.join(seconds)

    def _tell(self, **message: Any) -> None:
        for link in self.links:
            link.send(**message)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self.links:
                selector.register(link.socket, selectors.EVENT_READ, link)
            beat = time.monotonic() + BEAT
            while selector.get_map():
                for key, _ in selector.select(max(0, beat - time.monotonic())):
                    for message in _receive(key.data):
                        self._hear(key.data, message)
                    if key.data.closed:
                        selector.unregister(key.fileobj)
                if (late := time.monotonic() - beat) >= 0:
                    self._tell(event='alive')
                    self._check_silence(was_frozen=late > BEAT)
                    beat = time.monotonic() + BEAT

    def _check_silence(self, *, was_frozen: bool) -> None:
        """Warn about peers that are silent for too long, unless this process was itself frozen.

        Only process 0 and process 1 log the warning; the other processes would repeat process 1's
        warning.
        """
        now = time.monotonic()
        for link in self.links:
            if was_frozen:
                link.heard = now
            elif now - link.heard > SILENCE and not (link.silent or link.done):
                link.silent = True
                if self.index <= 1:
                    logger.warning(
                        '%s has been silent for %.0f s: it may be frozen, or its host overloaded; '
                        'jax ends the run when it does not answer',
                        link.name,
                        now - link.heard,
                    )

    def _hear(self, link: Connection, message: Message) -> None:
        if link.silent and message['event'] != 'closed' and self.index <= 1:
            logger.warning('%s answers again', link.name)
        link.heard, link.silent = time.monotonic(), False
        match message['event']:
            case 'done':
                link.done = True
            case 'closed' if not link.done:
                self._leave(
                    f'{link.name} was lost, so this process ends too: '
                    'start the run again to continue from its last checkpoint',
                    0,
                    RETRY,
                )
            case 'failed':
                link.done = True
                self._leave(
                    f'{link.name} failed ({message.get("why")}), so this process ends too: '
                    'see the output of the failed process',
                    OWN_ERROR,
                    message.get('code'),
                )
            case 'other':
                patience = OWN_ERROR if message.get('patience') else 0
                self._leave(str(message.get('what')), patience, message.get('code'))

    def _leave(self, what: str, patience: float, code: object) -> None:
        """End this process because a peer ended, unless it fails itself within `patience` s."""
        if self._failing:
            return
        if self.index == 0:
            self._tell(event='other', what=what, patience=patience, code=code)
        self._told.set()
        time.sleep(patience)
        if not (self._failing or LEAVING.is_set()):
            end(what, _own_code(code))


def _own_code(code: object) -> int:
    """Return the exit code of a process that ends because another one ends with `code`."""
    if isinstance(code, int) and code in FINAL:
        return FOLLOWS + code if LAUNCHED in os.environ else code
    return RETRY


def followed(code: int) -> int | None:
    """Return the code that a launched process passes on from another one, or None."""
    if code == RETRY:
        return RETRY
    return code - FOLLOWS if code - FOLLOWS in FINAL else None


def _receive(link: Connection) -> list[Message]:
    """Receive from an authenticated process; if its message is invalid, it counts as lost."""
    try:
        return link.receive()
    except ValueError:
        link.closed = True
        return [{'event': 'closed'}]


def end(line: str, code: int = RETRY) -> NoReturn:
    """End this process at once; jax's own exit waits for lost processes."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(f'error: {visible(line)}', file=sys.stderr, flush=True)
    os._exit(code)
