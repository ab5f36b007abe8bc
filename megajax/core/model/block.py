"""A transformer layer: two sublayers (`sublayer.py`)."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

import jax
import numpy as np
from flax import nnx

from megajax.core.config import ModelConfig
from megajax.core.counts.layers import Stack, feed_forward_name, layers_of, stacks
from megajax.core.model.attention import Attention, Core, Kept
from megajax.core.model.experts import Experts
from megajax.core.model.mlp import MLP
from megajax.core.model.parameters import Parameters
from megajax.core.model.rows import NO_ROWS, Rows
from megajax.core.model.sublayer import Sublayer

Module = TypeVar('Module')
FEED_FORWARD = 'mlp', 'experts'  # the second sublayers


def parts_of_rows(rows: Any, num_parts: int) -> list[Any]:
    """Split arrays [B, ...] into equal parts of their sequences."""

    def part(x: jax.Array, index: int) -> jax.Array:
        rows = x.shape[0] // num_parts
        return x if num_parts == 1 else x[index * rows : (index + 1) * rows]

    return [jax.tree.map(lambda x, i=i: part(x, i), rows) for i in range(num_parts)]


class Block(nnx.Module):
    """Attention, then the feed-forward layer; each adds its result to the residual stream.

    Every parameter belongs to a sublayer; the overlap schedule relies on this.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention = Attention(config, parameters['attention'], key=attention_key)
        if config.experts is None:
            self.mlp = MLP(config, parameters['mlp'], key=mlp_key)
        else:
            self.experts = Experts(config, parameters['experts'], key=mlp_key)

    @classmethod
    def stacked(cls, config: ModelConfig, parameters: Parameters, *, key: jax.Array) -> Self:
        """Return the layers of a model, stacked, in the order of the stages.

        The first dim of each sublayer's arrays is the layers that have this sublayer.
        """
        layout, count = parameters.layout, parameters.sizes['L']
        layers = layout.layer_order(count)
        key_L = jax.random.split(key, count)[np.array(layers)]

        def make(of_layer: Callable[[jax.Array], Module], stack: Stack) -> Module:
            own = {*layers_of(config, stack.dim)}
            places = np.array([place for place, layer in enumerate(layers) if layer in own])
            keys = key_L if len(places) == count else key_L[places]
            keys = jax.reshard(keys, layout(stack.dim))
            return jax.vmap(of_layer)(keys)

        attention, *feed_forwards = stacks(config)
        if len(feed_forwards) == 1:
            return make(lambda key: cls(config, parameters, key=key), attention)
        dense, experts = feed_forwards
        of_dense = config.model_copy(update={'experts': None})
        block = make(lambda key: cls(config, parameters, key=key), experts)
        block.mlp = make(lambda key: cls(of_dense, parameters, key=key).mlp, dense)
        block.attention = make(lambda key: cls(config, parameters, key=key).attention, attention)
        return block

    def at_layer(self, index: int, take: Callable[[str, jax.Array], jax.Array]) -> Self:
        """Return the block of the layer with this index, given a function that takes its arrays.

        `take` gets the name of a sublayer and one of its arrays.
        """
        config = self.attention.config.layer_config(index)
        block = jax.tree.map(lambda x: x, self)
        for name in ({*FEED_FORWARD} - {feed_forward_name(config)}) & vars(block).keys():
            delattr(block, name)
        block = block.each(take)
        for sublayer in block.attention, getattr(block, feed_forward_name(config)):
            sublayer.config = config
        return block

    def each(self, take: Callable[[str, jax.Array], jax.Array]) -> Self:
        """Return the block with `take(name of the sublayer, x)` in place of each array x.

        Arrays outside the sublayers count as part of attention, which all layers have.
        """
        block = jax.tree.map(lambda x: x, self)
        networks = {name: getattr(block, name) for name in FEED_FORWARD if hasattr(block, name)}
        for name in networks:
            delattr(block, name)
        block = jax.tree.map(partial(take, 'attention'), block)
        for name, network in networks.items():
            setattr(block, name, jax.tree.map(partial(take, name), network))
        return block

    def __call__(
        self, x_BTD: jax.Array, core: Core[Kept], rows: Rows = NO_ROWS
    ) -> tuple[jax.Array, Kept]:
        """Return the residual stream after this layer, and the second result of `core`."""
        x_BTD, kept = self.attention(x_BTD, core, rows)
        x_BTD, _ = self.feed_forward(x_BTD, rows=rows)
        return x_BTD, kept

    @property
    def feed_forward(self) -> MLP | Experts:
        """The second sublayer: an MLP, or a mixture of experts."""
        return self.mlp if self.attention.config.experts is None else self.experts

    @property
    def sublayers(self) -> tuple[Sublayer, Sublayer]:
        """The sublayers, in the order in which they are applied."""
        return self.attention, self.feed_forward
