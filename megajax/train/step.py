"""The training step: a pure function of state and batch, with the same numbers on every mesh."""

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
from megajax.counts.parameters import Parameter
from megajax.model.block import Block
from megajax.model.dropout import sequence_keys
from megajax.model.loss import Loss
from megajax.model.parameters import map_parameters
from megajax.model.shard_copies import add_copies, copy_to_shards
from megajax.model.transformer import Bert, Computation, LanguageModel, make_model, model_graph
from megajax.parallel.layout import Layout
from megajax.train.compiler_options import evaluation_options, step_options
from megajax.train.feed import Batch
from megajax.train.guard import Guard, init_guard, judge
from megajax.train.loss_scale import (
    LossScale,
    adjust,
    init_loss_scale,
    overflows,
    scale_weights,
    unscale,
)
from megajax.train.optimizer import make_optimizer, make_schedule
from megajax.train.overlap import num_parts
from megajax.train.zero import (
    gather_once,
    mapped_axes,
    shard_over_data,
    sum_over_data,
    weights_and_primals,
    zero_gradients,
)

Metrics = dict[str, jax.Array]
Sums = tuple[jax.Array, jax.Array]
DROPOUT = 0x6472706F  # differs from every index that a key is split by


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: jax.Array  # steps done, whether their update was applied or skipped
    batches: jax.Array  # batches read, also for steps that were rolled back
    params: nnx.State
    opt_state: optax.OptState
    guard: Guard
    loss_scale: LossScale | None  # None unless in fp16


def init_state(config: Config, params: nnx.State | None = None) -> TrainState:
    """Return the state before the first step, created where it belongs on the current mesh.

    The parameters are random unless `params` are given, placed as they are between steps. Under
    `jax.eval_shape` the result is the shapes and placements.
    """
    layout, optimizer = Layout.of(config), make_optimizer(config)

    def random_params() -> nnx.State:
        model = make_model(config.model, layout, key=jax.random.key(config.train.seed))
        return shard_over_data(nnx.state(model), layout)

    @jax.jit
    def init(given: nnx.State | None) -> TrainState:
        params = random_params() if given is None else given
        zero = jnp.zeros((), jnp.int32)
        return TrainState(
            step=zero,
            batches=zero,
            params=params if given is None else nnx.State({}),  # a result would be a copy
            opt_state=optimizer.init(params),
            guard=init_guard(),
            loss_scale=init_loss_scale(config),
        )

    state = init(params)
    return state if params is None else state._replace(params=params)


def before_skipped(state: TrainState) -> TrainState:
    """Return the state before a skipped step, given the state after it.

    Only the counts differ. The count of steady steps of fp16's loss scale is not restored.
    """
    guard = state.guard._replace(skipped_in_a_row=state.guard.skipped_in_a_row - 1)
    return state._replace(step=state.step - 1, batches=state.batches - 1, guard=guard)


def make_train_step(config: Config) -> Wrapped:
    """Return `train_step(state, batch) -> (state, metrics)`, compiled at its first call.

    The input state is donated. A batch holds `tokens`, `labels` and `loss_mask`, each [B, S], and
    may hold `segment_ids` and `positions`. BERT's also holds `token_types` and `swapped` [B, 1];
    its loss is the sum of the losses of masked-token and of sentence-order prediction, and `nll`
    is the former. A step whose loss or gradients are not finite leaves parameters and optimizer
    unchanged, bit for bit; so does a spike if `train.spike` says so.
    """
    optimizer, schedule = make_optimizer(config), make_schedule(config.optim, config.train.steps)
    loss_and_gradients = make_loss_and_gradients(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = dropout_key(config.train.seed, state.step)
        (loss, nll), grads = loss_and_gradients(state.params, batch, key, state.loss_scale)
        with jax.named_scope('optimizer'):
            grad_norm = optax.tree.norm(grads)
            overflow = overflows(state.loss_scale, loss, grad_norm)
            verdict, guard = judge(
                state.guard,
                loss,
                nll,
                grad_norm,
                overflow=overflow,
                spikes=config.train.spike != 'off',
            )
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            new = optax.apply_updates(state.params, updates), opt_state
            params, opt_state = jax.tree.map(
                partial(jnp.where, verdict.taken), new, (state.params, state.opt_state)
            )
        metrics = {
            'loss': loss,
            'nll': nll,
            'grad_norm': grad_norm,
            'lr': schedule(state.step),
            **verdict._asdict(),
        }
        if state.loss_scale is not None:
            metrics['loss_scale'] = state.loss_scale.value
        loss_scale = adjust(state.loss_scale, overflow)
        return TrainState(
            state.step + 1, state.batches + 1, params, opt_state, guard, loss_scale
        ), metrics

    return jax.jit(train_step, donate_argnums=0, compiler_options=step_options(config))


def dropout_key(seed: int, step: jax.Array | int) -> jax.Array:
    """Return the random key for the dropout of a step.

    jax.random.split(key, n)[i] is fold_in(key, i), so without DROPOUT the first steps would draw
    their masks with the keys that the parameters were initialised with.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), DROPOUT), step)


def make_loss_and_gradients(config: Config) -> Callable[..., tuple[Sums, nnx.State]]:
    """Return a function of parameters, batch, dropout key and loss scale.

    It returns the mean loss, the mean negative log-likelihood and the gradient of the loss. Every
    data shard differentiates the loss of its own rows with respect to the shared parameters, which
    gives one gradient per data shard; their sum, after the last microbatch, is a step's only
    reduction over `data`. From ZeRO-2 on (`zero.py`) the backward pass sums those of matrices.
    """
    layout, num_microbatches = Layout.of(config), config.train.microbatches
    differentiate = jax.value_and_grad(_make_shard_loss(config, layout.per_shard), has_aux=True)

    def loss_and_gradients(
        params: nnx.State, batch: Batch, key: jax.Array, loss_scale: LossScale | None = None
    ) -> tuple[Sums, nnx.State]:
        batch = scale_weights(loss_scale, _with_rows_and_weights(batch, layout))
        weights, primals = weights_and_primals(params, config, layout)
        weights, primals = copy_to_shards(weights, layout), copy_to_shards(primals, layout)
        microbatches = jax.tree.map(lambda x: _split(x, num_microbatches, layout), batch)

        # This closes over the matrices at rest: jax refuses arguments of a mapped function that
        # are sharded over the mesh axis that it is mapped over.
        def of_shard(shard: Batch) -> tuple[Sums, Any]:
            return differentiate(primals, weights, shard, key)

        of_microbatch = _over_shards(of_shard, layout, (0, mapped_axes(primals, config)))

        def accumulate(total: Any, microbatch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_microbatch(microbatch)), None

        if num_microbatches == 1:
            total = of_microbatch(jax.tree.map(lambda x: x[0], microbatches))
        else:
            shards = layout.mesh_axes('B')
            zero = jnp.zeros(layout.sizes_of(shards), out_sharding=layout.stacked('', shards))
            zeros = (zero, zero), zero_gradients(primals, config, layout)
            total, _ = lax.scan(accumulate, zeros, microbatches)
        with jax.named_scope('data_parallel'):
            sums, gradients = total
            sums = jax.tree.map(lambda x: x.sum(), sums)
            gradients = add_copies(sum_over_data(gradients, config, layout), layout)
        return unscale(loss_scale, (sums, gradients))

    return loss_and_gradients


def make_eval_step(config: Config) -> Wrapped:
    """Return `eval_step(params, batch)`, which sums metrics over a batch, without dropout.

    The sums are `nll` in nats, `tokens`, and `bytes` if the batch holds `label_bytes`. For BERT
    `nll` and `tokens` are of masked-token prediction, `order_nll` and `rows` of sentence-order
    prediction.
    """
    layout, computation = Layout.of(config), Computation.of(config)
    loss = Loss.of(config, layout.per_shard)
    graph = model_graph(config.model, layout.per_shard)

    def shard_sums(params: nnx.State, shard: Batch) -> Metrics:
        weights = params if config.optim.shard == 'weights' else None
        model, layers = _model_with_weights(graph, params, weights, computation, layout.per_shard)
        x_BTD = model.hidden(shard['tokens'], computation, **_beside_tokens(shard), weights=layers)
        nll = loss(
            model.before_head(x_BTD),
            model.head_Vd,
            shard['labels'],
            shard['loss_mask'],
            model.head_bias_V,
        )[1]
        if not isinstance(model, Bert):
            return {'nll': nll}
        return {
            'nll': nll,
            'order_nll': model.order_head.loss(x_BTD, shard['swapped'], _real_rows(shard)),
        }

    def eval_step(params: nnx.State, batch: Batch) -> Metrics:
        shards = jax.tree.map(lambda x: _split(x, 1, layout)[0], batch)
        weights = gather_once(params, config, layout)
        per_shard = _over_shards(lambda shard: shard_sums(weights, shard), layout)(shards)
        sums = {name: x.sum() for name, x in per_shard.items()} | {
            'tokens': batch['loss_mask'].sum()
        }
        if 'order_nll' in sums:
            sums['rows'] = _real_rows(batch).sum()
        return sums | {'bytes': batch['label_bytes'].sum()} if 'label_bytes' in batch else sums

    return jax.jit(eval_step, compiler_options=evaluation_options())


def _make_shard_loss(
    config: Config, layout: Layout
) -> Callable[[nnx.State, nnx.State | None, Batch, jax.Array], Sums]:
    loss, graph = Loss.of(config, layout), model_graph(config.model, layout)
    computation = Computation.of(config)._replace(num_parts=num_parts(config))

    def shard_loss(
        params: nnx.State, weights: nnx.State | None, shard: Batch, key: jax.Array
    ) -> Sums:
        model, layers = _model_with_weights(graph, params, weights, computation, layout)
        key_B = sequence_keys(key, shard['rows']) if config.model.dropout else None
        x_BTD = model.hidden(
            shard['tokens'], computation, **_beside_tokens(shard), key_B=key_B, weights=layers
        )
        head_BTD = model.before_head(x_BTD)
        with jax.named_scope('loss'):
            objective, nll = loss(
                head_BTD, model.head_Vd, shard['labels'], shard['weights'], model.head_bias_V
            )
        if isinstance(model, Bert):
            with jax.named_scope('head'):
                objective += model.order_head.loss(x_BTD, shard['swapped'], shard['row_weights'])
        return objective, nll

    return shard_loss


def _beside_tokens(shard: Batch) -> dict[str, Any]:
    return {
        'position_BS': shard.get('positions'),
        'segment_BS': shard.get('segment_ids'),
        'type_BS': shard.get('token_types'),
    }


def _model_with_weights(
    graph: nnx.GraphDef[LanguageModel],
    params: nnx.State,
    weights: nnx.State | None,
    computation: Computation,
    layout: Layout,
) -> tuple[LanguageModel, Block | None]:
    """Return the model, and the weights of its layers where they differ from its parameters.

    Each layer reads its weights inside the loop over layers, which would otherwise hold all of
    them in fp32.
    """
    if weights is None:
        return nnx.merge(graph, params), None

    def outside_layers(declared: Parameter, x: jax.Array, weight: jax.Array) -> jax.Array:
        return x if declared.is_stacked else computation.value(weight, x, declared, layout)

    params = map_parameters(outside_layers, params, weights)
    return nnx.merge(graph, params), nnx.merge(graph, weights).layers


def _over_shards(function: Callable[..., Any], layout: Layout, out_axes: Any = 0) -> Any:
    """Map a function of a shard's rows over all data shards; `out_axes` are those of `jax.vmap`."""
    *replicas, data = layout.mesh_axes('B')
    function = jax.vmap(function, out_axes=out_axes, spmd_axis_name=data)
    for axis in replicas:
        function = jax.vmap(function, spmd_axis_name=axis)
    return function


def _with_rows_and_weights(batch: Batch, layout: Layout) -> Batch:
    # Weights that add up to one over the global batch make the mean exact, however the mask is
    # distributed over the shards.
    mask_BS = batch['loss_mask']
    weights_BS = mask_BS / jnp.maximum(mask_BS.sum(), 1)
    rows_B = jnp.arange(mask_BS.shape[0], out_sharding=layout('B'))
    added = {'weights': weights_BS, 'rows': rows_B}
    if 'swapped' in batch:
        real_B1 = _real_rows(batch)
        added['row_weights'] = real_B1 / jnp.maximum(real_B1.sum(), 1)
    return {**{name: x for name, x in batch.items() if name != 'loss_mask'}, **added}


def _real_rows(batch: Batch) -> jax.Array:
    """Return [B, 1]: 1 for rows with at least one counted token, 0 for rows that pad the batch."""
    return batch['loss_mask'].max(-1, keepdims=True)


def _split(x: jax.Array, num_microbatches: int, layout: Layout) -> jax.Array:
    """Reshape [batch, ...] to [microbatch, data shard, rows, ...].

    Each data shard splits its own rows into microbatches, so no row moves between devices. Data
    shards have one dim for each of their mesh axes.
    """
    axes = layout.mesh_axes('B')
    rows = x.shape[0] // (num_microbatches * layout.num_shards('B'))
    shape = *layout.sizes_of(axes), num_microbatches, rows, *x.shape[1:]
    parts = x.reshape(shape, out_sharding=layout.stacked('-' * (x.ndim + 1), axes))
    return jnp.moveaxis(parts, len(axes), 0)
