"""What the processes of a run agree on."""

import time
from pathlib import Path

import jax
import pytest
from checkpoints import tiny
from jax.experimental import multihost_utils

from megajax.runtime.run.start import run_folder


def test_hosts_in_different_time_zones_name_the_same_run_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []

    def broadcast(values: object) -> object:
        sent.append(values)
        return sent[0]  # those of the first process

    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(multihost_utils, 'broadcast_one_to_all', broadcast)
    folders = []
    try:
        for zone in ('UTC-9', 'UTC+5'):
            monkeypatch.setenv('TZ', zone)
            time.tzset()
            folders.append((run_folder(tiny(), 'a'), time.strftime('%Y%m%d-%H')))
    finally:
        monkeypatch.undo()
        time.tzset()
    (first, now), (second, _) = folders
    assert first == second
    assert first.parent == Path('runs')
    assert first.name.startswith(f'a-{now}')
