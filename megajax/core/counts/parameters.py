"""The declaration of every parameter of a model: its dims, its role and its initial values.

Everything else about a parameter follows from its declaration: its sharding
(`core/parallel/layout.py` maps letters to mesh axes), the dtype that a step computes with, weight
decay, its ZeRO shards, what lint expects, its slices in `interop`, and every count in this package.
The letters of dims are defined in `core/parallel/layout.py`. Imports no jax.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from megajax.core.config.model import ModelConfig
from megajax.core.config.schema import Config
from megajax.core.counts import layers
from megajax.core.counts.declaration import (
    Declared,
    Parameter,
    Role,
    base_sizes,
    frozen,
    linear,
    named,
    norm,
    prefixed,
)
from megajax.core.counts.vision_parameters import (
    circled,
    declare_relevance,
    declare_vision,
    of_encoder,
    vision_sizes,
)
from megajax.core.parallel.layout import Layout

# Dims of weights and biases that Megatron shards over its ranks, including dims of an encoder.
SHARDED_BY_MEGATRON = 'VFAMNKⒻⓃⓀⓌ'
UNSHARDED: Mapping[str, int] = {}
# bytes of a number in `train.dtype`, or in a dtype between steps
BYTES = {'float32': 4, 'bfloat16': 2, 'float16': 2, 'fp8': 2}


@functools.cache
def declare(model: ModelConfig) -> Declared:
    """Declare the parameters of a model, by the names of the modules that hold them."""
    std = model.init_std
    declared: dict[str, Parameter | Declared] = {
        'embedding': {'table': Parameter('Vd', Role.MATRIX, std, inputs='d')},
        'layers': {
            stack.sublayer.name: prefixed(stack.sublayer.declared(model), stack.dim)
            for stack in layers.stacks(model)
        },
        'norm': norm(model, 'D', summed='T'),
    }
    if model.position == 'learned':
        declared['position'] = {'table': Parameter('sD', Role.TABLE, std)}
    if not model.tie_embeddings:
        declared['head'] = Parameter('Vd', Role.MATRIX, std, inputs='d')
    if model.is_bert:
        declared |= _bert(model)
    if model.is_decoder_frozen:
        declared = dict(frozen(declared))
    if model.vision is not None:
        declared['vision'] = of_encoder(declare_vision(model.vision, model.frozen_image_parts))
        if model.vision.relevance is not None:
            declared['relevance'] = declare_relevance(model, model.vision.relevance)
    if model.num_cross_layers:
        cross = _cross_attention(model)
        declared['cross'] = cross if model.lora is None else frozen(cross)
    return declared


def _cross_attention(model: ModelConfig) -> Declared:
    """Declare the layers that attend to images.

    One matmul, outside the layers, computes the keys and values of all layers.
    """
    assert model.vision is not None
    sublayers = layers.declared(model, layers.cross_layer(model))
    gates = Parameter('U', Role.VECTOR, value=model.vision.cross_gate, summed='T')
    return {
        'key_value': layers.key_value(model),
        'key_norm': prefixed(norm(model, 'h', summed='N'), 'J'),
        'layers': prefixed({**sublayers, 'gates': gates}, 'J'),
    }


def _bert(model: ModelConfig) -> Declared:
    """Declare BERT's token types and heads, whose square layers are unsharded as in Megatron-LM."""
    std = model.init_std
    dense = Parameter('DE', Role.MATRIX, std, inputs='D', summed='T')
    return {
        'token_type': {'table': Parameter('OD', Role.TABLE, std)},
        'masked_head': {
            'dense': {'weight': dense, 'bias': Parameter('E', Role.VECTOR, summed='T')},
            'norm': norm(model, 'D', summed='T'),
            'bias': Parameter('V', Role.VECTOR),
        },
        'order_head': {
            'pooler': linear('D', 'E', std, bias=True),
            'classifier': linear('D', 'O', std, bias=True),
        },
    }


@functools.cache
def parameters(model: ModelConfig) -> tuple[tuple[str, Parameter], ...]:
    """Return every parameter of a model with its dotted name."""
    return tuple(named(declare(model)))


@functools.cache
def dim_sizes(model: ModelConfig) -> Mapping[str, int]:
    """Return the size of each letter of the parameters' dims."""
    if model.vision is None:
        return base_sizes(model)
    of_encoder = {circled(letter): size for letter, size in vision_sizes(model).items()}
    return {**base_sizes(model), **of_encoder}


def shape_of(
    dims: str, sizes: Mapping[str, int], shards: Mapping[str, int] = UNSHARDED
) -> tuple[int, ...]:
    """Return the shape on a device of an array with these dims.

    A lowercase letter has its capital's size. `shards` has the number of shards of each letter.
    """
    return tuple(sizes[letter.upper()] // shards.get(letter, 1) for letter in dims)


def elements(dims: str, sizes: Mapping[str, int], shards: Mapping[str, int] = UNSHARDED) -> int:
    """Return how many elements of an array with these dims are on a device; see `shape_of`."""
    size = sharding = 1
    for letter in dims:
        size *= sizes[letter.upper()]
        sharding *= shards.get(letter, 1)
    return size // sharding


def num_at_rest(parameter: Parameter, model: ModelConfig, layout: Layout) -> int:
    """Return the number of a parameter's elements on a device between steps, with padding."""
    sizes = dim_sizes(model)
    if not parameter.is_matrix:
        return elements(parameter.dims, sizes, layout.shards)
    dims, shards = parameter.dims, layout.shards_at_rest(parameter.dims)
    shape = map(sum, zip(shape_of(dims, sizes), layout.padding(dims), strict=True))
    return math.prod(shape) // math.prod(shards.get(letter, 1) for letter in dims)


def dtype_at_rest(parameter: Parameter, config: Config) -> str:
    """Return the dtype of a parameter between steps.

    It is fp32, except for frozen matrices under adapters: a step never updates them, and they are
    stored in the compute dtype.
    """
    is_multiplied = config.lora is not None and parameter.is_frozen and parameter.is_matrix
    return config.train.compute_dtype if is_multiplied else 'float32'


def num_moments(parameter: Parameter, config: Config) -> int:
    """Return the number of arrays that the optimizer stores for a parameter."""
    if parameter.is_frozen:
        return 0
    return 1 if config.optim.kind == 'muon' and parameter.is_layer_matrix else 2


class Counts(NamedTuple):
    """Numbers of elements of the parameters on a device.

    With ZeRO-3, `layers` and `tables` are gathered and reduced in each microbatch.
    """

    matrices: int  # all matrices that a step computes with in `train.dtype`
    all: int
    layers: int  # matrices of the layers
    tables: int  # matrices outside the layers: embedding, head, BERT's sentence-order prediction


@functools.cache
def count(
    model: ModelConfig,
    shards: tuple[tuple[str, int], ...] = (),
    modules: tuple[str, ...] | None = None,
    learned: bool = False,
    of_experts: bool | None = None,
) -> Counts:
    """Count the elements of the arrays on a device; `shards` has the number of shards by letter.

    With `modules`, only the parameters of these modules are counted, such as `layers` and
    `embedding`; with `learned`, only parameters that are not frozen. With `of_experts`, only
    parameters with a dim of experts are counted (true), or only the others (false).
    """
    sizes = [
        (parameter, elements(parameter.dims, dim_sizes(model), dict(shards)))
        for name, parameter in parameters(model)
        if (modules is None or name.split('.')[0] in modules)
        and not (learned and parameter.is_frozen)
        and of_experts in (None, parameter.is_of_experts)
    ]
    # The matrix that computes the keys and values of all cross-attention layers is gathered again
    # for the backward pass, like the layers' matrices.
    in_microbatches = [('J' in x.dims or x.is_stacked, n) for x, n in sizes if x.is_in_microbatches]
    return Counts(
        matrices=sum(size for x, size in sizes if x.is_matrix),
        all=sum(size for _, size in sizes),
        layers=sum(size for is_of_layers, size in in_microbatches if is_of_layers),
        tables=sum(size for is_of_layers, size in in_microbatches if not is_of_layers),
    )


def own_counts(
    config: Config,
    modules: tuple[str, ...] | None = None,
    *,
    learned: bool = False,
    of_experts: bool | None = None,
) -> Counts:
    """Count the parameters of a device as sharded in the computation of a step."""
    shards = tuple(Layout.of(config).shards.items())
    return count(config.model, shards, modules, learned, of_experts)


def megatron_counts(
    model: ModelConfig,
    ranks: int,
    stages: int = 1,
    modules: tuple[str, ...] | None = None,
    *,
    learned: bool = False,
    experts: int = 1,
    of_experts: bool | None = None,
) -> Counts:
    """Count the parameters of a Megatron rank, which holds at least one entire key/value head.

    With pipeline parallelism, a rank has the layers of its stage; with expert parallelism, it has 1
    / `experts` of the experts. `of_experts` is as in `count`.
    """
    full_heads = model.changed(num_kv_heads=max(model.num_kv_heads, ranks))
    shards = dict.fromkeys(SHARDED_BY_MEGATRON, ranks) | dict.fromkeys('LΔΛ', stages)
    shards['X'] = experts
    return count(full_heads, tuple(shards.items()), modules, learned, of_experts)


def num_parameters(
    model: ModelConfig, *, padded: bool = False, trained: bool = False, active: bool = False
) -> int:
    """Count the model's parameters exactly, with the tokenizer's vocabulary or the padded one.

    With `trained`, count only the parameters that are not frozen; with `active`, count only the
    parameters that one token uses, because each token is sent to only some of the experts.
    """
    sizes = dim_sizes(model) if padded else {**dim_sizes(model), 'V': model.vocab_size}
    used = {**sizes, 'X': model.experts.active} if active and model.experts else sizes
    return sum(
        elements(parameter.dims, used if parameter.is_of_experts else sizes)
        for _, parameter in parameters(model)
        if not (trained and parameter.is_frozen)
    )
