"""Reject tokens without a row in the embedding, such as a padding token that was added later."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megajax.base.errors import ConfigError, Problem, mistake
from megajax.runtime.data.text.token_names import names_file

if TYPE_CHECKING:
    from megajax.runtime.data.text.tokenizer import Tokenizer

OWN = 'their own tokenizer, or data.tokenizer=none'

logger = logging.getLogger(__name__)


class NoRowError(ConfigError):
    """An error for a text with a token that has no row in the embedding."""

    def __init__(self, spec: str, token: str, token_id: int, rows: int, size: int) -> None:
        self.token = token
        message = (
            f'{spec} gives {token} the id {token_id}, and model.vocab_size={rows} ends below it; '
            'take this token out of the text, use a data.chat_template without it, or in a new '
            f'model model.vocab_size={size}'
        )
        super().__init__(Problem('data.tokenizer', message))


def fit_to_rows(tokenizer: 'Tokenizer', rows: int, spec: str, special: Sequence[str]) -> None:
    """Let a model with `rows` embedding rows use a tokenizer that may have more entries.

    As in transformers, added tokens may have ids beyond the rows, and a text with such a token is
    rejected. Raises ConfigError if such an id belongs to an ordinary token, to a token that every
    document has, or to a token of `special`.
    """
    beyond = tokenizer.limit(rows)
    if not beyond:
        return
    added = tokenizer.added_tokens
    of_objective = {i for i in beyond if beyond[i] in special}
    needed = dict.fromkeys((beyond.keys() - added) | of_objective, OWN)
    needed |= dict.fromkeys(tokenizer.start, 'a tokenizer.json whose post_processor adds others')
    needed[tokenizer.eod] = f'another eos_token in {names_file(spec)}'
    if used := [i for i in beyond if i in needed]:
        size = tokenizer.vocab_size
        message = (
            f'{rows} is below the {size} entries of data.tokenizer={spec}; '
            f'use {size} or more. Weights with {rows} rows have none for {beyond[used[0]]} '
            f'(id {used[0]}) and need {needed[used[0]]}'
        )
        raise mistake('model.vocab_size', message, 'data.tokenizer')
    logger.warning(
        'data.tokenizer: no row in the embedding for %s; a text that has one is rejected',
        ', '.join(beyond.values()),
    )
