"""`megajax data info` and `verify`, on files of Megatron and on files of `megajax data build`."""

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import megajax
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import ConfigError
from megajax.corpus.build import build
from megajax.corpus.describe import decode_samples, document_lengths, verify
from megajax.corpus.job import Job
from megajax.runtime.data.text.byte_level import END_OF_DOCUMENT
from megajax.runtime.data.text.tokenizer import byte_tokenizer, encode_documents
from megajax.runtime.data.tokens.indexed import Sequences, from_lengths, read_pair
from megajax.runtime.data.tokens.token_ids import token_range

ORACLES = Path(__file__).parents[1] / 'runtime/data/oracles/gpt_dataset'


@pytest.fixture
def built(tmp_path: Path, one_thread: None) -> Path:
    (tmp_path / 'text.jsonl').write_text(
        ''.join(f'{{"text": "document number {i}"}}\n' for i in range(100))
    )
    build(
        Job(
            out=str(tmp_path / 'web'),
            inputs=(str(tmp_path / 'text.jsonl'),),
            tokenizer='bytes',
            append_eod=True,
            workers=1,
        )
    )
    return tmp_path / 'web'


def test_what_was_built_is_shown_and_verified(built: Path) -> None:
    shown, verified = megajax('data', 'info', str(built)), megajax('data', 'verify', str(built))
    assert (shown.returncode, verified.returncode) == (0, 0), shown.stderr + verified.stderr
    assert shown.stdout.startswith('documents  100')
    for line in (
        'tokens     1,890 of uint16, 3,780 bytes',
        "document 33: 'document number 33<|endoftext|>'",
    ):
        assert line in shown.stdout
    of_lengths = [line.split() for line in shown.stdout.splitlines() if 'up to' in line]
    assert of_lengths == [['up', 'to', '32', '100', '█' * 40]]
    assert verified.stdout.count('ok  ') == 5


def test_a_sample_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / 'a.jsonl').write_text('{"text": "[b]:smile:"}\n')
    job = Job(
        out=str(tmp_path / 'a'),
        inputs=(str(tmp_path / 'a.jsonl'),),
        tokenizer='bytes',
        append_eod=False,
        workers=1,
    )
    build(job)
    done = CliRunner().invoke(app, ['data', 'info', str(tmp_path / 'a')])
    assert "document 0: '[b]:smile:'\n" in done.stdout


def test_letters_that_spell_a_special_token_are_told_from_the_token() -> None:
    tokenizer = byte_tokenizer()
    tokens, lengths = encode_documents(['plain', f'say {END_OF_DOCUMENT[0]}!'], tokenizer)
    found = list(decode_samples(from_lengths('it', tokens, lengths), tokenizer, 2))
    assert found == [(0, 'plain<|endoftext|>', False), (1, 'say <|endoftext|>!<|endoftext|>', True)]


def test_a_document_without_tokens_is_shown() -> None:
    sequences = from_lengths('x', np.zeros(2, np.uint16), np.array([0, 2], np.int32))
    shown = [text for _, text, _ in decode_samples(sequences, byte_tokenizer(), 2)]
    assert shown == ['', '\0\0']


@pytest.mark.parametrize('bad', [-1, 257])
def test_an_id_that_the_tokenizer_lacks_is_named(bad: int) -> None:
    sequences = from_lengths('x', np.array([0, bad], np.int32), np.array([2], np.int32))
    with pytest.raises(ConfigError, match=f'--tokenizer: has 257 .* document 0 contains id {bad};'):
        list(decode_samples(sequences, byte_tokenizer(), 1))


def test_files_of_megatron(tmp_path: Path) -> None:
    shown, verified = (
        megajax('data', 'info', str(ORACLES / 'c')),
        megajax('data', 'verify', str(ORACLES / 'c'), '--vocab-size', '70000'),
    )
    assert 'documents  30' in shown.stdout
    assert 'unknown: there is no manifest next to the files' in shown.stdout
    assert verified.stdout.count('ok  ') == 3


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['verify', f'{ORACLES}/c', '--vocab-size', '50000'], 'c.bin: at byte '),
        (
            ['info', f'{ORACLES}/c', '--tokenizer', 'bytes'],
            'error: --tokenizer: has 257 entries, but document 0 contains',
        ),
        (
            ['info', f'{ORACLES}/c', '--tokenizer', 'no'],
            "error: --tokenizer: there is no file no; give a tokenizer.json or 'bytes'\n",
        ),
        (
            ['info', f'{ORACLES}/c', '--tokenizer', 'https://host/tokenizer.json'],
            'error: --tokenizer: https://host/tokenizer.json is a URL; copy the file and ',
        ),
        (
            ['verify', 's3://bucket/corpus/web'],
            'error: s3://bucket/corpus/web: is a URL; copy the files to this machine, and give ',
        ),
        (
            ['info', 'nowhere'],
            'error: nowhere: there is no nowhere.bin and no nowhere.idx in ',
        ),
    ],
)
def test_what_is_wrong_exits_2(arguments: list[str], message: str) -> None:
    done = megajax('data', *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_ids_that_a_run_has_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    pair = tmp_path / 'c'
    for suffix in ('bin', 'idx'):
        shutil.copyfile(f'{ORACLES}/c.{suffix}', f'{pair}.{suffix}')
    sequences = read_pair(pair)
    assert token_range(sequences)[1] < 70000
    path = Path(f'{pair}.bin')
    before, times = path.read_bytes(), path.stat()
    damaged = np.frombuffer(before, sequences.tokens.dtype).copy()
    damaged[5] = 70001
    path.write_bytes(damaged.tobytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ConfigError, match=r'70000 ids end below 70001, which is token 5 of '):
        verify(pair, vocab_size=70000)
    path.write_bytes(before)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert verify(pair, vocab_size=70000)[-1].endswith(', all below 70000')


@pytest.mark.parametrize(
    ('suffix', 'change', 'message'),
    [
        (
            'bin',
            lambda content: content[:7] + b'\1' + content[8:],
            r'web.bin: does not match the SHA-256 in its manifest',
        ),
        (
            'json',
            lambda content: content.replace(b'"tokens": 1890', b'"tokens": 1891'),
            r'web.json: tokens is 1891, but the files have 1890',
        ),
    ],
)
def test_a_change_is_found(built: Path, suffix: str, change, message: str) -> None:  # type: ignore[no-untyped-def]
    path = Path(f'{built}.{suffix}')
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        verify(built)


@given(lengths=st.lists(st.integers(0, 9)), data=st.data())
def test_lengths_of_documents_add_up(lengths: list[int], data: st.DataObject) -> None:
    inner = sorted(data.draw(st.lists(st.integers(0, len(lengths)))))
    documents = np.array([0, *inner, len(lengths)])
    whole = from_lengths('x', np.zeros(sum(lengths), np.uint16), np.array(lengths, np.int32))
    sequences = Sequences(
        name='x',
        tokens=whole.tokens,
        lengths=whole.lengths,
        pointers=whole.pointers,
        documents=documents,
    )
    found = [int(length) for chunk in document_lengths(sequences) for length in chunk]
    assert found == [sum(lengths[a:b]) for a, b in itertools.pairwise(documents)]
