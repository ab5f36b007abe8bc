"""The feed-forward layer: column-parallel up, activation, row-parallel down.

The activation is not linear, so it must see complete sums. Splitting `up` by columns gives each
shard complete columns of the hidden layer; splitting it by rows would need a reduction before the
activation.
"""

import jax
from flax import nnx

from megajax.config import ModelConfig
from megajax.model.activation import activate
from megajax.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.model.parameters import Parameters


class MLP(nnx.Module):
    """A GELU layer or, with gate and up fused in one product, a gated one (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        self.activation = config.activation
        up_key, down_key = jax.random.split(key)
        self.up = ColumnParallelLinear(parameters['up'], key=up_key)
        self.down = RowParallelLinear(parameters['down'], key=down_key)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Transform the normed and gathered x_BSD; place the result as the residual stream is."""
        h_RSF = self.activate(self.up.product(x_BSD))  # column-parallel: no communication
        return self.down(h_RSF)  # row-parallel, g: all-reduce forward (SP: reduce-scatter)

    def activate(self, y_RSF: jax.Array) -> jax.Array:
        """Add the bias, if there is one, to the first product, and apply the activation.

        Only the product is saved for the backward pass, which adds the bias again.
        """

        def of_product(y_RSF: jax.Array) -> jax.Array:
            return activate(self.up.with_bias(y_RSF), self.activation)

        return of_product(y_RSF) if self.up.bias is None else jax.checkpoint(of_product)(y_RSF)
