"""LAMBADA (Paperno et al., 2016): prediction of the last word of a passage.

The last word counts by the strict rule of the Megatron paper (Shoeybi et al., 2019, appendix E.2).
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from megajax.config import ConfigError
from megajax.data import Tokenizer
from megajax.evaluate.score import Scorer, Window
from megajax.files.bounded_json import parse_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lambada:
    """The accuracy and perplexity of the last words of passages."""

    passages: int
    cut: int  # passages that were too long
    right: int  # passages whose last word was predicted
    accuracy: float  # right / passages
    perplexity: float  # per last word


def lambada(scorer: Scorer, tokenizer: Tokenizer, file: str) -> Lambada:
    """Evaluate a .jsonl file of passages under the key 'text', as OpenAI published it for GPT-2.

    A last word is right if each of its sub-word tokens is the most probable one, given the tokens
    before it. The passage without its last word, and the word with the space before it, are encoded
    separately. If a passage is longer than the model's positions, only its end is read.
    """
    limit = scorer.config.model.max_seq_len + 1
    passages = [_window(*_split(text), tokenizer) for text in _read(file)]
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
        perplexity=math.exp(sum(scores.nll.sum() for scores in scored) / len(windows)),
    )


def _split(text: str) -> tuple[str, str]:
    """Split a passage into the text before its last word, and the word."""
    word = text.split()[-1]
    return text[: text.rfind(word)].strip(), word


def _window(passage: str, word: str, tokenizer: Tokenizer) -> Window:
    before, target = tokenizer.encode_batch([passage, f' {word}'])
    return Window([*([*tokenizer.start, *before] or [tokenizer.eod]), *target], len(target))


def _read(file: str) -> Iterator[str]:
    try:
        lines = Path(file).read_text(encoding='utf-8').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{file} cannot be read as UTF-8: {error}') from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = parse_json(line)['text']
            assert text.split()
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"{file}:{number}: not a JSON object with a passage under 'text'"
            ) from error
        yield text
