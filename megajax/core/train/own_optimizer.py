"""An optimizer from outside megajax, in a step whose arrays have explicit shardings."""

from typing import Any

import jax
import optax

from megajax.core.config import Config, mistake


def check_keys(config: Config) -> None:
    """Raise ConfigError if a key promises memory that only megajax's optimizers save."""
    if (dtype := config.optim.moments_dtype) != 'float32':
        message = (
            f'{dtype} has no effect on an optimizer of your own; remove it, and set the dtype in '
            'the arguments of the optimizer'
        )
        raise mistake('optim.moments_dtype', message)


def own_update(optimizer: optax.GradientTransformation, config: Config) -> optax.TransformUpdateFn:
    """Return an optimizer's update that accepts sharded arrays, with the results sharded likewise.

    If the update leaves a sharding undetermined, as a dot product of sharded vectors does, XLA
    determines the shardings within it. Raises ConfigError as `check_keys` does.
    """
    check_keys(config)
    update = optimizer.update

    def sharded(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        try:
            return update(updates, state, params)
        except Exception as error:  # jax's error for shardings is not public
            if 'sharding' not in f'{type(error).__name__}: {error}'.lower():
                raise
            of_xla = jax.sharding.auto_axes(update, out_sharding=(_specs(updates), _specs(state)))
            return of_xla(updates, state, params)

    return sharded


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
