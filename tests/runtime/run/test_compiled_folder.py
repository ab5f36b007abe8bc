"""The folder of compiled programs: which one a start uses, and what it deletes there."""

import zlib
from collections.abc import Iterator

import jax
import pytest

from megajax.core.config import ConfigError, RunConfig
from megajax.runtime.run import compile_cache as module
from megajax.runtime.run.compile_cache import FOLDER, compile_cache

SETTING = 'jax_compilation_cache_dir'


@pytest.fixture(name='used')
def fixture_used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """The folders that jax was told to use, one after another."""
    used = list[str | None]()
    monkeypatch.setattr(module, '_use', used.append)
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    before = jax.config.values[SETTING]
    jax.config.update(SETTING, None)
    yield used
    jax.config.update(SETTING, before)


def test_a_run_uses_its_folder_at_every_start_and_jax_its_own_afterwards(tmp_path, used):
    for _ in range(2):
        with compile_cache(RunConfig(), tmp_path / 'new'):
            assert used.pop() == str(tmp_path / 'new' / FOLDER)
        assert used.pop() is None
    with compile_cache(RunConfig(compile_cache=str(tmp_path / 'x' / 'y')), tmp_path):
        assert used == [str(tmp_path / 'x' / 'y')]


@pytest.mark.parametrize('why', ['none', 'set before', 'several devices'])
def test_without_a_need_or_where_programs_may_hang_there_is_no_folder(
    tmp_path, used, why, monkeypatch
):
    if why == 'set before':
        jax.config.update(SETTING, 'elsewhere')
    if why == 'several devices':
        monkeypatch.setattr(jax, 'device_count', lambda: 2)
    with compile_cache(RunConfig(compile_cache='none' if why == 'none' else 'auto'), tmp_path):
        assert not [*tmp_path.iterdir()]
    assert used == []


def test_a_folder_that_is_named_for_several_devices_is_used_with_a_warning(
    tmp_path, used, monkeypatch, caplog
):
    monkeypatch.setattr(jax, 'device_count', lambda: 2)
    with compile_cache(RunConfig(compile_cache=str(tmp_path)), tmp_path):
        assert used == [str(tmp_path)]
    assert 'XLA may hang' in caplog.text


@pytest.mark.parametrize('process', [0, 1])
def test_process_0_deletes_damaged_programs_and_nothing_else(tmp_path, used, process, monkeypatch):
    zstandard = pytest.importorskip('zstandard')
    monkeypatch.setattr(jax, 'process_index', lambda: process)
    for name, data in {
        'a': zstandard.ZstdCompressor().compress(b'program' * 99),
        'b': zlib.compress(b'program' * 99),
    }.items():
        (tmp_path / f'{name}-cache').write_bytes(data)
        (tmp_path / f'{name}-cut-cache').write_bytes(data[:-10])
        (tmp_path / f'{name}-atime').write_bytes(data[:-10])
    with compile_cache(RunConfig(compile_cache=str(tmp_path)), tmp_path):
        left = {path.name for path in tmp_path.iterdir()}
    cut = {'a-cut-cache', 'b-cut-cache'}
    assert left == {'a-cache', 'b-cache', 'a-atime', 'b-atime'} | (cut if process else set())


def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_config(tmp_path, used):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match=r'run\.compile_cache=.*file.*; choose a folder'):
        compile_cache(RunConfig(compile_cache=str(tmp_path / 'file')), tmp_path).__enter__()
    assert used == []
