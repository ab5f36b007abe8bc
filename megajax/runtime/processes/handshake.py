"""Process 0's side of the handshake, before which every client is unauthenticated.

A port scan, a health check or an attacker costs one line in the log and, for `GREETING_SECONDS`,
one of `MAX_GREETINGS` connections. While all of these are in use, further clients wait in the
kernel's queue: unauthenticated clients can delay the processes of the run, but cannot exhaust the
file descriptors of process 0. Imports no jax.
"""

import logging
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from megajax.base.errors import ConfigError
from megajax.runtime.processes.environment import (
    LOCAL_DEVICES,
    PROCESSES,
    START_TIMEOUT,
    TOKEN,
    Start,
)
from megajax.runtime.processes.peers import Connection, Message, end
from megajax.runtime.processes.token import is_signed, make_nonce, sign

MAX_GREETINGS = 64  # maximum number of concurrent unauthenticated connections
GREETING_SECONDS = 10.0  # maximum seconds from a connection to the end of its handshake
SILENT_SECONDS = 10.0  # seconds of waiting before the missing processes are named
MAX_DROPS_LOGGED = 20
MAX_HOST_CHARACTERS = 100
MAX_PROCESSES = 10**6  # a handshake with a larger index or number is invalid

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Guest:
    """A connection to process 0, and the time by which its handshake must end."""

    link: Connection
    until: float
    challenge: str  # the nonce of process 0
    nonce: str = ''  # the client's nonce, from its handshake
    host: str = ''  # the client's host name, from its handshake
    gpus: str = ''  # its `Start.unlisted_gpus`, from its handshake

    def answer(self, token: str | None, **message: Any) -> None:
        """Send a message that proves that process 0 knows the token."""
        self.link.send(**sign(token, message, self.challenge, self.nonce))


class Greetings:
    """The connections to process 0 until all processes of the run are authenticated."""

    def __init__(self, start: Start, server: socket.socket, gpus: str):
        self.start, self.server, self._gpus = start, server, gpus
        self.joined: dict[int, Guest] = {}
        self._strangers: list[Guest] = []  # connections, the oldest first
        self._drops = 0
        self._selector = selectors.DefaultSelector()

    def wait(self) -> dict[int, Guest]:
        """Wait for the handshake of all other processes; return their connections by process index.

        The process exits with code 75 after `start.timeout` seconds, or if a process is lost before
        all have connected. Raises ConfigError if a process does not belong to this run, and in all
        processes if two of them would use the same GPUs.
        """
        deadline = time.monotonic() + self.start.timeout
        silent_until = time.monotonic() + SILENT_SECONDS
        self.server.setblocking(False)  # a client may disconnect before it is accepted
        with self._selector:
            while len(self.joined) < self.start.count - 1:
                if time.monotonic() >= deadline:
                    self._end_without_the_missing()
                if time.monotonic() >= silent_until:
                    self._name_the_missing()
                    silent_until = deadline
                self._drop_the_slow()
                self._accept_while_there_is_room()
                for key, _ in self._selector.select(
                    self._seconds_until(min(deadline, silent_until))
                ):
                    if key.fileobj is self.server:
                        self._accept()
                    else:
                        self._hear(key.data)
        for stranger in self._strangers:
            stranger.link.socket.close()
        self._refuse_shared_gpus()
        return self.joined

    def _seconds_until(self, deadline: float) -> float:
        first = min((stranger.until for stranger in self._strangers), default=deadline)
        return max(min(first, deadline) - time.monotonic(), 0)

    def _drop_the_slow(self) -> None:
        now = time.monotonic()
        for stranger in [one for one in self._strangers if one.until <= now]:
            self._drop(stranger, f'no handshake within {GREETING_SECONDS:g} s')

    def _accept_while_there_is_room(self) -> None:
        is_accepting = self.server in self._selector.get_map()
        if len(self._strangers) < MAX_GREETINGS and not is_accepting:
            self._selector.register(self.server, selectors.EVENT_READ)
        elif len(self._strangers) >= MAX_GREETINGS and is_accepting:
            self._selector.unregister(self.server)

    def _accept(self) -> None:
        try:
            connection, (host, *_) = self.server.accept()
            connection.settimeout(GREETING_SECONDS)
            link = Connection(connection, host)
        except OSError:  # the client has disconnected, or no file descriptor is left
            time.sleep(0.1)
            return
        until = time.monotonic() + GREETING_SECONDS
        stranger = Guest(link=link, until=until, challenge=make_nonce())
        link.send(event='challenge', nonce=stranger.challenge)
        self._strangers.append(stranger)
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _hear(self, guest: Guest) -> None:
        try:
            messages = guest.link.receive()
        except (ValueError, TimeoutError):
            messages = [{'event': 'invalid'}]
        for message in messages:
            if guest in self._strangers:
                self._greet(guest, message)
            elif guest in self.joined.values() and message['event'] in ('closed', 'invalid'):
                end(f'{guest.link.name} was lost before all {self.start.count} had connected')

    def _greet(self, guest: Guest, message: Message) -> None:
        match message:
            case {
                'event': 'hello',
                'process': int(index),
                'processes': int(count),
                'host': str(host),
                'nonce': str(nonce),
            } if max(abs(index), abs(count)) < MAX_PROCESSES:
                guest.nonce, guest.host = nonce, escape(host)
                guest.gpus = str(message.get('gpus', ''))
                if is_signed(self.start.token, message, guest.challenge):
                    self._join(guest, index, count)
                else:
                    guest.link.send(event='denied')
                    self._drop(guest, f'its {TOKEN} differs from process 0')
            case {'event': 'closed'}:
                self._drop(guest, 'it closed without a handshake')
            case _:
                self._drop(guest, 'it sent no valid handshake')

    def _join(self, guest: Guest, index: int, count: int) -> None:
        guest.link.name = f'process {index} on {guest.host}'
        if count != self.start.count or index in self.joined or not 0 < index < count:
            why = (
                f'{guest.link.name} of {count} connected to {self.start.address}, where process 0 '
                f'of {self.start.count} expects every other process once: '
                f'give all the same {PROCESSES}, and each its own index'
            )
            self._refuse([guest], why)
        self._strangers.remove(guest)
        self.joined[index] = guest
        guest.link.socket.settimeout(None)

    def _refuse_shared_gpus(self) -> None:
        users = {(own_host(), self._gpus): 0}  # process by its host and GPUs
        for index, guest in sorted(self.joined.items()):
            other = users.setdefault((guest.host, guest.gpus), index)
            if guest.gpus and other != index:
                why = (
                    f'{guest.link.name} uses the same GPUs as process {other}: '
                    f'start one process per host, or list the GPUs of each in {LOCAL_DEVICES}'
                )
                self._refuse(self.joined.values(), why)

    def _refuse(self, guests: Iterable[Guest], why: str) -> NoReturn:
        for guest in guests:
            guest.answer(self.start.token, event='refused', why=why)
        raise ConfigError(why)

    def _drop(self, stranger: Guest, why: str) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.link.socket)
        stranger.link.socket.close()
        self._drops += 1
        if self._drops <= MAX_DROPS_LOGGED:
            last = '; no more of them are logged' if self._drops == MAX_DROPS_LOGGED else ''
            logger.warning('dropped a connection from %s: %s%s', stranger.link.name, why, last)

    def _missing(self) -> str:
        return ', '.join(
            str(index) for index in range(1, self.start.count) if index not in self.joined
        )

    def _name_the_missing(self) -> None:
        logger.warning(
            'process 0 waits at %s for up to %g s: of %d processes, %s have not connected yet',
            self.start.address,
            self.start.timeout,
            self.start.count,
            self._missing(),
        )

    def _end_without_the_missing(self) -> None:
        end(
            f'of {self.start.count} processes, {self._missing()} did not connect to process 0 '
            f'at {self.start.address} within {self.start.timeout:g} s: check that they started '
            f'and can reach {self.start.address}, or set more seconds in {START_TIMEOUT}'
        )


def own_host() -> str:
    """Return the name of this host, escaped like `Guest.host`."""
    return escape(socket.gethostname())


def escape(text: str, most: int = MAX_HOST_CHARACTERS) -> str:
    """Return text from the network, truncated and with control characters escaped."""
    return text[:most].encode('unicode_escape').decode()
