"""A model's weights for generation: separate layers, and matrices in the compute dtype.

Training stacks the layers and casts a matrix at each use. For one token, that would copy every
weight: on a CPU, a token of GPT-2 takes 1.5 to 2.2 times as long. Here, the layers are separated
and the matrices are cast once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from megajax.core.config import Config, ConfigError
from megajax.core.config.lora import without_adapters
from megajax.core.config.one_dimensional import one_dimensional
from megajax.core.counts.declaration import Parameter
from megajax.core.model.block import Block
from megajax.core.model.cross_attention import CrossAttention, CrossBlock
from megajax.core.model.dropout import random_key
from megajax.core.model.merged import merged
from megajax.core.model.parameters import cast_matrices, map_parameters
from megajax.core.model.shard_copies import copy_to_shards
from megajax.core.model.stack import at_place, count_layers, layer_of
from megajax.core.model.transformer import LanguageModel, model_graph
from megajax.core.parallel.layer_order import in_model_order, map_stacked
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import mesh_of


class LayerWeights(NamedTuple):
    """The parameters of each layer, and of the rest of the decoder."""

    rest: nnx.State
    layers: tuple[nnx.State, ...]
    cross: tuple[nnx.State, ...] = ()  # the cross-attention layers


def inference_config(config: Config) -> Config:
    """Return the config without sequence parallelism, which would shard sequences of one token.

    Raises ConfigError for a model that does not predict the next token, and for a mesh with
    pipeline, context or 2-D tensor parallelism.
    """
    if config.model.is_bert:
        raise ConfigError(
            f'model.objective={config.model.objective}: the model predicts masked tokens, '
            'not the next token of a text'
        )
    if not config.mesh.is_one_dimensional:
        mesh, others = one_dimensional(config).mesh, ('stages', 'context', 'model_rows')
        used = {key: getattr(config.mesh, key) for key in others if getattr(config.mesh, key) > 1}
        raise ConfigError(
            f'{", ".join(f"mesh.{key}={size}" for key, size in used.items())}: generation and '
            'scoring shard sequences over mesh.data and a model over mesh.model alone; '
            f'use {" ".join(f"mesh.{key}=1" for key in used)} '
            f'mesh.data={mesh.data} mesh.model={mesh.model}'
        )
    return config.model_copy(
        update={'mesh': config.mesh.model_copy(update={'sequence_parallel': False})}
    )


def make_one_dimensional(config: Config, params: nnx.State) -> tuple[Config, Mesh, nnx.State]:
    """Return config, mesh and parameters without pipeline, context and 2-D tensor parallelism.

    The devices stay the same. `params` have their stored sharding on the current mesh, which is
    `config`'s. The result has the matrices in the compute dtype.
    """
    plain = one_dimensional(config)
    mesh = mesh_of(list(jax.sharding.get_mesh().devices.flat), plain.mesh.sizes)
    layout = Layout.of(plain)

    def placement(declared: Parameter, _: Any) -> NamedSharding:
        return NamedSharding(mesh, layout(declared.dims))

    gathered = _gather(config)(params)
    return plain, mesh, jax.device_put(gathered, map_parameters(placement, gathered))


@functools.cache
def _gather(config: Config) -> Any:
    layout = Layout.of(config)

    def gather(params: nnx.State) -> nnx.State:
        gathered = cast_matrices(params, config.train.compute_dtype, layout)
        return map_stacked(lambda x: in_model_order(x, layout), gathered, layout)

    return jax.jit(gather)


def make_weights(config: Config, params: nnx.State) -> LayerWeights:
    """Return a model's parameters as weights, sharded over `model` and replicated over `data`.

    Adapters are merged into their base weights.
    """
    return _maker(config)(params)


@functools.cache
def _maker(config: Config) -> Any:
    layout = Layout.of(config)
    graph = model_graph(without_adapters(config).model, layout)

    def make(params: nnx.State) -> LayerWeights:
        cast = cast_matrices(merged(params, config), config.train.compute_dtype, layout)
        model = nnx.merge(graph, copy_to_shards(cast, layout, encoder_only=True))
        layers = _separate(model, layer_of)
        cross = () if model.cross is None else _separate(model.cross, _cross_layer)
        return LayerWeights(nnx.state(model), layers, cross)

    return jax.jit(make)


def delete(params: nnx.State, *, keep: LayerWeights) -> None:
    """Free the memory of the parameters that these weights, made from them, do not contain."""
    jax.block_until_ready(keep)
    kept = {id(x) for x in jax.tree.leaves(keep)}
    for x in jax.tree.leaves(params):
        if id(x) not in kept:
            x.delete()


def _separate(
    model: LanguageModel | CrossAttention, take: Callable[[Any, int], nnx.Module]
) -> tuple[nnx.State, ...]:
    """Return the stacked layers of a module one by one, and remove them from the module."""
    stacked = model.layers
    del model.layers
    return tuple(nnx.state(take(stacked, i)) for i in range(count_layers(nnx.state(stacked))))


def _cross_layer(layers: CrossBlock, index: int) -> CrossBlock:
    layer: CrossBlock = jax.tree.map(lambda x: x[index], layers)
    return layer


class Graphs(NamedTuple):
    """The graph definitions for `nnx.merge`.

    `LayerWeights.rest` goes into a model without layers, each of `LayerWeights.layers` into its
    block, and each of `LayerWeights.cross` into a layer of cross-attention.
    """

    decoder: nnx.GraphDef[LanguageModel]
    blocks: tuple[nnx.GraphDef[Block], ...]  # graph of each layer
    cross: nnx.GraphDef[CrossBlock] | None


def graphs(config: Config) -> Graphs:
    """Return the graph definitions of a model's parts."""
    model, layout = without_adapters(config).model, Layout.of(config)
    decoder = jax.eval_shape(lambda: LanguageModel(model, layout, key=random_key(0)))
    places = range(count_layers(decoder.layers))
    blocks = tuple(nnx.graphdef(at_place(decoder.layers, place)) for place in places)
    cross = None
    del decoder.layers
    if decoder.cross is not None:
        cross = nnx.graphdef(decoder.cross.layers)
        del decoder.cross.layers
    return Graphs(nnx.graphdef(decoder), blocks, cross)
