"""The training step: a pure function of state and batch, with the same numbers on every mesh."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.stages import Wrapped

from megajax.core.config import Config
from megajax.core.config.overlap_rules import without_order
from megajax.core.model.dropout import random_key
from megajax.core.model.parameters import trainable, with_frozen
from megajax.core.model.transformer import make_model
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import check_current_mesh
from megajax.core.train import routing
from megajax.core.train.compiler_options import step_options
from megajax.core.train.feed import Batch
from megajax.core.train.gradients import make_gradients
from megajax.core.train.guard import Guard, init_guard, judge
from megajax.core.train.loss_scale import LossScale, adjust, init_loss_scale, overflows
from megajax.core.train.optimizer import make_optimizer, make_schedule
from megajax.core.train.own_optimizer import own_update
from megajax.core.train.scaling import are_finite, init_recent, nothing_seen, remember, scales_of
from megajax.core.train.zero import between_steps

Metrics = dict[str, jax.Array]
DROPOUT = 0x6472706F  # differs from every index that a key is split by


class TrainState(NamedTuple):
    """The state that a step changes."""

    step: jax.Array  # number of steps done, whether their update was applied or skipped
    batches: jax.Array  # number of batches read, including batches of steps that were rolled back
    params: nnx.State
    opt_state: optax.OptState
    guard: Guard
    loss_scale: LossScale | None  # None unless in fp16
    recent: jax.Array | None = None  # recent exponents in fp8 with delayed scaling (`scaling.py`)
    # load of each expert in the last step (`routing.py`), with experts
    load: jax.Array | None = None


def make_params(config: Config) -> nnx.State:
    """Return a model's random parameters in their stored form; trace this function, as in jit."""
    key = random_key(config.train.seed)
    return between_steps(nnx.state(make_model(config.model, Layout.of(config), key=key)), config)


def init_state(
    config: Config,
    params: nnx.State | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
) -> TrainState:
    """Return the state before the first step, created in its sharding on the current mesh.

    The parameters are random unless `params` are given, which must be in their stored sharding.
    The state contains `params` themselves, which the first training step donates. To use them
    afterwards, pass a copy: `jax.tree.map(jnp.copy, params)`.

    Pass the same `optimizer` as to `make_train_step`. Under `jax.eval_shape`, the result has the
    shapes and shardings of the state. Raises ConfigError if the current mesh is not the config's.
    """
    check_current_mesh(config)
    of_optimizer = (optimizer or make_optimizer(config)).init

    @jax.jit
    def init(given: nnx.State | None) -> TrainState:
        params = make_params(config) if given is None else given
        zero = jnp.zeros((), jnp.int32)
        return TrainState(
            step=zero,
            batches=zero,
            # as a result of jit, they would be a copy
            params=params if given is None else nnx.State({}),
            opt_state=of_optimizer(trainable(params)),
            guard=init_guard(),
            loss_scale=init_loss_scale(config),
            recent=init_recent(config),
            load=routing.init_load(config),
        )

    state = init(params)
    return state if params is None else state._replace(params=params)


def in_dtype(state: TrainState, config: Config) -> TrainState:
    """Return a state of a run in bf16 or fp8 in the form that the config's dtype needs."""
    is_kept = config.train.has_delayed_scales and state.recent is not None
    return state if is_kept else state._replace(recent=init_recent(config))


def before_skipped(state: TrainState) -> TrainState:
    """Return the state before a skipped step, given the state after it.

    Only the counts differ. The number of steps since fp16's loss scale last changed is not
    restored.
    """
    guard = state.guard._replace(skipped_in_a_row=state.guard.skipped_in_a_row - 1)
    return state._replace(step=state.step - 1, batches=state.batches - 1, guard=guard)


def make_train_step(
    config: Config, optimizer: optax.GradientTransformation | None = None
) -> Wrapped:
    """Return `train_step(state, batch) -> (state, metrics)`, compiled at its first call.

    The input state is donated. A batch holds `tokens`, `labels` and `loss_mask`, each [B, S], and
    may hold `segment_ids` and `positions`. The mask has the weights of a weighted mean. A batch for
    BERT also holds `token_types` and `swapped` [B, 1], and one with images `pixels`, `image_grid`,
    `image_index` and, for M-RoPE, `positions` [B, S, 3]. BERT's loss is the sum of masked-token
    loss (`nll`) and sentence-order loss. If loss or gradients are not finite, parameters and
    optimizer stay the same, bit for bit; also after a spike, unless `train.spike` is off. FP8's
    delayed scaling remembers the exponents of every finite step, including a spike.

    An `optimizer` replaces `optim.kind`, clipping, weight decay and `optim.moments_dtype`. `lr` in
    the metrics is `learning_rate(config)` of the updates applied so far, which it should use.

    Raises ConfigError as `step_options` does. Tracing the step raises one for a batch without these
    arrays, or with a number of rows or tokens that the config would not accept.
    """
    check_current_mesh(config)
    update = make_optimizer(config).update if optimizer is None else own_update(optimizer, config)
    schedule = make_schedule(config.optim, config.train.steps)
    gradients = make_gradients(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = dropout_key(config.train.seed, state.step)
        scales = None if state.recent is None else scales_of(state.recent)
        (loss, nll), grads, (places, routed) = gradients(
            state.params, batch, key, state.loss_scale, scales, state.load
        )
        with jax.named_scope('optimizer'):
            grad_norm = optax.tree.norm(grads)
            if places is not None:
                grad_norm = jnp.where(are_finite(places), grad_norm, jnp.nan)
            overflow = overflows(state.loss_scale, loss, grad_norm)
            seen, spikes = (state.guard, loss, nll, grad_norm), config.train.spike != 'off'
            verdict, guard = judge(*seen, overflow=overflow, spikes=spikes)
            params, opt_state = _updated(update, grads, state, taken=verdict.taken)
        metrics = {
            'loss': loss,
            'nll': nll,
            'grad_norm': grad_norm,
            'lr': schedule(state.guard.taken),
            **verdict._asdict(),
        }
        if state.loss_scale is not None:
            metrics['loss_scale'] = state.loss_scale.value
        loss_scale = adjust(state.loss_scale, overflow)
        recent, load = state.recent, state.load
        if routed is not None:
            metrics |= routing.metrics(routed, config)
            params, load = routing.after_step(params, load, routed, verdict.taken, config)
        if recent is not None and places is not None:
            # Also after a spike: clipping may have caused it, so the next scales must adapt.
            recent = jnp.where(verdict.finite, remember(recent, places), recent)
        return TrainState(
            state.step + 1, state.batches + 1, params, opt_state, guard, loss_scale, recent, load
        ), metrics

    return jax.jit(train_step, donate_argnums=0, compiler_options=step_options(config))


def _updated(
    update: optax.TransformUpdateFn, grads: nnx.State, state: TrainState, *, taken: jax.Array
) -> tuple[nnx.State, optax.OptState]:
    """Return the parameters and the optimizer's state after a step; unchanged unless `taken`."""
    trained = trainable(state.params)
    updates, opt_state = update(grads, state.opt_state, trained)
    new = optax.apply_updates(trained, updates), opt_state
    trained, opt_state = jax.tree.map(partial(jnp.where, taken), new, (trained, state.opt_state))
    return with_frozen(trained, state.params), opt_state


def dropout_key(seed: int, step: jax.Array | int) -> jax.Array:
    """Return the random key for the dropout of a step.

    jax.random.split(key, n)[i] is fold_in(key, i), so without DROPOUT, the first steps would draw
    their masks with the keys that initialized the parameters.
    """
    return jax.random.fold_in(jax.random.fold_in(random_key(seed), DROPOUT), step)


def make_calibration(config: Config) -> Wrapped:
    """Return `calibrate(params, step, batch) -> recent`, the initial fp8 state of a run.

    `recent` has the exponents of one batch, from the forward and backward pass of a bf16 step. The
    step loops over the layers, because a loop compiles quickly.
    """
    config = without_order(config)
    gradients = make_gradients(config)

    def calibrate(params: nnx.State, step: jax.Array, batch: Batch) -> jax.Array:
        _, _, seen = gradients(params, batch, dropout_key(config.train.seed, step))
        assert seen.places is not None
        return remember(nothing_seen(config), seen.places)

    return jax.jit(calibrate, compiler_options=step_options(config))
