"""Checkpoints that can be trusted: real files, broken in every way, and real processes, killed at every moment of a save."""

import json
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import make_config, on_mesh
from typer.testing import CliRunner

from megajax.cli_checkpoint import checkpoint_app
from megajax.config import CheckpointError, Config, ConfigError
from megajax.data.tokenizer import byte_tokenizer, train_bpe
from megajax.parallel.mesh import concrete
from megajax.train import checkpoint as module
from megajax.train.checkpoint import Checkpoints
from megajax.train.digests import COMMIT, STAMP, SUMS
from megajax.train.record import RECORD, read_record
from megajax.train.step import TrainState, init_state

pytestmark = pytest.mark.faults

PATHS = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[1])))
TINY = {'num_layers': 1, 'hidden_size': 32, 'num_heads': 4, 'vocab_size': 300, 'dropout': 0.0}


def tiny(data: int = 2, model: int = 2, /, **sections: dict[str, Any]) -> Config:
    return make_config('gpt', data, model, **{**sections, 'model': TINY | sections.get('model', {})})


def make_state(config: Config, seed: int) -> TrainState:
    """A state of random numbers in its places, made in numpy, so without compiling."""
    random = np.random.default_rng(seed)
    abstract = concrete(jax.eval_shape(lambda: init_state(config)))
    return jax.tree.map(lambda x: jax.device_put(random.normal(0, 9, x.shape).astype(x.dtype), x.sharding), abstract)


def leaves(state: TrainState) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def equal(state: TrainState, config: Config, seed: int) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(leaves(state), leaves(make_state(config, seed)), strict=True))


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    with on_mesh(tiny()):
        yield


@pytest.fixture(scope='module')
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('run') / 'checkpoints'
    config = tiny()
    with on_mesh(config), Checkpoints(folder, config, tokenizer=byte_tokenizer(), data={'corpus': 'a'}) as checkpoints:
        for step in (1, 2):
            checkpoints.save(make_state(config, step), step, validation_loss=3.0 / step)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / 'run' / 'checkpoints', symlinks=True))


def newest(folder: Path) -> int | None:
    with Checkpoints(folder, tiny()) as checkpoints:
        return checkpoints.newest_verified()


def largest(step: Path) -> str:
    return max((path for path in step.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size).relative_to(step).as_posix()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(b'\0' * path.stat().st_size)


def test_a_checkpoint_holds_all_that_a_run_is(folder: Path) -> None:
    step = folder / '2'
    record = read_record(step)
    assert record.config == tiny().model_dump(mode='json')
    assert record.tokenizer_sha256 == byte_tokenizer().fingerprint
    assert (record.validation_loss, record.data, record.mesh) == (1.5, {'corpus': 'a'}, 'data=2 x model=2')
    assert record.versions.keys() == {'megajax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'python'}
    assert json.loads((step / 'tokenizer.json').read_text())
    assert step.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(('data', 'model'), [(1, 4), (4, 1), (1, 1), (2, 2)])
def test_any_mesh_restores_the_same_bits(folder: Path, data: int, model: int) -> None:
    config = tiny(data, model)
    with on_mesh(config), Checkpoints(folder, config) as checkpoints:
        assert checkpoints.newest_verified() == 2
        state = checkpoints.restore(2)
        assert equal(state, config, 2)
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, make_state(config, 2))


@pytest.mark.parametrize('damage', [flip, truncate, zero, Path.unlink])
@pytest.mark.parametrize('name', ['largest', 'state/_METADATA', 'state/manifest.ocdbt', 'state/_sharding', RECORD, SUMS])
def test_a_damaged_step_is_refused_by_name(folder: Path, name: str, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    name = largest(folder / '2') if name == 'largest' else name
    damage(folder / '2' / name)
    assert newest(folder) == 1
    refused = [record.message for record in caplog.records if 'refused' in record.message]
    assert len(refused) == 1
    assert name in refused[0] or (name == SUMS and damage is flip)  # then it is the file whose digest it was
    verify = CliRunner().invoke(checkpoint_app, ['verify', str(folder.parent)])
    assert verify.exit_code == 4
    assert '1  ok' in verify.output


@pytest.mark.parametrize('damage', [flip, truncate, zero, Path.unlink])
def test_the_stamp_that_orbax_changes_last_is_not_needed(folder: Path, damage: Any) -> None:
    damage(folder / '2' / STAMP)
    with Checkpoints(folder, tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 2
        assert equal(checkpoints.restore(2), tiny(), 2)


def test_a_refused_step_is_written_anew_when_the_run_comes_there_again(folder: Path) -> None:
    flip(folder / '2' / largest(folder / '2'))
    with Checkpoints(folder, tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 1
        checkpoints.save(make_state(tiny(), 5), 1)  # stays as it is
        checkpoints.save(make_state(tiny(), 7), 2)
    with Checkpoints(folder, tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 2
        assert equal(checkpoints.restore(1), tiny(), 1)
        assert equal(checkpoints.restore(2), tiny(), 7)


def test_a_refused_step_takes_no_sound_ones_place(folder: Path) -> None:
    shutil.copytree(folder / '2', folder / '9')
    flip(folder / '9' / largest(folder / '9'))
    with Checkpoints(folder, tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 2
        checkpoints.save(make_state(tiny(), 3), 3)
    assert sorted(path.name for path in folder.iterdir()) == ['2', '3']


def test_no_sound_step_is_no_reason_to_start_afresh(folder: Path, tmp_path: Path) -> None:
    for step in ('1', '2'):
        truncate(folder / step / largest(folder / step))
    with Checkpoints(folder, tiny()) as checkpoints:
        with pytest.raises(CheckpointError, match='none of the 2 checkpoints'):
            checkpoints.newest_verified()
        with pytest.raises(CheckpointError, match='cannot be used'):
            checkpoints.restore(2)
    assert newest(tmp_path / 'new') is None


def test_junk_is_ignored_and_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ('99', 'abc', '98.orbax-checkpoint-tmp', '007'):
        (folder / name).mkdir()
    (folder / 'stray').write_text('')
    (folder / '50').symlink_to(folder / '1')
    assert newest(folder) == 2
    for name in ('99', 'abc', '98.orbax-checkpoint-tmp', '007', 'stray', '50'):
        assert any(f'/{name} ' in record.message for record in caplog.records), name
    with Checkpoints(folder, tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 2
        checkpoints.save(make_state(tiny(), 99), 99)
    assert newest(folder) == 99
    assert {path.name for path in folder.iterdir()} == {'2', '99', 'abc', '98.orbax-checkpoint-tmp', '007', 'stray', '50'}


def test_objects_in_the_folder_are_never_executed(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / 'canary'),)

    for place in (folder, folder / '2', folder / '2/state'):
        (place / 'checkpoint.pkl').write_bytes(pickle.dumps(Evil()))
        np.save(place / 'array.npy', np.array([Evil()]), allow_pickle=True)
    with Checkpoints(folder, tiny()) as checkpoints:
        assert equal(checkpoints.restore(checkpoints.newest_verified() or 0), tiny(), 2)
    assert 'array.npy, checkpoint.pkl' in caplog.text
    (folder / '2' / largest(folder / '2')).write_bytes(pickle.dumps(Evil()))
    assert newest(folder) == 1
    assert not (tmp_path / 'canary').exists()


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'model': {'hidden_size': 64, 'norm': 'rmsnorm'}}, ['model.hidden_size 32 there, 64 here', 'model.norm layernorm there, rmsnorm']),
        ({'train': {'dtype': 'bfloat16'}}, ['train.dtype float32 there, bfloat16 here']),
    ],
)
def test_another_model_is_a_mistake(folder: Path, changes: Any, said: list[str]) -> None:
    with Checkpoints(folder, tiny(**changes)) as checkpoints, pytest.raises(ConfigError) as error:
        checkpoints.restore(2)
    assert all(text in str(error.value) for text in said)


def test_another_tokenizer_is_a_mistake(folder: Path) -> None:
    other = train_bpe(['one two three one two three'], 300)
    with Checkpoints(folder, tiny(), tokenizer=other) as checkpoints, pytest.raises(ConfigError) as error:
        checkpoints.restore(2)
    assert other.fingerprint in str(error.value)
    assert byte_tokenizer().fingerprint in str(error.value)


def test_what_may_change_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny(optim={'lr': 0.5}, train={'steps': 7}, run={'dir': 'elsewhere'})
    with caplog.at_level(logging.INFO), Checkpoints(folder, config, data={'corpus': 'b'}) as checkpoints:
        checkpoints.restore(2)
    said = [record.message for record in caplog.records if record.message.startswith('resume')]
    assert [line.split(maxsplit=1)[1] for line in said] == ['optim.lr: 0.00015 -> 0.5', 'train.steps: 1000 -> 7', 'data corpus: a -> b']


@pytest.mark.parametrize('name', ['dtype', 'shape', 'missing'])
def test_arrays_that_orbax_would_cast_or_pad_are_refused(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(config: Config) -> Any:
        state = init_state(config)
        step = {'dtype': state.step.astype('float32'), 'shape': jax.numpy.zeros(3, 'int32'), 'missing': {'more': state.step}}[name]
        return state._replace(step=step)

    monkeypatch.setattr(module, 'init_state', other)
    with Checkpoints(folder, tiny()) as checkpoints, pytest.raises(ConfigError, match=r'step.* there'):
        checkpoints.restore(2)


def test_a_rollback_leaves_no_newer_step(folder: Path) -> None:
    with Checkpoints(folder, tiny(checkpoint={'keep': 3})) as checkpoints:
        checkpoints.save(make_state(tiny(), 3), 3)
        checkpoints.delete_after(1)
        assert checkpoints.newest_verified() == 1
        checkpoints.save(make_state(tiny(), 22), 2)
    with Checkpoints(folder, tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 2
        assert equal(checkpoints.restore(2), tiny(), 22)


def test_what_stays_is_what_any_key_asks_for(tmp_path: Path) -> None:
    config = tiny(checkpoint={'keep': 1, 'keep_every': 4, 'keep_best': 1})
    losses = {1: 5.0, 2: 1.0, 3: float('nan'), 4: 4.0}
    with Checkpoints(tmp_path, config) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(make_state(config, step), step, validation_loss=loss)
    with Checkpoints(tmp_path, config) as checkpoints:  # losses outlive the process
        for step in (5, 6):
            checkpoints.save(make_state(config, step), step, validation_loss=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['2', '4', '6']


def test_it_is_time_by_steps_and_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoints(tmp_path, tiny(checkpoint={'every': 10, 'minutes': 5})) as checkpoints:
        assert [step for step in range(1, 31) if checkpoints.poll(step)] == [10, 20, 30]
        now = module.time.monotonic()
        monkeypatch.setattr(module.time, 'monotonic', lambda: now + 301)
        assert checkpoints.poll(31)
        checkpoints.save(make_state(tiny(), 31), 31)
        checkpoints.wait()
        assert not checkpoints.poll(32)


def until_failed(checkpoints: Checkpoints, step: int, caplog: pytest.LogCaptureFixture) -> bool:
    """Poll as a loop would, and return the last answer."""
    for _ in range(1000):
        answer = checkpoints.poll(step)
        if 'could not be written' in caplog.text:
            return answer
        module.time.sleep(0.02)
    raise AssertionError('no failure')


def test_a_failed_save_is_told_cleaned_up_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(checkpoint={'keep': 1})
    with Checkpoints(tmp_path, config) as checkpoints:
        checkpoints.save(make_state(config, 1), 1)
        assert checkpoints.wait()
        with monkeypatch.context() as broken:
            broken.setattr(module, 'write_sums', lambda folder: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
            checkpoints.save(make_state(config, 2), 2)
            assert until_failed(checkpoints, 2, caplog)
            assert [path.name for path in tmp_path.iterdir()] == ['1']
            checkpoints.save(make_state(config, 3), 3)
            caplog.clear()
            assert not until_failed(checkpoints, 3, caplog)  # not at every step
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
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', tmp_path], check=False, capture_output=True).returncode:
        pytest.skip('mounting is not allowed here')
    try:
        with Checkpoints(tmp_path / 'c', tiny(checkpoint={'keep': 3})) as checkpoints:
            checkpoints.save(make_state(tiny(), 1), 1)
            assert checkpoints.wait()
            ballast = tmp_path / 'ballast'
            ballast.write_bytes(bytes(shutil.disk_usage(tmp_path).free - 100_000))
            checkpoints.save(make_state(tiny(), 2), 2)
            assert until_failed(checkpoints, 2, caplog)
            assert [path.name for path in (tmp_path / 'c').iterdir()] == ['1']
            ballast.unlink()
            checkpoints.save(make_state(tiny(), 3), 3)
        assert newest(tmp_path / 'c') == 3
    finally:
        subprocess.run(['umount', tmp_path], check=True)


CHILD = """
import os, signal, sys
import jax
jax.config.update('jax_num_cpu_devices', 4)
from pathlib import Path
from test_checkpoint import make_state, tiny
from support import on_mesh
from megajax.train import checkpoint
from megajax.train.checkpoint import Checkpoints
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
    return subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False).returncode


@pytest.mark.parametrize(
    ('moment', 'left'), [('returned', 1), ('arrays', 1), ('record', 1), ('digests', 1), ('finished', 2), ('end', 2), ('error', 2)]
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
from megajax.parallel.distributed import processes
from megajax.parallel.mesh import make_mesh
from megajax.train import checkpoint
from megajax.config import CheckpointError
from megajax.train.checkpoint import Checkpoints
from megajax.train.lock import run_lock
from test_checkpoint import tiny
from megajax.train.step import init_state
from megajax.parallel.mesh import concrete

folder, config = Path(sys.argv[1]), tiny(checkpoint={'every': 10, 'minutes': 1, 'keep': 3})
jax.config.update('jax_num_cpu_devices', 2)

def make_state(seed):
    abstract = concrete(jax.eval_shape(lambda: init_state(config)))
    random = np.random.default_rng(seed)
    def place(x):
        whole = random.normal(0, 9, x.shape).astype(x.dtype)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: whole[index])
    return jax.tree.map(place, abstract)

def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x.data, y.data) for a, b in pairs for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True))

with processes():
    first = jax.process_index() == 0
    with run_lock(folder), jax.set_mesh(make_mesh(2, 2)), Checkpoints(folder / 'c', config) as checkpoints:
        assert checkpoints.newest_verified() is None
        assert checkpoints.poll(10) and not checkpoints.poll(11)
        for step in (1, 2):
            checkpoints.save(make_state(step), step)
            assert checkpoints.wait()
        if first:
            checkpoint.write_sums, sound = lambda folder: (_ for _ in ()).throw(OSError(28, 'No space left')), checkpoint.write_sums
        checkpoints.save(make_state(3), 3)
        while not checkpoints.poll(3):
            time.sleep(0.02)
        assert not checkpoints.wait()
        if first:
            checkpoint.write_sums = sound
        checkpoints.save(make_state(4), 4)
        while checkpoints._saving:
            assert not checkpoints.poll(4)
        assert checkpoints.newest_verified() == 4
        assert same(checkpoints.restore(4), make_state(4))
        checkpoints.delete_after(1)
        assert checkpoints.newest_verified() == 1
        if not first:
            checkpoints._begun -= 100
        assert not checkpoints.poll(5)
        if first:
            checkpoints._begun -= 100
        assert checkpoints.poll(6)
        checkpoints.save(make_state(6), 6)
    print('well')
"""


def test_two_processes_agree(tmp_path: Path) -> None:
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
    common = {'MEGAJAX_COORDINATOR': f'127.0.0.1:{port}', 'MEGAJAX_PROCESSES': '2', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': PATHS}
    environments = [os.environ | common | {'MEGAJAX_PROCESS': str(index)} for index in range(2)]
    command = [sys.executable, '-c', TOGETHER, str(tmp_path)]
    started = [subprocess.Popen(command, env=e, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for e in environments]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert all('well' in output for output in outputs), outputs
    with Checkpoints(tmp_path / 'c', tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 6


def test_the_command_lists_and_compares(folder: Path) -> None:
    run = CliRunner()
    listed = run.invoke(checkpoint_app, ['ls', str(folder.parent)]).output.splitlines()
    assert [line.split()[0] for line in listed] == ['step', '1', '2']
    assert all(text in listed[2] for text in ('1.5000', 'data=2 x model=2', 'complete'))
    assert run.invoke(checkpoint_app, ['verify', f'{folder.parent}/2']).output == '2  ok\n'
    with Checkpoints(folder, tiny(1, 1, optim={'lr': 0.5})) as checkpoints:
        state = make_state(tiny(), 2)
        state.params['embedding']['table'].set_value(state.params['embedding']['table'].get_value() * 1.5)
        checkpoints.save(state, 3)
    said = run.invoke(checkpoint_app, ['diff', str(folder.parent), '3', '2'], catch_exceptions=False).output.splitlines()
    assert said[:3] == ['mesh.data: 1 -> 2', 'mesh.model: 1 -> 2', 'optim.lr: 0.5 -> 0.00015']
    assert 'embedding.table: 0.5' in said
    assert {line.split(': ')[1] for line in said[3:]} == {'0', '0.5'}
    missing = run.invoke(checkpoint_app, ['diff', str(folder.parent), '2', '9'])
    assert isinstance(missing.exception, ConfigError)
    assert 'choose one of steps' in str(missing.exception)
