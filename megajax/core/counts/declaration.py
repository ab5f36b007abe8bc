"""How a parameter is declared: its dims, its role and its initial values.

Imports no jax.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping
from typing import Literal

from megajax.core.config.model import ModelConfig

NUM_SEGMENTS = 2  # segments of a BERT sequence: the token types, and also the possible orders
OF_LAYERS = 'LΔΛJ'  # the first dims of the decoder's layers
STACKS = f'{OF_LAYERS}AⓁⒶ'  # the first dims of arrays with an entry for each layer or merger
IMAGES = 'Ⓘ'  # the dim of the copies of the encoder's parameters, one for each shard of the images


class Role(enum.Enum):
    """The role of a parameter: it decides the dtype in a step, weight decay, and ZeRO sharding."""

    MATRIX = 'matrix'  # a matmul weight: used in train.dtype, decayed, sharded by ZeRO
    # positions, token types, routers, small networks: in fp32, decayed, not sharded by ZeRO
    TABLE = 'table'
    ADAPTER = 'adapter'  # cast when it is multiplied; decayed, not sharded by ZeRO
    # norms, biases, attention sinks, gates: in fp32, not decayed, not sharded by ZeRO
    VECTOR = 'vector'
    # scales of an fp8 matmul, which exist only within a step: not a parameter of the model
    SCALES = 'scales'


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The declaration of a parameter.

    The initial values are N(0, std) or, without `std`, `value`. `inputs` are the dims of a weight
    that a matmul sums over. `summed` is a dim of activations: if that dim is sharded, each shard
    computes a partial gradient of the parameter, and these are summed over the shards once a step.
    """

    dims: str
    role: Role
    std: float = 0.0
    value: float = 0.0
    inputs: str = ''
    summed: str = ''
    # the encoder's parameters are replicated for a step
    owner: Literal['decoder', 'encoder'] = 'decoder'
    is_frozen: bool = False  # has neither gradient nor moments, and does not decay

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self.role is not Role.VECTOR

    @property
    def is_stacked(self) -> bool:
        """Whether the array stacks parameters of all layers, or of all cross-attention layers."""
        return self.dims[0] in OF_LAYERS

    @property
    def dims_of_layer(self) -> str:
        """The dims without the stacking dim of layers, or of the encoder's mergers."""
        return self.dims.lstrip(STACKS)

    @property
    def outputs(self) -> str:
        """The dims of a layer's weight that appear in the result of its matmul."""
        return ''.join(letter for letter in self.dims_of_layer if letter not in self.inputs)

    @property
    def is_of_experts(self) -> bool:
        """Whether the array has a dim of experts, which can be sharded over devices."""
        return 'X' in self.dims

    @property
    def is_matrix(self) -> bool:
        """Whether a step computes with it in `train.dtype`, and ZeRO shards it."""
        return self.role is Role.MATRIX

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it contains matrices of the decoder's layers, which Muon orthogonalizes."""
        return self.is_matrix and any(letter in self.dims for letter in OF_LAYERS)

    @property
    def is_multiplied(self) -> bool:
        """Whether a matmul multiplies by it: a matrix, an adapter, or a router's table."""
        return self.is_matrix or self.is_adapter or (self.role is Role.TABLE and bool(self.inputs))

    @property
    def is_adapter(self) -> bool:
        """Whether it is one of the two matrices of an adapter."""
        return self.role is Role.ADAPTER

    @property
    def is_in_microbatches(self) -> bool:
        """Whether each microbatch sums its gradient (ZeRO-2 and 3) and gathers it (ZeRO-3).

        This is false for vectors, tables, and the BERT layer that has a copy on each sequence
        shard.
        """
        return self.is_matrix and not self.summed


Declared = Mapping[str, 'Parameter | Declared']


def out_std(model: ModelConfig) -> float:
    """Return the std of the weights of a matmul that adds to the residual stream."""
    # Each layer adds to the residual stream twice; this scale preserves its initial variance
    # (Radford et al., 2019).
    return model.init_std / (2 * model.num_layers) ** 0.5


def linear(
    inputs: str, outputs: str, std: float, *, bias: bool = False, summed: str = '', each: str = ''
) -> Declared:
    """Declare a linear layer's weight and bias, or one of both for each index of the dims `each`.

    `summed` is the dim of activations along which the bias is applied.
    """
    weight = {'weight': Parameter(each + inputs + outputs, Role.MATRIX, std, inputs=inputs)}
    biased = {'bias': Parameter(each + outputs, Role.VECTOR, summed=summed)}
    return weight | (biased if bias else {})


def norm(model: ModelConfig, dims: str, *, summed: str) -> Declared:
    """Declare a norm of the model's kind."""
    value = 0.0 if model.zero_centered_norm else 1.0
    scale = {'weight': Parameter(dims, Role.VECTOR, value=value, summed=summed)}
    if model.norm == 'rmsnorm':
        return scale
    return scale | {'bias': Parameter(dims, Role.VECTOR, summed=summed)}


def prefixed(declared: Declared, dim: str) -> Declared:
    """Return the same parameters with one more leading dim."""
    return {
        name: dataclasses.replace(x, dims=dim + x.dims)
        if isinstance(x, Parameter)
        else prefixed(x, dim)
        for name, x in declared.items()
    }


def named(declared: Declared, prefix: str = '') -> Iterator[tuple[str, Parameter]]:
    """Yield each parameter with its dotted name, such as `layers.attention.qkv.weight`."""
    for name, x in declared.items():
        if isinstance(x, Parameter):
            yield prefix + name, x
        else:
            yield from named(x, f'{prefix}{name}.')


def frozen(declared: Declared) -> Declared:
    """Return the same parameters; all except adapters have neither gradients nor moments."""
    return {
        name: dataclasses.replace(x, is_frozen=not x.is_adapter)
        if isinstance(x, Parameter)
        else frozen(x)
        for name, x in declared.items()
    }


@functools.cache
def base_sizes(model: ModelConfig) -> Mapping[str, int]:
    """Return the size of each letter of dims that is not circled."""
    experts = model.experts
    return {
        'A': experts.ffn_size if experts else 0,
        'C': model.queries_per_kv + 2,
        'D': model.hidden_size,
        'E': model.hidden_size,
        'F': model.ffn_size,
        'G': model.queries_per_kv,
        'H': model.head_dim,
        'J': model.num_cross_layers,
        'K': model.num_kv_heads,
        'L': model.num_layers,
        'M': experts.shared_ffn_size if experts else 0,
        'N': model.num_heads,
        'O': NUM_SEGMENTS,
        'Q': model.lora.rank if model.lora else 0,
        'S': model.max_seq_len,
        'U': 2,
        'V': model.padded_vocab_size,
        'X': experts.count if experts else 0,
        **(stack_sizes(model) if model.has_dense_and_experts else {}),
    }


@functools.cache
def stack_sizes(model: ModelConfig) -> Mapping[str, int]:
    """Return the number of layers with an MLP, and with experts, of a model that has both."""
    dense = sum(layer.experts is None for layer in model.layer_configs)
    return {'Δ': dense, 'Λ': model.num_layers - dense}
