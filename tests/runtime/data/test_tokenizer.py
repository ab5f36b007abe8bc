"""Tokens are text and back, and their bytes are counted exactly."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from support import make_config
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megajax.core.config import ConfigError
from megajax.runtime.data import Tokenizer, encode_documents, make_tokenizer
from megajax.runtime.data.corpus_tokenizer import tokenizer_of_text
from megajax.runtime.data.text.long_texts import PART
from megajax.runtime.data.text.tokenizer import load_tokenizer

TEXTS = [
    'def f(x):\n    if x:\n        return x + 1\n\n\nclass A:\n\tpass\r\n',
    'Grüße, Ελλάδα, 日本語, 👩‍🔬 and \u2028 e\u0301\n',
    '<|endoftext|> in a text is text',
    '   \n\n   ',
    '\x00\x7f\xa0\xad',
    '',
]
CORPUS = [text * 20 for text in TEXTS]


def bpe_file(path: Path, *, eod: str = '<|endoftext|>') -> str:
    make_tokenizer('bpe', 300, CORPUS).save(path)
    path.write_text(
        path.read_text(encoding='utf-8').replace('<|endoftext|>', eod), encoding='utf-8'
    )
    return str(path)


def sentencepiece(path: Path) -> str:
    """A tokenizer as Llama 2's: a space before the text, U+2581 for spaces, bytes for what it does
    not know, and a token at the start.
    """
    names = [
        '<unk>',
        '<s>',
        '</s>',
        *(f'<0x{byte:02X}>' for byte in range(256)),
        '\u2581',
        'a',
        'b',
        '\u2581a',
        'é',
    ]
    vocab = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [('\u2581', 'a')], byte_fallback=True, unk_token='<unk>')
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')]
    )
    steps = [
        decoders.Replace('\u2581', ' '),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(' ', 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(['<unk>', '<s>', '</s>'])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single='<s> $A', special_tokens=[('<s>', 1)]
    )
    backend.save(str(path))
    return str(path)


@pytest.fixture(params=['bytes', 'bpe', 'file'])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    spec = bpe_file(tmp_path / 'tokenizer.json') if request.param == 'file' else request.param
    return make_tokenizer(spec, 300, CORPUS)


def test_decoding_undoes_encoding(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    assert all(tokenizer.eod not in ids and ids.dtype == np.uint16 for ids in encoded)


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.token_bytes[tokenizer.eod] == 0
    assert np.count_nonzero(tokenizer.token_bytes) == tokenizer.vocab_size - 1


def test_the_end_of_a_document_is_seen(tokenizer: Tokenizer) -> None:
    (a, b) = tokenizer.encode_batch(['a', 'b'])
    assert tokenizer.decode([*a, tokenizer.eod, *b]) == 'a<|endoftext|>b'


def test_a_byte_is_its_own_id() -> None:
    tokenizer = make_tokenizer('bytes', 257)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == list(text.encode())


def test_bpe_fills_the_vocabulary_and_is_the_same_every_time() -> None:
    first, second, smaller = (make_tokenizer('bpe', size, CORPUS) for size in (300, 300, 299))
    assert (first.vocab_size, first.eod, smaller.vocab_size) == (300, 299, 299)
    assert first.fingerprint == second.fingerprint != smaller.fingerprint


def test_bpe_merges_line_breaks_with_indentation_and_what_stands_before() -> None:
    tokenizer = make_tokenizer('bpe', 300, ['f(x):\n        y = g()\n' * 50])
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode_batch(['f(x):\n        y'])[0]]
    assert '):\n        ' in pieces


def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / 'saved.json')
    again = make_tokenizer(str(tmp_path / 'saved.json'), 300)
    assert (again.fingerprint, again.vocab_size, again.eod) == (
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eod,
    )
    np.testing.assert_array_equal(again.token_bytes, tokenizer.token_bytes)


def test_a_sentencepiece_tokenizer_counts_the_space_it_puts_first(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(sentencepiece(tmp_path / 'tokenizer.json'), 300)
    text = 'a b aé 日\n'
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == 1 + len(text.encode())
    assert tokenizer.eod == 2
    assert not tokenizer.token_bytes[:3].any()


def test_truncation_and_padding_of_a_file_are_turned_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(bpe_file(tmp_path / 'tokenizer.json'))
    backend.enable_truncation(2)
    backend.enable_padding()
    backend.save(str(tmp_path / 'tokenizer.json'))
    (long, short) = make_tokenizer(str(tmp_path / 'tokenizer.json'), 300).encode_batch(
        [TEXTS[1], 'a']
    )
    assert len(long) > 2
    assert len(short) == 1


@pytest.mark.parametrize(
    ('spec', 'vocab_size', 'entries'),
    [('bytes', 256, 257), ('bpe', 256, 257), ('tokenizer.json', 299, 300)],
)
def test_a_vocabulary_that_is_too_small(
    spec: str, vocab_size: int, entries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bpe_file(tmp_path / 'tokenizer.json')
    with pytest.raises(
        ConfigError,
        match=(
            f'model.vocab_size: {vocab_size} is below the {entries} .*{spec}; use {entries} or more'
        ),
    ):
        make_tokenizer(spec, vocab_size, CORPUS)


def test_a_text_that_a_tokenizer_cannot_encode_is_refused_with_its_reason(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordPiece({'b': 0, '[SEP]': 1}, unk_token='[UNK]'))
    words.save(str(tmp_path / 'tokenizer.json'))
    tokenizer = load_tokenizer(str(tmp_path / 'tokenizer.json'))
    assert [list(ids) for ids in tokenizer.encode_batch(['b'])] == [[0]]
    for text in ('a', 'a' * (PART + 1)):
        with pytest.raises(ConfigError, match=r'json cannot encode a text .*Missing \[UNK\]'):
            tokenizer.encode_batch([text])


def test_a_tokenizer_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / 'tokenizer.json'
    message = f"data.tokenizer: there is no file {path}; give a tokenizer.json or 'bytes'"
    with pytest.raises(ConfigError, match=f'{message}$'):
        make_tokenizer(str(path), 300)
    with pytest.raises(ConfigError, match=f"{message}, or 'bpe' to train one$"):
        tokenizer_of_text(make_config(data={'tokenizer': str(path)}), lambda: TEXTS)
    path.write_text('{"model":')
    with pytest.raises(ConfigError, match=r'json is not a tokenizer.json \(EOF.*copy it again'):
        make_tokenizer(str(path), 300)
    bpe_file(path, eod='<end>')
    with pytest.raises(ConfigError, match=r'has no end-of-document token; add one of'):
        make_tokenizer(str(path), 300)
    words = tokenizers.Tokenizer(models.WordLevel({'a': 0, '</s>': 1}, unk_token='a'))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(path))
    with pytest.raises(ConfigError, match=r'json has tokens that do not stand for bytes'):
        make_tokenizer(str(path), 300)
    bpe_file(path)
    content = json.loads(path.read_text(encoding='utf-8'))
    content['model']['vocab']['a'] = 1 << 31
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"json gives 'a' the id 2147483648, but ids end at 1677"):
        make_tokenizer(str(path), 300)


@pytest.mark.parametrize('name', ['tokenizer.json', 'web.tokenizer.json', 'gemma.json'])
def test_the_advice_for_a_tokenizer_without_an_end_works(name: str, tmp_path: Path) -> None:
    path = Path(bpe_file(tmp_path / name, eod='<end>'))
    with pytest.raises(ConfigError, match='has no end-of-document token') as caught:
        make_tokenizer(str(path), 300)
    advice = re.search(r'name yours as eos_token in a (\S+) next to it(.*)', str(caught.value))
    assert advice is not None
    if advice[2]:
        assert advice[2] == ', after you rename it to tokenizer.json'
        path = path.rename(tmp_path / 'tokenizer.json')
    (tmp_path / advice[1]).write_text('{"eos_token": "<end>"}')
    tokenizer = make_tokenizer(str(path), 300)
    assert tokenizer.decode([tokenizer.eod]) == '<end>'


def test_what_is_saved_is_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    path = bpe_file(tmp_path / 'tokenizer.json')
    assert json.loads(Path(path).read_text(encoding='utf-8'))['model']['type'] == 'BPE'
    theirs = tokenizers.Tokenizer.from_file(path)
    assert theirs.decode(theirs.encode(TEXTS[1]).ids) == TEXTS[1]


def test_a_document_starts_with_what_the_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    llama = make_tokenizer(sentencepiece(tmp_path / 'tokenizer.json'), 300)
    assert llama.start == [1]
    (ids,) = llama.encode_batch(['a b'])
    assert encode_documents(['a b', 'a b'], llama)[0].tolist() == [1, *ids, 2] * 2
    assert encode_documents(['a b'], llama)[1] == len(ids) + 2


def test_other_documents_start_with_their_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.start == []
