"""Cross-attention to images: gated layers between a model's layers (Flamingo, Llama 3.2 Vision).

A token attends to the images before it in its document. One matmul before the first layer computes
the keys and values of all layers, so that the gradient of the image vectors is reduced over `model`
once. The gates start closed, so that the initial model is the text model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.config import ModelConfig, VisionConfig
from megajax.core.model import adapter
from megajax.core.model.arr_coc.budget import num_tokens
from megajax.core.model.arr_coc.detail import Detail
from megajax.core.model.attention import attend_where
from megajax.core.model.block import parts_of_rows
from megajax.core.model.computation import Computation
from megajax.core.model.dropout import fold_in
from megajax.core.model.images import Images, encode, of_shards
from megajax.core.model.mlp import MLP
from megajax.core.model.norm import make_norm
from megajax.core.model.parameters import Parameters
from megajax.core.model.product import product
from megajax.core.model.rows import Rows
from megajax.core.model.shard_copies import along_last
from megajax.core.model.stack import AfterGroups
from megajax.core.model.sublayer import Sublayer
from megajax.core.model.vision import Encoder
from megajax.core.parallel.layout import Layout


class Seen(NamedTuple):
    """The images as the cross-attention layers read them: keys and values for each layer."""

    k_JBYNH: jax.Array
    v_JBYNH: jax.Array
    seen_BSY: jax.Array  # whether a token attends to a vector


class CrossAttention(nnx.Module):
    """The cross-attention layers, and one matmul that computes the keys and values for all."""

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        self.layout = parameters.layout
        self.first_index = config.num_layers + 1  # for dropout, after the layers and the embedding
        key_value_key, layers_key = jax.random.split(key)
        self.key_value = KeyValue(parameters['key_value'], key=key_value_key)
        keys = jax.random.split(layers_key, config.num_cross_layers)

        def norm(_: jax.Array) -> nnx.Module:
            return make_norm(config, parameters['key_norm'], 'Nh')

        self.key_norm = jax.vmap(norm)(keys)
        self.layers = jax.vmap(lambda key: CrossBlock(config, parameters['layers'], key=key))(keys)

    def see(
        self,
        encoder: Encoder,
        images: Images,
        segment_BS: jax.Array | None,
        computation: Computation,
        detail: Detail | None = None,
    ) -> Seen:
        """Encode the images of a shard's sequences; `segment_BS` has the documents, if any."""
        dtype, recompute = computation.dtype, computation.recompute
        kv_BYJNUH = self.key_values(encoder, dtype, recompute, images, detail)
        return self.split(kv_BYJNUH, seen(images, segment_BS, encoder.config, self.layout, detail))

    def see_of_shards(
        self,
        encoder: Encoder,
        images: Images,
        segment_BS: jax.Array,
        dtype: str,
        detail: Detail | None = None,
    ) -> Seen:
        """Compute what `see` computes, for all data shards, outside a function mapped over them."""
        of_shard = partial(self.key_values, encoder, dtype, 'none')
        kv_BYJNUH = of_shards(of_shard, self.layout, images, detail)
        images = jax.tree.map(lambda x: jax.reshard(x, self.layout('B')), images)
        return self.split(kv_BYJNUH, seen(images, segment_BS, encoder.config, self.layout, detail))

    def after_groups(
        self,
        seen: Seen,
        key_B: jax.Array | None,
        computation: Computation,
        weights: 'CrossAttention | None',
    ) -> AfterGroups:
        """Return a function that applies each layer after its group of layers, to all batch parts.

        `weights` has the weights to compute with, if they differ from the parameters.
        """
        num_parts = computation.overlap.num_parts

        def run(xs_BTD: tuple[jax.Array, ...], layer: tuple[Any, ...]) -> tuple[jax.Array, ...]:
            block, weights, index, *key_values = layer
            block = computation.pair(weights, block, self.layout)
            rows = *key_values, seen.seen_BSY, fold_in(key_B, index)
            is_recomputed = computation.recompute == 'selective'
            return tuple(
                block(x_BTD, *read, key_B=keys, recompute=is_recomputed)
                for x_BTD, (*read, keys) in zip(xs_BTD, parts_of_rows(rows, num_parts), strict=True)
            )

        if computation.recompute == 'full':
            run = jax.checkpoint(run, prevent_cse=False)
        own = None if weights is None else weights.layers
        index = self.first_index + jnp.arange(len(seen.k_JBYNH))
        return run, (self.layers, own, index, seen.k_JBYNH, seen.v_JBYNH)

    def key_values(
        self,
        encoder: Encoder,
        dtype: str,
        recompute: str,
        images: Images,
        detail: Detail | None,
    ) -> jax.Array:
        """Return the keys and values of all layers for the image vectors Y of each sequence."""
        vectors = encode(encoder, images, self.layout, dtype, recompute, detail)
        with jax.named_scope('cross_attention'):
            # All vectors are multiplied, including the empty slots after the last one: XLA then
            # scatters the sum of their gradient to the devices that encoded them.
            kv_YJNUH = self.key_value(vectors[:, 0])
            rows, slots = images.grid_BI2.shape[:2]
            own = slots * encoder.config.vectors
            shape = rows, own, *kv_YJNUH.shape[1:]
            return kv_YJNUH[: rows * own].reshape(shape, out_sharding=self.layout('-YJNUh'))

    def split(self, kv_BYJNUH: jax.Array, seen_BSY: jax.Array) -> Seen:
        """Return the normed keys, and the values, of each layer."""
        with jax.named_scope('cross_attention'):
            kv_UJBYNH = jnp.moveaxis(kv_BYJNUH, (4, 2), (0, 1))
            k_JBYNH = jax.vmap(lambda norm, k_BYNH: norm(k_BYNH))(self.key_norm, kv_UJBYNH[0])
            return Seen(k_JBYNH, kv_UJBYNH[1], seen_BSY)


class KeyValue(nnx.Module):
    """Keys and values of all layers, with complete heads on each shard: column-parallel."""

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        self.layout = parameters.layout
        self.weight = parameters.make('weight', key)
        self.adapter = adapter.maybe(parameters, key=key)

    def __call__(self, x_YD: jax.Array) -> jax.Array:
        layout = self.layout
        kv_YJKUH = self._product(x_YD)
        if not layout.is_sharded('H'):
            return kv_YJKUH
        # With fewer key/value heads than shards, copy to each shard the head that its queries
        # share.
        copies = layout.num_shards('N') // kv_YJKUH.shape[2]
        kv_YJKUH = jax.reshard(kv_YJKUH, layout('YJkUh'))  # all-gather
        kv_YJNUH = jnp.repeat(kv_YJKUH, copies, 2, out_sharding=layout('YJnUh'))
        return jax.reshard(kv_YJNUH, layout('YJNUh'))  # nothing forward, all-gather backward

    def _product(self, x_YD: jax.Array) -> jax.Array:
        if self.adapter is None:
            return product('YD,DJKUH->YJKUH', x_YD, self.weight, self.layout, x_YD.dtype)
        # The matmuls of an adapter also have a dim of sequences, here of size 1.
        given = x_YD[None], self.weight, self.adapter, self.layout
        return adapter.product('BYD,DJKUH->BYJKUH', *given)[0]


class CrossBlock(nnx.Module):
    """A layer with two sublayers, attention to images and MLP; each has a gate."""

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        self.layout = parameters.layout
        attention_key, mlp_key = jax.random.split(key)
        self.attention = ImageAttention(config, parameters['attention'], key=attention_key)
        self.mlp = MLP(config, parameters['mlp'], key=mlp_key)
        self.gates = parameters.make('gates')

    def __call__(
        self,
        x_BTD: jax.Array,
        k_BYNH: jax.Array,
        v_BYNH: jax.Array,
        seen_BSY: jax.Array,
        *,
        key_B: jax.Array | None = None,
        recompute: bool = False,
    ) -> jax.Array:
        """Return the residual stream after this layer; tokens that attend to no image keep theirs.

        Its collectives are the same as those in a self-attention layer.
        """
        is_open_BT1 = jnp.expand_dims(jax.reshard(seen_BSY.any(-1), self.layout('BT')), 2)
        gates = jnp.tanh(along_last(self.gates[...], x_BTD, 'TU', self.layout))
        config = self.attention.config
        attend: Callable[..., jax.Array] = partial(
            attend_where,
            layout=self.layout,
            rate=config.attention_dropout,
            scale=config.query_scale,
        )
        attend = jax.checkpoint(attend, prevent_cse=False) if recompute else attend

        def core(q_BSNH: jax.Array) -> tuple[jax.Array, None]:
            allowed, keys = jnp.expand_dims(seen_BSY, (1, 2)), fold_in(key_B, 0)
            return attend(q_BSNH, k_BYNH, v_BYNH, allowed, keys), None

        for gate, sublayer in enumerate((self.attention, self.mlp)):
            with jax.named_scope(sublayer.SCOPE):
                h_BTD, _ = sublayer.update(x_BTD, core, Rows(key_B=key_B))
                h_BTD = gates[..., gate : gate + 1] * h_BTD.astype(jnp.float32)
                x_BTD = x_BTD + jnp.where(is_open_BT1, h_BTD, 0).astype(x_BTD.dtype)
        return x_BTD


class ImageAttention(Sublayer):
    """Queries of the text (column-parallel), and the output projection (row-parallel)."""

    SCOPE, LINEARS, KEY, MIXES_TOKENS = 'cross_attention', ('query', 'out'), 1, False

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        super().__init__(config, parameters, key=key)
        self.query_norm = make_norm(config, parameters['query_norm'], 'Nh')

    def middle(self, y: jax.Array, core: Any, _: Rows) -> tuple[jax.Array, None]:
        """Return the attention of the queries to images; `core` has the keys and values."""
        q_BSNH = self.query_norm(self.first.with_bias(y))
        with jax.named_scope('core'):
            o_BSNH: tuple[jax.Array, None] = core(q_BSNH)
            return o_BSNH


def seen(
    images: Images,
    segment_BS: jax.Array | None,
    config: VisionConfig,
    layout: Layout,
    detail: Detail | None = None,
) -> jax.Array:
    """Return whether each token attends to each image vector of its sequence, [B, S, Y].

    A token attends to the images of its document whose own token is not after it.
    """
    index_BS = jax.reshard(images.index_BS, layout('BS'))
    rows, length = index_BS.shape
    slots, vectors = images.grid_BI2.shape[1], config.vectors
    slot_BS = jnp.where(index_BS >= 0, index_BS // vectors, -1)
    is_mark_BSI = slot_BS[..., None] == jnp.arange(slots)[None, None]
    mark_BI = jnp.argmax(is_mark_BSI, axis=1)
    token_1S1 = jnp.arange(length)[None, :, None]
    sees_BSI = is_mark_BSI.any(1)[:, None] & (token_1S1 >= mark_BI[:, None])
    if segment_BS is not None:
        segment_BS1 = jax.reshard(segment_BS, layout('BS'))[..., None]
        # The segment of an image's own token.
        segment_BI = jnp.where(token_1S1 == mark_BI[:, None], segment_BS1, 0).sum(1)
        sees_BSI &= segment_BS1 == segment_BI[:, None]
    if detail is None:
        count_BI = jax.reshard(images.grid_BI2, layout('B')).prod(-1) // config.unit
    else:
        count_BI = num_tokens(detail.level).sum(-1)
    exists_BIV = jnp.arange(vectors)[None, None] < count_BI[..., None]
    sees_BSIV = sees_BSI[..., None] & exists_BIV[:, None]
    return sees_BSIV.reshape(rows, length, slots * vectors, out_sharding=layout('BSY'))
