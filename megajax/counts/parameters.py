"""The declaration of every parameter of a model: its dims, its role and its initial values.

Everything else about a parameter follows from its declaration: its placement (`parallel/layout.py`
maps letters to mesh axes), the dtype that a step computes with, weight decay, its ZeRO shards, the
expectations of lint, its slices in `interop`, and every count of this package. The letters of dims
are those of `parallel/layout.py`. Imports no jax.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megajax.config.model import TEXTURE_CHANNELS, ModelConfig, RelevanceConfig, VisionConfig
from megajax.config.schema import Config
from megajax.parallel.layout import Layout

# Dims of weights and biases that Megatron shards over its ranks, those of an encoder too.
SHARDED_BY_MEGATRON = 'VFNKⒻⓃⓀⓌ'
IMAGES = 'Ⓘ'  # the dim of the encoder's copies, one for each shard of the images
MERGERS = 'merger', 'deep_mergers'  # the part `merger` of `vision.freeze`
UNSHARDED: Mapping[str, int] = {}
SCORERS = 3
SCORER_FEATURES = (
    2 * TEXTURE_CHANNELS + SCORERS
)  # of a region: its texture, how it differs, first scores
SUMMARIES = 3 * SCORERS  # mean, greatest and standard deviation of each score
RELEVANCE_HIDDEN = 64  # hidden units of relevance's two networks beside the scorers
NUM_SEGMENTS = 2  # in a BERT sequence: token types, and also their possible orders


class Role(enum.Enum):
    """The role of a parameter, which decides its dtype in a step, its decay and its ZeRO shards."""

    MATRIX = 'matrix'  # computed with in train.dtype, decayed, sharded by ZeRO
    TABLE = 'table'  # in fp32, decayed, not sharded by ZeRO: a lookup, a router
    VECTOR = 'vector'  # in fp32, not decayed, not sharded by ZeRO: norms and biases


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The declaration of a parameter.

    The initial values are N(0, std) or, without `std`, `value`. `partial` is the dim of an
    activation that the parameter is applied along: if that dim is sharded, each shard computes a
    partial gradient of the parameter, and the partial gradients are summed once a step.
    """

    dims: str
    role: Role
    std: float = 0.0
    value: float = 0.0
    partial: str = ''
    is_frozen: bool = False  # has neither gradient nor moments, and does not decay

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self.role is not Role.VECTOR

    @property
    def is_stacked(self) -> bool:
        """Whether the array holds the parameters of all layers, or of all that attend to images."""
        return self.dims[0] in 'LJ'

    @property
    def dims_of_layer(self) -> str:
        """The dims without those of stacked layers."""
        return self.dims[1:] if self.is_stacked else self.dims

    @property
    def is_matrix(self) -> bool:
        """Whether a step computes with it in `train.dtype`, and ZeRO shards it."""
        return self.role is Role.MATRIX

    @property
    def is_in_microbatches(self) -> bool:
        """Whether ZeRO-2 and ZeRO-3 sum its gradient, and ZeRO-3 gathers it, in each microbatch.

        The others are vectors and tables, and the layer of BERT that has a copy on each shard of
        the sequence.
        """
        return self.is_matrix and not self.partial

    @property
    def is_of_encoder(self) -> bool:
        """Whether it is the vision encoder's: whole on each device in the computation."""
        return self.partial == IMAGES


Declared = Mapping[str, 'Parameter | Declared']


@functools.cache
def declare(model: ModelConfig) -> Declared:
    """Declare the parameters of a model, by the names of the modules that hold them."""
    std = model.init_std
    declared: dict[str, Parameter | Declared] = {
        'embedding': {'table': Parameter('Vd', Role.MATRIX, std)},
        'layers': stacked(_block(model)),
        'norm': _norm(model, 'D', partial='T'),
    }
    if model.position == 'learned':
        declared['position'] = {'table': Parameter('sD', Role.TABLE, std)}
    if not model.tie_embeddings:
        declared['head'] = Parameter('Vd', Role.MATRIX, std)
    if model.is_bert:
        declared |= _bert(model)
    if model.vision is not None:
        if 'decoder' in model.vision.freeze:
            declared = dict(_frozen(declared))
        declared['vision'] = of_encoder(declare_vision(model.vision))
        if model.vision.relevance is not None:
            declared['relevance'] = _relevance(model, model.vision.relevance)
    if model.num_cross_layers:
        declared['cross'] = _cross_attention(model)
    return declared


@functools.cache
def declare_vision(vision: VisionConfig) -> Declared:
    """Declare the parameters of the vision encoder, by letters of its own dims."""
    blocks = vision.blocks
    # As large as their input: images are neither louder nor fainter than what is learned of text.
    patch_std = (vision.frames * vision.num_channels * vision.patch_size**2) ** -0.5
    merger_std = vision.merged_size**-0.5

    def merger(norm: str) -> Declared:
        return {
            'norm': _norm(blocks, norm, partial=''),
            'up': _linear('Ww', merger_std, bias='W'),
            'down': _linear('WE', merger_std, bias='E'),
        }

    declared: dict[str, Parameter | Declared] = {
        'patch': _linear('YQXD', patch_std, bias='D'),
        'position': {'table': Parameter('SD', Role.TABLE, blocks.init_std)},
        'layers': stacked(_block(blocks)),
        'merger': merger('D'),
    }
    if vision.deepstack:
        declared['deep_mergers'] = _prefixed(merger('W'), 'A')
    kept = {name: 'merger' if name in MERGERS else 'encoder' for name in declared}
    frozen = {name: declared[name] for name, part in kept.items() if part in vision.freeze}
    return declared | dict(_frozen(frozen))


def _frozen(declared: Declared) -> Declared:
    return {
        name: dataclasses.replace(x, is_frozen=True) if isinstance(x, Parameter) else _frozen(x)
        for name, x in declared.items()
    }


@functools.cache
def declare_scorers(model: ModelConfig, relevance: RelevanceConfig) -> Declared:
    """Declare the scorers of regions in their slots, by letters of the vision encoder's dims.

    Like its parameters they are sharded at rest and copied for a step; of its copy a device uses
    the slots that are its own.
    """
    hidden = relevance.scorer_size // relevance.scorer_shards
    return {
        'features': Parameter('PZR', Role.MATRIX, SCORER_FEATURES**-0.5),
        'query': Parameter('PER', Role.MATRIX, model.hidden_size**-0.5),
        'bias': Parameter('PR', Role.VECTOR),
        'out': Parameter('PR', Role.MATRIX, 0.1 * hidden**-0.5),
    }


def _relevance(model: ModelConfig, relevance: RelevanceConfig) -> Declared:
    """Declare the networks of relevance; those beside the scorers are small and unsharded."""
    hidden, size = RELEVANCE_HIDDEN**-0.5, model.hidden_size**-0.5

    def table(dims: str, std: float) -> Parameter:
        return Parameter(circled(dims), Role.TABLE, std)

    return {
        'coupling': {'texture': table('TB', TEXTURE_CHANNELS**-0.5), 'out': table('BE', hidden)},
        'scorers': of_encoder(declare_scorers(model, relevance)),
        'balance': {
            'summary': table('MB', SUMMARIES**-0.5),
            'query': table('EB', size),
            'out': table('BG', hidden),
        },
    }


def of_encoder(declared: Declared) -> Declared:
    """Return the encoder's parameters as a part of the whole model, with circled letters.

    Images are sharded, so that every shard computes a partial gradient of each of them.
    """
    return {
        name: in_model(x) if isinstance(x, Parameter) else of_encoder(x)
        for name, x in declared.items()
    }


def in_model(parameter: Parameter) -> Parameter:
    """Return the declaration of the encoder's parameter as one of the whole model."""
    return dataclasses.replace(parameter, dims=circled(parameter.dims), partial=IMAGES)


def circled(dims: str) -> str:
    """Return the letters of the vision encoder's dims: `Ⓓ` is its D."""
    return ''.join(
        chr(ord(letter) + (ord('Ⓐ') - ord('A') if letter.isupper() else ord('ⓐ') - ord('a')))
        for letter in dims
    )


def _block(model: ModelConfig) -> Declared:
    std, out_std = model.init_std, _out_std(model)
    attention: dict[str, Parameter | Declared] = {
        'qkv': _linear('DKCH', std, bias='KCH' if model.qkv_bias else None),
        'out': _linear('NhD', out_std, bias='D' if model.bias else None, partial='T'),
    }
    if model.qk_norm:
        attention |= {name: _norm(model, 'h', partial='N') for name in ('query_norm', 'key_norm')}
    up = 'UF' if model.activation == 'swiglu' else 'F'
    return {
        'attention_norm': _norm(model, 'D', partial='T'),
        'attention': attention,
        'mlp_norm': _norm(model, 'D', partial='T'),
        'mlp': {
            'up': _linear(f'D{up}', std, bias=up if model.bias else None),
            'down': _linear('FD', out_std, bias='D' if model.bias else None, partial='T'),
        },
    }


def _out_std(model: ModelConfig) -> float:
    # Each layer adds to the residual stream twice; this scale preserves its initial variance
    # (Radford et al., 2019).
    return model.init_std / (2 * model.num_layers) ** 0.5


def _cross_attention(model: ModelConfig) -> Declared:
    """Declare the layers that attend to images; as in Llama 3.2, no projection has a bias.

    The keys and values of all layers are one product, outside of the layers.
    """
    block = _block(model)
    attention: dict[str, Parameter | Declared] = {
        'query': {'weight': Parameter('DNh', Role.MATRIX, model.init_std)},
        'query_norm': _norm(model, 'h', partial='N'),
        'out': {'weight': Parameter('NhD', Role.MATRIX, _out_std(model))},
    }
    # Closed gates: at the start the model is that of text.
    gates = Parameter('U', Role.VECTOR, partial='T')
    return {
        'key_value': {'weight': Parameter('DJKUH', Role.MATRIX, model.init_std)},
        'key_norm': _prefixed(_norm(model, 'h', partial='N'), 'J'),
        'layers': _prefixed({**block, 'attention': attention, 'gates': gates}, 'J'),
    }


def _bert(model: ModelConfig) -> Declared:
    """Declare token types and heads; as in Megatron-LM, the heads' square layers are unsharded."""
    std = model.init_std
    dense = Parameter('DE', Role.MATRIX, std, partial='T')
    return {
        'token_type': {'table': Parameter('OD', Role.TABLE, std)},
        'masked_head': {
            'dense': {'weight': dense, 'bias': Parameter('E', Role.VECTOR, partial='T')},
            'norm': _norm(model, 'D', partial='T'),
            'bias': Parameter('V', Role.VECTOR),
        },
        'order_head': {
            'pooler': _linear('DE', std, bias='E'),
            'classifier': _linear('DO', std, bias='O'),
        },
    }


def _linear(dims: str, std: float, *, bias: str | None, partial: str = '') -> Declared:
    """Declare a linear layer's weight and bias; `partial` is that of the bias."""
    weight = {'weight': Parameter(dims, Role.MATRIX, std)}
    return weight | ({'bias': Parameter(bias, Role.VECTOR, partial=partial)} if bias else {})


def _norm(model: ModelConfig, dims: str, *, partial: str) -> Declared:
    scale = {'weight': Parameter(dims, Role.VECTOR, value=1.0, partial=partial)}
    if model.norm == 'rmsnorm':
        return scale
    return scale | {'bias': Parameter(dims, Role.VECTOR, partial=partial)}


def stacked(declared: Declared) -> Declared:
    """Return the same parameters with a leading dim L, one entry for each layer."""
    return _prefixed(declared, 'L')


def _prefixed(declared: Declared, dim: str) -> Declared:
    return {
        name: dataclasses.replace(x, dims=dim + x.dims)
        if isinstance(x, Parameter)
        else _prefixed(x, dim)
        for name, x in declared.items()
    }


def named(declared: Declared, prefix: str = '') -> Iterator[tuple[str, Parameter]]:
    """Yield each parameter with its dotted name, such as `layers.attention.qkv.weight`."""
    for name, x in declared.items():
        if isinstance(x, Parameter):
            yield prefix + name, x
        else:
            yield from named(x, f'{prefix}{name}.')


@functools.cache
def parameters(model: ModelConfig) -> tuple[tuple[str, Parameter], ...]:
    """Return every parameter of a model with its dotted name."""
    return tuple(named(declare(model)))


@functools.cache
def dim_sizes(model: ModelConfig) -> Mapping[str, int]:
    """Return the size of each letter of the parameters' dims."""
    return {
        'C': model.queries_per_kv + 2,
        'D': model.hidden_size,
        'E': model.hidden_size,
        'F': model.ffn_size,
        'H': model.head_dim,
        'J': model.num_cross_layers,
        'K': model.num_kv_heads,
        'L': model.num_layers,
        'N': model.num_heads,
        'O': NUM_SEGMENTS,
        'S': model.max_seq_len,
        'U': 2,
        'V': model.padded_vocab_size,
        **({} if model.vision is None else _circled_sizes(vision_sizes(model))),
    }


def vision_sizes(model: ModelConfig) -> Mapping[str, int]:
    """Return the size of each letter of the vision encoder's dims."""
    vision = model.vision
    assert vision is not None
    return {
        **dim_sizes(vision.blocks),
        'A': len(vision.deepstack),
        'E': model.hidden_size,
        'Q': vision.frames,
        'S': vision.positions**2,
        'W': vision.merged_size,
        'X': vision.patch_size**2,
        'Y': vision.num_channels,
        **({} if vision.relevance is None else _relevance_sizes(vision.relevance)),
    }


def _relevance_sizes(relevance: RelevanceConfig) -> Mapping[str, int]:
    return {
        'B': RELEVANCE_HIDDEN,
        'G': SCORERS,
        'P': SCORERS * relevance.scorer_shards,
        'M': SUMMARIES,
        'R': relevance.scorer_size // relevance.scorer_shards,
        'T': TEXTURE_CHANNELS,
        'Z': SCORER_FEATURES,
    }


def _circled_sizes(sizes: Mapping[str, int]) -> Mapping[str, int]:
    return {circled(letter): size for letter, size in sizes.items()}


def shape_of(dims: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an array with these dims; a lowercase letter has its capital's size."""
    return tuple(sizes[letter.upper()] for letter in dims)


def num_elements(
    parameter: Parameter, sizes: Mapping[str, int], shards: Mapping[str, int] = UNSHARDED
) -> int:
    """Return the elements of a parameter on a device; `shards` has the shards of each letter."""
    sharding = math.prod(shards.get(letter, 1) for letter in parameter.dims)
    return math.prod(shape_of(parameter.dims, sizes)) // sharding


class Counts(NamedTuple):
    """Numbers of elements of the parameters on a device.

    Those of `layers` and `tables` are gathered and summed in each microbatch where ZeRO shards the
    weights.
    """

    matrices: int  # all that a step computes with in `train.dtype`
    all: int
    layers: int  # matrices of the layers
    tables: int  # matrices outside the layers: embedding, head, BERT's sentence-order prediction


@functools.cache
def count(
    model: ModelConfig,
    shards: tuple[tuple[str, int], ...] = (),
    modules: tuple[str, ...] | None = None,
    learned: bool = False,
) -> Counts:
    """Count the elements of the arrays on a device; `shards` has the shards of each letter.

    With `modules`, count only the parameters of these, such as `layers` and `embedding`; with
    `learned`, only those that are not frozen.
    """
    sizes = [
        (parameter, num_elements(parameter, dim_sizes(model), dict(shards)))
        for name, parameter in parameters(model)
        if (modules is None or name.split('.')[0] in modules)
        and not (learned and parameter.is_frozen)
    ]
    in_microbatches = [(x.is_stacked, size) for x, size in sizes if x.is_in_microbatches]
    return Counts(
        matrices=sum(size for x, size in sizes if x.is_matrix),
        all=sum(size for _, size in sizes),
        layers=sum(size for is_stacked, size in in_microbatches if is_stacked),
        tables=sum(size for is_stacked, size in in_microbatches if not is_stacked),
    )


def own_counts(
    config: Config, modules: tuple[str, ...] | None = None, *, learned: bool = False
) -> Counts:
    """Count the parameters of a device in the computation of a step."""
    return count(config.model, tuple(Layout.of(config).shards.items()), modules, learned)


def megatron_counts(
    model: ModelConfig,
    ranks: int,
    stages: int = 1,
    modules: tuple[str, ...] | None = None,
    *,
    learned: bool = False,
) -> Counts:
    """Count the parameters of a Megatron rank, which holds at least one entire key/value head.

    A stage of a pipeline has its part of the layers.
    """
    full_heads = model.model_copy(update={'num_kv_heads': max(model.num_kv_heads, ranks)})
    shards = dict.fromkeys(SHARDED_BY_MEGATRON, ranks) | {'L': stages}
    return count(full_heads, tuple(shards.items()), modules, learned)


def num_parameters(model: ModelConfig, *, padded: bool = False) -> int:
    """Count the model's parameters exactly, with the tokenizer's vocabulary or the padded one."""
    sizes = dim_sizes(model) if padded else {**dim_sizes(model), 'V': model.vocab_size}
    return sum(num_elements(parameter, sizes) for _, parameter in parameters(model))
