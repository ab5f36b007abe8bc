"""A model's weights for generation: separate layers, and matrices in the dtype of the computation.

Training stacks the layers and casts a matrix where it is used. For one token that would copy every
weight: on a CPU a token of GPT-2 takes 1.5 to 2.2 times as long. Here the layers are separated and
the matrices cast once.
"""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx

from megajax.config import Config, ConfigError
from megajax.model.block import Block
from megajax.model.parameters import cast_matrices
from megajax.model.transformer import LanguageModel, model_graph
from megajax.parallel.layout import Layout


class LayerWeights(NamedTuple):
    """The parameters of each layer, and of the rest of the decoder."""

    rest: nnx.State
    layers: tuple[nnx.State, ...]


def inference_config(config: Config) -> Config:
    """Return the config without sequence parallelism, which would shard sequences of one token.

    Raises ConfigError for a model that does not predict the next token.
    """
    if config.model.is_bert:
        raise ConfigError(
            f'model.objective={config.model.objective}: the model predicts masked tokens, '
            'not the next token of a text'
        )
    return config.model_copy(
        update={'mesh': config.mesh.model_copy(update={'sequence_parallel': False})}
    )


def make_weights(config: Config, params: nnx.State) -> LayerWeights:
    """Return a model's parameters as weights, sharded over `model` and replicated over `data`."""
    return _maker(config)(params)


@functools.cache
def _maker(config: Config) -> Any:
    layout = Layout.of(config)
    graph = model_graph(config.model, layout)

    def make(params: nnx.State) -> LayerWeights:
        model = nnx.merge(graph, cast_matrices(params, config.train.dtype, layout))
        stacked = nnx.state(model.layers)
        del model.layers
        layers = (
            jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.model.num_layers)
        )
        return LayerWeights(nnx.state(model), tuple(layers))

    return jax.jit(make)


def graphs(config: Config) -> tuple[nnx.GraphDef[LanguageModel], nnx.GraphDef[Block]]:
    """Return the graph definitions to `nnx.merge` with.

    `LayerWeights.rest` goes into a model without layers, each of `LayerWeights.layers` into a
    block.
    """
    layout, key = Layout.of(config), jax.random.key(0)
    decoder = jax.eval_shape(lambda: LanguageModel(config.model, layout, key=key))
    layers = decoder.layers
    del decoder.layers
    return nnx.graphdef(decoder), nnx.graphdef(layers)
