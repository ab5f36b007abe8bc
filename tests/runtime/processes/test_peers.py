"""How processes meet and hear of one another's end, each a thread here.

`test_distributed.py` has it with real processes.
"""

import contextlib
import errno
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megajax.core.config import ConfigError
from megajax.runtime.processes import handshake, peers, rendezvous
from megajax.runtime.processes.environment import Start
from megajax.runtime.processes.peers import LAUNCHED, MAX_MESSAGE_BYTES, Connection, Peers
from megajax.runtime.processes.rendezvous import gather

# A process that ends is a thread that does.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')


PATIENCE = 0.05  # seconds for which a process waits for an error of its own


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What processes said that ended early: here only their thread ends."""
    lines: list[str] = []

    def end(line: str, code: int = 75) -> None:
        lines.append(line if code == 75 else f'{line} ({code})')
        raise SystemExit(code)

    monkeypatch.setattr(peers, 'end', end)
    monkeypatch.setattr(rendezvous, 'end', end)
    monkeypatch.setattr(handshake, 'end', end)
    monkeypatch.setattr(peers, 'OWN_ERROR', PATIENCE)
    yield lines
    for thread in threading.enumerate():
        if thread.name == 'megajax-peers':
            thread.join(10)
            assert not thread.is_alive(), 'it would end the tests with it'


@pytest.fixture
def port() -> int:
    with socket.create_server(('127.0.0.1', 0)) as server:
        return int(server.getsockname()[1])


def start(port: int, index: int, count: int, timeout: float = 20) -> Start:
    return Start(
        index=index, count=count, host='127.0.0.1', port=port, bind='127.0.0.1', timeout=timeout
    )


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(('127.0.0.1', port), timeout=20)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:  # the meeting ended before it was heard
                raise
            time.sleep(0.01)


def say(port: int, line: bytes, answers: list[bytes]) -> threading.Thread:
    """Send a line to process 0 as soon as it listens, from a thread, and note what it answers."""

    def talk() -> None:
        with contextlib.suppress(ConnectionRefusedError), connect(port) as connection:
            assert json.loads(connection.recv(1 << 16))['event'] == 'challenge'
            connection.sendall(line)
            answers.append(connection.recv(1 << 16))

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    return thread


def hello(index: int, count: int) -> bytes:
    said = {'event': 'hello', 'process': index, 'processes': count, 'host': 'h', 'nonce': 'n'}
    return json.dumps(said).encode() + b'\n'


def test_all_processes_meet_agree_on_a_port_and_part_in_peace(port: int, ended: list[str]) -> None:
    met: dict[int, tuple[Peers, int]] = {}

    def join(index: int) -> None:
        met[index] = gather(start(port, index, 3))

    threads = [threading.Thread(target=join, args=(index,)) for index in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(met) == [0, 1, 2]
    assert len({agreed for _, agreed in met.values()}) == 1
    assert sorted(link.name.split(' on ')[0] for link in met[0][0].links) == [
        'process 1',
        'process 2',
    ]
    for each, _ in met.values():
        each.done()
    for index in (1, 2):
        met[index][0].links[0].socket.shutdown(socket.SHUT_RDWR)
    met[0][0].wait(10)
    assert not met[0][0]._watcher.is_alive()
    assert ended == []


def test_a_process_that_comes_before_process_0_waits_for_it(port: int, ended: list[str]) -> None:
    met: dict[int, tuple[Peers, int]] = {}
    threads = [
        threading.Thread(
            target=lambda index=index: met.update({index: gather(start(port, index, 2, timeout=4))})
        )
        for index in (1, 0)
    ]
    threads[0].start()
    time.sleep(0.1)
    assert (met, ended) == ({}, [])
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert met[0][1] == met[1][1]
    for each, _ in met.values():
        each.done()
    met[1][0].links[0].socket.shutdown(socket.SHUT_RDWR)
    met[0][0].wait(10)
    assert ended == []


@pytest.mark.parametrize(
    'said',
    [hello(0, 2), hello(2, 2), hello(1, 3), hello(-1, 2)],
    ids=['0 of 2', '2 of 2', '1 of 3', '-1 of 2'],
)
def test_a_process_that_cannot_be_one_of_the_run_is_refused(
    said: bytes, port: int, ended: list[str]
) -> None:
    answers: list[bytes] = []
    thread = say(port, said, answers)
    with pytest.raises(
        ConfigError, match='where process 0 of 2 expects every other process once'
    ) as error:
        gather(start(port, 0, 2))
    thread.join(30)
    assert json.loads(answers[0]) == {'event': 'refused', 'why': str(error.value), 'proof': ''}
    assert ended == []


def test_an_index_that_comes_twice_is_refused(port: int, ended: list[str]) -> None:
    answers: list[bytes] = []
    threads = [say(port, hello(1, 3), answers) for _ in range(2)]
    with pytest.raises(ConfigError, match='each its own index'):
        gather(start(port, 0, 3))
    for thread in threads:
        thread.join(30)
    assert ended == []


@pytest.mark.parametrize(
    'said', [b'GET / HTTP/1.1\r\n\r\n', b'{"event": "hello", "process": "one"}\n', b'[1]\n']
)
def test_a_stranger_is_dropped_and_the_process_that_is_waited_for_is_welcome(
    said: bytes, port: int, ended: list[str]
) -> None:
    answers: list[bytes] = []
    threads = [say(port, line, answers) for line in (said, hello(1, 2))]
    met, agreed = gather(start(port, 0, 2))
    assert [link.name for link in met.links] == ['process 1 on h']
    met.done()
    met.links[0].done = True
    threads[1].join(30)
    assert {'event': 'welcome', 'jax_port': agreed, 'proof': ''} in [
        json.loads(line) for answer in answers for line in answer.splitlines()
    ]


def test_who_did_not_come_in_time_is_named(port: int, ended: list[str]) -> None:
    thread = say(port, hello(2, 4), [])
    with pytest.raises(SystemExit):
        gather(start(port, 0, 4, timeout=1))
    thread.join(30)
    assert ended[0].startswith(
        f'of 4 processes, 1, 3 did not connect to process 0 at 127.0.0.1:{port} within 1 s: '
    )
    with pytest.raises(SystemExit):
        gather(start(port, 1, 4, timeout=0.1))
    assert ended[1].startswith(
        f'process 1 could not reach process 0 at 127.0.0.1:{port} within 0.1 s (Connection '
        'refused): '
    )


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(('127.0.0.1', 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield Connection(near, 'process 1 on h'), Connection(far, 'process 0 on h')


def test_messages_come_whole_however_they_were_cut_and_the_end_last(
    pair: tuple[Connection, Connection],
) -> None:
    near, far = pair
    far.socket.sendall(b'{"event": "a"}\n{"ev')
    assert near.receive() == [{'event': 'a'}]
    far.socket.sendall(b'ent": "b"}\n')
    assert near.receive() == [{'event': 'b'}]
    far.send(event='c', x=1)
    far.socket.close()
    found = [*near.receive(), *([] if near.closed else near.receive())]
    assert found == [{'event': 'c', 'x': 1}, {'event': 'closed'}]
    near.send(event='d')  # which nobody hears


def test_the_kernel_notices_a_host_that_is_gone_within_seconds(
    pair: tuple[Connection, Connection],
) -> None:
    near = pair[0].socket
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle, interval, count = (
        near.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + interval * count <= 5
    # With data in flight, which each sign of life is, no probes are sent.
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000


def test_silence_is_a_timeout_and_a_host_that_is_gone_an_end(
    pair: tuple[Connection, Connection],
) -> None:
    near, _ = pair
    near.socket.settimeout(0.05)
    with pytest.raises(TimeoutError):
        near.receive()
    assert not near.closed

    def recv(_: int) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, 'the keepalive probes were not answered')

    near.socket = SimpleNamespace(recv=recv)  # type: ignore[assignment]
    assert near.receive() == [{'event': 'closed'}]


@pytest.mark.parametrize('said', [b'[1]\n', b'{}\n', b'x\n'])
def test_what_is_no_message_is_refused(said: bytes, pair: tuple[Connection, Connection]) -> None:
    near, far = pair
    far.socket.sendall(said)
    with pytest.raises(ValueError, match=r'not a message|Expecting value'):
        near.receive()


def test_a_line_that_does_not_end_is_refused(pair: tuple[Connection, Connection]) -> None:
    near, far = pair
    threading.Thread(
        target=far.socket.sendall, args=(b'x' * (2 * MAX_MESSAGE_BYTES),), daemon=True
    ).start()
    with pytest.raises(ValueError, match='not a message'):  # noqa: PT012
        for _ in itertools.count():
            near.receive()


@pytest.mark.parametrize('said', [b'[' * 60_000 + b'\n', b'{"event": 1e999\n', b'\xff\n'])
def test_a_process_that_sends_what_is_no_message_counts_as_lost(
    said: bytes, pair: tuple[Connection, Connection], ended: list[str]
) -> None:
    near, far = pair
    own = Peers(1, [near])
    far.socket.sendall(said)
    own.watch()
    own._watcher.join(10)
    assert ended == [LOST]


LOST = (
    'process 1 on h was lost, so this process ends too: '
    'start the run again to continue from its last checkpoint'
)
FAILED = (
    'process 1 on h failed (why), so this process ends too: see the output of the failed process'
)


@pytest.mark.parametrize(
    ('said', 'expected'),
    [([], LOST), ([{'event': 'done'}], None), ([{'event': 'failed', 'why': 'why'}], FAILED)],
    ids=['lost', 'done', 'failed'],
)
@pytest.mark.parametrize('fails_itself', [False, True])
def test_a_process_ends_when_another_does_early_unless_it_fails_itself(
    said: list[dict[str, Any]],
    expected: str | None,
    fails_itself: bool,
    pair: tuple[Connection, Connection],
    ended: list[str],
) -> None:
    near, far = pair
    own = Peers(0, [near])
    if fails_itself:
        own.failed('an error of its own', own=True)
    for message in said:
        far.send(**message)
    far.socket.shutdown(socket.SHUT_WR)
    own.watch()
    own.wait(10)
    assert ended == ([] if fails_itself or expected is None else [expected])
    heard = far.socket.recv(MAX_MESSAGE_BYTES) if fails_itself or expected else b''
    if fails_itself:
        assert json.loads(heard) == {'event': 'failed', 'why': 'an error of its own', 'code': 75}
    elif expected:
        assert json.loads(heard) == {
            'event': 'other',
            'what': expected,
            'patience': PATIENCE if said else 0,
            'code': None if said else 75,
        }


@pytest.mark.parametrize(
    ('code', 'launched', 'expected'),
    [
        (2, False, 2),
        (5, False, 5),
        (1, False, 75),
        (124, False, 75),
        ('x', False, 75),
        (1, True, 75),
        (2, True, 82),
        (5, True, 85),
    ],
)
def test_a_process_has_the_exit_code_of_the_error_that_would_repeat(
    code: object,
    launched: bool,
    expected: int,
    pair: tuple[Connection, Connection],
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if launched:
        monkeypatch.setenv(LAUNCHED, '1')
    near, far = pair
    own, later = Peers(0, [near]), Peers(1, [far])
    far.send(event='failed', why='why', code=code)
    own.watch()
    own.wait(10)
    later.watch()  # process 0 passes it on
    later._watcher.join(10)
    assert ended == 2 * [FAILED if expected == 75 else f'{FAILED} ({expected})']


def test_a_silent_process_is_named_once_and_so_is_its_return(
    pair: tuple[Connection, Connection],
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(peers, 'BEAT', 0.05)
    monkeypatch.setattr(peers, 'SILENCE', 0.3)
    near, far = pair
    own, frozen = Peers(0, [near]), Peers(1, [far])

    def wait_for(lines: int) -> None:
        deadline = time.monotonic() + 10
        while len(caplog.messages) < lines and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(4 * peers.BEAT)  # in which no line is said again

    own.watch()
    wait_for(1)
    assert caplog.messages == [
        'process 1 on h has been silent for 0 s: it may be frozen, or its host overloaded; '
        'jax ends the run when it does not answer'
    ]
    frozen.watch()
    wait_for(2)
    assert caplog.messages[1:] == ['process 1 on h answers again']
    for one in own, frozen:
        one.done()
    for connection in pair:
        connection.socket.shutdown(socket.SHUT_WR)
    own.wait(10)
    assert ended == []


def test_who_was_frozen_itself_names_no_other(
    pair: tuple[Connection, Connection],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(peers, 'SILENCE', 0.1)
    near, _ = pair
    own = Peers(0, [near])
    near.heard -= 0.2
    own._check_silence(was_frozen=True)
    assert (caplog.messages, near.silent) == ([], False)
    near.heard -= 0.2
    own._check_silence(was_frozen=False)
    assert near.silent


def test_an_error_that_follows_from_anothers_does_not_hide_it(
    pair: tuple[Connection, Connection],
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, 'OWN_ERROR', 0.3)
    near, far = pair
    own = Peers(1, [near])
    far.send(event='other', what=LOST, patience=0.8)
    own.watch()
    own.failed('a collective failed', own=False)
    own._watcher.join(10)
    assert ended == [LOST]


def test_process_0_passes_on_what_it_heard(
    pair: tuple[Connection, Connection], ended: list[str]
) -> None:
    near, far = pair
    own = Peers(1, [near])
    far.send(event='other', what=LOST, patience=0)
    own.watch()
    own._watcher.join(10)
    assert ended == [LOST]
