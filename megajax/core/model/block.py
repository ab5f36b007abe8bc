"""A transformer layer: two sublayers (`sublayer.py`)."""

from typing import Any

import jax
from flax import nnx

from megajax.core.config import ModelConfig
from megajax.core.model.attention import Attention, Core, Kept
from megajax.core.model.experts import Experts
from megajax.core.model.mlp import MLP
from megajax.core.model.parameters import Parameters
from megajax.core.model.rows import NO_ROWS, Rows
from megajax.core.model.sublayer import Sublayer


def parts_of_rows(rows: Any, num_parts: int) -> list[Any]:
    """Split arrays [B, ...] into equal parts of their sequences."""

    def part(x: jax.Array, index: int) -> jax.Array:
        rows = x.shape[0] // num_parts
        return x if num_parts == 1 else x[index * rows : (index + 1) * rows]

    return [jax.tree.map(lambda x, i=i: part(x, i), rows) for i in range(num_parts)]


class Block(nnx.Module):
    """Attention, then the feed-forward layer; each adds to the residual stream.

    Every parameter belongs to a sublayer; the overlap schedule relies on it.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention = Attention(config, parameters['attention'], key=attention_key)
        if config.experts is None:
            self.mlp = MLP(config, parameters['mlp'], key=mlp_key)
        else:
            self.experts = Experts(config, parameters['experts'], key=mlp_key)

    def __call__(
        self, x_BTD: jax.Array, core: Core[Kept], rows: Rows = NO_ROWS
    ) -> tuple[jax.Array, Kept]:
        """Return the residual stream after this layer, and the second result of `core`."""
        x_BTD, kept = self.attention(x_BTD, core, rows)
        x_BTD, _ = self.feed_forward(x_BTD, rows=rows)
        return x_BTD, kept

    @property
    def feed_forward(self) -> MLP | Experts:
        """The second sublayer: an MLP, or a mixture of experts."""
        return self.mlp if self.attention.config.experts is None else self.experts

    @property
    def sublayers(self) -> tuple[Sublayer, Sublayer]:
        """The sublayers, in the order in which they are applied."""
        return self.attention, self.feed_forward
