"""Checkpoints that can be trusted: real files, broken in every way, on every mesh."""

import json
import logging
import os
import pickle
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import equal, make_state, newest, tiny
from support import exhaustive, more, on_mesh
from typer.testing import CliRunner

from megajax.commands.checkpoint import checkpoint_app
from megajax.core.config import CheckpointError, Config, ConfigError
from megajax.core.train.optimizer import make_schedule
from megajax.core.train.step import init_state
from megajax.runtime.checkpoint import checkpoints as module
from megajax.runtime.checkpoint import compare, digests
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.compare import log_schedule
from megajax.runtime.checkpoint.digests import STAMP, SUMS, sound_checkpoint, write_sums
from megajax.runtime.checkpoint.record import RECORD, Record, make_record, read_record
from megajax.runtime.data.text.tokenizer import byte_tokenizer, train_bpe
from megajax.runtime.processes.consensus import SaveBarrier


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    with on_mesh(tiny()):
        yield


@pytest.fixture(scope='module')
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('run') / 'checkpoints'
    config = tiny()
    with (
        on_mesh(config),
        Checkpoints(
            folder, config, tokenizer=byte_tokenizer(), data={'corpus': 'a'}
        ) as checkpoints,
    ):
        for step in (1, 2):
            checkpoints.save(make_state(config, step), step, validation_loss=3.0 / step)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / 'run' / 'checkpoints', symlinks=True))


def largest(step: Path) -> str:
    return (
        max(
            (path for path in step.rglob('*') if path.is_file()),
            key=lambda path: path.stat().st_size,
        )
        .relative_to(step)
        .as_posix()
    )


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
    assert (record.validation_loss, record.data, record.mesh) == (
        1.5,
        {'corpus': 'a'},
        'data=2 x model=2',
    )
    assert record.versions.keys() == {
        'megajax',
        'jax',
        'jaxlib',
        'flax',
        'optax',
        'orbax-checkpoint',
        'numpy',
        'python',
    }
    assert json.loads((step / 'tokenizer.json').read_text())
    assert step.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ('data', 'model'), [(1, 4), exhaustive(4, 1), more(1, 1), exhaustive(2, 2)]
)
def test_any_mesh_restores_the_same_bits(folder: Path, data: int, model: int) -> None:
    config = tiny(data, model)
    with on_mesh(config), Checkpoints(folder, config) as checkpoints:
        assert checkpoints.newest_verified() == 2
        state = checkpoints.restore(2)
        assert equal(state, config, 2)
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
            lambda x: x.sharding, make_state(config, 2)
        )


@pytest.mark.parametrize('damage', [flip, truncate, zero, Path.unlink])
@pytest.mark.parametrize(
    'name', ['largest', 'state/_METADATA', 'state/manifest.ocdbt', 'state/_sharding', RECORD, SUMS]
)
def test_a_damaged_step_is_refused_by_name(
    folder: Path, name: str, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name = largest(folder / '2') if name == 'largest' else name
    damage(folder / '2' / name)
    assert newest(folder) == 1
    refused = [record.message for record in caplog.records if 'is rejected: ' in record.message]
    assert len(refused) == 1
    assert name in refused[0] or (
        name == SUMS and damage is flip
    )  # then it is the file whose digest it was
    verify = CliRunner().invoke(checkpoint_app, ['verify', str(folder.parent)])
    assert verify.exit_code == 4
    assert '1  ok' in verify.output


@pytest.mark.faults
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


def test_no_step_waits_for_a_save_in_progress(tmp_path: Path) -> None:
    config, begun, go_on = tiny(), threading.Event(), threading.Event()

    class OnASlowDisk:
        fingerprint = byte_tokenizer().fingerprint

        def save(self, path: Path) -> None:
            begun.set()
            go_on.wait(60)
            byte_tokenizer().save(path)

    with Checkpoints(tmp_path, config, tokenizer=OnASlowDisk()) as checkpoints:
        checkpoints.save(make_state(config, 1), 1)
        assert begun.wait(60)
        start = time.monotonic()
        assert not checkpoints.poll(config.checkpoint.every + 1)
        assert time.monotonic() - start < 30
        go_on.set()
    assert [path.name for path in tmp_path.iterdir()] == ['1']


def test_a_run_that_fails_finishes_the_save_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    monkeypatch.setattr(SaveBarrier, 'parts', lambda _: [] if written.wait(60) else None)
    checkpoints = Checkpoints(tmp_path, tiny())
    checkpoints.save(make_state(tiny(), 1), 1)
    threading.Timer(0.2, written.set).start()
    checkpoints.abandon()
    checkpoints.close(final=True)
    assert newest(tmp_path) == 1


def test_a_refused_step_takes_no_sound_ones_place(folder: Path) -> None:
    with Checkpoints(folder, tiny(checkpoint={'keep': 3})) as checkpoints:
        checkpoints.save(make_state(tiny(), 9), 9)
    shutil.rmtree(folder / '1')
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
    assert {path.name for path in folder.iterdir()} == {
        '2',
        '99',
        'abc',
        '98.orbax-checkpoint-tmp',
        '007',
        'stray',
        '50',
    }


def test_a_folder_under_the_number_of_another_step_is_left_alone_and_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder / '2', folder / '20261121')
    with Checkpoints(folder, tiny(checkpoint={'keep': 1})) as checkpoints:
        assert checkpoints.newest_verified() == 2
        assert checkpoints.newest_verified() == 2
        checkpoints.save(make_state(tiny(), 3), 3)
        assert checkpoints.wait()
        checkpoints.delete_after(3)
        assert checkpoints.newest_verified() == 3
    assert [record.message for record in caplog.records if '20261121' in record.message] == [
        f'{folder}/20261121 holds step 2, not the step in its name: ignored'
    ]
    assert sorted(path.name for path in folder.iterdir()) == ['20261121', '3']
    verify = CliRunner().invoke(checkpoint_app, ['verify', str(folder.parent)])
    assert verify.exit_code == 4
    assert '3  ok\n20261121  1 wrong\n  holds step 2: rename it to 2' in verify.output


def test_exchanged_folders_are_no_reason_to_start_afresh_and_make_room_without_being_lost(
    folder: Path,
) -> None:
    (folder / '1').rename(folder / 'x')
    (folder / '2').rename(folder / '1')
    (folder / 'x').rename(folder / '2')
    with Checkpoints(folder, tiny()) as checkpoints:
        with pytest.raises(CheckpointError, match='none of the 2 checkpoints'):
            checkpoints.newest_verified()
        checkpoints.save(make_state(tiny(), 5), 2)
    assert sorted(path.name for path in folder.iterdir()) == ['1', '2', '2.holds-1']
    with Checkpoints(folder, tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 2
        assert equal(checkpoints.restore(2), tiny(), 5)


def test_a_loss_that_is_measured_after_the_save_is_kept_beside_it(folder: Path) -> None:
    with Checkpoints(folder, tiny(checkpoint={'keep': 1, 'keep_best': 1})) as checkpoints:
        for step, loss in ((3, 0.5), (4, 0.7)):
            checkpoints.save(make_state(tiny(), step), step)
            checkpoints.note_validation_loss(step, loss)
            assert checkpoints.is_evaluated(step)
        checkpoints.save(make_state(tiny(), 5), 5)
    assert sorted(path.name for path in folder.iterdir()) == ['3', '5']
    assert read_record(folder / '3').validation_loss == 0.5
    assert read_record(folder / '5').validation_loss is None
    assert CliRunner().invoke(checkpoint_app, ['verify', str(folder.parent)]).exit_code == 0


def test_a_loss_that_is_measured_before_the_save_is_kept_unless_the_run_goes_back(
    folder: Path,
) -> None:
    with Checkpoints(folder, tiny(checkpoint={'keep': 9})) as checkpoints:
        checkpoints.note_validation_loss(3, 0.5)
        checkpoints.save(make_state(tiny(), 3), 3)
        checkpoints.note_validation_loss(4, 0.7)
        checkpoints.delete_after(3)
        checkpoints.save(make_state(tiny(), 4), 4)
        assert [checkpoints.is_evaluated(step) for step in (3, 4)] == [True, False]
    assert [read_record(folder / name).validation_loss for name in '34'] == [0.5, None]


@pytest.mark.faults
def test_objects_in_the_folder_are_never_executed(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
        (
            {'model': {'hidden_size': 64, 'norm': 'rmsnorm'}},
            ['model.hidden_size 32 there, 64 here', 'model.norm layernorm there, rmsnorm'],
        ),
        ({'train': {'dtype': 'bfloat16'}}, ['train.dtype float32 there, bfloat16 here']),
    ],
)
def test_another_model_is_a_mistake(folder: Path, changes: Any, said: list[str]) -> None:
    with Checkpoints(folder, tiny(**changes)) as checkpoints, pytest.raises(ConfigError) as error:
        checkpoints.restore(2)
    assert all(text in str(error.value) for text in said)


def test_another_tokenizer_is_a_mistake(folder: Path) -> None:
    other = train_bpe(['one two three one two three'], 300)
    with (
        Checkpoints(folder, tiny(), tokenizer=other) as checkpoints,
        pytest.raises(ConfigError) as error,
    ):
        checkpoints.restore(2)
    assert other.fingerprint in str(error.value)
    assert byte_tokenizer().fingerprint in str(error.value)
    assert f'): set data.tokenizer={folder}/2/tokenizer.json, or choose' in str(error.value)


def test_a_text_in_the_ids_of_another_tokenizer_is_no_other_text(folder: Path) -> None:
    other, config = train_bpe(['one two three'], 300), tiny(data={'tokenizer': 'other.json'})
    checkpoints = Checkpoints(folder, config, tokenizer=other, data={'corpus': 'b'})
    with checkpoints, pytest.raises(ConfigError, match=r'set data.tokenizer=.*/2/tokenizer.json'):
        checkpoints.restore(2)


def test_what_may_change_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny(
        optim={'lr': 0.5}, train={'steps': 7}, run={'dir': 'elsewhere', 'allow_changed_data': True}
    )
    with (
        caplog.at_level(logging.INFO),
        Checkpoints(folder, config, data={'corpus': 'b'}) as checkpoints,
    ):
        taken = checkpoints.restore(2).guard.taken
    rate, before = (make_schedule(x.optim, x.train.steps)(taken) for x in (config, tiny()))
    said = [record.message for record in caplog.records if record.message.startswith('resume')]
    assert [line.split(maxsplit=1)[1] for line in said] == [
        'optim.lr: 0.00015 -> 0.5',
        'train.steps: 1000 -> 7',
        'data corpus: a -> b',
        f'learning rate: {rate:.4g} at step 3, which had {before:.4g} before the change, and '
        'min_lr at step 7 instead of 1000; optim.decay_steps=1000 keeps the old end',
    ]


@pytest.mark.parametrize(
    ('before', 'after', 'said'),
    [
        (
            {},
            {'train': {'steps': 200}},
            '8e-05 at step 101, which had 1e-05 before the change, and min_lr at step 200 instead '
            'of 100; optim.decay_steps=100 keeps the old end',
        ),
        ({}, {'train': {'steps': 200}, 'optim': {'decay_steps': 100}}, None),
        ({'optim': {'schedule': 'constant'}}, {'train': {'steps': 200}}, None),
        ({}, {'optim': {'min_lr': 2e-5}}, '2e-05 at step 101, which had 1e-05 before the change'),
        ({}, {'train': {'eval_every': 7}}, None),
    ],
    ids=range(5),
)
def test_a_resume_says_what_becomes_of_the_learning_rate(
    before: dict[str, Any],
    after: dict[str, Any],
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def record(changes: dict[str, Any]) -> Record:
        keys = {'train': {'steps': 100}} | before
        merged = {key: keys.get(key, {}) | changes.get(key, {}) for key in {*keys, *changes}}
        return make_record(tiny(**merged), 100)

    with caplog.at_level(logging.INFO):
        log_schedule(record({}), record(after), taken=100)
    rates = [record.message for record in caplog.records if 'learning rate' in record.message]
    assert rates == ([] if said is None else [f'resume     learning rate: {said}'])


def test_skipped_steps_do_not_move_the_learning_rate(caplog: pytest.LogCaptureFixture) -> None:
    warmup = {'warmup_steps': 49, 'schedule': 'constant', 'lr': 1.0}
    there, here = (
        make_record(tiny(optim=warmup | {'lr': rate}, train={'steps': 100}), 30)
        for rate in (1.0, 2.0)
    )
    with caplog.at_level(logging.INFO):
        log_schedule(there, here, taken=24)
    (said,) = caplog.messages
    assert 'learning rate: 1 at step 31, which had 0.5 before' in said


def test_other_data_under_the_same_name_is_a_mistake_unless_the_config_asks_for_other_data(
    folder: Path,
) -> None:
    with (
        Checkpoints(folder, tiny(), data={'corpus': 'b'}) as checkpoints,
        pytest.raises(ConfigError, match='corpus a there, b here'),
    ):
        checkpoints.restore(2)
    with Checkpoints(folder, tiny(), data={'another': 'b'}) as checkpoints:
        assert equal(checkpoints.restore(2), tiny(), 2)


def test_another_version_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = folder / '2' / RECORD
    written = json.loads(record.read_text())
    record.write_text(
        json.dumps(
            written
            | {
                'versions': written['versions'] | {'jax': '0.1', 'python': '4.0', 'gone': '1'},
                'later': [1],
            }
        )
    )
    write_sums(folder / '2')
    with Checkpoints(folder, tiny()) as checkpoints:
        assert checkpoints.newest_verified() == 2
        assert equal(checkpoints.restore(2), tiny(), 2)
    warnings = [
        record.message.split(': ')[0]
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]
    assert [warning for warning in warnings if warning.startswith('resume')] == [
        f'resume     jax 0.1 -> {jax.__version__}',
        f'resume     python 4.0 -> {platform.python_version()}',
    ]


@pytest.mark.parametrize('name', ['dtype', 'shape', 'missing'])
def test_arrays_that_orbax_would_cast_or_pad_are_refused(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(config: Config, optimizer: Any) -> Any:
        state = init_state(config, optimizer=optimizer)
        step = {
            'dtype': state.step.astype('float32'),
            'shape': jax.numpy.zeros(3, 'int32'),
            'missing': {'more': state.step},
        }[name]
        return state._replace(step=step)

    monkeypatch.setattr(module, 'init_state', other)
    with (
        Checkpoints(folder, tiny()) as checkpoints,
        pytest.raises(ConfigError, match=r'step.* there'),
    ):
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


def test_a_rollback_hashes_the_step_that_the_run_has_saved_itself_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, own = [], digests._digest
    monkeypatch.setattr(digests, '_digest', lambda path: (hashed.append(path), own(path))[1])
    with Checkpoints(folder, tiny(checkpoint={'keep': 3})) as checkpoints:
        checkpoints.save(make_state(tiny(), 3), 3)
        assert checkpoints.wait()
        hashed.clear()
        assert checkpoints.newest_verified() == 3
        checkpoints.delete_after(3)
        assert equal(checkpoints.restore(3), tiny(), 3)
        assert len(hashed) == len({*hashed}) > 0
        flip(folder / '3' / largest(folder / '3'))
        assert checkpoints.newest_verified() == 2


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


def test_a_save_that_was_delayed_stays_as_the_one_that_was_due(tmp_path: Path) -> None:
    config = tiny(checkpoint={'every': 2, 'keep': 1, 'keep_every': 4})
    with Checkpoints(tmp_path, config) as checkpoints:
        for due, step in (2, 3), (4, 6), (8, 8):
            assert checkpoints.poll(due) == due
            checkpoints.save(make_state(config, step), step)
            checkpoints.wait()
    with Checkpoints(tmp_path, config) as checkpoints:
        checkpoints.save(make_state(config, 9), 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['6', '8', '9']


def test_a_step_that_is_being_read_is_deleted_after_a_later_save(folder: Path) -> None:
    with Checkpoints(folder, tiny(checkpoint={'keep': 1})) as checkpoints:
        with sound_checkpoint(folder.parent) as read:
            assert read == folder / '2'
            checkpoints.save(make_state(tiny(), 3), 3)
            checkpoints.wait()
            assert sorted(path.name for path in folder.iterdir()) == ['2', '3']
            with sound_checkpoint(folder.parent) as newest:
                assert newest == folder / '3'
        checkpoints.save(make_state(tiny(), 4), 4)
        checkpoints.wait()
        assert sorted(path.name for path in folder.iterdir()) == ['4']


def test_a_step_that_was_read_and_is_written_anew_stays(folder: Path) -> None:
    with Checkpoints(folder, tiny(checkpoint={'keep': 1})) as checkpoints:
        with sound_checkpoint(folder / '2'):
            checkpoints.save(make_state(tiny(), 3), 3)
            checkpoints.wait()
        checkpoints.delete_after(1)
        checkpoints.save(make_state(tiny(), 22), 2)
        checkpoints.wait()
        assert equal(checkpoints.restore(2), tiny(), 22)


def test_it_is_time_by_steps_and_by_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(tmp_path, tiny(checkpoint={'every': 10, 'minutes': 5})) as checkpoints:
        assert [checkpoints.poll(step) for step in (9, 10, 11)] == [None, 10, 10]
        checkpoints.save(make_state(tiny(), 11), 11)
        checkpoints.wait()
        assert checkpoints.poll(12) is None
        now = time.monotonic()
        monkeypatch.setattr(time, 'monotonic', lambda: now + 301)
        assert checkpoints.poll(13) == 13
        checkpoints.save(make_state(tiny(), 13), 13)
        checkpoints.wait()
        assert checkpoints.poll(14) is None
    assert [read_record(tmp_path / step).due for step in ('11', '13')] == [10, None]


def test_the_command_lists_and_compares(folder: Path) -> None:
    run = CliRunner()
    # Each checkpoint has one line in a pipe, whatever the width of the terminal.
    listed = run.invoke(
        checkpoint_app, ['ls', str(folder.parent)], env={'COLUMNS': '40'}
    ).output.splitlines()
    assert [line.split()[0] for line in listed] == ['step', '1', '2']
    assert all(text in listed[2] for text in ('1.5000', 'data=2 x model=2', 'complete'))
    assert run.invoke(checkpoint_app, ['verify', f'{folder.parent}/2']).output == '2  ok\n'
    with Checkpoints(folder, tiny(1, 1, optim={'lr': 0.5})) as checkpoints:
        state = make_state(tiny(), 2)
        state.params['embedding']['table'].set_value(
            state.params['embedding']['table'].get_value() * 1.5
        )
        checkpoints.save(state, 3)
    said = run.invoke(
        checkpoint_app, ['diff', str(folder.parent), '3', '2'], catch_exceptions=False
    ).output.splitlines()
    assert said[:3] == ['mesh.data: 1 -> 2', 'mesh.model: 1 -> 2', 'optim.lr: 0.5 -> 0.00015']
    assert 'embedding.table: 0.5' in said
    assert {line.split(': ')[1] for line in said[3:]} == {'0', '0.5'}
    assert run.invoke(checkpoint_app, ['diff', f'{folder}/2', f'{folder}/2']).exit_code == 0
    missing = run.invoke(checkpoint_app, ['diff', str(folder.parent), '2', '9'])
    assert isinstance(missing.exception, ConfigError)
    assert 'choose one of steps' in str(missing.exception)


def test_a_difference_is_relative_to_all_blocks_and_a_nan_is_never_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, 'BLOCK', 2)
    zeros, ones = np.zeros(5, np.float32), np.ones(5, np.float32)
    pairs = ([np.nan, 1, 1, 1, 1], ones), ([1, 2, 2, 2, 3], [4, 2, 2, 2, 2]), (ones, zeros)
    found = [compare._difference(*map(np.asarray, pair)) for pair in (*pairs, (zeros, zeros))]
    np.testing.assert_array_equal(found, [np.nan, 0.75, np.inf, 0])


def test_a_step_that_is_compared_is_intact_and_stays_until_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def difference(a: Path, b: Path) -> Iterator[tuple[str, float]]:
        with Checkpoints(folder, tiny(checkpoint={'keep': 1})) as checkpoints:
            for step in (3, 4):
                checkpoints.save(make_state(tiny(), step), step)
        yield 'all', float(a.is_dir() and b.is_dir())

    monkeypatch.setattr(compare, 'parameter_differences', difference)
    run, arguments = CliRunner(), ['diff', str(folder.parent), '1', '2']
    said = run.invoke(checkpoint_app, arguments, catch_exceptions=False).output
    assert 'all: 1' in said.splitlines()
    truncate(folder / '2' / RECORD)
    for steps in (['4', '2'], ['2', '4']):
        with pytest.raises(CheckpointError, match='2 cannot be used: run megajax checkpoint veri'):
            run.invoke(checkpoint_app, ['diff', str(folder.parent), *steps], catch_exceptions=False)
