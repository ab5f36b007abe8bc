"""A transformer layer: two branches, each with a norm, and between Megatron's f and g."""

from typing import Any

import jax
from flax import nnx

from megajax.config import ModelConfig
from megajax.model.attention import Attention, Core, Kept
from megajax.model.dropout import dropout, fold_in
from megajax.model.mlp import MLP
from megajax.model.norm import Norm, make_norm
from megajax.model.parameters import Parameters


def parts_of_rows(rows: Any, num_parts: int) -> list[Any]:
    """Return equal parts of the rows of arrays [B, ...]."""

    def part(x: jax.Array, index: int) -> jax.Array:
        rows = x.shape[0] // num_parts
        return x if num_parts == 1 else x[index * rows : (index + 1) * rows]

    return [jax.tree.map(lambda x, i=i: part(x, i), rows) for i in range(num_parts)]


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    With `model.norm_position=after` they are x + norm(attention(x)) and x + norm(mlp(x)).
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        self.layout, self.rate = parameters.layout, config.dropout
        self.is_norm_after = config.norm_position == 'after'
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
            h_BSD = self.attention.qkv.gather(self._before(self.attention_norm, x_BTD))
            h_BTD, kept = self.attention(h_BSD, position_BS, core)
            h_BTD = self._after(self.attention_norm, h_BTD)
            x_BTD = x_BTD + dropout(h_BTD, self.rate, fold_in(key_B, 1), row)
        with jax.named_scope('mlp'):
            # SP: all-gather forward, reduce-scatter backward
            h_BSD = self.mlp.up.gather(self._before(self.mlp_norm, x_BTD))
            h_BTD = self.mlp(h_BSD)
            h_BTD = self._after(self.mlp_norm, h_BTD)
            return x_BTD + dropout(h_BTD, self.rate, fold_in(key_B, 2), row), kept

    def _before(self, norm: Norm, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.is_norm_after else norm(x_BTD)

    def _after(self, norm: Norm, h_BTD: jax.Array) -> jax.Array:
        return norm(h_BTD) if self.is_norm_after else h_BTD
