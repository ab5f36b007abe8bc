"""A run that starts again reads the programs that it compiled before, and never a part of one."""

import signal
from pathlib import Path

import pytest
from runs import CONFIG, finish, losses, read_until, start, train
from support import write_run

from megajax.runtime.run.compile_cache import ENTRIES, FOLDER, _drop_damaged, _is_whole

pytestmark = pytest.mark.faults

# Without the cache of the tests; and these programs compile in less than a second.
ALL = {'JAX_COMPILATION_CACHE_DIR': '', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}

COUNT_HITS = """
import atexit, jax
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
atexit.register(lambda: print('read', sum('cache_hits' in one for one in events), 'programs'))
"""


ONE_DEVICE = 'mesh.data=1', 'mesh.model=1'


@pytest.fixture(scope='module')
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp('straight'), CONFIG)
    train(folder, *ONE_DEVICE, 'run.compile_cache=none')
    assert not (folder / 'run' / FOLDER).exists()
    return folder / 'run'


def interrupted(folder: Path) -> None:
    process = start(folder, *ONE_DEVICE, **ALL)
    read_until(process, r'step +12\b')
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75


@pytest.mark.parametrize('damaged', [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_resumed_run_reads_its_programs_and_ends_in_the_same_bits(
    tmp_path: Path, straight: Path, damaged: bool
) -> None:
    folder = write_run(tmp_path, CONFIG)
    interrupted(folder)
    entries = sorted((folder / 'run' / FOLDER).glob(ENTRIES))
    assert any('train_step' in entry.name for entry in entries)
    if damaged:  # as by a process that was killed while it wrote
        for entry in entries:
            entry.write_bytes(entry.read_bytes()[:-10])
    said = train(folder, *ONE_DEVICE, 'run.resume=must', fault=COUNT_HITS, **ALL)
    assert ('is damaged: the program is compiled again' in said) == damaged
    assert ('read 0 programs' in said) == damaged
    assert losses(folder / 'run') == losses(straight)
    entries = (folder / 'run' / FOLDER).glob(ENTRIES)
    assert all(_is_whole(entry.read_bytes()) for entry in entries)


def test_on_several_cpu_devices_only_a_folder_that_is_named_is_used_with_a_warning(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path, CONFIG, split='1,0,0')
    short = 'train.steps=3', 'optim.schedule=constant'
    first, second = (
        train(
            *(folder, *short, f'run.compile_cache={chosen}'),
            **{'fault': COUNT_HITS, 'name': chosen, 'processes': 2, **ALL},
        )
        for chosen in ('programs', 'auto')
    )
    assert 'XLA may hang' in first
    assert any((folder / 'programs').glob(ENTRIES))
    assert 'XLA may hang' not in second
    assert not (folder / 'auto' / FOLDER).exists()
    assert losses(folder / 'auto') == losses(folder / 'programs')


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, CONFIG)
    (folder / 'file').write_text('')
    code, said = finish(start(folder, 'run.compile_cache=file'))
    assert code == 2
    assert 'run.compile_cache=file' in said


def test_a_program_that_another_run_deletes_meanwhile_is_no_error(
    tmp_path: Path,
) -> None:
    (tmp_path / 'a-cache').symlink_to(tmp_path / 'gone')  # listed, and not there when it is read
    (tmp_path / 'b-cache').write_bytes(b'part')
    _drop_damaged(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['a-cache']
