"""Whoever reaches the port of process 0, whatever it says: a real process 0 and real sockets."""

import contextlib
import functools
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import slow

from megajax.runtime.processes.token import sign

ROOT = Path(__file__).parents[3]
MEET = """
from megajax.runtime.processes import handshake
from megajax.runtime.processes.environment import read_start
from megajax.runtime.processes.rendezvous import gather
handshake.GREETING_SECONDS = {seconds}
peers, port = gather(read_start())
peers.done()
"""


@pytest.fixture
def port() -> int:
    with socket.create_server(('127.0.0.1', 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def process(
    index: int, port: int, *, seconds: float = 10, descriptors: int | None = None, token: str = ''
) -> Iterator[subprocess.Popen[str]]:
    """Process `index` of two, which ends with 0 once it has met the other."""
    environ = {name: value for name, value in os.environ.items() if name != 'MEGAJAX_TOKEN'}
    environ |= {
        'PYTHONPATH': str(ROOT),
        'MEGAJAX_START_TIMEOUT': '30',
        'MEGAJAX_COORDINATOR': f'127.0.0.1:{port}',
        'MEGAJAX_PROCESSES': '2',
        'MEGAJAX_PROCESS': f'{index}',
    }
    environ |= {'MEGAJAX_TOKEN': token} if token else {}

    def limit() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with subprocess.Popen(
        [sys.executable, '-c', MEET.format(seconds=seconds)],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(('127.0.0.1', port), timeout=20)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def meets(first: subprocess.Popen[str], port: int, token: str = '') -> list[str]:
    """Let process 1 come; return the lines of process 0, which has met it."""
    with process(1, port, token=token):
        said = first.communicate(timeout=30)[1]
    assert first.returncode == 0, said
    return said.splitlines()


def hello(**changed: Any) -> bytes:
    parts = {'event': '"hello"', 'process': '1', 'processes': '2', 'host': '"h"', 'nonce': '"n"'}
    parts |= changed
    return ('{' + ', '.join(f'"{name}": {part}' for name, part in parts.items()) + '}\n').encode()


STRANGERS = {
    'brackets': b'[' * 60_000 + b'\n',
    'objects': b'{"event":' * 7_000 + b'\n',
    'infinity': hello(process='Infinity'),
    '1e999': hello(process='-1e999'),
    'nan': hello(processes='NaN'),
    'digits': hello(process='9' * 5_000),
    'number': hello(process='9' * 4_000),
    'list': hello(host='["\\u001b[2J"]'),
    'bytes': b'\xff\xfe\x00\xd8\n',
    'endless': b'x' * 200_000,
    'closed': b'{"event": "x"}\n{"event": "closed"}\n',
}


def test_each_stranger_is_dropped_in_one_line_and_the_run_goes_on(port: int) -> None:
    with process(0, port) as first:
        for said in STRANGERS.values():
            with connect(port) as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(said)
                while stranger.recv(1 << 16):  # until it is closed
                    pass
        lines = meets(first, port)
    dropped = 'dropped a connection from 127.0.0.1: it sent no valid handshake'
    assert dict(zip(STRANGERS, lines, strict=True)) == dict.fromkeys(STRANGERS, dropped)


def test_idle_connections_make_way_and_do_not_use_up_the_descriptors(port: int) -> None:
    with process(0, port, seconds=0.5, descriptors=90) as first, contextlib.ExitStack() as stack:
        stack.enter_context(connect(port))
        for _ in range(150):
            idle = stack.enter_context(socket.socket())
            idle.setblocking(False)
            idle.connect_ex(('127.0.0.1', port))
        lines = meets(first, port)
        assert lines[0] == 'dropped a connection from 127.0.0.1: no handshake within 0.5 s'
        assert lines[-1].endswith('no more of them are logged')
        assert len(lines) == 20


def test_a_greeting_that_comes_byte_by_byte_has_no_more_time_than_another(port: int) -> None:
    with process(0, port, seconds=0.5) as first, connect(port) as slow:
        slow.settimeout(0.05)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for letter in hello(host='"' + 'h' * 500 + '"'):
                slow.sendall(bytes([letter]))
                with contextlib.suppress(TimeoutError):
                    if slow.recv(1 << 16) == b'':
                        break
        assert time.monotonic() - began < 5
        (line,) = meets(first, port)
        assert line == 'dropped a connection from 127.0.0.1: no handshake within 0.5 s'


TOKEN = 'correct horse battery staple'


PROOFS = ['""', f'"{TOKEN}"', '"\\ud800"', '"é"', '1', '[' * 900 + ']' * 900]


def test_who_does_not_prove_the_token_is_dropped_and_learns_nothing(port: int) -> None:
    with process(0, port, token=TOKEN) as first:
        for proof in PROOFS:
            with connect(port) as stranger:
                stranger.sendall(hello(proof=proof, host='"\\u001b[2J"'))
                heard = b''.join(iter(functools.partial(stranger.recv, 1 << 16), b''))
            events = [json.loads(line)['event'] for line in heard.splitlines()]
            assert events == ['challenge', 'denied'], proof
        lines = meets(first, port, TOKEN)
    denied = 'dropped a connection from 127.0.0.1: its MEGAJAX_TOKEN differs from process 0'
    assert lines == [denied] * len(PROOFS)


@pytest.mark.parametrize(
    ('first_token', 'second_token', 'has'),
    [(TOKEN, '', 'none'), slow('', TOKEN, 'one'), slow(TOKEN, TOKEN[::-1], 'one')],
)
def test_a_process_with_another_token_exits_2_with_the_fix_and_process_0_waits_for_the_right_one(
    first_token: str, second_token: str, has: str, port: int
) -> None:
    with process(0, port, token=first_token) as first:
        with process(1, port, token=second_token) as second:
            said = second.communicate(timeout=30)[1].splitlines()
        assert said[-1] == (
            f'megajax.base.errors.ConfigError: process 0 at 127.0.0.1:{port} has a different '
            f'MEGAJAX_TOKEN than process 1, which has {has}: '
            'export the same token to all processes of the run'
        )
        (line,) = meets(first, port, first_token)
        assert line.endswith(': its MEGAJAX_TOKEN differs from process 0')
        assert not any(token and token in line for token in (first_token, second_token))


def test_a_process_follows_no_process_0_that_does_not_prove_the_token(port: int) -> None:
    with (
        socket.create_server(('127.0.0.1', port)) as server,
        process(1, port, token=TOKEN) as other,
    ):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"event": "challenge", "nonce": "n"}\n')
            greeting = connection.recv(1 << 16)
            proof = json.loads(greeting)['proof']
            connection.sendall(
                json.dumps({'event': 'welcome', 'jax_port': 1, 'proof': proof}).encode() + b'\n'
            )
            said = other.communicate(timeout=30)[1]
    assert TOKEN.encode() not in greeting
    assert 'ConfigError: process 0 at ' in said.splitlines()[-1]
    assert other.returncode == 1  # 2 from the command, which prints the last line alone
    assert TOKEN not in said


def test_a_greeting_that_was_overheard_opens_nothing_later(port: int) -> None:
    overheard: list[bytes] = []
    with process(0, port, token=TOKEN), connect(port) as honest:
        challenge = json.loads(honest.recv(1 << 16))['nonce']
        said = {'event': 'hello', 'process': 1, 'processes': 2, 'host': 'h', 'nonce': 'n'}
        overheard.append(json.dumps(sign(TOKEN, said, challenge)).encode() + b'\n')
        honest.sendall(overheard[0])
        assert b'"welcome"' in honest.recv(1 << 16)
    with process(0, port, token=TOKEN), connect(port) as stranger:
        stranger.sendall(overheard[0])
        heard = b''.join(iter(lambda: stranger.recv(1 << 16), b''))
        assert b'"denied"' in heard
        assert b'"welcome"' not in heard
