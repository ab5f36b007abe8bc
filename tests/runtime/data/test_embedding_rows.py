"""Added tokens may have ids beyond a model's embedding, and then no text can have them."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from support import make_config
from tokenizers import AddedToken

from megajax.core.config import ConfigError
from megajax.runtime.data.load import load_data
from megajax.runtime.data.text.pieces import Piece
from megajax.runtime.data.text.tokenizer import load_tokenizer, make_tokenizer

ROWS = 257  # the bytes and <|endoftext|>


def write(folder: Path, *added: str | AddedToken, **keys: Any) -> str:
    """Write a tokenizer of bytes with added tokens, and its tokenizer_config.json."""
    backend = tokenizers.Tokenizer.from_str(make_tokenizer('bytes', ROWS)._backend.to_str())
    backend.add_tokens(list(added))
    backend.save(str(folder / 'tokenizer.json'))
    if keys:
        (folder / 'tokenizer_config.json').write_text(json.dumps(keys))
    return str(folder / 'tokenizer.json')


def special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)


def test_a_padding_token_without_a_row_is_named_and_text_that_spells_it_is_letters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = write(tmp_path, pad_token='[PAD]', eos_token='<|endoftext|>')
    with caplog.at_level(logging.WARNING):
        tokenizer = make_tokenizer(spec, ROWS)
    assert 'no row in the embedding for [PAD]' in caplog.text
    (ids,) = tokenizer.encode_batch(['a [PAD]'])
    assert ids.tolist() == list(b'a [PAD]')
    assert not tokenizer.token_bytes[ROWS:].any()


def test_a_text_with_a_token_without_a_row_is_rejected_with_token_and_id(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(write(tmp_path, '<word>', special('<|im_end|>')), ROWS)
    with pytest.raises(ConfigError, match=r'gives <word> the id 257, and model.vocab_size=257'):
        tokenizer.encode_batch(['one', 'a <word>'])
    with pytest.raises(ConfigError, match=r'gives <\|im_end\|> the id 258'):
        tokenizer.encode_pieces([Piece(text='a'), Piece(token=258)])


@pytest.mark.parametrize(
    ('name', 'content', 'place'),
    [
        ('a.txt', 'one\ntwo\na <word>\n', 'a.txt:3'),
        ('a.jsonl', '{"text": "one"}\n{"text": "a <word>"}\n', 'a.jsonl: document 2'),
        (
            'chat.jsonl',
            '{"messages": [{"role": "assistant", "content": "a <word>"}]}\n',
            'chat.jsonl:1',
        ),
    ],
)
def test_the_line_of_a_corpus_that_has_such_a_token_is_named(
    name: str, content: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    spec = write(tmp_path, '<word>')
    config = make_config(
        'gpt',
        model={'vocab_size': ROWS},
        data={'corpus': str(tmp_path / name), 'tokenizer': spec, 'split': '100,0,0'},
    )
    with pytest.raises(ConfigError, match=f'{place}: data.tokenizer: .*gives <word>'):
        load_data(config)


def test_ids_are_unlimited_without_a_model(tmp_path: Path) -> None:
    (ids,) = load_tokenizer(write(tmp_path, '<word>')).encode_batch(['<word>'])
    assert ids.tolist() == [257]


@pytest.mark.parametrize(
    ('rows', 'keys', 'message'),
    [
        (257, {'eos_token': '<end>'}, r'none for <end> \(id 257\) and need another eos_token'),
        (255, {}, 'and need their own tokenizer, or data.tokenizer=none'),
    ],
)
def test_a_token_that_every_text_needs_must_have_a_row(
    rows: int, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec = write(tmp_path, special('<end>'), **keys)
    with pytest.raises(ConfigError, match=f'{rows} is below the 258 entries .*{message}'):
        make_tokenizer(spec, rows)


def test_a_random_replacement_of_a_masked_token_has_a_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(write(tmp_path, '<word>'), ROWS)
    assert np.flatnonzero(tokenizer.token_bytes).max() < ROWS
