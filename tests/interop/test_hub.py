"""Models of the Hub: what is downloaded, from a server of the tests, and what is said otherwise."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from interop import hub as hubs
from interop.hub import COMMIT, NAME, TAG, serving
from interop.stored import DATA
from support import megajax, slow

from megajax.core.config import ConfigError
from megajax.interop.huggingface.directories import REPOSITORY
from megajax.interop.huggingface.hub import find_source
from megajax.runtime.checkpoint.record import read_record

TOKEN = 'hf_' + 'x7' * 17
REFUSED = 'http://127.0.0.1:9'  # the port of `discard`, where nobody listens
FETCH = (  # all that `import hf` does before it makes arrays
    'import sys; from megajax.interop.huggingface.hub import find_source\n'
    'folder, repository = find_source(sys.argv[1]); repository.fetch_weights(); print(folder)'
)


@pytest.fixture(name='model')
def make_model(tmp_path: Path) -> Path:
    """A repository with more than is needed."""
    folder = tmp_path / 'there'
    shutil.copytree(DATA / 'gpt2', folder)
    for name in ('pytorch_model.bin', 'modeling_gpt2.py', 'README.md', 'onnx.safetensors'):
        (folder / name).write_text('not for megajax')
    (folder / 'generation_config.json').write_text('{"eos_token_id": [49, 7]}')
    return folder


def run(
    folder: Path, url: str, *command: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {'HF_ENDPOINT': url, 'HF_HOME': str(folder / 'hf'), 'JAX_PLATFORMS': 'cpu'}
    known: Mapping[str, str] = {k: x for k, x in os.environ.items() if not k.startswith('HF_')}
    return subprocess.run(
        [sys.executable, *command],
        env={**known, **environment, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


Import = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(name='import_hf')
def make_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """`megajax import hf ARGUMENTS` with a hub and a token, in this process."""
    for name in [name for name in os.environ if name.startswith('HF_')]:
        monkeypatch.delenv(name)

    def import_hf(
        url: str, *arguments: str, token: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        hubs.use(monkeypatch, url, tmp_path)
        if token:
            monkeypatch.setenv('HF_TOKEN', token)
        return megajax('import', 'hf', *arguments, folder=tmp_path)

    return import_hf


@pytest.fixture(name='fetch')
def make_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """All that `import hf` does before it makes arrays; the folder that it reads."""

    def fetch(url: str) -> Path:
        hubs.use(monkeypatch, url, tmp_path)
        monkeypatch.chdir(tmp_path)
        folder, repository = find_source(NAME)
        assert repository is not None
        repository.fetch_weights()
        return folder

    return fetch


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of a command that a mistake has ended."""
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    (line,) = done.stderr.splitlines()
    return line.removeprefix('error: ')


@pytest.mark.slow
def test_a_repository_becomes_a_run_that_names_its_commit(
    model: Path, tmp_path: Path, import_hf: Import
) -> None:
    with serving(model) as hub:
        done = import_hf(hub.url, NAME, 'run', '--revision', TAG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f'repository {NAME} at {COMMIT}'
    checkpoint = tmp_path / 'run' / 'checkpoints' / '0'
    assert read_record(checkpoint).data[REPOSITORY] == f'{NAME} at {COMMIT}'
    ends = json.loads((checkpoint / 'huggingface' / 'generation_config.json').read_text())
    assert ends == {'eos_token_id': [49, 7]}


def test_only_the_files_that_are_needed_are_downloaded(
    model: Path, fetch: Callable[[str], Path]
) -> None:
    of_images = {'preprocessor_config.json', 'processor_config.json'}
    for name in of_images:
        (model / name).write_text(name)
    with serving(model) as hub:
        fetch(hub.url)
        needed = {'config.json', 'tokenizer.json', 'generation_config.json', 'model.safetensors'}
        assert hub.fetched - {''} == needed | of_images


def test_the_files_of_an_index_are_downloaded_and_no_other_name(
    model: Path, fetch: Callable[[str], Path]
) -> None:
    for name in ('a.safetensors', 'b.safetensors'):
        (model / name).write_text(name)
    (model / 'model.safetensors').unlink()
    weights = {'x': 'a.safetensors', 'y': 'b.safetensors', 'z': 'modeling_gpt2.py', 'w': '*'}
    (model / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weights}))
    with serving(model) as hub:
        fetch(hub.url)
        fetched = {name for name in hub.fetched if name.endswith(('.safetensors', '.py', '.bin'))}
    assert fetched == {'a.safetensors', 'b.safetensors'}


def test_without_a_network_the_cache_is_used(
    model: Path, tmp_path: Path, fetch: Callable[[str], Path]
) -> None:
    with serving(model) as hub:
        before = fetch(hub.url)
        count = len(hub.asked)
        offline = run(tmp_path, hub.url, '-c', FETCH, NAME, HF_HUB_OFFLINE='1')
        assert len(hub.asked) == count
    assert offline.stdout == f'{before}\n'


def test_a_private_repository_needs_the_token_which_is_never_printed(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fetch: Callable[[str], Path],
    import_hf: Import,
) -> None:
    with serving(model, token=TOKEN) as hub:
        monkeypatch.setenv('HF_TOKEN', TOKEN)
        fetch(hub.url)
        shutil.rmtree(tmp_path / 'hf')
        said = refusal(import_hf(hub.url, NAME, 'run', token=TOKEN + 'y'))
    assert said.startswith(f'{NAME}: is neither a folder here nor a repository that 127.0.0.1:')
    assert 'set HF_TOKEN to a token that may read it' in said
    assert TOKEN not in said


@pytest.mark.parametrize('token', [slow(TOKEN + '\x01'), TOKEN + '\u20ac'])
def test_a_token_that_no_header_can_hold_is_not_printed_either(
    token: str, import_hf: Import
) -> None:
    said = refusal(import_hf(REFUSED, NAME, 'run', token=token))
    assert said.startswith(f'{NAME}: cannot be downloaded from 127.0.0.1:9 (')
    assert TOKEN not in said


def test_a_gated_repository_says_whose_terms_to_accept(model: Path, import_hf: Import) -> None:
    with serving(model, gated=True) as hub:
        said = refusal(import_hf(hub.url, NAME, 'run'))
    assert f'{NAME}: is gated on 127.0.0.1:{hub.server_port}: accept its terms there' in said


def test_a_revision_that_is_not_there_is_named(model: Path, import_hf: Import) -> None:
    with serving(model) as hub:
        said = refusal(import_hf(hub.url, NAME, 'run', '--revision', 'v9'))
    assert said.startswith(f'{NAME}: has no revision v9 on 127.0.0.1:')


@pytest.mark.parametrize(
    ('offline', 'message'),
    [('', 'cannot be downloaded from 127.0.0.1:9 ('), ('1', ', and HF_HUB_OFFLINE is set: ')],
)
def test_without_a_network_or_a_copy_the_fix_is_a_folder(
    offline: str, message: str, tmp_path: Path, import_hf: Import
) -> None:
    if offline:  # read when the library is imported, so in another process
        command = '-m', 'megajax', 'import', 'hf', NAME, 'run'
        said = refusal(run(tmp_path, REFUSED, *command, HF_HUB_OFFLINE=offline))
    else:
        said = refusal(import_hf(REFUSED, NAME, 'run'))
    assert said.startswith(f'{NAME}: ')
    assert message in said
    assert said.endswith(
        'download it with: hf download Some/Model --local-dir Model, where there is a network, '
        'and give that folder'
    )
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('override', ['mesh.modle=2', 'lora.rank=4'])
def test_an_override_that_is_refused_costs_no_download_of_weights(
    override: str, model: Path, import_hf: Import
) -> None:
    with serving(model) as hub:
        assert override.partition('=')[0] in refusal(import_hf(hub.url, NAME, 'run', override))
        assert 'model.safetensors' not in hub.fetched
        assert 'config.json' in hub.fetched


def test_a_tokenizer_that_is_refused_costs_no_download_of_weights(
    model: Path, import_hf: Import
) -> None:
    (model / 'tokenizer_config.json').write_text('{"tokenizer_class": "BertTokenizer"}')
    with serving(model) as hub:
        said = refusal(import_hf(hub.url, NAME, 'run'))
        assert 'model.safetensors' not in hub.fetched
    assert 'transformers makes a BertTokenizer, which reads WordPiece' in said


def test_a_folder_of_that_name_comes_first_and_is_said(
    model: Path, tmp_path: Path, import_hf: Import, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(model, tmp_path / NAME)
    (tmp_path / NAME / 'config.json').write_text('{"model_type": "mamba"}')
    with serving(model) as hub:
        done = import_hf(hub.url, NAME, 'run')
        assert hub.asked == []
    assert done.returncode == 2
    assert f'{NAME} is a local folder, so nothing is downloaded' in caplog.text
    assert '"mamba": only' in done.stderr
    said = refusal(import_hf(REFUSED, NAME, 'run', '--revision', 'v1'))
    assert said == f'--revision is of a repository, and {NAME} is here: leave it out'


@pytest.mark.parametrize(
    'name',
    ['../x', 'a/..', 'a/b..c', 'Some/Mo\x1b[31mdel', 'Some/Model\n', 'gpt2', 'a/b/c', 'a/' * 999],
)
def test_what_is_no_name_of_a_repository_asks_nobody(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        find_source(name)
    said = str(error.value)
    assert 'no such folder, and no name of a repository, which is ORG/NAME' in said
    assert said.isprintable()


@pytest.mark.parametrize('revision', ['../main', 'ma\x1bin', '', 'a b', 'x' * 999])
def test_what_is_no_revision_asks_nobody(revision: str) -> None:
    with pytest.raises(ConfigError, match=r'give a branch, a tag or a commit, such as main$'):
        find_source(NAME, revision)


def test_the_library_that_downloads_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    said = refusal(megajax('import', 'hf', NAME, 'run', folder=tmp_path))
    assert said.startswith(f'{NAME}: needs huggingface_hub: pip install ')
    assert '[hub]' in said
