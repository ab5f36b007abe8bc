"""Inputs of the Hugging Face Hub and of Google Cloud Storage, from servers of the tests."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import fsspec
import pytest
from interop import hub
from runtime.data import google
from runtime.data.test_inputs import LINES, WRITERS, units, write
from runtime.data.test_remote import check_the_same_units, write_all

from megajax.core.config import ConfigError
from megajax.runtime.data.sources.inputs import find_inputs

ROOT = Path(__file__).parents[3]
DATASET = f'hf://datasets/{hub.NAME}'
BUCKET = f'gs://{google.BUCKET}'


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No credentials, no look for a cloud that this machine may be in, no listings of before."""
    for name in ('HF_TOKEN', 'GOOGLE_APPLICATION_CREDENTIALS'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('NO_GCE_CHECK', 'true')
    monkeypatch.setenv('CLOUDSDK_CONFIG', str(tmp_path / 'no gcloud'))
    yield
    for protocol in ('hf', 'gs'):
        if protocol in fsspec.registry:
            fsspec.get_filesystem_class(protocol).clear_instance_cache()


@pytest.fixture(name='folder')
def make_folder(tmp_path: Path) -> Path:
    """Files of every kind, also in a folder."""
    folder = tmp_path / 'corpus'
    (folder / 'more').mkdir(parents=True)
    write_all(folder)
    write(folder / 'more', 'c.jsonl', b'{"text": "c"}\n')
    return folder


def use_storage(monkeypatch: pytest.MonkeyPatch, served: google.Storage) -> None:
    pytest.importorskip('gcsfs', reason='gcsfs is not installed')
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', served.url)


def names(url: str) -> list[str]:
    return [input.path for input in find_inputs([url], None)]


def refusal(url: str) -> str:
    with pytest.raises(ConfigError) as caught:
        units(url, unit=1000)
    return str(caught.value)


def check_a_store(folder: Path, url: str) -> None:
    check_the_same_units(folder, url)
    assert names(f'{url}/a.*') == [f'{url}/a.jsonl{suffix}' for suffix in WRITERS]
    assert names(f'{url}/**/*.jsonl') == [f'{url}/a.jsonl', f'{url}/more/c.jsonl']
    assert refusal(f'{url}/*.csv') == f'{url}/*.csv: matches no file; check the pattern'
    assert f'{url}/none.jsonl: there is no such file; check ' in refusal(f'{url}/none.jsonl')
    assert f'{url}/more: is a folder; give its files' in refusal(f'{url}/more')


def test_the_hub_has_the_units_of_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.serving(folder, kind='datasets') as served:
        hub.use(monkeypatch, served.url, tmp_path)
        check_a_store(folder, DATASET)
        check_the_same_units(folder, f'{DATASET}@{hub.TAG}')
        private = 'there is no such file; check repository, revision and name; a private one '
        for url in (f'{DATASET}@v9/a.jsonl', 'hf://datasets/No/Such/*.jsonl'):
            assert refusal(url) == f'{url}: {private}needs HF_TOKEN'


def test_a_glob_asks_the_hub_for_a_list_and_not_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / 'corpus'
    folder.mkdir()
    for number in range(20):
        write(folder, f'{number}.jsonl', LINES)
    with hub.serving(folder, kind='datasets') as served:
        hub.use(monkeypatch, served.url, tmp_path)
        listed = find_inputs([f'{DATASET}/*.jsonl'], None)
        asked = len(served.asked)
        (alone,) = find_inputs([listed[0].path], None)
    assert len(listed) == 20
    assert asked < 20
    assert listed[0] == alone
    assert alone.version


def test_a_private_repository_needs_the_token(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.serving(folder, kind='datasets', token='hf_secret') as served:
        hub.use(monkeypatch, served.url, tmp_path)
        url = f'{DATASET}/a.jsonl'
        assert refusal(url).endswith('; a private one needs HF_TOKEN')
        fsspec.get_filesystem_class('hf').clear_instance_cache()
        monkeypatch.setenv('HF_TOKEN', 'hf_secret')
        assert len(units(url, unit=len(LINES))) == 1


@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'b.parquet'])
def test_a_gated_repository_is_refused_by_its_terms_and_not_as_a_broken_file(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.serving(folder, kind='datasets', gated=True) as served:
        hub.use(monkeypatch, served.url, tmp_path)
        said = refusal(f'{DATASET}/{name}')
    assert said.startswith(f'{DATASET}/{name}: cannot be read: 403 Client Error.')
    assert 'HF_TOKEN, and the terms of a gated repository accepted on the Hub' in said


def test_a_changed_file_of_a_repository_is_another_version(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.serving(folder, kind='datasets') as served:
        hub.use(monkeypatch, served.url, tmp_path)
        (before,) = find_inputs([f'{DATASET}/a.jsonl'], None)
        write(folder, 'a.jsonl', LINES[::-1])
        fsspec.get_filesystem_class('hf').clear_instance_cache()
        (after,) = find_inputs([f'{DATASET}/a.jsonl'], None)
    assert before.size == after.size
    assert '' not in (before.version, after.version)
    assert before.version != after.version


def test_google_has_the_units_of_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with google.serving(folder) as served:
        use_storage(monkeypatch, served)
        check_a_store(folder, BUCKET)
        for url in ('gs://none/a.jsonl', 'gs://none/*.jsonl'):
            assert refusal(url) == f'{url}: there is no such file; check the name, or give a glob'


@pytest.mark.parametrize('status', [401, 403])
def test_a_private_bucket_is_refused_with_the_way_to_log_in(
    status: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with google.serving(folder, refuses=status) as served, caplog.at_level(logging.WARNING):
        use_storage(monkeypatch, served)
        for name in ('a.jsonl', '*.jsonl'):
            said = refusal(f'{BUCKET}/{name}')
            assert said.startswith(f'{BUCKET}/{name}: cannot be read: ')
            assert 'gcloud auth application-default login' in said
    assert caplog.text == ''


@pytest.mark.parametrize(
    ('url', 'package'),
    [(f'{DATASET}/a.jsonl', 'huggingface_hub'), (f'{BUCKET}/a.jsonl', 'gcsfs')],
)
def test_a_package_that_is_missing_is_named(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    known = import_module('fsspec.registry')._registry
    for protocol in ('gs', 'hf'):
        monkeypatch.delitem(known, protocol, raising=False)
    said = refusal(url)
    needed = f'{url}: needs {package}, which is not installed; pip install {package} '
    assert said.startswith(needed)
    assert 'remote' in said.removeprefix(needed)


def test_a_bucket_has_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'gcsfs', None)  # so that no server is asked
    for protocol in ('gs', 'gcs'):
        monkeypatch.delitem(import_module('fsspec.registry')._registry, protocol, raising=False)
    with pytest.raises(ConfigError, match=r'gcs://corpus/a\.jsonl: would be read twice: '):
        find_inputs([f'{BUCKET}/a.jsonl', f'gcs://{google.BUCKET}/a.jsonl'], None)


@pytest.mark.slow
def test_a_build_of_a_repository_is_that_of_its_files(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip('huggingface_hub', reason="it is in the extra 'hub'")

    def run(name: str, *inputs: str, url: str = '') -> subprocess.CompletedProcess[str]:
        known = {k: x for k, x in os.environ.items() if not k.startswith('HF_')}
        out = str(tmp_path / name)
        command = [sys.executable, '-m', 'megajax', 'data', 'build', out, '--tokenizer', 'bytes']
        return subprocess.run(
            [*command, *(word for input in inputs for word in ('--input', input))],
            env={**known, 'HF_ENDPOINT': url, 'HF_HOME': str(tmp_path / 'hf')},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    patterns = ('*.jsonl', '*.jsonl.gz', '*.parquet')
    here = run('here', *(f'{folder}/{pattern}' for pattern in patterns))
    with hub.serving(folder, kind='datasets') as served:
        there = run('there', *(f'{DATASET}/{pattern}' for pattern in patterns), url=served.url)
        missing = run('missing', 'hf://datasets/No/Such/*.jsonl', url=served.url)
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    for suffix in ('bin', 'idx'):
        files = [tmp_path / f'{name}.{suffix}' for name in ('here', 'there')]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert missing.returncode == 2
    (line,) = missing.stderr.splitlines()
    assert line.startswith('error: hf://datasets/No/Such/*.jsonl: there is no such file; check ')
