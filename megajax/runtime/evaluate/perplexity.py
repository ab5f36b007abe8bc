"""The perplexity of a text, and of WikiText-103 by the rule of the Megatron paper.

The rule is in Shoeybi et al. (2019), appendix E.1.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from megajax.core.config import ConfigError
from megajax.runtime.data import Tokenizer, encode_documents, read_documents
from megajax.runtime.data.text.corpus import naming_lines, read_text
from megajax.runtime.data.text.spelled_tokens import warn_of_letters
from megajax.runtime.evaluate.detokenize import detokenize_wikitext
from megajax.runtime.evaluate.score import Scorer, Window

WIKITEXT_STRIDE = 32  # tokens, as in the paper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The perplexity of a text."""

    documents: int
    tokens: int
    bytes: int  # size of the text in UTF-8
    loss: float  # loss in nats per token
    perplexity: float  # perplexity per token
    # The loss in bits per byte of UTF-8, comparable between tokenizers; None for an empty text.
    bits_per_byte: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WikiText:
    """The perplexity of WikiText."""

    tokens: int  # number of sub-word tokens
    original_tokens: int  # number of words in the file
    loss: float  # loss in nats per sub-word token
    token_perplexity: float  # perplexity per sub-word token
    perplexity: float  # perplexity normalized by `original_tokens`


def perplexity(
    scorer: Scorer, tokenizer: Tokenizer, files: Sequence[str], *, stride: int | None = None
) -> Perplexity:
    """Evaluate the documents in files and folders (see `read_documents`), joined into one sequence.

    An end-of-document token follows each document. Every token except a start token of the first
    document is predicted once, from the tokens before it in its window of `max_seq_len`. The window
    moves by `stride` tokens. By default, `stride` is the window's length, which leaves the first
    tokens of each window little context.
    """
    documents = [document for file in files for document in read_documents(file)]
    texts = [document.text for document in documents]
    warn_of_letters(', '.join(files), texts, tokenizer.special_tokens())
    with naming_lines(documents):
        ids, _ = encode_documents(texts, tokenizer)
    if not tokenizer.start:
        ids = np.concatenate([[tokenizer.eod], ids])
    stride = scorer.config.model.max_seq_len if stride is None else stride
    tokens, nll = len(ids) - 1, _sum(scorer, ids, stride)
    num_bytes = sum(len(text.encode()) for text in texts)
    return Perplexity(
        documents=len(texts),
        tokens=tokens,
        bytes=num_bytes,
        loss=nll / tokens,
        perplexity=exp(nll / tokens),
        bits_per_byte=nll / num_bytes / math.log(2),
    )


def wikitext(
    scorer: Scorer, tokenizer: Tokenizer, file: str, *, stride: int = WIKITEXT_STRIDE
) -> WikiText:
    """Evaluate a file of WikiText-103 as it is published, such as `wiki.test.tokens`.

    The file has words and punctuation with spaces between them. It is converted back to text, and
    the loss of its T sub-word tokens is normalized by the T_o words of the file: exp(loss (T - 1) /
    (T_o - 1)). Each token except the first is predicted once, in a window that moves by `stride`
    tokens. The tokenizer's start tokens precede the text.

    Raises ConfigError for a file that is not UTF-8, or has fewer than two words or tokens.
    """
    text = read_text(file).replace('\r\n', '\n')
    words = len(text.strip().split(' '))
    (ids,) = tokenizer.encode_batch([detokenize_wikitext(text)])
    if words < 2 or len(ids) < 2:
        raise ConfigError(
            f'{file} has {words} words and {len(ids)} tokens: use a text with at least two of each'
        )
    warn_of_letters(file, [text], tokenizer.special_tokens())
    tokens = [*tokenizer.start, *ids]
    loss = _sum(scorer, tokens, stride) / (len(tokens) - 1)
    return WikiText(
        tokens=len(ids),
        original_tokens=words,
        loss=loss,
        token_perplexity=exp(loss),
        perplexity=exp(loss * (len(ids) - 1) / (words - 1)),
    )


def windows(ids: Sequence[int] | np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """Yield windows in which each token except the first is predicted once.

    The first window predicts all of its tokens except the first; each later window predicts its
    last `stride` tokens or fewer.
    """
    end = min(length + 1, len(ids))
    yield Window(ids[:end], end - 1)
    while end < len(ids):
        new = min(stride, len(ids) - end)
        end += new
        yield Window(ids[max(end - length - 1, 0) : end], new)


def _sum(scorer: Scorer, ids: Sequence[int] | np.ndarray, stride: int) -> float:
    length = scorer.config.model.max_seq_len
    if not 1 <= stride <= length:
        raise ConfigError(f'stride {stride} must be from 1 to model.max_seq_len={length}')
    return math.fsum(scored.nll.sum() for scored in scorer(windows(ids, length, stride)))


def exp(loss: float) -> float:
    """Return the perplexity of a loss; infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
