"""Run the forward pass of a model, site by site.

The model's own modules run layer by layer in the layout of a training step, on each shard. The
overlap schedule, the loop over layers, recomputation, microbatches and pipeline stages are left
out: the numbers of a step do not depend on them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from megajax.core.config import Config
from megajax.core.config.overlap_rules import without_order
from megajax.core.model.block import Block
from megajax.core.model.computation import Computation
from megajax.core.model.grid import is_grid
from megajax.core.model.loss import Loss
from megajax.core.model.stack import count_layers, layer_of, run_layer
from megajax.core.model.transformer import LanguageModel
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.pipeline_ops import over_shards
from megajax.core.train import routing
from megajax.core.train.feed import Batch, shard_order
from megajax.core.train.microbatches import rows_of, split, with_weights
from megajax.core.train.objective import Objective
from megajax.core.train.zero import StepWeights

Sites = dict[str, jax.Array]


def layer_by_layer(config: Config) -> Config:
    """Return the config without pipeline stages, microbatches, recomputation and overlap."""
    mesh = config.mesh.model_copy(update={'stages': 1, 'virtual_stages': 1})
    plain = without_order(config)
    train = plain.train.model_copy(update={'microbatches': 1, 'recompute': 'none'})
    return plain.model_copy(update={'mesh': mesh, 'train': train})


def make_forward(config: Config) -> Callable[..., Sites]:
    """Return a function of parameters, batch, dropout key and FP8 scales.

    The function returns the result at each site, [*data shards, rows, tokens, ...], which `on_host`
    turns into an array of the batch. `config` is a result of `layer_by_layer`.
    """
    layout, objective = Layout.of(config), Objective.of(config, Layout.of(config))

    def forward(
        params: nnx.State, batch: Batch, key: jax.Array, scales: jax.Array | None = None
    ) -> Sites:
        batch, share = with_weights(batch, config, layout), routing.init_load(config)
        load = None if share is None else routing.Load.of(share, batch, config.train)
        weights, primals, _ = StepWeights.of(params, config, layout, scales, load)
        shards = jax.tree.map(lambda x: split(x, 1, layout)[0], batch)

        def of_shard(shard: Batch) -> Sites:
            model, used = objective.model(primals, weights)
            return _sites(model, used, objective.computation, shard, key)

        return over_shards(of_shard, layout)(shards)

    return forward


def on_host(x: jax.Array, config: Config) -> np.ndarray:
    """Return a result of `make_forward` as an array [rows, tokens, ...] in fp32."""
    context, length = config.mesh.context, config.train.seq_len
    array = np.asarray(x).astype(np.float32)
    stacked = len(Layout.of(config).mapped)
    rows, tokens = array.shape[stacked : stacked + 2]
    array = array.reshape(-1, context, rows, tokens, *array.shape[stacked + 2 :])
    array = np.moveaxis(array, 1, 2).reshape(-1, length, *array.shape[4:])
    order = shard_order(length, context)
    return array if order is None else array[:, np.argsort(order)]


def _sites(
    model: LanguageModel,
    used: LanguageModel | None,
    computation: Computation,
    shard: Batch,
    key: jax.Array,
) -> Sites:
    """Return the result at each site; `used`, if given, has the weights to compute with."""
    rows = rows_of(shard, key)
    x_BTD = model.embed(shard['tokens'], computation.dtype, rows)
    sites = {'embedding': x_BTD}
    for index in range(count_layers(model.layers)):
        weights = None if used is None else layer_of(used.layers, index)
        block = computation.pair(weights, layer_of(model.layers, index), model.layout)
        seen = _tapped(block)
        x_BTD = run_layer(block, x_BTD, rows, index, computation)
        sites |= {f'layers.{index}.{name}': x for name, x in seen.items()}
        sites[f'layers.{index}'] = x_BTD
    sites['norm'] = model.finish(x_BTD)
    sites['logits'] = _logits(model, sites['norm'])
    return sites


def _tapped(block: Block) -> Sites:
    """Make a block save the result of each sublayer's norm, and of its last linear layer.

    The results are in the returned dict once the block has run.
    """
    seen = Sites()

    def norm(site: str, module: Callable[..., jax.Array], *arguments: Any) -> jax.Array:
        seen[site] = module(*arguments)
        return seen[site]

    def finished(site: str, method: Callable[..., jax.Array], *arguments: Any) -> jax.Array:
        seen[site] = arguments[0]
        return method(*arguments)

    sublayer: Any
    for sublayer in block.sublayers:
        name = sublayer.SCOPE
        sublayer.norm = nnx.static(partial(norm, f'{name}.norm', sublayer.norm))
        sublayer.finished = nnx.static(partial(finished, name, sublayer.finished))
    return seen


def _logits(model: LanguageModel, x_BTD: jax.Array) -> jax.Array:
    x_BSD = model.before_head(x_BTD)
    if not is_grid(model.layout):  # in 2-D, the matmul gathers x over both axes
        x_BSD = jax.reshard(x_BSD, model.layout('BSd'))
    size = model.config.vocab_size
    logits_BSV = Loss(vocab_size=size, layout=model.layout).logits(
        x_BSD, model.head_Vd.T.astype(x_BSD.dtype), model.head_bias_V
    )
    return logits_BSV
