"""All processes of a run come to process 0 before jax starts: jax aborts with a stack dump where one is missing or a port is taken."""

import selectors
import socket
import time
from contextlib import closing

from megajax.config.errors import ConfigError
from megajax.processes.environment import BIND, COORDINATOR, PROCESSES, START_TIMEOUT, Start
from megajax.processes.peers import Link, Message, Peers, end


def gather(start: Start) -> tuple[Peers, int]:
    """Wait until all processes have come; the peers, being watched, and the port for jax's coordinator on the host of process 0.

    Ends the process with 75, in a line that names the address and who is missing, after `start.timeout` seconds. Raises ConfigError
    if process 0 cannot listen, or if the processes do not agree on their number.
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


def _welcome(start: Start, server: socket.socket, deadline: float) -> dict[int, Link]:
    joined: dict[int, Link] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(joined) < start.count - 1:
            if (left := deadline - time.monotonic()) <= 0:
                missing = ', '.join(
                    str(index) for index in range(1, start.count) if index not in joined
                )
                end(
                    f'of {start.count} processes, {missing} did not come to process 0 at {start.address} within {start.timeout:g} s: '
                    f'see whether they started and can reach {start.address}, or give them more seconds in {START_TIMEOUT}'
                )
            for key, _ in selector.select(left):
                if key.fileobj is server:
                    connection, (host, *_) = server.accept()
                    selector.register(connection, selectors.EVENT_READ, Link(connection, host))
                else:
                    _greet(start, key.data, joined)
                    if key.data.closed:
                        selector.unregister(key.data.socket)
    return joined


def _greet(start: Start, link: Link, joined: dict[int, Link]) -> None:
    """Read what a connection says; one that is not of this run, such as a port scan or a health check, is dropped."""
    try:
        hello = [
            (int(m['process']), int(m['processes']), str(m['host']))
            for m in link.receive()
            if m['event'] == 'hello'
        ]
    except (ValueError, TypeError, KeyError):
        link.closed, hello = True, []
    if link.closed and link in joined.values():
        end(f'{link.name} was lost before all {start.count} had come')
    for index, count, host in hello:
        link.name = f'process {index} on {host}'
        if count != start.count or index in joined or not 0 < index < count:
            why = (
                f'{link.name} of {count} came to {start.address}, where process 0 of {start.count} waits for each other one once: '
                f'give all the same {PROCESSES}, and each its own index'
            )
            link.send(event='refused', why=why)
            raise ConfigError(why)
        joined[index] = link


def _join(start: Start) -> tuple[Peers, int]:
    deadline = time.monotonic() + start.timeout
    link = Link(_connect(start, deadline), f'process 0 on {start.host}')
    link.send(event='hello', process=start.index, processes=start.count, host=socket.gethostname())
    link.socket.settimeout(
        max(deadline - time.monotonic(), 0) + 5
    )  # process 0 tells first, and it knows who is missing
    messages: list[Message] = []
    try:
        while not messages:
            messages = link.receive()
    except (TimeoutError, ValueError):
        end(
            f'{start.address} does not answer as process 0 of this run: see whether {COORDINATOR} is right'
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
        f'process 0 at {start.address} ended before all {start.count} had come: its own output tells why'
    )


def _connect(start: Start, deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection((start.host, start.port), timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                end(
                    f'process {start.index} could not reach process 0 at {start.address} within {start.timeout:g} s '
                    f'({error.strerror}): see whether it started and {COORDINATOR} is right, or give it more seconds in {START_TIMEOUT}'
                )
        else:
            if (
                connection.getsockname() != connection.getpeername()
            ):  # a port where nobody listens can meet itself, on one host
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
        message = f'process 0 cannot listen on {where} ({error.strerror}): choose another port in {COORDINATOR}, or interface in {BIND}'
        raise ConfigError(message) from error
