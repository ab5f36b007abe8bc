"""The layout of the residual stream in the memory of a GPU.

With many sequences, XLA would put the dim of sequences innermost, and copy the residual stream for
every matmul.
"""

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from megajax.core.model.per_device import per_device
from megajax.core.model.platform import is_on_cpu


@jax.custom_vjp
def row_major(x: jax.Array) -> jax.Array:
    """Return x with its last dim innermost in the memory of a GPU, as in x's gradient."""
    return x if is_on_cpu(x) else _constrained(x)[0]


def _constrain(x: jax.Array) -> tuple[jax.Array]:
    return (with_layout_constraint(x, Layout(tuple(range(x.ndim)))),)


# XLA's partitioner would gather the argument of a constraint.
_constrained = per_device(_constrain, lambda specs: specs)


row_major.defvjp(lambda x: (row_major(x), None), lambda _, dx: (row_major(dx),))
