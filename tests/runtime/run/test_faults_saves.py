"""Saves that fail, are killed at every moment, or are those of several processes: what was there
before stays, and is found.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import equal, make_state, newest, tiny
from support import on_mesh

from megajax.core.config import CheckpointError
from megajax.runtime.checkpoint import checkpoints as module
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.digests import COMMIT

pytestmark = pytest.mark.faults

PATHS = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[2]), os.environ.get('PYTHONPATH')))
)


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    with on_mesh(tiny()):
        yield


def until_failed(checkpoints: Checkpoints, step: int, caplog: pytest.LogCaptureFixture) -> bool:
    """Poll as a loop would, and return the last answer."""
    for _ in range(1000):
        answer = checkpoints.poll(step) is not None
        if 'could not be written' in caplog.text:
            return answer
        time.sleep(0.02)
    raise AssertionError('no failure')


def test_a_failed_save_is_told_cleaned_up_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(checkpoint={'keep': 1})
    with Checkpoints(tmp_path, config) as checkpoints:
        checkpoints.save(make_state(config, 1), 1)
        assert checkpoints.wait()
        with monkeypatch.context() as broken:
            broken.setattr(
                module,
                'write_sums',
                lambda *_: (_ for _ in ()).throw(OSError(28, 'No space left on device')),
            )
            checkpoints.save(make_state(config, 2), 2)
            assert until_failed(checkpoints, 2, caplog)
            assert [path.name for path in tmp_path.iterdir()] == ['1']
            checkpoints.save(make_state(config, 3), 3)
            caplog.clear()
            assert not until_failed(checkpoints, 3, caplog)  # not at every step
        late = tmp_path / '2' / 'state' / 'ocdbt.process_0' / 'd' / 'array'
        late.parent.mkdir(parents=True)
        late.write_bytes(bytes(8))  # by a thread that had not finished when the save failed
        checkpoints.save(make_state(config, 4), 4)
        assert checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ['4']


def test_only_the_last_save_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'checkpoints'
    checkpoints = Checkpoints(folder, tiny())
    checkpoints.save(make_state(tiny(), 1), 1)
    assert checkpoints.wait()
    shutil.move(folder, tmp_path / 'moved')
    folder.write_text('in the way')
    checkpoints.save(make_state(tiny(), 2), 2)
    assert not checkpoints.wait()
    with pytest.raises(CheckpointError, match='the last checkpoint'):
        checkpoints.close(final=True)
    checkpoints.close()
    folder.unlink()
    shutil.move(tmp_path / 'moved', folder)
    assert newest(folder) == 1


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which('mount'), reason='mounting needs root')
def test_a_full_disk_costs_one_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', 'size=16m', 'tmpfs', tmp_path],
        check=False,
        capture_output=True,
    ).returncode:
        pytest.skip('mounting is not allowed here')
    try:
        with Checkpoints(tmp_path / 'c', tiny(checkpoint={'keep': 3})) as checkpoints:
            checkpoints.save(make_state(tiny(), 1), 1)
            assert checkpoints.wait()
            ballast = tmp_path / 'ballast'
            ballast.write_bytes(bytes(shutil.disk_usage(tmp_path).free - 100_000))
            checkpoints.save(make_state(tiny(), 2), 2)
            assert until_failed(checkpoints, 2, caplog)
            ballast.unlink()
            checkpoints.save(make_state(tiny(), 3), 3)
        assert sorted(path.name for path in (tmp_path / 'c').iterdir()) == ['1', '3']
        assert newest(tmp_path / 'c') == 3
    finally:
        subprocess.run(['umount', tmp_path], check=True)


CHILD = """
import os, signal, sys
import jax
jax.config.update('jax_num_cpu_devices', 4)
from pathlib import Path
from checkpoints import make_state, tiny
from support import on_mesh
from megajax.runtime.checkpoint import checkpoints as checkpoint
from megajax.runtime.checkpoint.checkpoints import Checkpoints
moment, folder = sys.argv[1], Path(sys.argv[2])

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def dies_in(name, *, after=False):
    real = getattr(checkpoint, name)
    def replaced(*arguments):
        if after:
            real(*arguments)
        die()
    setattr(checkpoint, name, replaced)

with on_mesh(tiny()):
    checkpoints = Checkpoints(folder, tiny(checkpoint={'keep': 1}))
    checkpoints.save(make_state(tiny(), 1), 1)
    assert checkpoints.wait()
    if moment == 'arrays': dies_in('write_file')
    if moment == 'record': dies_in('write_sums')
    if moment == 'digests': dies_in('write_sums', after=True)
    with checkpoints:
        checkpoints.save(make_state(tiny(), 2), 2)
        if moment == 'returned': die()
        if moment == 'error': raise RuntimeError('of the loop')
        if moment == 'finished': checkpoints.wait(); die()
"""


def run_child(moment: str, folder: Path) -> int:
    environment = os.environ | {'PYTHONPATH': PATHS, 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, '-c', CHILD, moment, str(folder)]
    return subprocess.run(
        command, env=environment, capture_output=True, timeout=120, check=False
    ).returncode


@pytest.mark.parametrize(
    ('moment', 'left'),
    [
        ('returned', 1),
        ('arrays', 1),
        pytest.param('record', 1, marks=pytest.mark.exhaustive),
        ('digests', 1),
        ('finished', 2),
        pytest.param('end', 2, marks=pytest.mark.exhaustive),
        ('error', 2),
    ],
)
def test_a_run_may_end_at_any_moment_of_a_save(tmp_path: Path, moment: str, left: int) -> None:
    assert run_child(moment, tmp_path / 'c') == {'end': 0, 'error': 1}.get(moment, -signal.SIGKILL)
    with Checkpoints(tmp_path / 'c', tiny(checkpoint={'keep': 1})) as checkpoints:
        assert checkpoints.newest_verified() == left
        assert equal(checkpoints.restore(left), tiny(), left)
        checkpoints.save(make_state(tiny(), 3), 3)
    assert [path.name for path in (tmp_path / 'c').iterdir()] == ['3']
    assert (tmp_path / 'c/3' / COMMIT).is_file()


TOGETHER = """
import jax, sys, time
from pathlib import Path
import numpy as np
from jax.experimental import multihost_utils
from megajax.runtime.processes.distributed import processes
from megajax.core.parallel.mesh import make_mesh
from megajax.runtime.checkpoint import checkpoints as checkpoint, digests, orbax_manager
from megajax.core.config import CheckpointError
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.run.lock import run_lock
from checkpoints import tiny
from megajax.core.train.step import init_state
from megajax.core.parallel.mesh import concrete

saves = {'every': 10, 'minutes': 1, 'keep': 3}
folder, config = Path(sys.argv[1]), tiny(checkpoint=saves, optim={'shard': 'weights'})
hashed = []
jax.config.update('jax_num_cpu_devices', 2)

def make_state(seed):
    abstract = concrete(jax.eval_shape(lambda: init_state(config)))
    random = np.random.default_rng(seed)
    def place(x):
        whole = random.normal(0, 9, x.shape).astype(x.dtype)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: whole[index])
    return jax.tree.map(place, abstract)

def digest(path, own=digests._digest):
    hashed.append(path)
    return own(path)

def fails(*_):
    raise OSError(28, 'No space left')

def same(a, b):
    return all(
        np.array_equal(x.data, y.data)
        for a, b in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
    )

with processes():
    first, digests._digest = jax.process_index() == 0, digest
    own, other = (f'ocdbt.process_{index}' for index in ((0, 1) if first else (1, 0)))
    with (
        run_lock(folder),
        jax.set_mesh(make_mesh(2, 2)),
        Checkpoints(folder / 'c', config) as checkpoints,
    ):
        assert checkpoints.newest_verified() is None
        assert checkpoints.poll(9) is None and checkpoints.poll(10) == 10
        for step in (1, 2):
            checkpoints.save(make_state(step), step)
            assert checkpoints.wait()
        folders = {folder for path in hashed for folder in path.parts}
        assert own in folders and other not in folders
        if first:
            sound, checkpoint.write_sums = checkpoint.write_sums, fails
        checkpoints.save(make_state(3), 3)
        while not checkpoints.poll(3):
            time.sleep(0.02)
        assert not checkpoints.wait()
        if first:
            checkpoint.write_sums = sound
        else:
            sound, orbax_manager.hash_part = orbax_manager.hash_part, fails
        checkpoints.save(make_state(3), 3)
        assert not checkpoints.wait()
        assert not (folder / 'c/3').exists()
        if not first:
            orbax_manager.hash_part = sound
        checkpoints.save(make_state(4), 4)
        while checkpoints._saving:
            assert not checkpoints.poll(4)
        assert checkpoints.newest_verified() == 4
        assert same(checkpoints.restore(4), make_state(4))
        checkpoints.delete_after(1)
        assert checkpoints.newest_verified() == 1
        if not first:
            checkpoints._due._begun -= 100
        assert not checkpoints.poll(5)
        if first:
            checkpoints._due._begun -= 100
        assert checkpoints.poll(6)
        for step in (6, 7, 8):
            checkpoints.save(make_state(step), step)
            assert checkpoints.wait()
        for damaged in (8, 7):
            if first:
                (folder / f'c/{damaged}/record.json').write_text('{}')
            assert checkpoints.newest_verified() == damaged - 1
            assert checkpoints._folders._refused == {*range(damaged, 9)}
    print('well')
"""


def test_two_processes_agree(tmp_path: Path) -> None:
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    common = {
        'MEGAJAX_COORDINATOR': f'127.0.0.1:{port}',
        'MEGAJAX_PROCESSES': '2',
        'JAX_PLATFORMS': 'cpu',
        'PYTHONPATH': PATHS,
    }
    environments = [os.environ | common | {'MEGAJAX_PROCESS': str(index)} for index in range(2)]
    command = [sys.executable, '-c', TOGETHER, str(tmp_path)]
    started = [
        subprocess.Popen(
            command, env=e, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for e in environments
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert all('well' in output for output in outputs), outputs
    with Checkpoints(tmp_path / 'c', tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 6
