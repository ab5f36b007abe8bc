"""A document that is cut into pieces has the ids that `tokenizers` gives for the whole text."""

import functools
import itertools
import json
import random

import pytest
import tokenizers
from twelve_tokenizers import TWELVE, random_text

from megajax.core.config import ConfigError
from megajax.runtime.data.text.pieces import Piece
from megajax.runtime.data.text.tokenizer import Tokenizer, byte_tokenizer

COUNT = 100
IMAGE_TOKEN = 1 << 20
IMAGE = chr(0x10FF00)


@functools.cache
def pair(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer, dict[int, str]]:
    """A tokenizer, and one whose special tokens have names that no text spells, with the names."""
    backend = TWELVE[kind]()
    content = json.loads(backend.to_str())
    names = {}
    for token in content['added_tokens']:
        if token['special']:
            name = names[token['id']] = chr(0x10F000 + len(names))
            vocab = content['model']['vocab']
            for entry in vocab if isinstance(vocab, list) else ():
                if entry[0] == token['content']:
                    entry[0] = name
            if isinstance(vocab, dict) and token['content'] in vocab:
                vocab[name] = vocab.pop(token['content'])
            if content['model'].get('unk_token') == token['content']:
                content['model']['unk_token'] = name
            token['content'] = name
    theirs = tokenizers.Tokenizer.from_str(json.dumps(content))
    theirs.add_tokens([tokenizers.AddedToken(IMAGE, normalized=False)])
    assert theirs.get_vocab_size() == 1 + backend.get_vocab_size()
    return Tokenizer(backend, kind), theirs, names


def random_pieces(draw: random.Random, tokenizer: Tokenizer) -> list[Piece]:
    special = tokenizer.special_tokens()
    pieces: list[Piece] = []
    for _ in range(draw.randrange(1, 8)):
        if draw.random() < 0.3:
            token = draw.choice(list(special.values()))
            pieces.append(Piece(token=token, answered=draw.random() < 0.5))
        elif draw.random() < 0.05:
            pieces.append(Piece(image='a.png'))
        else:
            text = random_text(draw, list(special))
            pieces.append(Piece(text=text, answered=draw.random() < 0.5))
    return pieces


def cut(draw: random.Random, pieces: list[Piece]) -> list[Piece]:
    """Cut each text at random places."""
    cuts = []
    for piece in pieces:
        places = [draw.randrange(len(piece.text) + 1) for _ in range(draw.randrange(4))]
        bounds = sorted({0, *places, len(piece.text)})
        cuts += [
            Piece(text=piece.text[a:b], answered=piece.answered)
            for a, b in itertools.pairwise(bounds)
        ] or [piece]
    return cuts


def differences(kind: str, count: int, seed: int = 0) -> list[list[Piece]]:
    """Documents, of `count` random ones, that are read otherwise than by `tokenizers`."""
    tokenizer, theirs, names = pair(kind)
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        pieces = random_pieces(draw, tokenizer)
        texts = [
            names[piece.token] if piece.token is not None else piece.text or '' for piece in pieces
        ]
        texts = [IMAGE if piece.image else text for piece, text in zip(pieces, texts, strict=True)]
        encoding = theirs.encode(''.join(texts), add_special_tokens=False)
        image = theirs.token_to_id(IMAGE)
        wanted = [x for i in encoding.ids for x in ([IMAGE_TOKEN] * 3 if i == image else [i])]
        starts = list(itertools.accumulate(map(len, texts), initial=0))
        counts = []
        for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            spans = [
                (starts[a], starts[b])
                for a in range(len(pieces))
                for b in range(a + 1, len(pieces) + 1)
                if all(piece.answered for piece in pieces[a:b])
            ]
            counted = any(start < stop and end > first for first, stop in spans)
            counts += [False] * 3 if i == image else [counted]
        images = sum(piece.image is not None for piece in pieces)
        try:
            read = tokenizer.encode_pieces(
                cut(draw, pieces), sizes=[3] * images, image_token=IMAGE_TOKEN
            )
        except ConfigError:  # a special token of the markup is letters for `tokenizers`
            marks = len([text for text in texts if text in names.values()])
            if sum(i in names for i in encoding.ids) == marks:
                raise
            continue
        if read != (wanted, counts):
            found.append(pieces)
    return found


@pytest.mark.parametrize('kind', TWELVE)
def test_a_document_in_pieces_has_the_ids_of_the_whole(kind: str) -> None:
    assert not differences(kind, COUNT)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('kind', TWELVE)
def test_two_thousand_documents_in_pieces_have_the_ids_of_the_whole(kind: str) -> None:
    assert not differences(kind, 2000, seed=1)


@pytest.mark.parametrize('kind', TWELVE)
def test_a_text_that_spells_special_tokens_has_none(kind: str) -> None:
    tokenizer, theirs, _ = pair(kind)
    draw = random.Random(2)
    special = list(tokenizer.special_tokens())
    texts = [random_text(draw, special) + draw.choice(special) for _ in range(COUNT)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids


def test_a_text_may_have_the_characters_of_the_marks() -> None:
    tokenizer, theirs, names = pair('byte-level')
    (start,) = (i for i, name in names.items() if name == chr(0x10F001))
    marks = [*map(chr, range(0xFDD0, 0xFDE0)), f'\ufdd0{start}\ufdef']
    for text in [*marks, ''.join(marks)]:
        ids, _ = tokenizer.encode_pieces([Piece(token=start), Piece(text=text)])
        assert ids == theirs.encode(names[start] + text).ids
    with pytest.raises(ConfigError, match='all noncharacters'):
        tokenizer.encode_pieces([Piece(text=''.join(map(chr, range(0xFDD0, 0xFDEF))))])


def test_a_special_token_that_the_text_around_hides_is_named() -> None:
    tokenizer, _, _ = pair('added tokens')
    word = tokenizer.special_tokens()['<|word|>']
    with pytest.raises(ConfigError, match=r'does not find its special token <\|word\|> within'):
        tokenizer.encode_pieces([Piece(text='a'), Piece(token=word)])


@pytest.mark.parametrize('by_merges', [False, True])
@pytest.mark.parametrize('by_words', [False, True])
def test_no_bpe_makes_special_tokens_of_letters(by_words: bool, by_merges: bool) -> None:
    name = '<|im_end|>'
    content = json.loads(byte_tokenizer([name])._backend.to_str())
    model = content['model']
    model['ignore_merges'] = by_words
    for token in content['added_tokens']:
        model['vocab'][token['content']] = token['id']
    if by_merges:
        for end in range(2, len(name) + 1):
            model['merges'].append([name[: end - 1], name[end - 1]])
            model['vocab'].setdefault(name[:end], 256 + end)
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.encode_special_tokens = True
    (end,) = (token['id'] for token in content['added_tokens'] if token['content'] == name)
    assert (end in backend.encode(name).ids) == (by_words or by_merges)
    tokenizer = Tokenizer(backend, 'a BPE')
    for text in (name, f'a{name}b'):
        (ids,) = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids) == text
        assert end not in ids
        (first, *rest), _ = tokenizer.encode_pieces([Piece(token=end), Piece(text=text)])
        assert (first, rest) == (end, ids.tolist())
