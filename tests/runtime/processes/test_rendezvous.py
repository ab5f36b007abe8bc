"""Where process 0 waits for the others, and of what it warns."""

import json
import os
import resource
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from megajax.core.config import ConfigError
from megajax.runtime.processes import environment, handshake, peers, rendezvous
from megajax.runtime.processes.environment import BIND, Start
from megajax.runtime.processes.peers import LAUNCHED, Peers
from megajax.runtime.processes.rendezvous import _listen, gather
from megajax.runtime.processes.token import sign


@pytest.fixture(autouse=True)
def only_this_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would end the process ends only the thread that here stands for it."""

    def end(line: str, code: int = 75) -> NoReturn:
        raise SystemExit(line)

    for module in (handshake, peers, rendezvous):
        monkeypatch.setattr(module, 'end', end)


def start(bind: str | None, port: int = 0) -> Start:
    return Start(index=0, count=2, host='127.0.0.1', port=port, bind=bind, timeout=20)


@pytest.mark.parametrize(
    ('bind', 'interfaces'),
    [('127.0.0.1', {'127.0.0.1'}), ('::1', {'::1'}), (None, {'::', '0.0.0.0'})],
)
def test_it_listens_on_the_interface_that_it_is_given_and_on_no_other(
    bind: str | None, interfaces: set[str]
) -> None:
    with _listen(start(bind), 0) as server:
        assert server.getsockname()[0] in interfaces


def test_an_interface_that_this_host_has_not_is_refused_with_the_fix() -> None:
    with pytest.raises(
        ConfigError,
        match=r'^process 0 cannot listen on 192\.0\.2\.1, port 0 \(.+\): no interface of this host '
        'has that address: set MEGAJAX_COORDINATOR to the host of process 0, or MEGAJAX_BIND to ',
    ):
        _listen(start('192.0.2.1'), 0)


def test_a_port_that_launch_chose_and_lost_asks_for_a_new_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LAUNCHED, '1')
    with socket.create_server(('127.0.0.1', 0)) as taken:
        one = start('127.0.0.1', taken.getsockname()[1])
        with pytest.raises(ConfigError, match='choose a different port in MEGAJAX_COORDINATOR'):
            gather(one)  # which the user chose, as with launch --hosts
        monkeypatch.setenv(BIND, '127.0.0.1')
        with pytest.raises(SystemExit, match=r'was free when launch chose it: start it again$'):
            gather(one)


def test_the_name_of_an_interface_is_refused_with_what_to_give_instead() -> None:
    with pytest.raises(ConfigError, match='to the address of an interface of this host, such as'):
        _listen(start('no-such-eth0'), 0)


TWO_GPUS = 'echo "GPU 0: H100 (UUID: GPU-1)"; echo "GPU 1: H100 (UUID: GPU-2)"'


def make_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = TWO_GPUS) -> None:
    command = folder / 'nvidia-smi'
    command.write_text(f'#!/bin/sh\n{script}\n')
    command.chmod(0o755)
    monkeypatch.setenv('PATH', str(folder), prepend=os.pathsep)
    monkeypatch.setattr(environment, 'has_cuda_plugin', lambda: True)
    for name in ('JAX_PLATFORMS', 'CUDA_VISIBLE_DEVICES', 'JAX_LOCAL_DEVICE_IDS'):
        monkeypatch.delenv(name, raising=False)


def connect(port: int) -> socket.socket:
    for _ in range(1000):
        try:
            return socket.create_connection(('127.0.0.1', port), timeout=20)
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise AssertionError('process 0 does not listen')


@pytest.mark.parametrize('token', ['correct horse battery staple', None])
@pytest.mark.parametrize('host', ['another', socket.gethostname()])
def test_a_run_over_several_hosts_without_a_token_is_warned_of_once(
    host: str, token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]

    def greet() -> None:
        with connect(port) as connection:
            challenge = json.loads(connection.recv(1 << 16))['nonce']
            said = {'event': 'hello', 'process': 1, 'processes': 2, 'host': host, 'nonce': 'n'}
            connection.sendall(json.dumps(sign(token, said, challenge)).encode() + b'\n')
            connection.recv(1 << 16)
            connection.sendall(b'{"event": "done"}\n')

    thread = threading.Thread(target=greet)
    thread.start()
    met, _ = gather(replace(start('127.0.0.1', port), token=token))
    thread.join(30)
    met.wait(10)
    warned = [line for line in caplog.messages if line.startswith('no MEGAJAX_TOKEN: ')]
    assert len(warned) == len(caplog.messages) == (token is None and host == 'another')


def test_a_process_0_that_listens_on_all_interfaces_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for bind in (None, '127.0.0.1'):
        with pytest.raises(SystemExit, match='1 did not connect to process 0'):
            gather(replace(start(bind), timeout=0.01))
    (line,) = caplog.messages
    assert line.startswith('process 0 listens on all interfaces, because it has none with the ')


def test_who_is_missing_is_named_once_while_process_0_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, 'SILENT_SECONDS', 0.02)
    with pytest.raises(SystemExit, match='1, 2 did not connect'):
        gather(replace(start('127.0.0.1'), count=3, timeout=0.2))
    (line,) = caplog.messages
    assert line.endswith('for up to 0.2 s: of 3 processes, 1, 2 have not connected yet')


def test_who_comes_long_before_process_0_waits_for_the_last_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, 'LONGER', 0.1)
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    met: dict[int, Peers] = {}

    def meet(index: int) -> None:
        own = replace(start('127.0.0.1', port), index=index, count=3, timeout=1.5)
        met[index], _ = gather(own)

    threads = {index: threading.Thread(target=meet, args=(index,)) for index in (1, 0, 2)}
    for thread in threads.values():  # they come at 0, 0.9 and 1.8 s
        thread.start()
        thread.join(0.9)
    for thread in threads.values():
        thread.join(10)
    assert sorted(met) == [0, 1, 2]
    for each in met.values():
        each.done()
    for index in (1, 2):
        met[index].links[0].socket.shutdown(socket.SHUT_RDWR)
    met[0].wait(10)


def meet(port: int, gpus: tuple[tuple[int, ...] | None, ...]) -> dict[int, Peers | ConfigError]:
    """Let processes with these lists of GPUs meet; return their peers, or their errors."""
    met: dict[int, Peers | ConfigError] = {}

    def join(index: int) -> None:
        own = replace(start('127.0.0.1', port), index=index, count=len(gpus), gpus=gpus[index])
        try:
            met[index], _ = gather(own)
        except ConfigError as error:
            met[index] = error

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return met


@pytest.mark.parametrize(
    ('environ', 'gpus', 'same'),
    [
        ({}, (None, None), (0, 1)),
        ({}, (None, None, None, None), (0, 1)),
        ({}, ((0,), None, None), (1, 2)),
        ({'CUDA_VISIBLE_DEVICES': '1'}, (None, None), (0, 1)),
        ({}, ((0,), (1,)), ()),
        ({'JAX_LOCAL_DEVICE_IDS': '0'}, (None, None), ()),
        ({'JAX_PLATFORMS': 'cpu'}, (None, None), ()),
    ],
)
def test_all_processes_are_refused_if_two_of_one_host_would_use_the_same_gpus(
    environ: dict[str, str],
    gpus: tuple[tuple[int, ...] | None, ...],
    same: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_nvidia_smi(tmp_path, monkeypatch)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    met = meet(port, gpus)
    peers = [each for each in met.values() if isinstance(each, Peers)]
    assert len(met) == len(gpus)
    if same:
        error = (
            f'process {same[1]} on {socket.gethostname()} uses the same GPUs as process {same[0]}: '
            'start one process per host, or list the GPUs of each in JAX_LOCAL_DEVICE_IDS'
        )
        assert {str(each) for each in met.values()} == {error}
    assert len(peers) == (0 if same else len(gpus))
    for each in peers:
        each.done()
    for each in peers:
        each.links[0].socket.shutdown(socket.SHUT_RDWR)
        each._watcher.join(10)


def test_a_process_connects_when_nvidia_smi_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / 'ended'
    make_nvidia_smi(tmp_path, monkeypatch, f'touch {ended}')

    def join(port: int) -> None:
        with pytest.raises(SystemExit, match='ended before all 2 had connected'):
            gather(replace(start('127.0.0.1', port), index=1))

    with socket.create_server(('127.0.0.1', 0)) as server:
        thread = threading.Thread(target=join, args=server.getsockname()[1:])
        thread.start()
        connection, _ = server.accept()  # from now on, process 0 counts the seconds
        has_ended = ended.exists()
        connection.close()
        thread.join(30)
    assert has_ended


def test_gpus_are_compared_by_their_uuids_if_nvidia_smi_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = start('127.0.0.1')
    make_nvidia_smi(tmp_path, monkeypatch)
    assert own.unlisted_gpus({}) == 'GPU-1,GPU-2'
    assert own.unlisted_gpus({'CUDA_VISIBLE_DEVICES': '1,GPU-1'}) == 'GPU-2,GPU-1'
    monkeypatch.setenv('PATH', str(tmp_path / 'none'))
    assert own.unlisted_gpus({'CUDA_VISIBLE_DEVICES': '0'}) == ''


def test_a_process_uses_no_gpus_without_the_plugin_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_nvidia_smi(tmp_path, monkeypatch)
    monkeypatch.setattr(environment, 'has_cuda_plugin', lambda: False)
    assert start('127.0.0.1').unlisted_gpus({}) == ''


def test_a_run_of_many_processes_may_open_a_connection_to_each() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        with pytest.raises(SystemExit, match='did not connect'):
            gather(replace(start('127.0.0.1'), count=512, timeout=0.01))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1024 + 3 * 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
