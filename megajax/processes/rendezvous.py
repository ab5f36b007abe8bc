"""A meeting of all processes of a run at process 0, before jax starts.

jax itself would abort with a stack dump if one is missing or a port is taken.
"""

import selectors
import socket
import time
from contextlib import closing

from megajax.config.errors import ConfigError
from megajax.processes.environment import BIND, COORDINATOR, PROCESSES, START_TIMEOUT, Start
from megajax.processes.peers import Connection, Message, Peers, end


def gather(start: Start) -> tuple[Peers, int]:
    """Wait until all processes have connected to process 0.

    Returns the peers, which are being watched, and the port for jax's coordinator on the host of
    process 0. After `start.timeout` seconds it ends the process with exit code 75 and one line that
    names the address and the missing processes. Raises ConfigError if process 0 cannot listen, or
    if the processes do not agree on their number.
    """
    return _gather_all(start) if start.index == 0 else _join(start)


def _gather_all(start: Start) -> tuple[Peers, int]:
    with closing(_listen(start, start.port)) as server:
        joined = _welcome(start, server, time.monotonic() + start.timeout)
    with closing(_listen(start, 0)) as unused:
        port: int = unused.getsockname()[1]
    for link in joined.values():
        link.send(event='welcome', jax_port=port)
    peers = Peers(0, list(joined.values()))
    peers.watch()
    return peers, port


def _welcome(start: Start, server: socket.socket, deadline: float) -> dict[int, Connection]:
    joined: dict[int, Connection] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(joined) < start.count - 1:
            if (left := deadline - time.monotonic()) <= 0:
                missing = ', '.join(
                    str(index) for index in range(1, start.count) if index not in joined
                )
                end(
                    f'of {start.count} processes, {missing} did not connect to process 0 '
                    f'at {start.address} within {start.timeout:g} s: check that they started '
                    f'and can reach {start.address}, or set more seconds in {START_TIMEOUT}'
                )
            for key, _ in selector.select(left):
                if key.fileobj is server:
                    connection, (host, *_) = server.accept()
                    selector.register(
                        connection, selectors.EVENT_READ, Connection(connection, host)
                    )
                else:
                    _greet(start, key.data, joined)
                    if key.data.closed:
                        selector.unregister(key.data.socket)
    return joined


def _greet(start: Start, link: Connection, joined: dict[int, Connection]) -> None:
    """Read the greeting of a connection and add it to `joined`.

    A connection from outside the run, such as a port scan or a health check, is dropped.
    """
    try:
        hello = [
            (int(m['process']), int(m['processes']), str(m['host']))
            for m in link.receive()
            if m['event'] == 'hello'
        ]
    except (ValueError, TypeError, KeyError):
        link.closed, hello = True, []
    if link.closed and link in joined.values():
        end(f'{link.name} was lost before all {start.count} had connected')
    for index, count, host in hello:
        link.name = f'process {index} on {host}'
        if count != start.count or index in joined or not 0 < index < count:
            why = (
                f'{link.name} of {count} connected to {start.address}, where process 0 '
                f'of {start.count} expects every other process once: '
                f'give all the same {PROCESSES}, and each its own index'
            )
            link.send(event='refused', why=why)
            raise ConfigError(why)
        joined[index] = link


def _join(start: Start) -> tuple[Peers, int]:
    deadline = time.monotonic() + start.timeout
    link = Connection(_connect(start, deadline), f'process 0 on {start.host}')
    link.send(event='hello', process=start.index, processes=start.count, host=socket.gethostname())
    # Longer than process 0 waits, which knows who is missing and so reports it first.
    link.socket.settimeout(max(deadline - time.monotonic(), 0) + 5)
    messages: list[Message] = []
    try:
        while not messages:
            messages = link.receive()
    except (TimeoutError, ValueError):
        end(
            f'{start.address} does not answer as process 0 of this run: '
            f'check that {COORDINATOR} is right'
        )
    link.socket.settimeout(None)
    match messages[0]:
        case {'event': 'welcome', 'jax_port': int(port)}:
            peers = Peers(start.index, [link])
            peers.watch(messages[1:])
            return peers, port
        case {'event': 'refused', 'why': str(why)}:
            raise ConfigError(why)
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
            # On one host, a connection to a port where nobody listens can connect to itself.
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()
        time.sleep(0.1)


def _listen(start: Start, port: int) -> socket.socket:
    try:
        if start.bind is None and socket.has_dualstack_ipv6():
            return socket.create_server(
                ('', port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=start.count
            )
        family = socket.AF_INET6 if ':' in (start.bind or '') else socket.AF_INET
        return socket.create_server((start.bind or '', port), family=family, backlog=start.count)
    except OSError as error:
        where = f'{start.bind or "all interfaces"}, port {port}'
        raise ConfigError(
            f'process 0 cannot listen on {where} ({error.strerror}): '
            f'choose another port in {COORDINATOR}, or another interface in {BIND}'
        ) from error
