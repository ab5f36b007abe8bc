"""What the processes of a run agree on."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from checkpoints import tiny
from jax._src.lib import _jax
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from megajax.runtime.processes.consensus import SaveBarrier, local_time
from megajax.runtime.run.start import run_folder

PROCESSES = 8


class Counting:
    """A client of the coordinator, and the number of its calls."""

    def __init__(self, client: Any):
        self.client, self.calls = client, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.client, name)


@contextmanager
def in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Counting]]]:
    """Map a function over processes that are threads with real clients of one real coordinator."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        address = f'127.0.0.1:{server.getsockname()[1]}'
    service = _jax.get_distributed_runtime_service(address, PROCESSES)
    clients = [
        Counting(_jax.get_distributed_runtime_client(address, index, init_timeout=60))
        for index in range(PROCESSES)
    ]
    own = threading.local()
    monkeypatch.setattr(jax, 'process_count', lambda: PROCESSES)
    monkeypatch.setattr(jax, 'process_index', lambda: own.index)
    monkeypatch.setattr(multihost, 'get_jax_distributed_client', lambda: clients[own.index])

    def process(index: int, task: Any, *values: Any) -> Any:
        own.index = index
        return task(*values)

    with ThreadPoolExecutor(PROCESSES) as pool:

        def run(task: Any, *values: Any) -> list[Any]:
            return list(pool.map(process, range(PROCESSES), [task] * PROCESSES, *values))

        list(pool.map(lambda client: client.connect(), clients))
        try:
            yield run, clients
        finally:
            list(pool.map(lambda client: client.shutdown(), clients))
            service.shutdown()


def test_each_process_asks_the_coordinator_once_for_the_keys_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barriers = [SaveBarrier(str) for _ in range(PROCESSES)]

    def save(barrier: SaveBarrier) -> None:
        for key in ('set_value_start', 'write', 'commit', 'set_value_end'):
            barrier(key=key, timeout_ms=60_000)

    with in_threads(monkeypatch) as (run, clients):
        before = [client.calls.copy() for client in clients]
        run(save, barriers)
        calls = [client.calls - old for client, old in zip(clients, before, strict=True)]
    rounds = barriers[0].round
    assert rounds == 4
    assert all(call.total() <= 5 * rounds for call in calls), calls


def test_the_first_process_reads_what_all_have_hashed_in_this_save_and_no_value_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = iter(range(2 * PROCESSES))
    barriers = [SaveBarrier(lambda: str(next(names))) for _ in range(PROCESSES)]

    def save(barrier: SaveBarrier) -> list[str]:
        barrier(key='async_write_complete.1', timeout_ms=60_000)
        parts = barrier.parts() if jax.process_index() == 0 else []
        barrier(key='async_commit_complete.1', timeout_ms=60_000)
        return parts

    with in_threads(monkeypatch) as (run, clients):
        parts = [{int(part) for part in run(save, barriers)[0]} for _ in range(2)]
        left = [clients[0].key_value_dir_get(f'megajax_parts_{round}/') for round in range(5)]
    assert parts == [{*range(PROCESSES)}, {*range(PROCESSES, 2 * PROCESSES)}]
    assert not any(left)


def test_the_same_processes_can_save_in_one_run_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def save(barrier: SaveBarrier, num_rounds: int) -> None:
        for key in range(num_rounds):
            barrier(key=str(key), timeout_ms=60_000)

    with in_threads(monkeypatch) as (run, _):
        for num_rounds in (1, 2, 3):
            run(save, [SaveBarrier(str) for _ in range(PROCESSES)], [num_rounds] * PROCESSES)


def test_a_process_that_fails_takes_all_to_the_last_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barriers = [SaveBarrier(str) for _ in range(PROCESSES)]

    def save(barrier: SaveBarrier, fails: bool) -> str:
        said = 'of its own'
        if not fails:
            try:
                barrier(key='write', timeout_ms=60_000)
            except RuntimeError as error:
                said = str(error)
        barrier(key='set_value', timeout_ms=60_000)
        return said

    with in_threads(monkeypatch) as (run, _):
        said = run(save, barriers, [index == 3 for index in range(PROCESSES)])
    assert Counter(said) == {
        'another process could not write its part': PROCESSES - 1,
        'of its own': 1,
    }


def test_hosts_in_different_time_zones_use_the_time_of_the_first_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []

    def broadcast(values: object) -> object:
        sent.append(values)
        return sent[0]  # those of the first process

    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(multihost_utils, 'broadcast_one_to_all', broadcast)
    times = []
    try:
        for zone in ('UTC-9', 'UTC+5'):
            monkeypatch.setenv('TZ', zone)
            time.tzset()
            times.append((local_time(), time.strftime('%Y%m%d-%H')))
    finally:
        monkeypatch.undo()
        time.tzset()
    (first, now), (second, _) = times
    assert first == second
    assert f'{first:%Y%m%d-%H}' == now


def test_all_processes_get_the_run_directory_that_the_first_one_creates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent = list[Any]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(
        multihost_utils, 'broadcast_one_to_all', lambda values: sent.append(values) or values
    )
    first = run_folder(tiny(), 'a')
    monkeypatch.setattr(jax, 'process_index', lambda: 1)
    monkeypatch.setattr(multihost_utils, 'broadcast_one_to_all', lambda _: sent.pop(0))
    assert run_folder(tiny(), 'a') == first
    assert [*Path('runs').iterdir()] == [first]
