"""The files of a run that a resume reads are there as a whole, or as they were."""

import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkpoints import make_state, tiny
from support import disk_full_at, on_mesh

from megajax.base.files import locks
from megajax.core.config import ConfigError, dump, load
from megajax.core.config.recorded import LOCK
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.hf_files import Companions
from megajax.runtime.data.text.tokenizer import byte_tokenizer, load_tokenizer
from megajax.runtime.run import start as run_start
from megajax.runtime.run.inputs import REPLACED, write_inputs
from megajax.runtime.run.lock import run_lock
from megajax.runtime.run.start import opened_folder


def contents(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir()}


def test_on_a_full_disk_the_files_stay_and_the_start_says_why_it_ends(tmp_path: Path) -> None:
    write_inputs(tmp_path, tiny(), byte_tokenizer(), Companions())
    before = contents(tmp_path)
    assert before.keys() == {'config.yaml', 'tokenizer.json'}
    assert before['config.yaml'].decode() == dump(tiny())
    longer = tiny(train={'steps': 100_000})
    refused = rf'^{re.escape(str(tmp_path))} cannot be written: File too large; free some '
    with disk_full_at(1000), pytest.raises(ConfigError, match=refused):
        write_inputs(tmp_path, longer, None, Companions())
    with disk_full_at(1000), pytest.raises(ConfigError, match=r'too large.*; free some space, '):
        write_inputs(tmp_path, longer, byte_tokenizer(), Companions())
    assert contents(tmp_path) == before


def test_what_has_not_changed_needs_no_room(tmp_path: Path) -> None:
    write_inputs(tmp_path, tiny(), None, Companions())
    with disk_full_at(1000):
        write_inputs(tmp_path, tiny(), None, Companions())


def test_the_config_keeps_no_key_of_one_start(tmp_path: Path) -> None:
    of_start = {'dir': str(tmp_path), 'resume': 'never', 'allow_changed_data': True}
    config = tiny(run={**of_start, 'max_minutes': 5.0})
    write_inputs(tmp_path, config, None, Companions())
    assert load(tmp_path / 'config.yaml') == tiny(run={'max_minutes': 5.0})


def test_a_start_without_a_step_to_take_leaves_the_files(tmp_path: Path) -> None:
    config = tiny(train={'steps': 3})
    write_inputs(tmp_path, config, None, Companions(), step=3)  # a copy without a config
    before = contents(tmp_path)
    assert before.keys() == {'config.yaml'}
    other = tiny(train={'steps': 3}, optim={'lr': 0.5})
    write_inputs(tmp_path, other, byte_tokenizer(), Companions(), step=3)
    assert contents(tmp_path) == before
    write_inputs(tmp_path, other, byte_tokenizer(), Companions(), step=2)
    assert contents(tmp_path)['config.yaml'] != before['config.yaml']


def test_a_tokenizer_is_there_with_its_names_and_without_those_of_another(tmp_path: Path) -> None:
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "<other>"}')
    write_inputs(tmp_path, tiny(), byte_tokenizer(), Companions())
    assert contents(tmp_path).keys() == {'config.yaml', 'tokenizer.json'}
    own = load_tokenizer(str(tmp_path / 'tokenizer.json'))
    assert own.fingerprint == byte_tokenizer().fingerprint


def test_a_failed_start_does_not_make_a_users_later_files_those_of_a_run(tmp_path: Path) -> None:
    own = tmp_path / 'mine'
    start = opened_folder(tiny(run={'dir': str(own)}), 'a')
    with pytest.raises(ConfigError, match='typo'), start:
        raise ConfigError('typo in the corpus')
    own.mkdir()
    (own / 'tokenizer.json').write_text('mine')
    start = opened_folder(tiny(run={'dir': str(own)}), 'a')
    with pytest.raises(ConfigError, match='no run has written'), start:
        pass


def test_a_start_that_another_overtakes_leaves_the_new_folder_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / 'run'
    is_created = run_start._is_created
    with ExitStack() as other:

        def overtaken(path: Path) -> bool:
            is_new = is_created(path)
            other.enter_context(run_lock(path))
            return is_new

        monkeypatch.setattr(run_start, '_is_created', overtaken)
        later = opened_folder(tiny(run={'dir': str(folder)}), 'a')
        with pytest.raises(ConfigError, match='is locked by'), later:
            pass
        assert (folder / LOCK).read_text()


def test_a_folder_that_is_deleted_during_the_start_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / 'run'

    def deleted(descriptor: int, path: Path) -> None:
        shutil.rmtree(folder)
        locks.lock(descriptor, path)

    with monkeypatch.context() as patch:
        patch.setattr('megajax.runtime.run.lock.lock', deleted)
        with pytest.raises(ConfigError, match='is locked by'), run_lock(folder):
            pass
    with run_lock(folder):
        pass


def test_the_cache_of_hugging_face_in_a_folder_is_not_replaced(tmp_path: Path) -> None:
    cached = tmp_path / 'huggingface/hub/version.txt'
    cached.parent.mkdir(parents=True)
    cached.write_text('mine')
    with opened_folder(tiny(run={'dir': str(tmp_path)}), 'a'):
        write_inputs(tmp_path, tiny(), None, Companions())
    assert cached.read_text() == 'mine'


@pytest.mark.parametrize('name', REPLACED)
def test_a_file_that_no_run_has_written_is_not_replaced(name: str, tmp_path: Path) -> None:
    run = tmp_path / 'my run'
    own = run / name
    own.parent.mkdir(parents=True)
    own.write_text('mine')
    start = opened_folder(tiny(run={'dir': str(run)}), 'a')
    files = f'has files that no run has written and that this run would replace: {name}; use a new'
    with pytest.raises(ConfigError, match=rf'^run\.dir: .* {re.escape(files)}') as raised, start:
        pass
    assert own.read_text() == 'mine'
    assert [path for path in run.rglob('*') if path.is_file()] == [own]
    *command, override = shlex.split(str(raised.value).rpartition('for example ')[2])
    assert command == (['megajax', 'train', str(own)] if name == 'config.yaml' else [])
    new = tiny(run={'dir': override.removeprefix('run.dir=')})
    with opened_folder(new, 'a') as folder:
        assert folder == run / 'run'


def test_the_folder_of_a_run_that_was_killed_or_lost_its_lock_is_taken(tmp_path: Path) -> None:
    config = tiny(run={'dir': str(tmp_path)})
    with opened_folder(config, 'a'):
        write_inputs(tmp_path, config, None, Companions())
    with opened_folder(config, 'a'):  # before its first checkpoint
        (tmp_path / 'lock').unlink()
    with pytest.raises(ConfigError), opened_folder(config, 'a'):
        pass
    with on_mesh(config), Checkpoints(tmp_path / 'checkpoints', config) as checkpoints:
        checkpoints.save(make_state(config, 1), 1)
    with opened_folder(config, 'a'):
        pass
