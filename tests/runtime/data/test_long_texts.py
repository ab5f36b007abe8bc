"""A long text is read in parts, and has the tokens that it has in one."""

import codecs
import functools
import gzip
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from twelve_tokenizers import TWELVE, random_text

from megajax.corpus.encode import Options, encode
from megajax.runtime.data.sources.inputs import find_inputs
from megajax.runtime.data.sources.pieces import Position
from megajax.runtime.data.sources.read import read_units
from megajax.runtime.data.text import long_texts
from megajax.runtime.data.text.long_texts import UncuttableError, parts
from megajax.runtime.data.text.tokenizer import Tokenizer, byte_tokenizer, train_bpe

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
    monkeypatch.setattr('megajax.runtime.data.text.tokenizer.PART', 2000)
    monkeypatch.setattr('megajax.runtime.data.text.tokenizer.WHOLE', 8000)


def mixed() -> str:
    draw = random.Random(0)
    return ''.join(draw.choice(WORDS) + draw.choice(' \n') for _ in range(12_000))


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return {'bytes': byte_tokenizer, 'bpe': lambda: train_bpe([SOURCE, mixed()], 600)}.get(
        kind, lambda: Tokenizer(TWELVE[kind](), kind)
    )()


def whole_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer._reader.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize('kind', ['bytes', 'bpe', *TWELVE])
@pytest.mark.parametrize('text', [SOURCE[:30_000], mixed(), SOURCE[:9000].replace('\n', ' ')])
def test_the_ids_of_the_parts_are_those_of_the_text(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert max(map(len, parts(text))) <= 2000
    ids = tokenizer._encode_long(text, '', '')
    np.testing.assert_array_equal(ids, whole_ids(tokenizer, text))


@pytest.mark.parametrize('kind', ['bytes', 'bpe', *TWELVE])
def test_a_text_has_the_ids_that_it_has_in_its_document_or_is_refused(kind: str) -> None:
    tokenizer, draw = tokenizer_of(kind), random.Random(1)
    special, refused = list(tokenizer.special_tokens()), 0
    for _ in range(10):
        text = ''.join(random_text(draw, special) for _ in range(200))
        cuts = sorted(draw.sample(range(len(text)), 3))
        found: list[int] = []
        try:
            for start, end in pairwise([0, *cuts, len(text)]):
                (ids,) = tokenizer.encode_batch(
                    [text[start:end]], before=text[:start], after=text[end:]
                )
                found += ids.tolist()
        except UncuttableError:
            refused += 1
            continue
        assert found == whole_ids(tokenizer, text)
    assert refused <= 2


@functools.cache
def parsing(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """A tokenizer that parses special tokens, and that of the library."""
    theirs = TWELVE[kind]()
    ours = tokenizers.Tokenizer.from_str(theirs.to_str())
    return Tokenizer(ours, kind).parsing_special(), theirs


def spelling(tokenizer: Tokenizer, seed: int, count: int = 200) -> str:
    """A text that spells many special tokens."""
    draw = random.Random(seed)
    special = list(tokenizer.special_tokens())
    return ''.join(
        random_text(draw, special) + draw.choice(special) * draw.randrange(3) + draw.choice(' \n.')
        for _ in range(count)
    )


@pytest.mark.parametrize('kind', TWELVE)
def test_spelled_special_tokens_are_parsed_as_in_the_whole_wherever_it_is_cut(kind: str) -> None:
    (tokenizer, theirs), draw, refused = parsing(kind), random.Random(2), 0
    for seed in range(10):
        text = spelling(tokenizer, seed)
        whole = theirs.encode(text, add_special_tokens=False).ids
        assert len(set(whole) & set(tokenizer.special_tokens().values())) > 1
        inside = [m.start() + 3 for m in re.finditer(r'<\||</s>|\[MASK', text)]
        cuts = sorted({*draw.sample(inside, 2), draw.randrange(len(text))})
        found: list[int] = []
        try:
            for start, end in pairwise([0, *cuts, len(text)]):
                (ids,) = tokenizer.encode_batch(
                    [text[start:end]], before=text[:start], after=text[end:]
                )
                found += ids.tolist()
        except UncuttableError:
            refused += 1
            continue
        assert found == whole
    assert refused <= 2


def test_a_word_that_is_long_is_not_cut() -> None:
    text = 'one ' + 'a' * 5000 + ' two' + ' b' * 3000
    pieces = list(parts(text))
    assert ''.join(pieces) == text
    assert any('a' * 5000 in piece for piece in pieces)


@pytest.mark.parametrize('text', ['a' * 8001, 'one ' * 1000 + 'a' * 8001])
def test_a_text_without_a_place_for_a_cut_has_a_limit(text: str) -> None:
    assert byte_tokenizer().encode_batch([text[-8000:]])
    with pytest.raises(UncuttableError):
        byte_tokenizer().encode_batch([text])


def test_blanks_that_a_tokenizer_strips_around_a_cut_make_it_read_the_text_at_once() -> None:
    tokenizer = tokenizer_of('Strip')
    text = 'x' * 1000 + ('\n' * 700 + 'x') + 'x' * 1000
    (ids,) = tokenizer.encode_batch([text])
    np.testing.assert_array_equal(ids, whole_ids(tokenizer, text))
    with pytest.raises(UncuttableError):
        tokenizer.encode_batch([text[1300:]], before=text[:1300])
    with pytest.raises(UncuttableError):
        tokenizer.encode_batch([text[:1300]], after=text[1300:])


def test_a_bpe_is_learned_from_parts_as_from_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [SOURCE, mixed()]
    assert all(''.join(parts(text)) == text for text in texts)
    assert all(len(list(parts(text))) > 10 for text in texts)
    of_parts = train_bpe(texts, 700).fingerprint
    monkeypatch.setattr(long_texts, 'PART', 10**9)
    assert train_bpe(texts, 700).fingerprint == of_parts


def ids_of_units(tokenizer: Tokenizer, file: Path) -> list[int]:
    inputs = find_inputs([str(file)], None)
    options = Options(key='', append_eod=False, skip_bad=False)
    start, found, units = Position(), [], 0
    while unit := next(read_units(inputs, '', start, 3000), None):  # resumed before each unit
        encoded = encode(unit, tokenizer, options)
        assert encoded.error is None
        found += encoded.ids.tolist()
        start, units = unit.after, units + 1
    assert units > 4
    return found


@pytest.mark.parametrize('kind', TWELVE)
@pytest.mark.parametrize('suffix', ['', '.gz'])
def test_a_text_file_in_units_has_the_ids_of_the_whole_from_wherever_it_is_read(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(kind)
    data = codecs.BOM_UTF8 + mixed()[:12_000].encode()
    file = tmp_path / f'a.txt{suffix}'
    file.write_bytes(gzip.compress(data) if suffix else data)
    text = data.decode('utf-8-sig')
    assert ids_of_units(tokenizer, file) == [*tokenizer.start, *whole_ids(tokenizer, text)]


@pytest.mark.parametrize('kind', TWELVE)
def test_a_text_file_in_units_is_parsed_as_the_whole(kind: str, tmp_path: Path) -> None:
    tokenizer, theirs = parsing(kind)
    text = spelling(tokenizer, seed=3, count=500)
    text = re.sub(r'[\x00\ufeff]', '', re.sub(r'\s*\n\s*', '\n', text))
    (tmp_path / 'a.txt').write_text(text, newline='')
    whole = theirs.encode(text, add_special_tokens=False).ids
    begin = tokenizer.start if whole[: len(tokenizer.start)] != tokenizer.start else []
    assert ids_of_units(tokenizer, tmp_path / 'a.txt') == [*begin, *whole]


@pytest.mark.slow
def test_the_memory_of_a_long_line_is_a_few_times_its_bytes(tmp_path: Path) -> None:
    with (tmp_path / 'line.jsonl').open('w') as file:
        file.write('{"text": "')
        for _ in range(12):
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
    # Read at once it takes a hundred times its size; 0.3 GB are needed for any size.
    assert peak < 12 * size + 400_000_000
