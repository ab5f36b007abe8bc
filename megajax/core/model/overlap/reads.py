"""Find out which parameters the steps of a layer read, by tracing the steps.

The schedule runs the steps of sublayers. A parameter that none of the steps reads would not affect
the loss, and would get no gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

from megajax.core.counts.declaration import Role
from megajax.core.model.block import Block
from megajax.core.model.overlap.sublayer_steps import SublayerSteps
from megajax.core.model.sublayer import Sublayer
from megajax.core.parallel.placements import parameter_name

LINEARS = 'first', 'second'


def require(layers: Block, found: Iterable[str], what: str) -> None:
    """Raise an AssertionError that lists the parameters of `layers` that are not among `found`."""
    missing = sorted({name for name, _ in named(layers)} - {*found})
    if missing:
        raise AssertionError(
            f'the overlap schedule {what} {", ".join(f"layers.{name}" for name in missing)}: '
            'make it a parameter of a sublayer, and apply it in `enter`, `middle` or `added` of '
            'megajax/core/model/sublayer.py'
        )


def named(module: Block | Sublayer) -> Iterator[tuple[str, nnx.Variable[Any]]]:
    """Yield the parameters of a module with their names."""
    is_parameter = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    for path, param in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_parameter)[0]:
        yield parameter_name(path), param


def read(sublayer: SublayerSteps, x_BTD: jax.Array, num_parts: int, *, gathers: bool) -> set[str]:
    """Return the names of the parameters that a sublayer reads, in `num_parts` parts of the tokens.

    `gathers` says whether the sublayer gathers its matrices.
    """

    def run(vectors: Sublayer, x_BTD: jax.Array) -> jax.Array:
        one = sublayer.with_vectors(vectors)
        h, _ = one.enter(x_BTD)
        y = one.first(weight('first'), one.gather(h) if one.is_scattered else h)
        z = one.middle_and_pull(*[y] * num_parts)[0]
        return one.leave(x_BTD, one.sum(one.second(weight('second'), z)))

    def weight(linear: str) -> jax.Array:
        matrix = sublayer.matrix(linear)
        own = matrix.own(matrix.stored)
        return matrix.gathered(own) if gathers else own

    vectors = [(name, param) for name, param in named(sublayer.vectors) if has_value(param)]
    is_read = _are_read(run, sublayer.vectors, x_BTD)
    products = [linear.weight for linear in (sublayer.matrices.first, sublayer.matrices.second)]
    return {
        # fp8 scales always count as read.
        *(n for (n, x), used in zip(vectors, is_read[:-1], strict=True) if used or is_scale(x)),
        *(
            n
            for n, x in named(sublayer.matrices)
            if any(x is of_product for of_product in products)
        ),
    }


def reads_output(sublayer: SublayerSteps, y_BTD: jax.Array) -> bool:
    """Return whether the gradients of `leave` depend on the second matmul's result."""
    return _are_read(sublayer.gradient_of_leave, y_BTD, y_BTD)[1]


def has_value(param: nnx.Variable[Any]) -> bool:
    """Return whether a parameter has a value in this part of a sublayer."""
    return param.get_value() is not None


def is_scale(param: nnx.Variable[Any]) -> bool:
    """Return whether a parameter is the scales of an fp8 matmul."""
    return bool(param.declared.role is Role.SCALES)


def _are_read(function: Callable[..., Any], *args: Any) -> Sequence[bool]:
    """Return for each array in `args` whether a result of the function depends on it."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
