"""LAMBADA (Paperno et al., 2016): prediction of the last word of a passage.

The last word is scored by the strict rule of the Megatron paper (Shoeybi et al., 2019, appendix
E.2).
"""

import dataclasses
from typing import TypeGuard

from megajax.core.config import mistake
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.sources.inputs import format_of, is_table
from megajax.runtime.data.sources.objects import read_objects
from megajax.runtime.data.text.pieces import Piece
from megajax.runtime.data.text.spelled_tokens import warn_of_letters
from megajax.runtime.evaluate.perplexity import exp
from megajax.runtime.evaluate.score import Scorer, Window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lambada:
    """The accuracy and perplexity of the last words of passages."""

    passages: int
    cut: int  # number of passages that were too long
    right: int  # number of passages whose last word was predicted
    accuracy: float  # right / passages
    perplexity: float  # perplexity per last word


def lambada(scorer: Scorer, tokenizer: Tokenizer, file: str) -> Lambada:
    """Evaluate JSON lines of passages under the key 'text', as in OpenAI's files for GPT-2.

    A last word is right if each of its sub-word tokens is the most probable one, given the tokens
    before it. A passage is encoded as a whole; the last word's tokens are all tokens that cover a
    character of it or of the space before it. If a passage is longer than the model's context, only
    its end is read.
    """
    limit = scorer.config.model.max_seq_len + 1
    texts = _read(file)
    warn_of_letters(file, texts, tokenizer.special_tokens())
    passages = [_window(*_split(text), tokenizer) for text in texts]
    windows = [
        Window(window.tokens[-limit:], min(window.num_targets, limit - 1)) for window in passages
    ]
    scored = scorer.in_any_order(windows)
    right = sum(bool(scores.is_top.all()) for scores in scored)
    return Lambada(
        passages=len(windows),
        cut=sum(len(window.tokens) > limit for window in passages),
        right=right,
        accuracy=right / len(windows),
        perplexity=exp(sum(scores.nll.sum() for scores in scored) / len(windows)),
    )


def _split(text: str) -> tuple[str, str]:
    """Split a passage into the text before its last word, and the word."""
    word = text.split()[-1]
    return text[: text.rfind(word)].strip(), word


def _window(passage: str, word: str, tokenizer: Tokenizer) -> Window:
    pieces = [Piece(text=passage), Piece(text=f' {word}', answered=True)]
    ids, answered = tokenizer.encode_pieces(pieces)
    tokens, targets = [*tokenizer.start, *ids], sum(answered)
    return Window(tokens if len(tokens) > targets else [tokenizer.eod, *tokens], targets)


def _read(file: str) -> list[str]:
    passages = []
    by_suffix = format_of(file) != 'text' or is_table(file)
    for place, line in read_objects(file, None if by_suffix else 'jsonl'):
        text = line.get('text')
        if not _is_passage(text):
            message = "has no passage under 'text'; correct the line"
            raise mistake(place, message)
        passages.append(text)
    if not passages:
        raise mistake(file, 'holds no passages; give JSON lines that do')
    return passages


def _is_passage(text: object) -> TypeGuard[str]:
    """Whether a value is a text with words, and without lone surrogates."""
    try:
        return isinstance(text, str) and bool(text.encode() and text.split())
    except UnicodeEncodeError:
        return False
