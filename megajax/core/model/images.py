"""Images in a sequence: each device encodes some images, and image tokens get their vectors."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from megajax.core.config import VisionConfig
from megajax.core.model.arr_coc.detail import Detail, chosen, places_of
from megajax.core.model.rows import Rows
from megajax.core.model.vision import Encoder, numbers_of, places
from megajax.core.parallel.image_shards import over_images
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.pipeline_ops import over_shards


class Images(NamedTuple):
    """The images of a batch, I slots per sequence, and the question about them for relevance."""

    pixels_BIPX: jax.Array  # uint8, patches of each image
    grid_BI2: jax.Array  # rows and columns of patches; 0 0 in an empty slot
    index_BS: jax.Array  # index of a token's vector among its sequence's vectors; -1 at text
    is_question_BS: jax.Array | None = None  # the tokens of the question that relevance refers to
    key_B: jax.Array | None = None  # turns relevance's noise on


class Merged(NamedTuple):
    """A sequence with its images."""

    x_BTD: jax.Array
    deep_BTAD: jax.Array  # vectors that DeepStack adds after the first layers
    # Rows and columns [B, S, 2] that relevance adds to the tokens' positions, and the tokens that
    # it leaves empty.
    offset_BS2: jax.Array | None = None
    is_empty_BS: jax.Array | None = None

    def rows(self, rows: Rows) -> Rows:
        """Return `rows` with the images' arrays and relevance's changes to positions and segments.

        Empty tokens are a segment of their own, so that no other tokens attend to them, and routers
        do not count them.
        """
        rows = rows._replace(deep_BTAD=self.deep_BTAD)
        if self.offset_BS2 is None or self.is_empty_BS is None:
            return rows
        position_BS, segment_BS, real_BS = rows.position_BS, rows.segment_BS, rows.real_BS
        if position_BS is not None and position_BS.ndim == 3:
            offset_BS3 = jnp.pad(self.offset_BS2, ((0, 0), (0, 0), (1, 0)))
            position_BS = position_BS + offset_BS3
        segment = 0 if segment_BS is None else segment_BS
        segment_BS = jnp.where(self.is_empty_BS, -1, segment)
        if real_BS is not None:
            real_BS = jnp.where(self.is_empty_BS, 0, real_BS)
        return rows._replace(position_BS=position_BS, segment_BS=segment_BS, real_BS=real_BS)


def merge_images(
    encoder: Encoder,
    x_BTD: jax.Array,
    images: Images,
    layout: Layout,
    recompute: str = 'none',
    detail: Detail | None = None,
) -> Merged:
    """Encode images and put their vectors in place of their tokens."""
    vectors = encode(encoder, images, layout, x_BTD.dtype, recompute, detail)
    return place(x_BTD, vectors, images, encoder.config, layout, detail)


def encode(
    encoder: Encoder,
    images: Images,
    layout: Layout,
    dtype: DTypeLike,
    recompute: str,
    detail: Detail | None = None,
) -> jax.Array:
    """Return the vectors [rows x slots x V, 1 + taps, D] of all images, on every device.

    `encoder` has a copy of each parameter for each shard of the images, in a first dim. Encoding
    communicates nothing, and one all-gather follows. The backward pass has no collective or, with
    sequence parallelism, one reduce-scatter. With `detail`, each region is encoded at its level.
    """

    def of_shard(
        encoder: Encoder, pixel_IPX: jax.Array, grid_I2: jax.Array, detail: Detail | None
    ) -> jax.Array:
        config = encoder.config
        numbers_IPX = numbers_of(pixel_IPX, grid_I2, config)
        if detail is None:
            place_IP2, segment_IP = places(grid_I2, config)
        else:
            numbers_IPX, place_IP2, segment_IP = chosen(numbers_IPX, detail, config)
        return encoder(
            numbers_IPX.astype(dtype), grid_I2, place_IP2, segment_IP, recompute=recompute
        )

    with jax.named_scope('vision'):
        vectors = over_images(of_shard, layout)(
            encoder, images.pixels_BIPX, images.grid_BI2, detail
        )
    with jax.named_scope('vision_gather'):
        # The dim of images comes first: in any other position XLA would all-reduce its gradient.
        vectors = vectors.reshape(-1, *vectors.shape[3:], out_sharding=layout('I--'))
        return jax.reshard(vectors, layout('---'))


def place(
    x_BTD: jax.Array,
    vectors: jax.Array,
    images: Images,
    config: VisionConfig,
    layout: Layout,
    detail: Detail | None = None,
) -> Merged:
    """Put the vectors of images in place of their tokens; no collective."""
    with jax.named_scope('vision_place'):
        at_BS, is_image_BS = _vector_at(images, config)
        offset_BS2 = is_empty_BS = None
        if detail is not None:
            offset_BS2, is_used_BS = places_of(detail, at_BS, is_image_BS, config)
            is_empty_BS = is_image_BS & ~is_used_BS
            is_image_BS = is_image_BS & is_used_BS
        at_BT, is_image_BT = (jax.reshard(x, layout('BT')) for x in (at_BS, is_image_BS))
        found = vectors.at[at_BT].get(out_sharding=layout('BT--'))
        found = jnp.where(jnp.expand_dims(is_image_BT, (2, 3)), found, 0).astype(x_BTD.dtype)
        x_BTD = jnp.where(jnp.expand_dims(is_image_BT, 2), found[:, :, 0], x_BTD)
        return Merged(x_BTD, found[:, :, 1:], offset_BS2, is_empty_BS)


def merge_images_of_shards(
    encoder: Encoder,
    x_BTD: jax.Array,
    images: Images,
    layout: Layout,
    detail: Detail | None = None,
) -> Merged:
    """Compute what `merge_images` computes, for all data shards, outside a mapped function."""

    def of_shard(x_BTD: jax.Array, images: Images, detail: Detail | None) -> Merged:
        return merge_images(encoder, x_BTD, images, layout.per_shard, detail=detail)

    return of_shards(of_shard, layout, x_BTD, images, detail)


def of_shards(function: Callable[..., Any], layout: Layout, *rows: Any) -> Any:
    """Apply a function of one data shard's sequences to every data shard, and join the results.

    The first dim of each array is the sequences.
    """
    rows = jax.tree.map(lambda x: jax.reshard(x, layout('B')), rows)
    shards = layout.sizes_of(layout.mapped)

    def divide(x: jax.Array) -> jax.Array:
        spec = layout.stacked('-' * x.ndim, layout.mapped)
        return x.reshape(*shards, -1, *x.shape[1:], out_sharding=spec)

    def join(x: jax.Array) -> jax.Array:
        spec = layout.like(jax.typeof(x).sharding.spec[len(shards) + 1 :], '*->B*')
        # The count is computed, because -1 is ambiguous if a dim of DeepStack's taps is empty.
        count = prod(x.shape[: len(shards) + 1])
        return x.reshape(count, *x.shape[len(shards) + 1 :], out_sharding=spec)

    return jax.tree.map(join, over_shards(function, layout)(*jax.tree.map(divide, rows)))


def _vector_at(images: Images, config: VisionConfig) -> tuple[jax.Array, jax.Array]:
    """Return each token's index into the vectors of all sequences, and whether it has a vector."""
    index_BS = images.index_BS
    own = images.grid_BI2.shape[1] * config.vectors
    first_B1 = jnp.expand_dims(jnp.arange(len(index_BS)) * own, 1)
    return jnp.where(index_BS >= 0, index_BS + first_B1, 0), index_BS >= 0
