"""Megatron's pair of linear layers, column-parallel and row-parallel.

A column-parallel matmul needs no communication; a row-parallel matmul ends with one reduction. A
weight is stored [input dims, output dims], the transpose of Megatron's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.core.model import adapter, fp8
from megajax.core.model.parameters import Parameters
from megajax.core.model.platform import is_on_cpu
from megajax.core.model.product import product
from megajax.core.model.shard_copies import along_last


class Linear(nnx.Module):
    """A linear layer whose weight is sharded over `model`."""

    scales: nnx.Param[Any] | None = None  # in a step that computes in fp8

    def __init__(self, parameters: Parameters, equation: str, placed: str, *, key: jax.Array):
        """Make the parameters; `placed` are the dims by which the input is sharded."""
        self.layout, self.equation, self.placed = parameters.layout, equation, placed
        self.weight = parameters.make('weight', key)
        self.bias = parameters.maybe('bias')
        self.adapter = adapter.maybe(parameters, key=key)

    def product(self, x: jax.Array) -> jax.Array:
        """Multiply by the weight, and reduce the partial sums, if there are any."""
        if self.adapter is not None:
            given = self.weight, self.adapter, self.layout, self.scales
            return adapter.product(self.equation, x, *given)
        if self.scales is None:
            return product(self.equation, x, self.weight, self.layout, x.dtype)
        return fp8.product(self.equation, x, self.weight, self.scales, self.layout, self.placed)


class ColumnParallelLinear(Linear):
    """Multiply x_BSD by a weight with output dims sharded over `model`; forward sends nothing.

    The backward pass of `product` reduces the gradient of x over `model`: Megatron's f. 2-D tensor
    parallelism also shards D, over `row`: the partial sums of the result are reduce-scattered over
    the sequences R.
    """

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        dims = parameters.dims('weight')
        self.outputs = dims[1:]
        super().__init__(parameters, f'BSD,{dims}->RS{self.outputs}', 'BTD', key=key)

    def gather(self, x_BTD: jax.Array) -> jax.Array:
        """Gather the sequence, if it is sharded; with fp8, `product` gathers it in 8 bits.

        With an adapter, it is gathered here in 16 bits, because the adapter multiplies it too.
        """
        if self.scales is not None and self.adapter is None:
            return x_BTD
        return jax.reshard(x_BTD, self.layout('BSD'))  # SP: all-gather, backward RS

    def with_bias(self, y: jax.Array) -> jax.Array:
        """Add the bias, if there is one, to the result."""
        return y if self.bias is None else add_bias(y, jnp.expand_dims(self.bias[...], (0, 1)))


class RowParallelLinear(Linear):
    """Multiply x by a weight whose input dims are sharded over `model`, for the residual stream.

    Forward, the partial sums are reduced over `model`: Megatron's g. The bias is replicated and
    added once, after the reduction. With 2-D tensor parallelism, each device has some sequences R
    of x, which are gathered over `row` first, and some columns D of the weight.
    """

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        dims = parameters.dims('weight')
        self.inputs = dims[:-1]
        equation = f'BS{self.inputs},{dims}->BTD'
        super().__init__(parameters, equation, f'RS{self.inputs}', key=key)

    def reduced(self, x: jax.Array) -> jax.Array:
        """Gather the sequences of x, if 2-D tensor parallelism shards them, multiply and reduce.

        With fp8, the matmul gathers them in 8 bits.
        """
        if self.scales is None or self.adapter is not None:
            # grid: all-gather over row forward, reduce-scatter backward
            x = jax.reshard(x, self.layout(f'BS{self.inputs}'))
        # g: all-reduce forward, nothing backward (SP: reduce-scatter forward, all-gather backward)
        return self.product(x)

    def with_bias(self, y_BTD: jax.Array) -> jax.Array:
        """Add the bias, if there is one, to the reduced result."""
        if self.bias is None:
            return y_BTD
        return add_bias(y_BTD, along_last(self.bias[...], y_BTD, 'TD', self.layout))


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a bias in fp32, so that its gradient is summed in fp32; the result has the dtype of y."""
    if y.dtype == jnp.float32 and not is_on_cpu(y):
        # Keep the bias out of cuBLAS's epilogue: XLA has added it along the wrong dim of a square
        # result (openxla/xla#46897), and has left it unscaled if a factor followed
        # (openxla/xla#46110). The operation that reads the sum is a separate kernel anyway.
        y = lax.optimization_barrier(y)
    return (y.astype(jnp.float32) + bias).astype(y.dtype)
