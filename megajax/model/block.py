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


BRANCHES = 'attention', 'mlp'


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
        with jax.named_scope('attention'):
            # SP: all-gather forward, reduce-scatter backward
            h_BSD = self.attention.qkv.gather(self._before(self.attention_norm, x_BTD))
            h_BTD, kept = self.attention(h_BSD, position_BS, core)
            x_BTD = x_BTD + self.added('attention', h_BTD, key_B)
        with jax.named_scope('mlp'):
            # SP: all-gather forward, reduce-scatter backward
            h_BSD = self.mlp.up.gather(self._before(self.mlp_norm, x_BTD))
            return x_BTD + self.added('mlp', self.mlp(h_BSD), key_B), kept

    def added(self, branch: str, h_BTD: jax.Array, key_B: jax.Array | None) -> jax.Array:
        """Return what a branch adds to the residual stream, from the output of its module.

        It reads only parameters whose names begin with that of the branch.
        """
        if self.is_norm_after:
            h_BTD = getattr(self, f'{branch}_norm')(h_BTD)
        keys = fold_in(key_B, 1 + BRANCHES.index(branch))
        return dropout(h_BTD, self.rate, keys, self.layout('TD'))

    def _before(self, norm: Norm, x_BTD: jax.Array) -> jax.Array:
        return x_BTD if self.is_norm_after else norm(x_BTD)
