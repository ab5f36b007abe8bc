"""What BERT has beside the blocks: the masked-LM head before the tied decoder, and the head that knows the order of two segments.

As in Megatron-LM their square layers are whole on every device. B batch, S sequence, D model, E made dims, V vocabulary (padded),
T sequence shards, O orders of the segments.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config import ModelConfig
from megajax.config.parameters import NUM_ORDERS
from megajax.model.activation import activate
from megajax.model.linear import add_bias, normal
from megajax.model.norm import make_norm
from megajax.model.product import product
from megajax.model.vector import along_last
from megajax.parallel.layout import Layout


class WholeLinear(nnx.Module):
    """x [..., D] times a weight [D, E] that every device has: no communication.

    Where x is sharded over the sequence, the train step gives each shard its copy of the weight (`vector.py`).
    """

    def __init__(self, num_in: int, num_out: int, *, std: float, layout: Layout, key: jax.Array):
        self.layout = layout
        self.weight = nnx.Param(normal(key, (num_in, num_out), std, layout.whole_DE))
        self.bias = nnx.Param(jnp.zeros((num_out,), out_sharding=layout.vector_D))

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        y = product(x, weight, 1, jax.typeof(x).sharding.spec, x.dtype) if weight.ndim == 2 else self._with_copies(x, weight)
        return add_bias(y, along_last(self.bias[...], y))

    def _with_copies(self, x_BSD: jax.Array, weight_DTE: jax.Array) -> jax.Array:
        batch, length, size = x_BSD.shape
        copies, made = weight_DTE.shape[1:]
        x_BTSD = x_BSD.reshape(batch, copies, length // copies, size, out_sharding=self.layout.by_shard_BTSD(x_BSD))

        def multiply(x_BSD: jax.Array, weight_DE: jax.Array) -> jax.Array:
            return product(x_BSD, weight_DE, 1, self.layout.full_BSD(x_BSD), x_BSD.dtype)

        y_BTSE = jax.vmap(multiply, in_axes=1, out_axes=1, spmd_axis_name='model')(x_BTSD, weight_DTE)
        return y_BTSE.reshape(batch, length, made, out_sharding=self.layout.residual_BSD(x_BSD))


class MaskedHead(nnx.Module):
    """Between the last norm and the tied decoder: dense, GELU, norm. The decoder's bias is sharded over the vocabulary as its rows are."""

    def __init__(self, config: ModelConfig, layout: Layout, *, key: jax.Array):
        hidden = config.hidden_size
        self.activation = 'gelu_tanh' if config.activation == 'gelu_tanh' else 'gelu'
        self.dense = WholeLinear(hidden, hidden, std=config.init_std, layout=layout, key=key)
        self.norm = make_norm(config, hidden)
        self.bias = nnx.Param(jnp.zeros((config.padded_vocab_size,), out_sharding=layout.vocab_V))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """x_BSD in the residual placement, where it stays."""
        return self.norm(activate(self.dense(x_BSD), self.activation))


class OrderHead(nnx.Module):
    """Whether the second segment came first (Lan et al., 2020): pooler (dense and tanh of the first token) and classifier."""

    def __init__(self, config: ModelConfig, layout: Layout, *, key: jax.Array):
        self.layout = layout
        pooler_key, classifier_key = jax.random.split(key)
        hidden, std = config.hidden_size, config.init_std
        self.pooler = WholeLinear(hidden, hidden, std=std, layout=layout, key=pooler_key)
        self.classifier = WholeLinear(hidden, NUM_ORDERS, std=std, layout=layout, key=classifier_key)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Logits [B, O] in fp32 of x_BSD in the residual placement, the same on every device."""
        pooled_BD = jnp.tanh(self.pooler(self._first(x_BSD)))
        return self.classifier(pooled_BD).astype(jnp.float32)

    def loss(self, x_BSD: jax.Array, swapped_B1: jax.Array, weight_B1: jax.Array) -> jax.Array:
        """The negative log-likelihood of `swapped_B1` (0 or 1), added up with the rows' weights."""
        log_probability_BO = jax.nn.log_softmax(self(x_BSD), axis=-1)
        order_O = jnp.expand_dims(jnp.arange(NUM_ORDERS), 0)
        return -(jnp.where(order_O == swapped_B1, log_probability_BO, 0) * weight_B1).sum()

    def _first(self, x_BSD: jax.Array) -> jax.Array:
        if not self.layout.sequence_parallel:
            return x_BSD[:, 0]
        batch, length, size = x_BSD.shape
        shards = self.layout.model_size
        x_BTSD = x_BSD.reshape(batch, shards, length // shards, size, out_sharding=self.layout.by_shard_BTSD(x_BSD))
        # all-gather of each shard's first token, where Megatron gathers all tokens; nothing backward
        return jax.reshard(x_BTSD[:, :, 0], self.layout.full_BSD(x_BSD))[:, 0]
