"""Every parameter of a model, declared once: its dims, what it is for, how it begins. Imports no jax.

What happens to a parameter follows from its declaration and from nothing else: where it lies
(`parallel/layout.py` maps letters to mesh axes), in which dtype a step computes with it, whether it
decays, what ZeRO shards, what lint expects, how `interop` cuts it, and every count of this package.
The letters of dims are those of `parallel/layout.py`.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megajax.config.schema import Config, ModelConfig
from megajax.parallel.layout import Layout

SHARDED_BY_MEGATRON = 'VFNK'  # the dims of weights and biases that it cuts over its ranks
UNSHARDED: Mapping[str, int] = {}
NUM_SEGMENTS = 2  # of a BERT sequence: token types, and the orders they can be in


class Role(enum.Enum):
    """What a parameter is for."""

    MATRIX = 'matrix'  # a step computes with it in train.dtype; it decays, and ZeRO shards it
    TABLE = 'table'  # stays in fp32 and unsharded by ZeRO, and decays: a lookup, a router
    VECTOR = 'vector'  # stays in fp32 and unsharded by ZeRO, and does not decay: norms and biases


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The declaration of a parameter.

    It begins with N(0, std) or, without `std`, with `value`. `partial` is the dim of an activation
    that the parameter is applied along: where that dim is sharded, each shard makes a part of the
    parameter's gradient, and the parts are added up once a step.
    """

    dims: str
    role: Role
    std: float = 0.0
    value: float = 0.0
    partial: str = ''

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self.role is not Role.VECTOR

    @property
    def is_stacked(self) -> bool:
        """Whether it holds that of every layer."""
        return self.dims.startswith('L')

    @property
    def is_matrix(self) -> bool:
        """Whether a step computes with it in `train.dtype`, and ZeRO shards it."""
        return self.role is Role.MATRIX


Declared = Mapping[str, 'Parameter | Declared']


@functools.cache
def declare(model: ModelConfig) -> Declared:
    """The parameters of a model, by the names of the modules that hold them."""
    std = model.init_std
    declared: dict[str, Parameter | Declared] = {
        'embedding': {'table': Parameter('VD', Role.MATRIX, std)},
        'layers': stacked(_block(model)),
        'norm': _norm(model, 'D', partial='T'),
    }
    if model.position == 'learned':
        declared['position'] = {'table': Parameter('sD', Role.TABLE, std)}
    if not model.tie_embeddings:
        declared['head'] = Parameter('VD', Role.MATRIX, std)
    if model.is_bert:
        declared |= _bert(model)
    return declared


def _block(model: ModelConfig) -> Declared:
    std = model.init_std
    # Each layer adds to the residual stream twice; this keeps its variance at the start (Radford et
    # al., 2019).
    out_std = std / (2 * model.num_layers) ** 0.5
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


def _bert(model: ModelConfig) -> Declared:
    """Token types and heads; as in Megatron-LM the square layers of the heads are unsharded."""
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
    """A product's weight and its bias; `partial` is that of the bias."""
    weight = {'weight': Parameter(dims, Role.MATRIX, std)}
    return weight | ({'bias': Parameter(bias, Role.VECTOR, partial=partial)} if bias else {})


def _norm(model: ModelConfig, dims: str, *, partial: str) -> Declared:
    scale = {'weight': Parameter(dims, Role.VECTOR, value=1.0, partial=partial)}
    if model.norm == 'rmsnorm':
        return scale
    return scale | {'bias': Parameter(dims, Role.VECTOR, partial=partial)}


def stacked(declared: Declared) -> Declared:
    """The same parameters with a dim L before the others, one entry for each layer."""
    return {
        name: dataclasses.replace(x, dims=f'L{x.dims}') if isinstance(x, Parameter) else stacked(x)
        for name, x in declared.items()
    }


def named(declared: Declared, prefix: str = '') -> Iterator[tuple[str, Parameter]]:
    """Each parameter with its dotted name, as `layers.attention.qkv.weight`."""
    for name, x in declared.items():
        if isinstance(x, Parameter):
            yield prefix + name, x
        else:
            yield from named(x, f'{prefix}{name}.')


@functools.cache
def parameters(model: ModelConfig) -> tuple[tuple[str, Parameter], ...]:
    """Every parameter of a model with its dotted name."""
    return tuple(named(declare(model)))


@functools.cache
def dim_sizes(model: ModelConfig) -> Mapping[str, int]:
    """The size of each letter of a parameter's dims."""
    return {
        'C': model.queries_per_kv + 2,
        'D': model.hidden_size,
        'E': model.hidden_size,
        'F': model.ffn_size,
        'H': model.head_dim,
        'K': model.num_kv_heads,
        'L': model.num_layers,
        'N': model.num_heads,
        'O': NUM_SEGMENTS,
        'S': model.max_seq_len,
        'U': 2,
        'V': model.padded_vocab_size,
    }


def shape_of(dims: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an array with these dims; a small letter has the size of its capital."""
    return tuple(sizes[letter.upper()] for letter in dims)


def num_elements(
    parameter: Parameter, sizes: Mapping[str, int], shards: Mapping[str, int] = UNSHARDED
) -> int:
    """Elements of a parameter on each device, where a letter of its dims has so many shards."""
    sharding = math.prod(shards.get(letter, 1) for letter in parameter.dims)
    return math.prod(shape_of(parameter.dims, sizes)) // sharding


class Counts(NamedTuple):
    """Numbers of parameters: those that a step computes with in `train.dtype`, and all."""

    matrices: int
    all: int


@functools.cache
def count(model: ModelConfig, shards: tuple[tuple[str, int], ...] = ()) -> Counts:
    """The parameters as the arrays hold them, on each device where letters have so many shards."""
    found = [
        (parameter.is_matrix, num_elements(parameter, dim_sizes(model), dict(shards)))
        for _, parameter in parameters(model)
    ]
    matrices = sum(size for is_matrix, size in found if is_matrix)
    return Counts(matrices, sum(size for _, size in found))


def own_counts(config: Config) -> Counts:
    """The parameters of a device in the computation of a step."""
    return count(config.model, tuple(Layout.of(config).shards.items()))


def megatron_counts(model: ModelConfig, ranks: int) -> Counts:
    """Those of a rank of Megatron's, where a key/value head lies on one rank at least."""
    whole_heads = model.model_copy(update={'num_kv_heads': max(model.num_kv_heads, ranks)})
    return count(whole_heads, tuple((letter, ranks) for letter in SHARDED_BY_MEGATRON))


def num_parameters(model: ModelConfig, *, padded: bool = False) -> int:
    """Count the model's parameters exactly, as the tokenizer's vocabulary or the padded one has them."""
    sizes = dim_sizes(model) if padded else {**dim_sizes(model), 'V': model.vocab_size}
    return sum(num_elements(parameter, sizes) for _, parameter in parameters(model))
