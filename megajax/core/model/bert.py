"""BERT's heads: masked-token prediction with the tied decoder, and sentence-order prediction.

Their square layers are unsharded, as in Megatron-LM.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.config import ModelConfig
from megajax.core.counts.declaration import NUM_SEGMENTS
from megajax.core.model.activation import activate
from megajax.core.model.linear import add_bias
from megajax.core.model.norm import make_norm
from megajax.core.model.parameters import Parameters
from megajax.core.model.product import product
from megajax.core.model.shard_copies import along_last


class UnshardedLinear(nnx.Module):
    """Multiply x by a replicated weight, without communication.

    If x is sharded over the sequence, the train step gives each shard its own copy of the weight
    (`shard_copies.py`).
    """

    def __init__(self, parameters: Parameters, *, rows: str, key: jax.Array):
        """Make weight and bias; `rows` are the letters of the dims of x except the last."""
        self.layout, self.rows = parameters.layout, rows
        dims = parameters.dims('weight')
        self.equation = f'{rows}D,{dims}->{rows}{dims[-1]}'
        self.weight = parameters.make('weight', key)
        self.bias = parameters.make('bias')

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        has_copies = weight.ndim > len(self.weight.declared.dims)
        y = self._with_copies(x, weight) if has_copies else self._product(x, weight)
        return add_bias(y, along_last(self.bias[...], y, f'{self.rows[-1]}E', self.layout))

    def _product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return product(self.equation, x, weight, self.layout, x.dtype)

    def _with_copies(self, x_BTD: jax.Array, weight_DTE: jax.Array) -> jax.Array:
        batch, length, size = x_BTD.shape
        copies, num_out = weight_DTE.shape[1:]
        shape = batch, copies, length // copies, size
        shards = x_BTD.reshape(shape, out_sharding=self.layout('BT-D'))

        def multiply(x_BSD: jax.Array, weight_DE: jax.Array) -> jax.Array:
            return product('BSD,DE->BSE', x_BSD, weight_DE, self.layout, x_BSD.dtype)

        mapped = jax.vmap(multiply, in_axes=1, out_axes=1)
        y = mapped(shards, weight_DTE)
        return y.reshape(batch, length, num_out, out_sharding=self.layout('BTE'))


class MaskedHead(nnx.Module):
    """The layers between the final norm and the tied decoder: dense, GELU, norm.

    The decoder's bias is sharded over the vocabulary, like the rows of the decoder.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        self.activation = 'gelu_tanh' if config.activation == 'gelu_tanh' else 'gelu'
        self.dense = UnshardedLinear(parameters['dense'], rows='BT', key=key)
        self.norm = make_norm(config, parameters['norm'])
        self.bias = parameters.make('bias')

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Transform x_BTD; the result is sharded like x_BTD and the residual stream."""
        return self.norm(activate(self.dense(x_BTD), self.activation))


class OrderHead(nnx.Module):
    """Sentence-order prediction: did the second segment come first (Lan et al., 2020)?

    The head is a pooler (a dense layer and tanh on the first token) and a classifier.
    """

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        self.layout = parameters.layout
        pooler_key, classifier_key = jax.random.split(key)
        self.pooler = UnshardedLinear(parameters['pooler'], rows='B', key=pooler_key)
        self.classifier = UnshardedLinear(parameters['classifier'], rows='B', key=classifier_key)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits [B, O] in fp32, replicated over `model`."""
        pooled_BD = jnp.tanh(self.pooler(self._first(x_BTD)))
        return self.classifier(pooled_BD).astype(jnp.float32)

    def loss(self, x_BTD: jax.Array, swapped_B1: jax.Array, weight_B1: jax.Array) -> jax.Array:
        """Return the summed negative log-likelihood of `swapped_B1`, weighted by sequence."""
        log_probability_BO = jax.nn.log_softmax(self(x_BTD), axis=-1)
        order_O = jnp.expand_dims(jnp.arange(NUM_SEGMENTS), 0)
        return -(jnp.where(order_O == swapped_B1, log_probability_BO, 0) * weight_B1).sum()

    def _first(self, x_BTD: jax.Array) -> jax.Array:
        shards = self.layout.num_shards('T')
        if shards == 1:
            return x_BTD[:, 0]
        batch, length, size = x_BTD.shape
        shape = batch, shards, length // shards, size
        tokens = x_BTD.reshape(shape, out_sharding=self.layout('BT-D'))
        # all-gather of each shard's first token (Megatron gathers all tokens); nothing backward
        return jax.reshard(tokens[:, :, 0], self.layout('BSD'))[:, 0]
