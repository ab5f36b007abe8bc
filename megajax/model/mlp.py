"""The feed-forward layer: column-parallel up, activation, row-parallel down.

The activation is not linear, so it must see whole sums: splitting `up` by columns gives each shard whole columns of the hidden
layer, splitting it by rows would need a reduction before the activation. B batch, S sequence, D model, F feed-forward.
"""

import jax
from flax import nnx

from megajax.config import ModelConfig
from megajax.model.activation import activate
from megajax.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.parallel.layout import Layout


class MLP(nnx.Module):
    """GELU or, with gate and up fused in one product, SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, layout: Layout, *, out_std: float, key: jax.Array):
        hidden, ffn, bias = config.hidden_size, config.ffn_size, config.bias
        gated = config.activation == 'swiglu'
        shape, spec = ((hidden, 2, ffn), layout.mlp_gated_up_DCF) if gated else ((hidden, ffn), layout.mlp_up_DF)
        self.activation = config.activation
        up_key, down_key = jax.random.split(key)
        self.up = ColumnParallelLinear(shape, spec, bias=bias, std=config.init_std, layout=layout, key=up_key)
        self.down = RowParallelLinear((ffn, hidden), layout.mlp_down_FD, bias=bias, std=out_std, layout=layout, key=down_key)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """x_BSD whole and normed, to the residual placement."""
        h_BSF = activate(self.up(x_BSD), self.activation)  # column-parallel: no communication
        return self.down(h_BSF)  # row-parallel, g: all-reduce forward (SP: reduce-scatter)
