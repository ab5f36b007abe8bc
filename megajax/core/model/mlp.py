"""The feed-forward layer: column-parallel up, activation, row-parallel down.

The activation is not linear, so its input must be complete sums. Splitting `up` by columns gives
each shard complete columns of the hidden layer; splitting it by rows would need a reduction before
the activation.
"""

import jax

from megajax.core.model.activation import activate
from megajax.core.model.sublayer import Sublayer


class MLP(Sublayer):
    """A GELU layer or, with gate and up fused in one matmul, a gated one (Shazeer, 2020)."""

    SCOPE, LINEARS, KEY, MIXES_TOKENS = 'mlp', ('up', 'down'), 2, False

    def middle(self, y: jax.Array, *_: object) -> tuple[jax.Array, None]:
        """Add the bias of `up`, if there is one, and apply the activation.

        Only the result of the matmul is saved for the backward pass, which adds the bias again.
        """

        def of_product(y_RSF: jax.Array) -> jax.Array:
            return activate(self.first.with_bias(y_RSF), self.config.activation)

        return of_product(y) if self.first.bias is None else jax.checkpoint(of_product)(y), None
