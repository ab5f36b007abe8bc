"""A file in a folder that this user may not enter is named as unreadable, and not as missing."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ordinary_user import as_ordinary_user

from megajax.analysis.report.read import read_runs
from megajax.base.files.outputs import check_outputs
from megajax.core.config import ConfigError, load
from megajax.corpus.build import build
from megajax.corpus.job import Job
from megajax.runtime.data import load_data
from megajax.runtime.data.sources.inputs import find_inputs
from megajax.runtime.run.infer_config import config_of_overrides

LINE = '{"text": "a line of text"}\n'


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / 'open.jsonl').write_text(LINE * 9)
    folder = tmp_path / 'closed'
    folder.mkdir()
    (folder / 'a.jsonl').write_text(LINE)
    folder.chmod(0)
    yield folder
    folder.chmod(0o755)


def data(**keys: str) -> Callable[[Path], object]:
    def call(folder: Path) -> object:
        set_keys = [f'data.{key}={named(value, folder)}' for key, value in keys.items()]
        return load_data(load('tiny', ['mesh.data=1', 'mesh.model=1', *set_keys]))

    return call


def build_to(out: str) -> Callable[[Path], object]:
    return lambda folder: build(
        Job(
            out=named(out, folder),
            inputs=(named('OPEN', folder),),
            tokenizer='bytes',
            workers=1,
        )
    )


def named(text: str, folder: Path) -> str:
    return text.replace('FOLDER', str(folder)).replace('OPEN', str(folder.parent / 'open.jsonl'))


@pytest.mark.usefixtures('one_thread')
@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (data(corpus='FOLDER/a.jsonl'), 'FOLDER/a.jsonl: cannot'),
        (data(blend='{FOLDER/a: 1}'), 'FOLDER/a.bin: cannot'),
        (
            data(corpus='OPEN', tokenizer='FOLDER/tokenizer.json'),
            'data.tokenizer: FOLDER/tokenizer.json cannot',
        ),
        (lambda folder: find_inputs([f'{folder}/a.jsonl'], None), 'FOLDER/a.jsonl: cannot'),
        (build_to('FOLDER/b'), 'FOLDER/b.tokenizer.json: cannot'),
        (build_to('FOLDER/b/c'), 'FOLDER/b: cannot'),
        (lambda folder: check_outputs(folder / 'x.json'), 'FOLDER/x.json: cannot'),
        (
            lambda folder: config_of_overrides([f'run.dir={folder}/x']),
            'FOLDER/x/config.yaml cannot',
        ),
        (
            lambda folder: config_of_overrides([f'run.start_from={folder}/x']),
            'run.start_from: FOLDER/x/checkpoints cannot',
        ),
        (lambda folder: read_runs([folder / 'x']), 'FOLDER/x/config.yaml: cannot'),
    ],
)
def test_a_path_in_a_folder_that_may_not_be_entered_is_named(
    closed: Path, call: Callable[[Path], object], message: str
) -> None:
    words = named(f'{message} be read: Permission denied; ', closed)
    with pytest.raises(ConfigError, match=f'^{re.escape(words)}'):
        as_ordinary_user(lambda: call(closed))
