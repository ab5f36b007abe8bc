"""The table of settings that cannot be combined; `megajax config combinations` prints it.

It has the pairs of features. Constraints between sizes (`ffn_size` and `mesh.model`) are in
`rules.py`.
"""

from collections.abc import Callable, Iterator
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
        """Return the problem to report at the second setting's key."""
        path, key = self.other.split('=')[0], self.one.split('=')[0]
        return Problem(path=path, message=f'{self.reason}; {self.instead}', others=(key,))


# A setting, whether a config has it, why it excludes the other one, and what to use instead.
Other = tuple[str, Callable[['Config'], bool], str, str]


def _both(
    one: Callable[['Config'], bool], other: Callable[['Config'], bool]
) -> Callable[['Config'], bool]:
    return lambda config: one(config) and other(config)


def _pairs(
    one: str, is_one: Callable[['Config'], bool], own: str, *others: Other
) -> Iterator[Combination]:
    """Yield the pairs of a setting with others; `own` is what to use in its place."""
    for key, is_in, reason, instead in others:
        yield Combination(one, key, _both(is_one, is_in), reason, f'use {instead}, or {own}')


MASKED = 'model.objective=masked_lm'
TOKENS = 'train.overlap=sequence_split'
UNROLLED = 'train.unroll=true'
FP8 = 'train.dtype=fp8'
AFTER, ALL_HEADS = 'model.norm_position=after', 'model.qk_norm=all'
NO_DROPOUT = 'model.dropout=0 and model.attention_dropout=0'
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
        f'a sequence of {MASKED} comes from one document',
        'leave it out',
    ),
    Combination(
        MASKED,
        'mesh.model_rows',
        lambda config: config.model.is_bert and config.mesh.is_grid,
        "BERT's heads have square layers that a grid would have to gather",
        f'use mesh.model_rows=1 with {MASKED}',
    ),
    Combination(
        'optim.shard=none',
        'mesh.replicas',
        lambda config: config.optim.shard == 'none' and config.mesh.replicas > 1,
        'replicas are groups that a state is sharded within, and optim.shard=none shards nothing',
        'use mesh.replicas=1, or optim.shard=weights',
    ),
    Combination(
        'mesh.model_rows',
        'mesh.stages',
        lambda config: config.mesh.is_grid and config.mesh.stages > 1,
        'stages divide a model that one group of devices cannot hold, and so does a grid',
        'use mesh.model_rows=1, or mesh.stages=1',
    ),
    Combination(
        'mesh.model_rows',
        'mesh.context',
        lambda config: config.mesh.is_grid and config.mesh.context > 1,
        'attention on context shards needs the rows that a grid would shard',
        'use mesh.model_rows=1, or mesh.context=1',
    ),
    Combination(
        'data.document_mask=true',
        'mesh.context',
        lambda config: config.data.document_mask and config.mesh.context > 1,
        'a block of keys of another shard has no mask of documents',
        'use data.document_mask=false, or mesh.context=1',
    ),
    Combination(
        'model.dropout',
        'mesh.context',
        lambda config: config.model.has_dropout and config.mesh.context > 1,
        'a mask of dropout is drawn for all tokens of a row at once',
        f'use {NO_DROPOUT}, or mesh.context=1',
    ),
    Combination(
        MASKED,
        'mesh.context',
        lambda config: config.model.is_bert and config.mesh.context > 1,
        "the order of tokens on context shards balances causal attention, and BERT's is not",
        f'use mesh.context=1 with {MASKED}',
    ),
    Combination(
        'vision',
        'mesh.stages',
        lambda config: config.vision is not None and config.mesh.stages > 1,
        'the encoder stands before the first stage, and the others would wait for it',
        'use mesh.stages=1; mesh.model and optim.shard=weights divide the model too',
    ),
    Combination(
        'vision',
        'mesh.context',
        lambda config: config.vision is not None and config.mesh.context > 1,
        "an image's vectors stand beside each other, and context shards would cut them apart",
        'use mesh.context=1',
    ),
    Combination(
        'vision',
        'mesh.model_rows',
        lambda config: config.vision is not None and config.mesh.is_grid,
        "a grid shards D, and the encoder's vectors have all of it",
        'use mesh.model_rows=1',
    ),
    Combination(
        'vision',
        MASKED,
        lambda config: config.vision is not None and config.model.is_bert,
        "BERT's pairs of segments have no place for images",
        'use model.objective=next_token, or no vision',
    ),
    Combination(
        'vision.fusion=cross_attention',
        'vision.deepstack',
        lambda config: (
            config.vision is not None and config.vision.is_crossed and bool(config.vision.deepstack)
        ),
        'DeepStack adds vectors to the tokens of an image, and cross-attention has one token for '
        'each image',
        'use vision.deepstack=[], or vision.fusion=tokens',
    ),
    *_pairs(
        TOKENS,
        lambda config: config.train.overlap == 'sequence_split',
        'train.overlap=batch_split',
        (
            'model.dropout',
            lambda config: config.model.has_dropout,
            'a mask of dropout is drawn for all tokens of a row at once',
            NO_DROPOUT,
        ),
        (
            'mesh.stages',
            lambda config: config.mesh.stages > 1,
            'the stages of a pipeline already have microbatches that take turns',
            'mesh.stages=1',
        ),
        (
            'mesh.context',
            lambda config: config.mesh.context > 1,
            'context shards cut the sequence already',
            'mesh.context=1',
        ),
        (
            'mesh.model_rows',
            lambda config: config.mesh.is_grid,
            'a grid needs all tokens of the rows that it shards',
            'mesh.model_rows=1',
        ),
        (
            'vision',
            lambda config: config.vision is not None,
            "an image's vectors stand beside each other, and halves would cut them apart",
            'no vision',
        ),
        (
            'lora',
            lambda config: config.lora is not None,
            'the order of halves of the tokens does not know adapters',
            'no lora',
        ),
        (
            AFTER,
            lambda config: config.model.norm_position == 'after',
            'the order of the halves has norms before the sublayers',
            'model.norm_position=before',
        ),
        (
            ALL_HEADS,
            lambda config: config.model.norms_all_heads,
            'the order of the halves has no place for a sum over all heads',
            'model.qk_norm=true',
        ),
    ),
    *(
        Combination(
            UNROLLED,
            key,
            _both(lambda config: config.train.unroll is True, is_in),
            f'train.unroll=true runs the layers in an order that does not know {what}',
            'use train.unroll=false',
        )
        for key, is_in, what in (
            ('mesh.stages', lambda config: config.mesh.stages > 1, 'the ticks of a pipeline'),
            ('mesh.context', lambda config: config.mesh.context > 1, 'context shards'),
            ('mesh.model_rows', lambda config: config.mesh.is_grid, 'a grid'),
            ('vision', lambda config: config.vision is not None, 'images'),
            ('lora', lambda config: config.lora is not None, 'adapters'),
            (AFTER, lambda config: config.model.norm_position == 'after', 'norms of outputs'),
            (ALL_HEADS, lambda config: config.model.norms_all_heads, 'sums over all heads'),
        )
    ),
    Combination(
        ALL_HEADS,
        'model.norm=layernorm',
        lambda config: config.model.norms_all_heads and config.model.norm == 'layernorm',
        'over all heads there is an RMSNorm alone',
        'use model.norm=rmsnorm, or model.qk_norm=true',
    ),
    *_pairs(
        'vision',
        lambda config: config.vision is not None,
        'no vision',
        (
            AFTER,
            lambda config: config.model.norm_position == 'after',
            'the layers of a model that sees have norms before their sublayers',
            'model.norm_position=before',
        ),
        (
            ALL_HEADS,
            lambda config: config.model.norms_all_heads,
            'the layers of a model that sees have norms of queries and keys by the head',
            'model.qk_norm=true',
        ),
    ),
    *_pairs(
        FP8,
        lambda config: config.train.dtype == 'fp8',
        'train.dtype=bfloat16',
        (
            'mesh.stages',
            lambda config: config.mesh.stages > 1,
            'the ticks of a pipeline do not count the exponents that give fp8 its scales',
            'mesh.stages=1',
        ),
        (
            'vision',
            lambda config: config.vision is not None,
            'the layers of an encoder and those that attend to images have no scales of fp8',
            'no vision',
        ),
    ),
    *_pairs(
        'lora',
        lambda config: config.lora is not None,
        'no lora',
        (
            'mesh.stages',
            lambda config: config.mesh.stages > 1,
            'what adapters train is too small to be divided in stages',
            'mesh.stages=1; mesh.model and optim.shard=weights divide the frozen weights',
        ),
        (
            'mesh.context',
            lambda config: config.mesh.context > 1,
            "adapters' gradients are not summed over context shards",
            'mesh.context=1',
        ),
        (
            'mesh.model_rows',
            lambda config: config.mesh.is_grid,
            'a grid shards both dims of a weight, and an adapter has only one of them',
            'mesh.model_rows=1',
        ),
        (
            FP8,
            lambda config: config.train.dtype == 'fp8',
            'the product of an adapter has no scales of fp8',
            'train.dtype=bfloat16',
        ),
        (
            'vision',
            lambda config: config.vision is not None,
            'the layers of an encoder have no adapters',
            'vision.freeze instead',
        ),
        (
            MASKED,
            lambda config: config.model.is_bert,
            "BERT's heads would be frozen",
            'model.objective=next_token',
        ),
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
    """Return a problem for each pair of the table that a config has."""
    return [combination.problem() for combination in COMBINATIONS if combination.is_in(config)]
