"""The table of settings that conflict; `megajax config conflicts` prints it.

It lists pairs of features. Constraints between sizes, such as `ffn_size` and `mesh.model`, are in
`tensor_rules.py` and other modules of rules.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from megajax.base.errors import Problem

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

MASKED, NEXT = 'model.objective=masked_lm', 'model.objective=next_token'
CAUSAL, BIDIRECTIONAL = 'model.attention=causal', 'model.attention=bidirectional'
WINDOW = 'model.window'
SINKS = 'model.attention_sinks=true'
EXPERTS = 'model.experts'
OUTPUTS, ALL_HEADS = 'model.norm_position', 'model.qk_norm=all'
ZERO_CENTERED = 'model.zero_centered_norm=true'
CROSS, DEEPSTACK = 'vision.fusion=cross_attention', 'vision.deepstack'
BATCH, TOKENS = 'train.overlap=batch_split', 'train.overlap=sequence_split'
UNROLLED, FP8 = 'train.unroll=true', 'train.dtype=fp8'
CURRENT = 'train.fp8_scaling=current'
NO_DROPOUT = 'model.dropout=0 and model.attention_dropout=0'

# For each feature's setting: a function that tells whether a config has the feature, and the
# setting that turns it off.
FEATURES: Mapping[str, tuple[Callable[['Config'], bool], str]] = {
    MASKED: (lambda config: config.model.is_bert, NEXT),
    NEXT: (lambda config: not config.model.is_bert, MASKED),
    CAUSAL: (lambda config: config.model.causal, BIDIRECTIONAL),
    BIDIRECTIONAL: (lambda config: not config.model.causal, CAUSAL),
    OUTPUTS: (lambda config: config.model.norms_outputs, 'model.norm_position=before'),
    ALL_HEADS: (lambda config: config.model.norms_all_heads, 'model.qk_norm=true'),
    ZERO_CENTERED: (
        lambda config: config.model.zero_centered_norm,
        'model.zero_centered_norm=false',
    ),
    'model.norm=layernorm': (lambda config: config.model.norm == 'layernorm', 'model.norm=rmsnorm'),
    'model.position=learned': (
        lambda config: config.model.position == 'learned',
        'model.position=rope',
    ),
    'model.rope_scaling': (
        lambda config: config.model.rope_scaling is not None,
        'model.rope_scaling=null',
    ),
    WINDOW: (lambda config: config.model.has_windows, 'no window'),
    SINKS: (lambda config: config.model.attention_sinks, 'model.attention_sinks=false'),
    EXPERTS: (lambda config: config.model.experts is not None, 'model.experts=null'),
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
    'lora': (lambda config: config.lora is not None, 'lora=null'),
    'mesh.replicas': (lambda config: config.mesh.replicas > 1, 'mesh.replicas=1'),
    'mesh.stages': (lambda config: config.mesh.stages > 1, 'mesh.stages=1'),
    'mesh.context': (lambda config: config.mesh.context > 1, 'mesh.context=1'),
    'mesh.model_rows': (lambda config: config.mesh.is_grid, 'mesh.model_rows=1'),
    BATCH: (lambda config: config.train.overlap == 'batch_split', 'train.overlap=none'),
    TOKENS: (lambda config: config.train.overlap == 'sequence_split', 'train.overlap=batch_split'),
    UNROLLED: (lambda config: config.train.unroll is True, 'train.unroll=false'),
    FP8: (lambda config: config.train.dtype == 'fp8', 'train.dtype=bfloat16'),
    CURRENT: (lambda config: config.train.has_current_scales, 'train.fp8_scaling=delayed'),
    'train.sample_prompts': (
        lambda config: bool(config.train.sample_prompts),
        'train.sample_prompts=[]',
    ),
    'optim.shard=none': (lambda config: config.optim.shard == 'none', 'optim.shard=weights'),
    'data.order': (lambda config: config.data.order != 'stateless', 'data.order=stateless'),
    'data.document_mask=true': (
        lambda config: config.data.document_mask,
        'data.document_mask=false',
    ),
}

# The reason why two features conflict and, after a semicolon, what to use instead. If there is no
# semicolon, the message suggests to turn off one of the two features.
PAIRS: Mapping[str, Mapping[str, str]] = {
    MASKED: {
        CAUSAL: 'masked-token prediction needs the tokens on both sides',
        'train.sample_prompts': f'a model with {MASKED} cannot continue a prompt; '
        'remove the prompts',
        'data.order': f'{MASKED} reads pairs of whole documents, which only data.order=stateless '
        'makes; use stateless',
        'data.document_mask=true': f'with {MASKED} each sequence has one document; remove it',
        'mesh.model_rows': '2-D tensor parallelism does not support BERT: it would have to '
        f"all-gather the square layers of BERT's heads; use mesh.model_rows=1 with {MASKED}",
    },
    WINDOW: {BIDIRECTIONAL: 'windows (model.window, model.layers) are of earlier tokens only'},
    EXPERTS: {
        'mesh.model_rows': '2-D tensor parallelism does not support experts: it shards the model '
        'dimension, along which tokens are sent to experts; use mesh.model_rows=1',
        TOKENS: 'experts wait for their tokens, so there is no matmul to overlap with; '
        'use train.overlap=none',
        FP8: 'fp8 is not supported with experts: their matmuls have no FP8 scales',
    },
    NEXT: {BIDIRECTIONAL: 'a token that attends to the next one has nothing to predict'},
    'mesh.model_rows': {
        'mesh.stages': 'pipeline parallelism and 2-D tensor parallelism cannot be combined: each '
        'splits a model that one tensor-parallel group cannot hold; '
        'use mesh.model_rows=1, or mesh.stages=1',
        'mesh.context': 'context parallelism is not supported with 2-D tensor parallelism, which '
        'shards the sequences of a microbatch inside attention; '
        'use mesh.model_rows=1, or mesh.context=1',
    },
    'vision': {
        'mesh.stages': 'vision models do not support pipeline parallelism: all later stages would '
        'wait for the encoder; use mesh.stages=1 (mesh.model and optim.shard=weights split the '
        'model too)',
        'mesh.context': 'vision models do not support context parallelism, which would split the '
        'tokens of an image; use mesh.context=1',
        'mesh.model_rows': 'vision models do not support 2-D tensor parallelism: it shards the '
        "model dimension, and the encoder's output is unsharded; use mesh.model_rows=1",
        MASKED: "BERT's segment pairs cannot contain images",
    },
    CROSS: {
        DEEPSTACK: 'DeepStack adds embeddings to each token of an image, and with cross-attention '
        'one token marks the image',
    },
    TOKENS: {
        'model.dropout': 'sequence_split does not support dropout, whose masks are drawn for '
        'entire sequences',
        'mesh.stages': 'the overlap schedule does not run in pipeline stages, and only XLA orders '
        'the halves of a batch there; use train.overlap=batch_split, or mesh.stages=1',
        'mesh.context': 'context parallelism already splits the sequence',
        'mesh.model_rows': '2-D tensor parallelism shards whole sequences, which sequence_split '
        'would cut',
        'vision': 'sequence_split does not support vision models: it would split the tokens of an '
        'image',
    },
    CURRENT: {
        TOKENS: 'with current scaling a matmul waits for the largest value of all tokens',
    },
    'lora': {
        'mesh.model_rows': 'LoRA does not support 2-D tensor parallelism, which shards both dims '
        'of a weight, of which an adapter has only one',
    },
    'model.position=learned': {
        'model.rope_scaling': 'needs model.position=rope, not learned; remove it',
    },
}


class Conflict(NamedTuple):
    """Two features that cannot be combined."""

    one: str
    other: str
    reason: str
    instead: str

    def problem(self) -> Problem:
        """Return the problem to report at the second setting's key."""
        path, key = self.other.split('=')[0], self.one.split('=')[0]
        return Problem(path, f'{self.reason}; {self.instead}', others=(key,))


def _conflict(one: str, other: str, text: str) -> Conflict:
    reason, _, instead = text.partition('; ')
    without = f'use {FEATURES[other][1]}, or {FEATURES[one][1]}'
    return Conflict(one, other, reason, instead or without)


CONFLICTS = tuple(
    _conflict(one, other, text) for one, pairs in PAIRS.items() for other, text in pairs.items()
)
# A search of layouts checks thousands of configs, and few of them have a feature that comes first.
_BY_ONE = tuple(
    (one, tuple(pair for pair in CONFLICTS if pair.one == one))
    for one in dict.fromkeys(pair.one for pair in CONFLICTS)
)


def excluded(config: 'Config') -> list[Problem]:
    """Return a problem for each pair of features that a config combines."""
    return [
        pair.problem()
        for one, pairs in _BY_ONE
        if FEATURES[one][0](config)
        for pair in pairs
        if FEATURES[pair.other][0](config)
    ]
