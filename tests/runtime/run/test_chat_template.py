"""A run writes messages with its model's own chat template, and as on the day it began."""

import json
import logging
from datetime import datetime
from pathlib import Path

import pytest
from runtime.data import stores
from support import make_config, on_mesh, random_state

from megajax.core.config import Config, ConfigError
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.hf_files import TEMPLATE, Companions, read_companions
from megajax.runtime.data import load_data
from megajax.runtime.data.text.tokenizer import train_bpe
from megajax.runtime.run.chat_template import companions_of_run, read_corpus, template_of_run
from megajax.runtime.run.watchdog import Watchdog

TEXT = '{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}'
DATED = '{{ strftime_now("%H:%M:%S") }}' + TEXT
LINE = {'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'chats.jsonl').write_text((json.dumps(LINE) + '\n') * 20)
    return tmp_path


def config(**data: object) -> Config:
    sizes = {'vocab_size': 300, 'max_seq_len': 64}
    data = {'tokenizer': 'bytes', 'corpus': 'chats.jsonl', **data}
    return make_config('llama', model=sizes, train={'seq_len': 64, 'batch_size': 1}, data=data)


def came_with(folder: Path, text: str) -> Path:
    """A checkpoint whose model was imported with a chat template."""
    Companions({TEMPLATE: text.encode()}).write(folder / 'start')
    return folder / 'start'


def tokens(config: Config, run: Path, companions: Companions) -> list[int]:
    return load_data(config, template_of_run(config, run, companions)).train[0]['tokens'].tolist()


def test_the_template_of_the_model_that_a_run_starts_from_is_the_default(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    start = came_with(folder, TEXT)
    companions = companions_of_run(config(), folder / 'run', start)
    assert companions.chat_template == TEXT
    template = template_of_run(config(), folder / 'run', companions)
    text = load_data(config(), template).train[0]['tokens'][0].astype('uint8').tobytes()
    assert text.startswith(b'[user]a[assistant]b')
    assert f'messages are written by the chat template of {start}' in caplog.text


def test_the_watchdog_is_told_of_progress_while_chats_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('megajax.runtime.data.image_text.load.BETWEEN_CALLS', 8)
    watchdog = Watchdog(None, None)
    began = watchdog.since
    read_corpus(config(), folder / 'run', None, watchdog)
    assert watchdog.phase == 'reading the corpus'
    assert watchdog.since > began


def test_another_template_needs_a_word_and_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (folder / 'mine.jinja').write_text('mine' + TEXT)
    mine, start = config(chat_template='mine.jinja'), came_with(folder, TEXT)
    companions = companions_of_run(mine, folder / 'run', start)
    assert companions.chat_template == 'mine' + TEXT
    assert 'messages are written by mine.jinja' in caplog.text
    assert f'{start} came with a different template' in caplog.text


def test_a_run_carries_all_templates_of_its_file(folder: Path) -> None:
    texts = {'default': TEXT, 'tool_use': 'tools' + TEXT}
    listed = [{'name': name, 'template': text} for name, text in texts.items()]
    (folder / 'tokenizer_config.json').write_text(json.dumps({'chat_template': listed}))
    mine, run = config(chat_template='tokenizer_config.json'), folder / 'run'
    companions_of_run(mine, run, None).write(run)
    template = template_of_run(mine, run, read_companions(run))
    assert template is not None
    assert template.texts == texts


def test_a_run_keeps_the_time_that_its_template_saw_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, start = folder / 'run', came_with(folder, DATED)

    def at(hour: int, start: Path | None) -> Companions:
        class Clock(datetime):
            @classmethod
            def now(cls) -> datetime:
                return cls(2026, 11, 27, hour)

        monkeypatch.setattr('megajax.runtime.processes.consensus.datetime', Clock)
        return companions_of_run(config(), run, start)

    first = at(9, start)
    first.write(run)
    assert first.template('').now == datetime(2026, 11, 27, 9)
    assert at(10, None) == first == read_companions(run)
    assert tokens(config(), run, at(10, None)) == tokens(config(), run, first)
    later = at(11, start)  # another run
    assert tokens(config(), run, later) != tokens(config(), run, first)


def test_a_run_that_resumes_has_the_template_that_it_began_with_and_takes_no_other_for_it(
    folder: Path,
) -> None:
    (folder / 'mine.jinja').write_text(TEXT)
    mine, run = config(chat_template='mine.jinja'), folder / 'run'
    with on_mesh(mine), Checkpoints(run / 'checkpoints', mine) as checkpoints:
        checkpoints.save(random_state(mine), 1)
    companions_of_run(mine, run, None).write(run)
    for change in ((folder / 'mine.jinja').unlink, lambda: (folder / 'mine.jinja').write_text('x')):
        change()
        assert companions_of_run(mine, run, None).chat_template == TEXT
    with pytest.raises(ConfigError, match=r'mime.jinja: cannot be read'):
        companions_of_run(config(chat_template='mime.jinja'), run, None)
    (folder / 'mine.jinja').unlink()
    with pytest.raises(ConfigError, match=r'mine.jinja: cannot be read'):
        companions_of_run(mine, folder / 'other', None)


def test_a_corpus_without_messages_needs_no_template(folder: Path) -> None:
    (folder / 'a.txt').write_text('text ' * 200)
    companions = companions_of_run(config(corpus='a.txt'), folder / 'run', came_with(folder, DATED))
    assert companions.template('').now is None
    assert companions.chat_template == DATED


def test_a_streamed_corpus_is_not_copied_to_look_for_messages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
    (folder / 'a.jsonl').write_text((json.dumps({'text': 'text ' * 99}) + '\n') * 20)
    start = came_with(folder, DATED)
    with stores.web(folder) as server:
        streamed = config(corpus=f'{server.url}/a.jsonl', order='streamed')
        companions = companions_of_run(streamed, folder / 'run', start)
        assert server.asked == []
    assert companions.template('').now is None


def test_a_run_that_starts_from_a_model_reads_its_kept_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
    (folder / 'a.jsonl').write_text((json.dumps({'text': 'text ' * 99}) + '\n') * 20)
    start = came_with(folder, TEXT)
    train_bpe(['some text ' * 99], 270).save(start / 'tokenizer.json')
    with stores.web(folder) as server:
        auto = config(corpus=f'{server.url}/a.jsonl', tokenizer='auto')
        run = auto.run.model_copy(update={'start_from': str(start)})
        auto = auto.model_copy(update={'run': run})
        read_corpus(auto, folder / 'run', start)
        for copy in (folder / 'cache').rglob('a.jsonl'):
            copy.unlink()
        read_corpus(auto, folder / 'run', start)
    assert server.asked == ['/a.jsonl']
