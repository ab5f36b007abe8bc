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
from megajax.model.block import Block
from megajax.model.decoder import Decoder, model_graph
from megajax.model.dropout import sequence_keys
from megajax.model.loss import Loss
from megajax.model.main_gradient import hand_on_gradients, separate
from megajax.model.vector import add_copies, one_copy_per_shard
from megajax.parallel import layout
from megajax.train.compiler_options import evaluation_options, step_options
from megajax.train.feed import Batch
from megajax.train.guard import Guard, init_guard, judge
from megajax.train.loss_scale import LossScale, adjust, init_loss_scale, overflows, scale_weights, unscale
from megajax.train.optimizer import make_optimizer, make_schedule
from megajax.train.overlap import num_parts
from megajax.train.zero1 import gather_over_data, shard_over_data, sum_over_data

Metrics = dict[str, jax.Array]
Sums = tuple[jax.Array, jax.Array]


class TrainState(NamedTuple):
    """All that a step changes; `step` counts the ones done, taken or skipped, and `batches` those read, also for steps rolled back."""

    step: jax.Array
    batches: jax.Array
    params: nnx.State
    opt_state: optax.OptState
    guard: Guard
    loss_scale: LossScale | None  # of fp16


def init_state(config: Config, params: nnx.State | None = None) -> TrainState:
    """The state before the first step, created in its place on the current mesh; under `jax.eval_shape`, its shapes and places.

    Of random parameters, unless there are `params` to start from, placed as a Decoder's.
    """
    optimizer = make_optimizer(config)

    @jax.jit
    def init(params: nnx.State | None) -> TrainState:
        if params is None:
            params = nnx.state(Decoder(config, key=jax.random.key(config.train.seed)))
        params = shard_over_data(params, config)
        zero = jnp.zeros((), jnp.int32)
        return TrainState(
            step=zero,
            batches=zero,
            params=params,
            opt_state=optimizer.init(params),
            guard=init_guard(),
            loss_scale=init_loss_scale(config),
        )

    return init(params)


def before_skipped(state: TrainState) -> TrainState:
    """The state before a step that was skipped, from that after it: only counts have changed. fp16's of steady steps stays."""
    guard = state.guard._replace(skipped_in_a_row=state.guard.skipped_in_a_row - 1)
    return state._replace(step=state.step - 1, batches=state.batches - 1, guard=guard)


def make_train_step(config: Config) -> Wrapped:
    """`train_step(state, batch) -> (state, metrics)`, compiled at its first call; the state that goes in is donated.

    A batch holds `tokens`, `labels` and `loss_mask`, each [B, S], and may hold `segment_ids` and `positions`; BERT's also `token_types`
    and `swapped` [B, 1], and its loss is that of the masked tokens and that of the segments' order, of which `nll` is the first. A step
    whose loss or gradients are not finite leaves parameters and optimizer as they are, to the bit; so does a spike if `train.spike`
    says so.
    """
    optimizer, schedule = make_optimizer(config), make_schedule(config.optim, config.train.steps)
    loss_and_gradients = make_loss_and_gradients(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        (loss, nll), grads = loss_and_gradients(state.params, batch, key, state.loss_scale)
        with jax.named_scope('optimizer'):
            grad_norm = optax.tree.norm(grads)
            overflow = overflows(state.loss_scale, loss, grad_norm)
            verdict, guard = judge(state.guard, loss, nll, grad_norm, overflow=overflow, spikes=config.train.spike != 'off')
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            new = optax.apply_updates(state.params, updates), opt_state
            params, opt_state = jax.tree.map(partial(jnp.where, verdict.taken), new, (state.params, state.opt_state))
        metrics = {'loss': loss, 'nll': nll, 'grad_norm': grad_norm, 'lr': schedule(state.step), **verdict._asdict()}
        if state.loss_scale is not None:
            metrics['loss_scale'] = state.loss_scale.value
        loss_scale = adjust(state.loss_scale, overflow)
        return TrainState(state.step + 1, state.batches + 1, params, opt_state, guard, loss_scale), metrics

    return jax.jit(train_step, donate_argnums=0, compiler_options=step_options(config))


def make_loss_and_gradients(config: Config) -> Callable[..., tuple[Sums, nnx.State]]:
    """A function of parameters, batch, dropout key and loss scale: mean loss and negative log-likelihood, and the gradient of the loss.

    Every data shard differentiates its own rows with the parameters that all share, so gradients come out one per data shard;
    their sum, after the last microbatch, is the one reduction over `data` of a step.
    """
    num_data, num_microbatches = config.mesh.data, config.train.microbatches
    shard_loss = _make_shard_loss(config)
    over_data = jax.vmap(jax.value_and_grad(shard_loss, has_aux=True), in_axes=(None, None, 0, None), spmd_axis_name='data')

    def loss_and_gradients(params: nnx.State, batch: Batch, key: jax.Array, loss_scale: LossScale | None = None) -> tuple[Sums, nnx.State]:
        batch = scale_weights(loss_scale, _with_rows_and_weights(batch))
        weights, whole = separate(gather_over_data(params, config))
        weights, copied = one_copy_per_shard(weights, config), one_copy_per_shard(whole, config)
        microbatches = jax.tree.map(lambda x: _split(x, num_microbatches, num_data), batch)

        def accumulate(total: Any, microbatch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, over_data(copied, weights, microbatch, key)), None

        if num_microbatches == 1:
            total = over_data(copied, weights, jax.tree.map(lambda x: x[0], microbatches), key)
        else:
            zero = jnp.zeros((num_data,), out_sharding=layout.DATA_SHARDS)
            zeros = jax.tree.map(lambda p: jnp.zeros((num_data, *p.shape), p.dtype, out_sharding=layout.per_data_shard(p)), copied)
            total, _ = lax.scan(accumulate, ((zero, zero), zeros), microbatches)
        with jax.named_scope('data_parallel'):
            sums, gradients = total
            sums, gradients = jax.tree.map(lambda x: x.sum(0), sums), add_copies(sum_over_data(gradients, params), params)
        return unscale(loss_scale, (sums, gradients))

    return loss_and_gradients


def make_eval_step(config: Config) -> Wrapped:
    """`eval_step(params, batch)`: sums over the batch, without dropout: `nll` in nats, `tokens`, and `bytes` if it holds `label_bytes`.

    Of BERT `nll` and `tokens` are those of masked tokens, and `order_nll` and `rows` those of its other head.
    """
    loss = Loss.of(config)
    graph = model_graph(config)

    def shard_sums(params: nnx.State, shard: Batch) -> Metrics:
        model = nnx.merge(graph, params)
        x_BSD = model.hidden(shard['tokens'], **_beside_tokens(shard))
        nll = loss(model.before_head(x_BSD), model.head_VD, shard['labels'], shard['loss_mask'], model.head_bias_V)[1]
        if model.order_head is None:
            return {'nll': nll}
        return {'nll': nll, 'order_nll': model.order_head.loss(x_BSD, shard['swapped'], _real_rows(shard))}

    def eval_step(params: nnx.State, batch: Batch) -> Metrics:
        shards = jax.tree.map(lambda x: _split(x, 1, config.mesh.data)[0], batch)
        per_shard = jax.vmap(shard_sums, in_axes=(None, 0), spmd_axis_name='data')(gather_over_data(params, config), shards)
        sums = {name: x.sum() for name, x in per_shard.items()} | {'tokens': batch['loss_mask'].sum()}
        if 'order_nll' in sums:
            sums['rows'] = _real_rows(batch).sum()
        return sums | {'bytes': batch['label_bytes'].sum()} if 'label_bytes' in batch else sums

    return jax.jit(eval_step, compiler_options=evaluation_options())


def _make_shard_loss(config: Config) -> Callable[[nnx.State, nnx.State | None, Batch, jax.Array], Sums]:
    loss = Loss.of(config)
    graph = model_graph(config)

    def shard_loss(params: nnx.State, weights: nnx.State | None, shard: Batch, key: jax.Array) -> Sums:
        model, layers = (nnx.merge(graph, params), None) if weights is None else _model_with_weights(graph, params, weights)
        key_B = sequence_keys(key, shard['rows']) if config.model.dropout else None
        x_BSD = model.hidden(
            shard['tokens'],
            **_beside_tokens(shard),
            key_B=key_B,
            num_parts=num_parts(config),
            weights=layers,
        )
        head_BSD = model.before_head(x_BSD)
        with jax.named_scope('loss'):
            objective, nll = loss(head_BSD, model.head_VD, shard['labels'], shard['weights'], model.head_bias_V)
        if model.order_head is not None:
            with jax.named_scope('head'):
                objective += model.order_head.loss(x_BSD, shard['swapped'], shard['row_weights'])
        return objective, nll

    return shard_loss


def _beside_tokens(shard: Batch) -> dict[str, Any]:
    return {'position_BS': shard.get('positions'), 'segment_BS': shard.get('segment_ids'), 'type_BS': shard.get('token_types')}


def _model_with_weights(graph: nnx.GraphDef[Decoder], params: nnx.State, weights: nnx.State) -> tuple[Decoder, Block]:
    """The model, and what its layers compute with; each layer takes that for itself, because a loop would hold all in fp32."""
    outside = {name: hand_on_gradients(weights[name], x) for name, x in params.items() if name != 'layers'}
    return nnx.merge(graph, nnx.State({**params, **outside})), nnx.merge(graph, weights).layers


def _with_rows_and_weights(batch: Batch) -> Batch:
    # Weights that add up to one over the global batch make the mean exact however the mask is spread over the shards.
    mask_BS = batch['loss_mask']
    weights_BS = mask_BS / jnp.maximum(mask_BS.sum(), 1)
    rows_B = jnp.arange(mask_BS.shape[0], out_sharding=layout.DATA_SHARDS)
    made = {'weights': weights_BS, 'rows': rows_B}
    if 'swapped' in batch:
        real_B1 = _real_rows(batch)
        made['row_weights'] = real_B1 / jnp.maximum(real_B1.sum(), 1)
    return {**{name: x for name, x in batch.items() if name != 'loss_mask'}, **made}


def _real_rows(batch: Batch) -> jax.Array:
    """1 for the rows [B, 1] that hold something, 0 for those that fill up the batch."""
    return batch['loss_mask'].max(-1, keepdims=True)


def _split(x_BS: jax.Array, num_microbatches: int, num_data: int) -> jax.Array:
    """[M, D, B / (M D), ...]: each data shard cuts its own rows into microbatches, so no row moves."""
    rows = x_BS.shape[0] // (num_microbatches * num_data)
    x_DMBS = x_BS.reshape(num_data, num_microbatches, rows, *x_BS.shape[1:], out_sharding=layout.microbatches(x_BS))
    return jnp.moveaxis(x_DMBS, 1, 0)
