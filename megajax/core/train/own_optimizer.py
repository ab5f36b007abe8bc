"""An optimizer from outside megajax, in a step whose arrays have explicit shardings."""

from typing import Any

import jax
import optax


def on_any_mesh(update: optax.TransformUpdateFn) -> optax.TransformUpdateFn:
    """Return an optimizer's update that accepts sharded arrays, with the results sharded likewise.

    If the update leaves a sharding undetermined, as a dot product of sharded vectors does, XLA
    determines the shardings within it.
    """

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
