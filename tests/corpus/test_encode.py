"""A text that cannot be encoded is named with its place."""

import signal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import tokenizers
from pyarrow import parquet
from tokenizers import models

from megajax.core.config import ConfigError
from megajax.corpus.build import build
from megajax.corpus.encode import Options, Workers, encode
from megajax.corpus.job import Job
from megajax.runtime.data.sources.inputs import find_inputs
from megajax.runtime.data.sources.pieces import Position, Unit
from megajax.runtime.data.sources.read import read_units
from megajax.runtime.data.text import long_texts, tokenizer
from megajax.runtime.data.text.tokenizer import byte_tokenizer

OPTIONS = Options(key='text', append_eod=False, skip_bad=False)


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A tokenizer that knows nothing but the word b."""
    path = str(tmp_path / 'words.json')
    vocab = {'b': 0, '[SEP]': 1}
    tokenizers.Tokenizer(models.WordPiece(vocab, unk_token='[UNK]')).save(path)
    return path


def test_a_text_that_the_tokenizer_does_not_know_is_named(words: str, tmp_path: Path) -> None:
    (tmp_path / 'a.jsonl').write_text('{"text": "b"}\n\n{"text": "b"}\n{"text": "c"}\n')
    job = Job(
        out=str(tmp_path / 'out'), inputs=(f'{tmp_path}/a.jsonl',), tokenizer=words, workers=1
    )
    with pytest.raises(ConfigError, match=r'a.jsonl:4: --tokenizer: .* cannot encode a text'):
        build(job)
    assert not list(tmp_path.glob('out*'))


def test_a_text_that_cannot_be_cut_is_named_by_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (long_texts, tokenizer):
        monkeypatch.setattr(module, 'PART', 20)
        monkeypatch.setattr(module, 'WHOLE', 80)
    texts = ['one', 'two', 'a' * 81]
    parquet.write_table(pyarrow.table({'text': texts}), tmp_path / 'a.parquet')
    (unit,) = read_units(find_inputs([f'{tmp_path}/a.parquet'], None), 'text', Position())
    error = encode(unit, byte_tokenizer(), OPTIONS).error
    assert error is not None
    assert error.path == f'{tmp_path}/a.parquet: row 3'


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSEGV])
def test_only_a_worker_that_was_killed_may_have_lacked_memory(number: int, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / 'tokenizer.json')
    with Workers(1, tmp_path / 'tokenizer.json', OPTIONS) as workers:
        (process,) = workers._processes.values()
        process.send_signal(number)
        process.wait()
        with pytest.raises(ConfigError, match=f'exit code -{number} ') as caught:
            list(workers.encode(iter([Unit(after=Position())])))
    assert ('fewer workers' in str(caught.value)) == (number == signal.SIGKILL)


def test_a_worker_that_fails_does_not_lack_memory(tmp_path: Path, capfd: Any) -> None:
    with Workers(1, tmp_path / 'none.json', OPTIONS) as workers:
        unit = Unit(after=Position())
        with pytest.raises(ConfigError, match='exit code 1 for the reason printed above') as caught:
            list(workers.encode(iter([unit])))
    assert 'fewer workers' not in str(caught.value)
    assert 'there is no file' in capfd.readouterr().err
