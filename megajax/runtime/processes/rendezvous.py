"""The rendezvous of all processes of a run at process 0, before jax starts.

jax itself would abort with a stack dump if a process is missing or a port is in use.
"""

import errno
import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from typing import NoReturn

from megajax.base.errors import MAX_REASON_CHARACTERS, ConfigError
from megajax.base.files.open_files import allow_open_files
from megajax.runtime.processes.environment import (
    BIND,
    COORDINATOR,
    LOOPBACK,
    START_TIMEOUT,
    TOKEN,
    Start,
)
from megajax.runtime.processes.handshake import Greetings, escape, own_host
from megajax.runtime.processes.peers import LAUNCHED, Connection, Message, Peers, end
from megajax.runtime.processes.token import is_signed, make_nonce, sign

# Maximum number of connections between two processes: one of `Peers`, one of jax's coordinator, and
# the connections of Gloo or NCCL.
CONNECTIONS = 4
# Seconds for which the others wait longer than process 0, which knows the missing processes and so
# names them first.
LONGER = 5.0
# `errno` of an address that is a name which does not resolve.
UNRESOLVED = socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL

logger = logging.getLogger(__name__)


def gather(start: Start, environ: Mapping[str, str] = os.environ) -> tuple[Peers, int]:
    """Wait until all processes have connected to process 0.

    Returns the peers, which are watched from now on, and the port for jax's coordinator on the host
    of process 0. After `start.timeout` seconds the process exits with code 75 and one line that
    names the address and the missing processes. Raises ConfigError if process 0 cannot listen, if
    the processes have different values for their number, or, in all processes, if two would use
    the same GPUs.
    """
    allow_open_files(CONNECTIONS * start.count)
    # Before the first connection: nvidia-smi can take longer than a handshake may.
    gpus = start.unlisted_gpus(environ)
    return _gather_all(start, gpus) if start.index == 0 else _join(start, gpus)


def _gather_all(start: Start, gpus: str) -> tuple[Peers, int]:
    if start.bind is None:
        logger.warning(
            'process 0 listens on all interfaces, because it has none with the address of %s: '
            'set %s to the address of the interface that leads to the other hosts',
            start.host,
            BIND,
        )
    with closing(_listen(start, start.port)) as server:
        joined = Greetings(start, server, gpus).wait()
    with closing(_listen(start, 0)) as unused:
        port: int = unused.getsockname()[1]
    for guest in joined.values():
        guest.answer(start.token, event='welcome', jax_port=port)
    if start.token is None and {guest.host for guest in joined.values()} - {own_host()}:
        logger.warning(
            'no %s: any client that reaches process 0 at %s before the run has started can join '
            'it; give the same random token to the processes of all hosts (docs/hosts.md)',
            TOKEN,
            start.address,
        )
    peers = Peers(0, [guest.link for guest in joined.values()])
    peers.watch()
    return peers, port


def _join(start: Start, gpus: str) -> tuple[Peers, int]:
    connection = _connect(start, time.monotonic() + start.timeout)
    link = Connection(connection, f'process 0 on {start.host}')
    # Process 0 may have started only now, and waits for all of this time.
    link.socket.settimeout(start.timeout + LONGER)
    nonces = _greet(start, link, gpus)
    answer, *later = _receive(start, link)
    link.socket.settimeout(None)
    if answer['event'] == 'denied' or (
        answer['event'] in ('welcome', 'refused') and not is_signed(start.token, answer, *nonces)
    ):
        raise ConfigError(
            f'process 0 at {start.address} has a different {TOKEN} than process {start.index}, '
            f'which has {"none" if start.token is None else "one"}: '
            'export the same token to all processes of the run'
        )
    match answer:
        case {'event': 'welcome', 'jax_port': int(port)}:
            peers = Peers(start.index, [link])
            peers.watch(later)
            return peers, port
        case {'event': 'refused', 'why': str(why)}:
            raise ConfigError(escape(why, MAX_REASON_CHARACTERS))
    _end_without_process_0(start)


def _greet(start: Start, link: Connection, gpus: str) -> tuple[str, str]:
    """Answer process 0's challenge; return its nonce and the nonce of this process."""
    match _receive(start, link)[0]:
        case {'event': 'challenge', 'nonce': str(challenge)}:
            nonce = make_nonce()
        case _:
            _end_without_process_0(start)
    hello = {
        'event': 'hello',
        'process': start.index,
        'processes': start.count,
        'host': own_host(),
        'gpus': gpus,
        'nonce': nonce,
    }
    link.send(**sign(start.token, hello, challenge))
    return challenge, nonce


def _receive(start: Start, link: Connection) -> list[Message]:
    messages: list[Message] = []
    try:
        while not messages:
            messages = link.receive()
    except (TimeoutError, ValueError):
        end(
            f'{start.address} does not answer as process 0 of this run: '
            f'check that {COORDINATOR} is right'
        )
    return messages


def _end_without_process_0(start: Start) -> NoReturn:
    end(
        f'process 0 at {start.address} ended before all {start.count} had connected: '
        'its own output says why'
    )


def _connect(start: Start, deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection((start.host, start.port), timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                end(
                    f'process {start.index} could not reach process 0 at {start.address} '
                    f'within {start.timeout:g} s ({error.strerror}): check that it started '
                    f'and that {COORDINATOR} is right, or set more seconds in {START_TIMEOUT}'
                )
        else:
            # On one host, a connection to a port without a listener can connect to itself.
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()
        time.sleep(0.1)


def _listen(start: Start, port: int) -> socket.socket:
    backlog = max(start.count, socket.SOMAXCONN)
    try:
        if start.bind is None and socket.has_dualstack_ipv6():
            return socket.create_server(
                ('', port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        family = socket.AF_INET6 if ':' in (start.bind or '') else socket.AF_INET
        return socket.create_server((start.bind or '', port), family=family, backlog=backlog)
    except OSError as error:
        where = f'{start.bind or "all interfaces"}, port {port}'
        failure = f'process 0 cannot listen on {where} ({error.strerror})'
        if error.errno == errno.EADDRINUSE and _is_from_launch(start):
            end(f'{failure}, which was free when launch chose it: start it again')
        raise ConfigError(f'{failure}: {_fix(error)}') from error


def _is_from_launch(start: Start) -> bool:
    """Whether `launch` chose the port, as it does for the processes of one host."""
    return LAUNCHED in os.environ and os.environ.get(BIND) == start.host == LOOPBACK


def _fix(error: OSError) -> str:
    if error.errno in UNRESOLVED:
        return (
            f'set {BIND} to the address of an interface of this host, such as 10.0.0.1, '
            'not to the name of the interface'
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f'no interface of this host has that address: set {COORDINATOR} to the host of '
            f'process 0, or {BIND} to the address of one of its interfaces'
        )
    return (
        f'choose a different port in {COORDINATOR}, '
        f'or the address of a different interface in {BIND}'
    )
