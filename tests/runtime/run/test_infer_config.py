"""A run keeps the tokenizer that it began with through every resume."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_state, tiny
from counting import CONFIG
from runtime.data import stores
from support import on_mesh, slow, write_run
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import Config, ConfigError, dump, load
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.record import read_record
from megajax.runtime.run.chat_template import read_corpus
from megajax.runtime.run.infer_config import config_of_overrides, how_to_resume
from megajax.runtime.run.run import run


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    with on_mesh(tiny(1, 1)):
        yield


@pytest.fixture(name='server')
def make_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.Web]:
    """A server of two texts that have no words in common."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    (tmp_path / 'web').mkdir()
    write(tmp_path / 'web/a.jsonl', 'one two three four ')
    write(tmp_path / 'web/b.jsonl', 'seventy eighty ninety ')
    with stores.web(tmp_path / 'web') as server:
        yield server


def write(path: Path, words: str) -> None:
    lines = [json.dumps({'text': f'{words}{i} {i * i} ' * 50}) for i in range(60)]
    path.write_text('\n'.join(lines))


def config(corpus: str, *, run: dict[str, object] | None = None, **data: object) -> Config:
    keys = {'corpus': corpus, 'tokenizer': 'auto', 'split': '90,10,0', **data}
    return tiny(1, 1, data=keys, train={'batch_size': 2}, run=run or {})


def test_a_stopped_run_names_a_command_that_takes_its_config(tmp_path: Path) -> None:
    folder = tmp_path / 'my run'
    folder.mkdir()
    again = f"to resume, run the same command with 'run.dir={folder}'"
    begun = load('tiny', [f'run.dir={folder}', 'train.steps=70'])
    (folder / 'config.yaml').write_text(dump(load('tiny', ['train.steps=70', 'run.resume=never'])))
    assert how_to_resume(folder, is_alone=False) == again
    anyway = how_to_resume(folder, is_alone=False, resume='never')
    assert anyway == f'{again} run.resume=auto'
    command = shlex.split(how_to_resume(folder, is_alone=True).removeprefix('to resume, run '))
    assert command[:2] == ['megajax', 'train']
    assert config_of_overrides(command[2:])[0] == begun
    (folder / 'config.yaml').unlink()
    with on_mesh(begun), Checkpoints(folder / 'checkpoints', begun) as checkpoints:
        checkpoints.save(make_state(begun, 1), 1)
    assert how_to_resume(folder, is_alone=True) == again


def test_a_run_that_is_stopped_before_it_is_one_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write_run(tmp_path, CONFIG))
    with pytest.raises(SystemExit) as stopped:
        run(load('small.yaml', ['run.max_minutes=1e-9']), name='small')
    assert stopped.value.code == 75
    said = capsys.readouterr().out
    assert said.endswith('; to start it again, run the same command\n')
    assert not list(Path('runs').iterdir())


def start(config: Config, run: Path) -> str | None:
    """Start or resume a run, and save its next step; return the hash of its tokenizer."""
    data, _ = read_corpus(config, run, None)
    saved = run / 'checkpoints'
    with Checkpoints(
        saved, config, tokenizer=data.tokenizer, data=data.fingerprints
    ) as checkpoints:
        newest = checkpoints.newest_verified()
        if newest is not None:
            checkpoints.restore(newest)
        step = (newest or 0) + 1
        checkpoints.save(make_state(config, step), step)
    return read_record(saved / str(step)).tokenizer_sha256


@pytest.mark.parametrize(
    ('old', 'changes'),
    [({}, [{'corpus': '{}/b.jsonl'}, {'split': '80,20,0'}]), slow({'order': 'streamed'}, [{}])],
    ids=['another corpus and split', 'another order'],
)
def test_a_changed_key_of_the_data_lets_a_run_resume_again_and_again(
    server: stores.Web, tmp_path: Path, old: dict[str, str], changes: list[dict[str, str]]
) -> None:
    before, *others = (
        {key: value.format(server.url) for key, value in {'corpus': '{}/a.jsonl', **keys}.items()}
        for keys in (old, *changes)
    )
    first = start(config(**before), tmp_path / 'run')
    assert first
    for keys in (*(x for after in others for x in (after, after, before)), before):
        assert start(config(**keys), tmp_path / 'run') == first


def test_a_changed_remote_file_is_read_with_the_tokenizer_of_the_run_if_that_is_allowed(
    server: stores.Web, tmp_path: Path
) -> None:
    url = f'{server.url}/a.jsonl'
    first = start(config(url), tmp_path / 'run')
    write(tmp_path / 'web/a.jsonl', 'seventy eighty ninety ')
    with pytest.raises(ConfigError, match=r'different data of the same name.*allow_changed_data'):
        start(config(url), tmp_path / 'run')
    assert start(config(url, run={'allow_changed_data': True}), tmp_path / 'run') == first


def test_a_resumed_run_finds_the_tokens_that_its_first_start_has_kept(
    server: stores.Web, tmp_path: Path
) -> None:
    url = f'{server.url}/a.jsonl'
    first = start(config(url), tmp_path / 'run')
    for copy in (tmp_path / 'cache').rglob('a.jsonl'):
        copy.unlink()
    assert start(config(url), tmp_path / 'run') == first
    assert server.asked == ['/a.jsonl']


def build(tmp_path: Path, name: str, *options: str) -> str:
    """Build token files of a text, as `megajax data build` does; return their prefix."""
    words = ['data', 'build', str(tmp_path / name), '--input', str(tmp_path / 'text.jsonl')]
    done = CliRunner().invoke(app, [*words, *options])
    assert done.exit_code == 0, (done.output, done.exception)
    return str(tmp_path / name)


@pytest.mark.usefixtures('one_thread')
@pytest.mark.parametrize(
    ('began', 'is_blend'), [('auto', False), ('web.tokenizer.json', False), ('auto', True)]
)
def test_the_advice_on_tokens_of_another_tokenizer_ends_in_a_run_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: str, is_blend: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / 'text.jsonl', 'one two three four ')
    web = build(tmp_path, 'web', '--train-bpe', '280')
    other = build(tmp_path, 'other', '--train-bpe', '300')

    def resumed(corpus: str) -> Config:
        data = {'corpus': 'stdlib', 'blend': {corpus: 1.0}} if is_blend else {'corpus': corpus}
        return config(**data, tokenizer=began, run={'dir': 'run'})

    run = tmp_path / 'run'
    first = start(resumed(web), run)
    with pytest.raises(ConfigError) as error:
        start(resumed(other), run)
    message = str(error.value)
    assert 'data.tokenizer=auto' not in message
    assert message.endswith('name NEW in data.blend' if is_blend else 'set data.corpus=NEW')
    option = message.rpartition('--input FILES ')[2].partition(', and')[0]
    assert start(resumed(build(tmp_path, 'again', *option.split())), run) == first
