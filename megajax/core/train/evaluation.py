"""The evaluation step: sums of metrics over a batch, without dropout."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.stages import Wrapped

from megajax.core.config import Config
from megajax.core.config.overlap_rules import without_order
from megajax.core.model.shard_copies import copy_to_shards
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import check_current_mesh
from megajax.core.parallel.pipeline_ops import over_shards
from megajax.core.train.compiler_options import evaluation_options
from megajax.core.train.feed import Batch
from megajax.core.train.microbatches import for_shards, real_rows, split
from megajax.core.train.objective import Objective
from megajax.core.train.pipeline import evaluate_pipelined
from megajax.core.train.zero import gather_once

Metrics = dict[str, jax.Array]


def make_eval_step(config: Config) -> Wrapped:
    """Return `eval_step(params, batch)`, which sums metrics over a batch, without dropout.

    It runs the batch in `train.microbatches` microbatches, or as many as divide the sequences of a
    data shard. A batch of `train.batch_size` sequences needs no more memory than in training.

    The sums are `nll` in nats, `tokens`, and `bytes` if the batch holds `label_bytes`. For BERT,
    `nll` and `tokens` are the sums of masked-token prediction, and `order_nll` and `rows` are those
    for sentence-order prediction. Raises ConfigError if the current mesh is not the config's.
    """
    check_current_mesh(config)
    config, layout = without_order(config), Layout.of(config)
    objective = Objective.of(config, layout, is_training=False)

    def eval_step(params: nnx.State, batch: Batch) -> Metrics:
        batch = batch | {'loss_mask': batch['loss_mask'].astype(jnp.float32)}
        gathered = gather_once(params, config, layout)
        params = copy_to_shards(gathered, layout, encoder_only=True)
        weights = params if config.optim.shard == 'weights' else None

        def of_shard(shard: Batch) -> tuple[jax.Array, jax.Array | None]:
            (_, nll), order_nll = objective.parts(params, weights, shard)
            return nll, order_nll

        weighted = _with_weights(batch)
        if layout.mesh_axes('S'):
            weighted = for_shards(weighted, config, layout)
        rows = len(batch['tokens']) // layout.num_shards('B')
        count = math.gcd(rows, config.train.microbatches)
        microbatches = jax.tree.map(lambda x: split(x, count, layout), weighted)
        if config.mesh.stages > 1:
            nll, order_nll = evaluate_pipelined(objective, layout, params, microbatches)
        else:
            nll, order_nll = lax.map(over_shards(of_shard, layout), microbatches)
        sums = {'nll': nll.sum(), 'tokens': batch['loss_mask'].sum()}
        if config.model.is_bert:
            assert order_nll is not None
            sums |= {'order_nll': order_nll.sum(), 'rows': real_rows(batch).sum()}
        return sums | {'bytes': batch['label_bytes'].sum()} if 'label_bytes' in batch else sums

    return jax.jit(eval_step, compiler_options=evaluation_options())


def _with_weights(batch: Batch) -> Batch:
    added = {'weights': batch['loss_mask']}
    if 'swapped' in batch:
        added['row_weights'] = real_rows(batch)
    return {**batch, **added}
