"""The loss and the gradients of a training step, as functions for a custom training loop."""

from collections.abc import Iterator

import jax
from flax import nnx

from megajax.core.config import Config, ConfigError, Problem, mistake
from megajax.core.parallel.mesh import check_current_mesh, check_is_config
from megajax.core.train.feed import Batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.step import TrainState, dropout_key


def loss(
    params: nnx.State, batch: Batch, config: Config, *, step: jax.Array | int = 0
) -> jax.Array:
    """Return the loss of a batch as the training step computes it; differentiate and jit it.

    `params` come from `init_state(config)` or `load_params`, and `batch` from `place_batch`. `step`
    selects the dropout masks of that step of a run. `jax.value_and_grad(loss)` gives the gradients
    of the training step on any mesh and at any ZeRO stage, in one pass. Second derivatives are not
    supported. On GPUs, compile with the options that work around known miscompiles of XLA and that
    `train.overlap` needs:

        @partial(jax.jit, compiler_options=megajax.step_options(config))
        def step(params, opt_state, batch):
            loss, gradients = jax.value_and_grad(megajax.loss)(params, batch, config)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

    Raises ConfigError for train.dtype=fp8 and float16, whose scales only `make_train_step` keeps,
    for a model with frozen parameters, which have no gradients, for a balance loss over the batch,
    which needs the experts' load in the step before, for a batch without the arrays of the loss or
    with a number of rows or tokens that the config would not accept, and if the current mesh is not
    the config's. Token ids are not checked: they must be below `model.vocab_size`.
    """

    @jax.custom_vjp
    def of(params: nnx.State) -> jax.Array:
        return forward(params)[0]

    def forward(params: nnx.State) -> tuple[jax.Array, nnx.State]:
        key = dropout_key(config.train.seed, step)
        (value, _), of_params = make_loss_and_gradients(config)(params, batch, key)
        return value, of_params

    def backward(of_params: nnx.State, factor: jax.Array) -> tuple[nnx.State]:
        return (jax.tree.map(lambda gradient: factor * gradient, of_params),)

    _check(config)
    check_current_mesh(config)
    _check_params(params)
    of.defvjp(forward, backward)
    return of(params)


def gradients(
    params: nnx.State, batch: Batch, config: Config, *, step: jax.Array | int = 0
) -> nnx.State:
    """Return the gradients of `loss`, sharded like `params`, to pass to an optimizer.

    If you also need the loss, call `jax.value_and_grad(megajax.loss)`, which computes both in one
    pass. Raises ConfigError as `loss` does.
    """
    _check_params(params)
    return jax.grad(loss)(params, batch, config, step=step)


def _check(config: Config) -> None:
    """Raise ConfigError for a config whose gradients need more than parameters and a batch."""
    check_is_config(config)
    dtype, problems = config.train.dtype, []
    if dtype in ('fp8', 'float16'):
        message = (
            f'{dtype} is not supported in a custom loop, because only make_train_step keeps its '
            'scales; use train.dtype=bfloat16'
        )
        problems.append(Problem('train.dtype', message))
    problems += _of_frozen(config)
    experts = config.model.experts
    if experts is not None and experts.balance_loss and experts.balance_over == 'batch':
        message = (
            f'{experts.balance_loss} over the batch is not supported in a custom loop, because it '
            "needs the experts' load in the step before, which only make_train_step keeps; use "
            'model.experts.balance_over=sequence, or model.experts.balance_loss=0'
        )
        problems.append(Problem('model.experts.balance_loss', message))
    if problems:
        raise ConfigError(*problems)


def _of_frozen(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.lora is not None or (model.vision is not None and model.vision.freeze):
        message = (
            'frozen parameters are not supported in a custom loop, because they have no '
            'gradients; use make_train_step'
        )
        path = 'lora' if model.lora is not None else 'vision.freeze'
        yield Problem(path, message)
    elif model.has_frozen:
        message = (
            'true is not supported in a custom loop, because the bias has no gradient and only '
            'make_train_step moves it; use false, or make_train_step'
        )
        yield Problem('model.experts.selection_bias', message)


def _check_params(params: object) -> None:
    """Raise ConfigError if `params` are not a model's parameters but, say, the whole state."""
    if not isinstance(params, nnx.State):
        whole = isinstance(params, TrainState)
        fix = 'give its params' if whole else 'give init_state(config).params'
        message = f'a {type(params).__name__} is not the nnx.State of a model; {fix}'
        raise mistake('params', message)
