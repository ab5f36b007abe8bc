"""The training step: a pure function of state and batch, the same numbers on every mesh.

B batch, S sequence, M microbatches, D data shards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.stages import Wrapped

from megajax.config import Config
from megajax.model.decoder import Decoder, model_graph
from megajax.model.dropout import sequence_keys
from megajax.model.loss import Loss
from megajax.model.vector import add_copies, one_copy_per_shard
from megajax.parallel import layout
from megajax.train.feed import Batch
from megajax.train.guard import Guard, init_guard, judge
from megajax.train.optimizer import make_optimizer, make_schedule
from megajax.train.overlap import compiler_options, num_parts

Metrics = dict[str, jax.Array]
Sums = tuple[jax.Array, jax.Array]


class TrainState(NamedTuple):
    """All that a step changes; `step` counts the ones done, taken or skipped, and `batches` those read, also for steps rolled back."""

    step: jax.Array
    batches: jax.Array
    params: nnx.State
    opt_state: optax.OptState
    guard: Guard


def init_state(config: Config) -> TrainState:
    """The state before the first step, created in its place on the current mesh; under `jax.eval_shape`, its shapes and places."""
    optimizer = make_optimizer(config)

    @jax.jit
    def init() -> TrainState:
        params = nnx.state(Decoder(config, key=jax.random.key(config.train.seed)))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(step=zero, batches=zero, params=params, opt_state=optimizer.init(params), guard=init_guard())

    return init()


def make_train_step(config: Config) -> Wrapped:
    """`train_step(state, batch) -> (state, metrics)`, compiled at its first call; the state that goes in is donated.

    A batch holds `tokens`, `labels` and `loss_mask`, each [B, S], and may hold `segment_ids` and `positions`. A step whose loss or
    gradients are not finite leaves parameters and optimizer as they are, to the bit; so does a spike if `train.spike` says so.
    """
    optimizer, schedule = make_optimizer(config), make_schedule(config.optim, config.train.steps)
    loss_and_gradients = make_loss_and_gradients(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        (loss, nll), grads = loss_and_gradients(state.params, batch, key)
        with jax.named_scope('optimizer'):
            grad_norm = optax.tree.norm(grads)
            verdict, guard = judge(state.guard, loss, grad_norm, spikes=config.train.spike != 'off')
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            new = optax.apply_updates(state.params, updates), opt_state
            params, opt_state = jax.tree.map(partial(jnp.where, verdict.taken), new, (state.params, state.opt_state))
        metrics = {'loss': loss, 'nll': nll, 'grad_norm': grad_norm, 'lr': schedule(state.step), **verdict._asdict()}
        return TrainState(state.step + 1, state.batches + 1, params, opt_state, guard), metrics

    return jax.jit(train_step, donate_argnums=0, compiler_options=compiler_options(config))


def make_loss_and_gradients(config: Config) -> Callable[[nnx.State, Batch, jax.Array], tuple[Sums, nnx.State]]:
    """A function of (parameters, batch, dropout key): mean loss and mean negative log-likelihood, and the gradient of the loss.

    Every data shard differentiates its own rows with the parameters that all share, so gradients come out one per data shard;
    their sum, after the last microbatch, is the one reduction over `data` of a step.
    """
    num_data, num_microbatches = config.mesh.data, config.train.microbatches
    shard_loss = _make_shard_loss(config)
    over_data = jax.vmap(jax.value_and_grad(shard_loss, has_aux=True), in_axes=(None, 0, None), spmd_axis_name='data')

    def loss_and_gradients(params: nnx.State, batch: Batch, key: jax.Array) -> tuple[Sums, nnx.State]:
        batch = _with_rows_and_weights(batch)
        copied = one_copy_per_shard(params, config)
        microbatches = jax.tree.map(lambda x: _split(x, num_microbatches, num_data), batch)

        def accumulate(total: Any, microbatch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, over_data(copied, microbatch, key)), None

        if num_microbatches == 1:
            total = over_data(copied, jax.tree.map(lambda x: x[0], microbatches), key)
        else:
            zero = jnp.zeros((num_data,), out_sharding=layout.DATA_SHARDS)
            zeros = jax.tree.map(lambda p: jnp.zeros((num_data, *p.shape), p.dtype, out_sharding=layout.per_data_shard(p)), copied)
            total, _ = lax.scan(accumulate, ((zero, zero), zeros), microbatches)
        with jax.named_scope('data_parallel'):
            sums, gradients = jax.tree.map(lambda x: x.sum(0), total)  # all-reduce over data, of each parameter shard once
            return sums, add_copies(gradients, params)

    return loss_and_gradients


def make_eval_step(config: Config) -> Wrapped:
    """`eval_step(params, batch)`: sums over the batch, without dropout: `nll` in nats, `tokens`, and `bytes` if it holds `label_bytes`."""
    loss = Loss.of(config)
    graph = model_graph(config)

    def shard_nll(params: nnx.State, shard: Batch) -> jax.Array:
        model = nnx.merge(graph, params)
        x_BSD = model.hidden(shard['tokens'], position_BS=shard.get('positions'), segment_BS=shard.get('segment_ids'))
        return loss(x_BSD, model.head_VD, shard['labels'], shard['loss_mask'])[1]

    def eval_step(params: nnx.State, batch: Batch) -> Metrics:
        shards = jax.tree.map(lambda x: _split(x, 1, config.mesh.data)[0], batch)
        nll = jax.vmap(shard_nll, in_axes=(None, 0), spmd_axis_name='data')(params, shards).sum()
        sums = {'nll': nll, 'tokens': batch['loss_mask'].sum()}
        return sums | {'bytes': batch['label_bytes'].sum()} if 'label_bytes' in batch else sums

    return jax.jit(eval_step)


def _make_shard_loss(config: Config) -> Callable[[nnx.State, Batch, jax.Array], Sums]:
    loss = Loss.of(config)
    graph = model_graph(config)

    def shard_loss(params: nnx.State, shard: Batch, key: jax.Array) -> Sums:
        model = nnx.merge(graph, params)
        key_B = sequence_keys(key, shard['rows']) if config.model.dropout else None
        x_BSD = model.hidden(
            shard['tokens'],
            position_BS=shard.get('positions'),
            segment_BS=shard.get('segment_ids'),
            key_B=key_B,
            num_parts=num_parts(config),
        )
        with jax.named_scope('loss'):
            return loss(x_BSD, model.head_VD, shard['labels'], shard['weights'])

    return shard_loss


def _with_rows_and_weights(batch: Batch) -> Batch:
    # Weights that add up to one over the global batch make the mean exact however the mask is spread over the shards.
    mask_BS = batch['loss_mask']
    weights_BS = mask_BS / jnp.maximum(mask_BS.sum(), 1)
    rows_B = jnp.arange(mask_BS.shape[0], out_sharding=layout.DATA_SHARDS)
    return {**{name: x for name, x in batch.items() if name != 'loss_mask'}, 'weights': weights_BS, 'rows': rows_B}


def _split(x_BS: jax.Array, num_microbatches: int, num_data: int) -> jax.Array:
    """[M, D, B / (M D), ...]: each data shard cuts its own rows into microbatches, so no row moves."""
    rows = x_BS.shape[0] // (num_microbatches * num_data)
    x_DMBS = x_BS.reshape(num_data, num_microbatches, rows, *x_BS.shape[1:], out_sharding=layout.microbatches(x_BS))
    return jnp.moveaxis(x_DMBS, 1, 0)
