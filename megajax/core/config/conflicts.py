"""The table of settings that cannot be combined; `megajax config combinations` prints it.

It has the pairs of features. Constraints between sizes (`ffn_size` and `mesh.model`) are in
`rules.py`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from megajax.base.errors import Problem

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

MASKED, NEXT = 'model.objective=masked_lm', 'model.objective=next_token'
CAUSAL, BIDIRECTIONAL = 'model.attention=causal', 'model.attention=bidirectional'
OUTPUTS, ALL_HEADS = 'model.norm_position', 'model.qk_norm=all'
CROSS, DEEPSTACK = 'vision.fusion=cross_attention', 'vision.deepstack'
TOKENS, UNROLLED, FP8 = 'train.overlap=sequence_split', 'train.unroll=true', 'train.dtype=fp8'
NO_DROPOUT = 'model.dropout=0 and model.attention_dropout=0'

# Each feature by its setting: whether a config has it, and the setting of a config without it.
FEATURES: Mapping[str, tuple[Callable[['Config'], bool], str]] = {
    MASKED: (lambda config: config.model.is_bert, NEXT),
    NEXT: (lambda config: not config.model.is_bert, MASKED),
    CAUSAL: (lambda config: config.model.causal, BIDIRECTIONAL),
    BIDIRECTIONAL: (lambda config: not config.model.causal, CAUSAL),
    OUTPUTS: (lambda config: config.model.norms_outputs, 'model.norm_position=before'),
    ALL_HEADS: (lambda config: config.model.norms_all_heads, 'model.qk_norm=true'),
    'model.norm=layernorm': (lambda config: config.model.norm == 'layernorm', 'model.norm=rmsnorm'),
    'model.position=learned': (
        lambda config: config.model.position == 'learned',
        'model.position=rope',
    ),
    'model.rope_scaling': (
        lambda config: config.model.rope_scaling is not None,
        'model.rope_scaling=null',
    ),
    'model.dropout': (lambda config: config.model.has_dropout, NO_DROPOUT),
    'vision': (lambda config: config.vision is not None, 'no vision'),
    CROSS: (
        lambda config: config.vision is not None and config.vision.is_crossed,
        'vision.fusion=tokens',
    ),
    DEEPSTACK: (
        lambda config: config.vision is not None and bool(config.vision.deepstack),
        'vision.deepstack=[]',
    ),
    'lora': (lambda config: config.lora is not None, 'no lora'),
    'mesh.replicas': (lambda config: config.mesh.replicas > 1, 'mesh.replicas=1'),
    'mesh.stages': (lambda config: config.mesh.stages > 1, 'mesh.stages=1'),
    'mesh.context': (lambda config: config.mesh.context > 1, 'mesh.context=1'),
    'mesh.model_rows': (lambda config: config.mesh.is_grid, 'mesh.model_rows=1'),
    TOKENS: (lambda config: config.train.overlap == 'sequence_split', 'train.overlap=batch_split'),
    UNROLLED: (lambda config: config.train.unroll is True, 'train.unroll=false'),
    FP8: (lambda config: config.train.dtype == 'fp8', 'train.dtype=bfloat16'),
    'train.sample_prompts': (
        lambda config: bool(config.train.sample_prompts),
        'train.sample_prompts=[]',
    ),
    'optim.shard=none': (lambda config: config.optim.shard == 'none', 'optim.shard=weights'),
    'data.order=megatron': (lambda config: config.data.order == 'megatron', 'data.order=stateless'),
    'data.document_mask=true': (
        lambda config: config.data.document_mask,
        'data.document_mask=false',
    ),
}

# The reason why two features exclude one another and, after a semicolon, what to use instead if
# that is not the setting without the second one or without the first one.
PAIRS: Mapping[str, Mapping[str, str]] = {
    MASKED: {
        CAUSAL: 'a masked token is filled in from both sides',
        'train.sample_prompts': f'{MASKED} fills in tokens and continues no prompt; leave it out',
        'data.order=megatron': "megatron is the order of Megatron's GPTDataset; "
        f'use stateless with {MASKED}',
        'data.document_mask=true': f'a sequence of {MASKED} comes from one document; leave it out',
        'mesh.model_rows': "BERT's heads have square layers that a grid would have to gather; "
        f'use mesh.model_rows=1 with {MASKED}',
        'mesh.context': 'the order of tokens on context shards balances causal attention, and '
        f"BERT's is not; use mesh.context=1 with {MASKED}",
    },
    NEXT: {BIDIRECTIONAL: 'a token that sees the next one has nothing to predict'},
    'optim.shard=none': {
        'mesh.replicas': 'replicas are groups that a state is sharded within, and '
        'optim.shard=none shards nothing',
    },
    'mesh.model_rows': {
        'mesh.stages': 'stages divide a model that one group of devices cannot hold, and so does '
        'a grid; use mesh.model_rows=1, or mesh.stages=1',
        'mesh.context': 'attention on context shards needs the rows that a grid would shard; '
        'use mesh.model_rows=1, or mesh.context=1',
    },
    'data.document_mask=true': {
        'mesh.context': 'a block of keys of another shard has no mask of documents; '
        'use data.document_mask=false, or mesh.context=1',
    },
    'model.dropout': {
        'mesh.context': 'a mask of dropout is drawn for all tokens of a row at once; '
        f'use {NO_DROPOUT}, or mesh.context=1',
    },
    'vision': {
        'mesh.stages': 'the encoder stands before the first stage, and the others would wait for '
        'it; use mesh.stages=1; mesh.model and optim.shard=weights divide the model too',
        'mesh.context': "an image's vectors are next to each other, and context shards would cut "
        'them apart; use mesh.context=1',
        'mesh.model_rows': "a grid shards D, and the encoder's vectors have all of it; "
        'use mesh.model_rows=1',
        MASKED: "BERT's pairs of segments have no place for images",
        OUTPUTS: 'the layers of a model that sees have norms before their sublayers',
        ALL_HEADS: 'the layers of a model that sees have norms of queries and keys by the head',
    },
    CROSS: {
        DEEPSTACK: 'DeepStack adds vectors to the tokens of an image, and cross-attention has one '
        'token for each image',
    },
    TOKENS: {
        'model.dropout': 'a mask of dropout is drawn for all tokens of a row at once',
        'mesh.stages': 'the stages of a pipeline already have microbatches that take turns',
        'mesh.context': 'context shards cut the sequence already',
        'mesh.model_rows': 'a grid needs all tokens of the rows that it shards',
        'vision': "an image's vectors are next to each other, and halves would cut them apart",
        'lora': 'the order of halves of the tokens does not know adapters',
    },
    UNROLLED: {
        key: f'{UNROLLED} runs the layers in an order that does not know {what}; '
        'use train.unroll=false'
        for key, what in (
            ('mesh.stages', 'the ticks of a pipeline'),
            ('mesh.context', 'context shards'),
            ('mesh.model_rows', 'a grid'),
            ('vision', 'images'),
            ('lora', 'adapters'),
        )
    },
    ALL_HEADS: {'model.norm=layernorm': 'over all heads there is an RMSNorm alone'},
    FP8: {
        'mesh.stages': 'the ticks of a pipeline do not count the exponents that give fp8 its '
        'scales',
        'vision': 'the layers of an encoder and those that attend to images have no scales of fp8',
    },
    'lora': {
        'mesh.stages': 'what adapters train is too small to be divided in stages; use '
        'mesh.stages=1; mesh.model and optim.shard=weights divide the frozen weights, or no lora',
        'mesh.context': "adapters' gradients are not summed over context shards",
        'mesh.model_rows': 'a grid shards both dims of a weight, and an adapter has only one of '
        'them',
        FP8: 'the product of an adapter has no scales of fp8',
        'vision': 'the layers of an encoder have no adapters; use vision.freeze instead, or no '
        'lora',
        MASKED: "BERT's heads would be frozen",
    },
    'model.position=learned': {
        'model.rope_scaling': 'needs model.position=rope, not learned; leave it out',
    },
}


class Conflict(NamedTuple):
    """Two features that exclude one another."""

    one: str
    other: str
    reason: str
    instead: str

    def problem(self) -> Problem:
        """Return the problem to report at the second setting's key."""
        path, key = self.other.split('=')[0], self.one.split('=')[0]
        return Problem(path=path, message=f'{self.reason}; {self.instead}', others=(key,))


def _conflict(one: str, other: str, text: str) -> Conflict:
    reason, _, instead = text.partition('; ')
    without = f'use {FEATURES[other][1]}, or {FEATURES[one][1]}'
    return Conflict(one, other, reason, instead or without)


CONFLICTS = tuple(
    _conflict(one, other, text) for one, pairs in PAIRS.items() for other, text in pairs.items()
)


def excluded(config: 'Config') -> list[Problem]:
    """Return a problem for each pair of the table that a config has."""
    has = {name for name, (is_in, _) in FEATURES.items() if is_in(config)}
    return [pair.problem() for pair in CONFLICTS if {pair.one, pair.other} <= has]
