"""A long text is read in parts, and has the tokens that it has in one."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers

from megajax.data.text import long_texts
from megajax.data.text.long_texts import UncuttableError, parts, parts_to_learn
from megajax.data.text.tokenizer import Tokenizer, byte_tokenizer, train_bpe

SOURCE = Path(random.__file__).read_text()
WORDS = [
    'naïve',
    '東京',
    '  ',
    '\n',
    '\n\n',
    '\t',
    '🙂',
    "don't",
    '3.14',
    ')',
    '_x',
    ' ',
    'café\r\n',
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, 'PART', 2000)
    monkeypatch.setattr(long_texts, 'WHOLE', 8000)
    monkeypatch.setattr('megajax.data.text.tokenizer.PART', 2000)


def mixed() -> str:
    draw = random.Random(0)
    return ''.join(draw.choice(WORDS) + draw.choice(' \n') for _ in range(12_000))


def without_spaces() -> Tokenizer:
    """A tokenizer like Llama 2's, which puts a space before each text that it reads."""
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={'<unk>': 0, '</s>': 1, '▁': 2, 'a': 3, '▁a': 4},
            merges=[('▁', 'a')],
            unk_token='<unk>',
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')]
    )
    backend.add_special_tokens(['</s>'])
    backend.decoder = tokenizers.decoders.Metaspace()
    return Tokenizer(backend, 'mine')


@pytest.mark.parametrize('make', [byte_tokenizer, lambda: train_bpe([SOURCE, mixed()], 600)])
@pytest.mark.parametrize('text', [SOURCE, mixed(), SOURCE.replace('\n', ' '), 'a\n' * 9000])
def test_the_ids_of_the_parts_are_those_of_the_text(
    make: Callable[[], Tokenizer], text: str
) -> None:
    tokenizer = make()
    whole = tokenizer._backend.encode(text, add_special_tokens=False).ids
    (ids,) = tokenizer.encode_batch([text])
    np.testing.assert_array_equal(ids, whole)
    assert max(map(len, parts(text, lambda part: tokenizer.encode_batch([part])[0]))) <= 2000


def test_a_word_that_is_long_is_not_cut() -> None:
    text = 'one ' + 'a' * 5000 + ' two' + ' b' * 3000
    pieces = list(parts(text, lambda part: byte_tokenizer().encode_batch([part])[0]))
    assert ''.join(pieces) == text
    assert any('a' * 5000 in piece for piece in pieces)


@pytest.mark.parametrize('text', ['a' * 8001, 'one ' * 1000 + 'a' * 8001])
def test_a_text_without_a_place_for_a_cut_has_a_limit(text: str) -> None:
    assert byte_tokenizer().encode_batch([text[-8000:]])
    with pytest.raises(UncuttableError):
        byte_tokenizer().encode_batch([text])


def test_a_tokenizer_that_allows_no_cut_reads_a_text_at_once_or_refuses_it() -> None:
    tokenizer = without_spaces()
    (ids,) = tokenizer.encode_batch(['a ' * 1500])
    whole = tokenizer._backend.encode('a ' * 1500, add_special_tokens=False).ids
    np.testing.assert_array_equal(ids, whole)
    with pytest.raises(UncuttableError):
        tokenizer.encode_batch(['a ' * 5000])


def test_a_bpe_is_learned_from_parts_as_from_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [SOURCE, mixed()]
    assert all(''.join(parts_to_learn(text)) == text for text in texts)
    assert all(len(list(parts_to_learn(text))) > 10 for text in texts)
    of_parts = train_bpe(texts, 700).fingerprint
    monkeypatch.setattr(long_texts, 'PART', 10**9)
    assert train_bpe(texts, 700).fingerprint == of_parts


@pytest.mark.slow
def test_the_memory_of_a_long_line_is_a_few_times_its_bytes(tmp_path: Path) -> None:
    with (tmp_path / 'line.jsonl').open('w') as file:
        file.write('{"text": "')
        for _ in range(30):
            file.write('one line of a long text, of which there are many\\n' * 20_000)
        file.write('"}\n')
    # In a process of its own, whose children are those of the build alone.
    code = (
        'import resource, subprocess, sys; '
        'subprocess.run([sys.executable, "-m", "megajax", *sys.argv[1:]], check=True); '
        'print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, file=sys.stderr)'
    )
    build = 'data build out --input line.jsonl --train-bpe 300 --append-eod --workers 1'
    done = subprocess.run(
        [sys.executable, '-c', code, *build.split()],
        cwd=tmp_path,
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    size, peak = (tmp_path / 'line.jsonl').stat().st_size, int(done.stderr.split()[-1])
    # Read at once it takes a hundred times its size.
    assert peak < 12 * size + 250_000_000
