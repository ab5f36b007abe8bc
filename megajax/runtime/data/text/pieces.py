"""Tokenize a text with special tokens and images as `tokenizers` encodes the whole text.

A tokenizer may encode a piece of a text differently by itself: it may add a space, strip blanks, or
miss a merge across the border. The pieces are therefore joined and encoded at once. In the joined
text, a mark that no text can spell replaces each special token of the markup. A copy of the
tokenizer has the marks as added tokens with the properties of the special ones, so that letters
that spell a special token remain letters.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from secrets import token_hex
from typing import TYPE_CHECKING

from megajax.base.errors import ConfigError, mistake

if TYPE_CHECKING:
    import tokenizers

# Unicode noncharacters, which texts should not contain
GUARDS = tuple(map(chr, range(0xFDD0, 0xFDEF)))
END = chr(0xFDEF)  # the end of a mark; the beginning is one of GUARDS
IMAGE = -1  # the id that the mark of an image stands for if it stands for no special token
PROPERTIES = 'single_word', 'lstrip', 'rstrip', 'normalized'


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A text, a special token or an image; exactly one is given."""

    text: str = ''
    token: int | None = None
    image: str | None = None  # file name in the dataset's folder
    answered: bool = False  # whether it counts in the loss; an image never does


class MarkedTokenizer:
    """A copy of a tokenizer in which marks stand for special tokens and images.

    The texts to encode must not contain the character `guard`.
    """

    def __init__(self, backend: 'tokenizers.Tokenizer', guard: str) -> None:
        from tokenizers import AddedToken

        self.guard = guard
        self._backend = type(backend).from_str(reader_of_letters(backend).to_str())
        self._backend.encode_special_tokens, self._names = True, backend.id_to_token
        self._marks = {IMAGE: f'{guard}{END}'}
        added = [AddedToken(self._marks[IMAGE], normalized=False)]
        for i, token in backend.get_added_tokens_decoder().items():
            if token.special:
                self._marks[i] = f'{guard}{i}{END}'
                properties = {name: getattr(token, name) for name in PROPERTIES}
                added.append(AddedToken(self._marks[i], **properties))
        self._backend.add_tokens(added)
        self._ids = {self._backend.token_to_id(mark): i for i, mark in self._marks.items()}

    def encode(
        self, pieces: Sequence[Piece], sizes: Sequence[int], image_token: int
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of consecutive pieces, and whether each counts in the loss.

        Image n becomes sizes[n] times `image_token`. An id counts if its token covers an answered
        character, as in the mask of transformers' `apply_chat_template`. Raises ConfigError if the
        tokenizer does not find a special token at its place.
        """
        image = image_token if image_token in self._marks else IMAGE
        texts = [self._text(piece, image) for piece in pieces]
        encoding = self._backend.encode(''.join(texts), add_special_tokens=False)
        found = [self._ids[i] for i in encoding.ids if i in self._ids]
        places = [image if p.image is not None else p.token for p in pieces]
        if found != (expected := [i for i in places if i is not None]):
            raise self._not_found(next(i for i in expected if found.count(i) != expected.count(i)))
        counts = covered(encoding.offsets, answered_spans(pieces, texts))
        rest = iter(sizes)
        ids: list[int] = []
        answered: list[bool] = []
        for i, is_answered in zip(encoding.ids, counts, strict=True):
            if (original := self._ids.get(i, i)) == image:
                size = next(rest)
                ids += [image_token] * size
                answered += [False] * size
            else:
                ids.append(original)
                answered.append(is_answered)
        return ids, answered

    def _text(self, piece: Piece, image: int) -> str:
        if piece.image is not None:
            return self._marks[image]
        return piece.text if piece.token is None else self._marks[piece.token]

    def _not_found(self, i: int) -> ConfigError:
        return mistake(
            'data.tokenizer',
            f'does not find its special token {self._names(i)} within a document, because of the '
            'text around it; set "single_word" and "normalized" to false for this token in '
            'tokenizer.json',
        )


def reader_of_letters(backend: 'tokenizers.Tokenizer') -> 'tokenizers.Tokenizer':
    """Return a tokenizer that reads spelled special tokens as letters.

    It is `backend` with `encode_special_tokens` set, or a copy if its model itself would make
    special tokens of letters. In the copy, they have names that nobody can spell.
    """
    names = {name: f'{END}{token_hex()}{END}' for name in _found_by_model(backend)}
    if not names:
        return backend
    content = json.loads(backend.to_str())
    model = content['model']
    if isinstance(model['vocab'], dict):  # for BPE and WordPiece
        model['vocab'] = {names.get(name, name): i for name, i in model['vocab'].items()}
        model['unk_token'] = names.get(model['unk_token'], model['unk_token'])
    else:  # for Unigram
        model['vocab'] = [(names.get(name, name), score) for name, score in model['vocab']]
    if 'merges' in model:  # merges as pairs of tokens
        model['merges'] = [x for x in model['merges'] if names.keys().isdisjoint([*x, ''.join(x)])]
    for token in content['added_tokens']:
        token['content'] = names.get(token['content'], token['content'])
    copy = type(backend).from_str(json.dumps(content))
    copy.encode_special_tokens = True
    return copy


def _found_by_model(backend: 'tokenizers.Tokenizer') -> set[str]:
    """Return the names of special tokens that a tokenizer's model would make of their letters.

    A BPE with `ignore_merges` makes a token of any word in the vocabulary; other models only make
    tokens by merges.
    """
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    names = {x.content for x in added if x.special and model.token_to_id(x.content) is not None}
    if type(model).__name__ != 'BPE':
        return names
    return {name for name in names if name in [token.value for token in model.tokenize(name)]}


def answered_spans(pieces: Sequence[Piece], texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the first character and the end of each run of answered pieces with these texts."""
    spans, end = [], 0
    for answered, run in groupby(zip(pieces, texts, strict=True), lambda pair: pair[0].answered):
        start, end = end, end + sum(len(text) for _, text in run)
        if answered:
            spans.append((start, end))
    return spans


def covered(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> Iterator[bool]:
    """Yield for each token whether it overlaps one of the spans, which are in order.

    The tokens may be out of order, because byte-level tokenizers give an added space the end of its
    neighbor.
    """
    ends = [end for _, end in spans]
    for start, end in offsets:
        number = bisect_right(ends, start)
        yield number < len(spans) and end > spans[number][0]
