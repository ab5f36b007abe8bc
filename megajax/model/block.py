"""One pre-norm transformer layer: two branches, each between Megatron's f and g. B batch, S sequence, D model."""

import jax
from flax import nnx

from megajax.config import ModelConfig
from megajax.model.attention import Attention
from megajax.model.dropout import dropout, fold_in
from megajax.model.mlp import MLP
from megajax.model.norm import make_norm
from megajax.parallel.layout import Layout


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layout: Layout, *, recompute_attention: bool, key: jax.Array):
        self.layout, self.rate = layout, config.dropout
        attention_key, mlp_key = jax.random.split(key)
        # Each layer adds to the residual stream twice; this keeps its variance at the start (Radford et al., 2019).
        out_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.attention_norm = make_norm(config, config.hidden_size)
        self.attention = Attention(config, layout, recompute=recompute_attention, out_std=out_std, key=attention_key)
        self.mlp_norm = make_norm(config, config.hidden_size)
        self.mlp = MLP(config, layout, out_std=out_std, key=mlp_key)

    def __call__(self, x_BSD: jax.Array, position_BS: jax.Array | None, segment_BS: jax.Array | None, key_B: jax.Array | None) -> jax.Array:
        full_BSD = self.layout.full_BSD(x_BSD)
        with jax.named_scope('attention'):
            # f: nothing forward, all-reduce backward (SP: all-gather forward, reduce-scatter backward)
            h_BSD = jax.reshard(self.attention_norm(x_BSD), full_BSD)
            h_BSD = self.attention(h_BSD, position_BS, segment_BS, fold_in(key_B, 0))
            x_BSD = x_BSD + dropout(h_BSD, self.rate, fold_in(key_B, 1))
        with jax.named_scope('mlp'):
            # f: nothing forward, all-reduce backward (SP: all-gather forward, reduce-scatter backward)
            h_BSD = jax.reshard(self.mlp_norm(x_BSD), full_BSD)
            h_BSD = self.mlp(h_BSD)
            return x_BSD + dropout(h_BSD, self.rate, fold_in(key_B, 2))
