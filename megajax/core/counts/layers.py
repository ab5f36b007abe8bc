"""A transformer layer on paper: its sublayers, and their matmuls with weights.

A layer's parameters and adapters, its matmuls, Megatron's collectives and the values that a step
saves all follow from this list. `core/model/sublayer.py` computes it. Imports no jax.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megajax.core.config.model import ModelConfig
from megajax.core.counts.declaration import (
    Declared,
    Parameter,
    Role,
    base_sizes,
    linear,
    norm,
    out_std,
)

# the sublayers of a layer without experts, in the order in which they are applied
SUBLAYERS = 'attention', 'mlp'


class Matmul(NamedTuple):
    """A matmul with a weight [inputs, outputs]."""

    name: str
    inputs: str
    outputs: str
    bias: bool = False
    # the dims of a stack of weights: one weight for each index, such as each expert X
    each: str = ''
    target: str = ''  # its name among the targets of LoRA, if it differs

    def declared(
        self, model: ModelConfig, std: float, of_adapter: tuple[str, str], summed: str = ''
    ) -> Declared:
        """Declare the weight, the bias, and the adapters A and B (LoRA, Hu et al., 2021).

        The matrix without the weight's sharded dim is replicated, and each shard computes a partial
        gradient of it. A has the std that PEFT's uniform initial values have, and B starts at zero,
        so that an adapter adds nothing at first.
        """
        parameters = linear(
            self.inputs, self.outputs, std, bias=self.bias, summed=summed, each=self.each
        )
        if model.lora is None or (self.target or self.name) not in model.lora.targets:
            return parameters
        sizes, (of_a, of_b) = base_sizes(model), of_adapter
        std = (3 * math.prod(sizes[letter.upper()] for letter in self.inputs)) ** -0.5
        a = Parameter(f'{self.inputs}Q', Role.ADAPTER, std, inputs=self.inputs, summed=of_a)
        b = Parameter(f'Q{self.outputs}', Role.ADAPTER, inputs='Q', summed=of_b)
        return {**parameters, 'adapter': {'A': a, 'B': b}}


class Sublayer(NamedTuple):
    """A part of a layer: x + second(middle(first(norm(x)))), or with a norm after `second`."""

    name: str  # 'attention', 'mlp' or 'experts'
    first: Matmul  # column-parallel
    second: Matmul  # row-parallel
    vectors: Declared  # vectors that `middle` reads, and parameters that send tokens to experts

    def declared(self, model: ModelConfig) -> Declared:
        """Declare the parameters."""
        has_both = model.norms_inputs and model.norms_outputs
        # Each shard of the experts' hidden dim multiplies an expert's bias by the token's weight.
        summed = self.second.inputs[0] if self.second.each else 'T'
        first, second, sharded = self.first, self.second, self.second.inputs[0]
        return {
            'norm': norm(model, 'D', summed='T'),
            **({'output_norm': norm(model, 'D', summed='T')} if has_both else {}),
            first.name: first.declared(model, model.init_std, (sharded, '')),
            second.name: second.declared(model, out_std(model), ('', sharded), summed=summed),
            **self.vectors,
        }


def layer(model: ModelConfig) -> tuple[Sublayer, Sublayer]:
    """Return the sublayers of a layer: attention and a feed-forward network."""
    heads = {'query_norm': 'h', 'key_norm': 'h'} if model.qk_norm else {}
    if model.norms_all_heads:  # sharded like the columns that they scale
        heads = {'query_norm': 'KGH', 'key_norm': 'KH'}
    summed = '' if model.norms_all_heads else 'N'
    # As gpt-oss initializes its sinks.
    sinks = {'sinks': Parameter('N', Role.VECTOR, model.init_std)} if model.attention_sinks else {}
    return (
        Sublayer(
            'attention',
            Matmul('qkv', 'D', 'KCH', model.qkv_bias),
            Matmul('out', 'Nh', 'D', model.bias),
            {
                **{name: norm(model, dims, summed=summed) for name, dims in heads.items()},
                **sinks,
            },
        ),
        _feed_forward(model),
    )


def _feed_forward(model: ModelConfig) -> Sublayer:
    """Return the MLP, or the mixture of experts, of a layer."""
    gate = 'U' if model.is_gated else ''
    experts = model.experts
    if experts is None:
        up = Matmul('up', 'D', f'{gate}F', model.bias)
        return Sublayer('mlp', up, Matmul('down', 'F', 'D', model.bias), {})
    # Each shard of the experts' hidden dim computes a partial gradient of a token's weights.
    router = {'weight': Parameter('Dx', Role.TABLE, model.init_std, inputs='D', summed='A')}
    if experts.router_bias:
        router['bias'] = Parameter('x', Role.VECTOR, summed='A')
    if experts.selection_bias:
        router['selection_bias'] = Parameter('x', Role.VECTOR, is_frozen=True)
    # Its result is added to the experts' partial sums before they are reduced, so it needs no
    # collective.
    shared = {
        'shared_up': linear('D', f'{gate}M', model.init_std),
        'shared_down': linear('M', 'D', out_std(model)),
    }
    return Sublayer(
        'experts',
        Matmul('up', 'D', f'{gate}A', model.bias, each='X'),
        Matmul('down', 'A', 'D', model.bias, each='X'),
        {'router': router, **(shared if experts.shared_ffn_size else {})},
    )


class Stack(NamedTuple):
    """A sublayer, and the first dim of its parameters: L for all layers, or one kind's letter."""

    sublayer: Sublayer
    dim: str


@functools.cache
def stacks(model: ModelConfig) -> tuple[Stack, ...]:
    """Return the sublayers of a model's layers; each kind of feed-forward network has a stack."""
    attention, feed_forward = layer(model)
    if not model.has_dense_and_experts:
        return Stack(attention, 'L'), Stack(feed_forward, 'L')
    dense = _feed_forward(model.model_copy(update={'experts': None}))
    return Stack(attention, 'L'), Stack(dense, 'Δ'), Stack(feed_forward, 'Λ')


def num_in_stack(model: ModelConfig, dim: str, layers: int) -> int:
    """Return how many of a device's `layers`, or of their runs, are in the stack with this dim.

    Each pipeline stage has the same share of each kind of layers.
    """
    sizes = base_sizes(model)
    return layers * sizes[dim] // sizes['L']


def num_with_experts(model: ModelConfig, layers: int | None = None) -> int:
    """Return how many of a device's `layers`, or of their runs, have experts; by default of all."""
    layers = model.num_layers if layers is None else layers
    return num_in_stack(model, stacks(model)[-1].dim, layers) if model.experts else 0


def layers_of(model: ModelConfig, dim: str) -> Sequence[int]:
    """Return the indices, in the model, of the layers in the stack with this first dim."""
    if dim == 'L':
        return range(model.num_layers)
    layers = enumerate(model.layer_configs)
    return [i for i, layer in layers if (layer.experts is None) == (dim == 'Δ')]


def feed_forward_name(model: ModelConfig) -> str:
    """Return the name of the second sublayer of a layer with this config."""
    return 'mlp' if model.experts is None else 'experts'


def num_before(model: ModelConfig, sublayer: str, index: int) -> int:
    """Return the number of layers before the one with this index that have a sublayer."""
    if sublayer == 'attention' or not model.has_dense_and_experts:
        return index
    return _places(model, sublayer)[index]


@functools.cache
def _places(model: ModelConfig, sublayer: str) -> Sequence[int]:
    """Return, for each layer and the end, the number of layers before it with a sublayer."""
    names = map(feed_forward_name, model.layer_configs)
    return [*itertools.accumulate((name == sublayer for name in names), initial=0)]


def sublayers(model: ModelConfig) -> tuple[str, str]:
    """Return the names of the sublayers of a layer, in the order in which they are applied."""
    attention, feed_forward = layer(model)
    return attention.name, feed_forward.name


def cross_layer(model: ModelConfig) -> tuple[Sublayer, Sublayer]:
    """Return the sublayers of a layer that attends to images.

    As in Llama 3.2, no projection of attention has a bias. The second sublayer is an MLP, also if
    the model has experts.
    """
    return (
        Sublayer(
            'attention',
            Matmul('query', 'D', 'Nh', target='qkv'),
            Matmul('out', 'Nh', 'D'),
            {'query_norm': norm(model, 'h', summed='N')},
        ),
        _feed_forward(model.model_copy(update={'experts': None}) if model.experts else model),
    )


def key_value(model: ModelConfig) -> Declared:
    """Declare the matmul of image vectors that computes the keys and values of all these layers."""
    matmul = Matmul('key_value', 'D', 'JKUH', target='qkv')
    return matmul.declared(model, model.init_std, ('N', ''))


def declared(model: ModelConfig, sublayers: Iterable[Sublayer]) -> dict[str, Declared]:
    """Declare the parameters of a layer."""
    return {sublayer.name: sublayer.declared(model) for sublayer in sublayers}
