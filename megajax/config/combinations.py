"""What cannot be combined, in one table: `megajax config combinations` prints it.

Here are the pairs of features; what sizes demand of one another (`ffn_size` and `mesh.model`) is in
`check.py`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from megajax.config.errors import Problem

if TYPE_CHECKING:
    from megajax.config.schema import Config


class Combination(NamedTuple):
    """Two settings that exclude one another."""

    one: str
    other: str
    is_in: Callable[['Config'], bool]
    reason: str
    instead: str

    def problem(self) -> Problem:
        """The mistake of the second setting's key."""
        path, key = self.other.split('=')[0], self.one.split('=')[0]
        return Problem(path=path, message=f'{self.reason}; {self.instead}', others=(key,))


MASKED = 'model.objective=masked_lm'
COMBINATIONS = (
    Combination(
        MASKED,
        'model.attention=causal',
        lambda config: config.model.is_bert and config.model.causal,
        'a masked token is filled in from both sides',
        'use model.attention=bidirectional, or model.objective=next_token',
    ),
    Combination(
        'model.objective=next_token',
        'model.attention=bidirectional',
        lambda config: not config.model.is_bert and not config.model.causal,
        'a token that sees the next one has nothing to predict',
        'use model.attention=causal, or model.objective=masked_lm',
    ),
    Combination(
        MASKED,
        'train.sample_prompts',
        lambda config: config.model.is_bert and bool(config.train.sample_prompts),
        f'{MASKED} fills in tokens and continues no prompt',
        'leave it out',
    ),
    Combination(
        MASKED,
        'data.order=megatron',
        lambda config: config.model.is_bert and config.data.order == 'megatron',
        "megatron is the order of Megatron's GPTDataset",
        f'use stateless with {MASKED}',
    ),
    Combination(
        MASKED,
        'data.document_mask=true',
        lambda config: config.model.is_bert and config.data.document_mask,
        f'a sequence of {MASKED} is of one document',
        'leave it out',
    ),
    Combination(
        'model.position=learned',
        'model.rope_scaling',
        lambda config: config.model.rope_scaling is not None and config.model.position == 'learned',
        'needs model.position=rope, not learned',
        'leave it out',
    ),
)


def excluded(config: 'Config') -> list[Problem]:
    """The pairs of the table that are in a config."""
    return [one.problem() for one in COMBINATIONS if one.is_in(config)]
