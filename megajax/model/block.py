"""A pre-norm transformer layer: two branches, each between Megatron's f and g."""

from typing import Any

import jax
from flax import nnx

from megajax.config import ModelConfig
from megajax.model.attention import Attention, Core, Kept
from megajax.model.dropout import dropout, fold_in
from megajax.model.mlp import MLP
from megajax.model.norm import make_norm
from megajax.model.parameters import Parameters


def parts_of_rows(rows: Any, num_parts: int) -> list[Any]:
    """Return equal parts of the rows of arrays [B, ...]."""

    def part(x: jax.Array, index: int) -> jax.Array:
        rows = x.shape[0] // num_parts
        return x if num_parts == 1 else x[index * rows : (index + 1) * rows]

    return [jax.tree.map(lambda x, i=i: part(x, i), rows) for i in range(num_parts)]


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        self.layout, self.rate = parameters.layout, config.dropout
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = make_norm(config, parameters['attention_norm'])
        self.attention = Attention(config, parameters['attention'], key=attention_key)
        self.mlp_norm = make_norm(config, parameters['mlp_norm'])
        self.mlp = MLP(config, parameters['mlp'], key=mlp_key)

    def __call__(
        self,
        x_BTD: jax.Array,
        core: Core[Kept],
        *,
        position_BS: jax.Array | None = None,
        key_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Kept]:
        """Return the residual stream after this layer, and the second result of `core`.

        Without sequence parallelism T is S and the gathers before the two branches do nothing: the
        backward pass of `product` makes f's all-reduce.
        """
        row = self.layout('TD')
        with jax.named_scope('attention'):
            # SP: all-gather forward, reduce-scatter backward
            h_BSD = self.attention.qkv.gather(self.attention_norm(x_BTD))
            h_BTD, kept = self.attention(h_BSD, position_BS, core)
            x_BTD = x_BTD + dropout(h_BTD, self.rate, fold_in(key_B, 1), row)
        with jax.named_scope('mlp'):
            # SP: all-gather forward, reduce-scatter backward
            h_BSD = self.mlp.up.gather(self.mlp_norm(x_BTD))
            h_BTD = self.mlp(h_BSD)
            return x_BTD + dropout(h_BTD, self.rate, fold_in(key_B, 2), row), kept
