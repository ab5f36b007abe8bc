"""Images in a sequence: each device encodes some, all get the vectors, and tokens take theirs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.typing import DTypeLike

from megajax.config import VisionConfig
from megajax.model.vision import Encoder
from megajax.parallel.layout import Layout
from megajax.parallel.stages import over_shards


class Images(NamedTuple):
    """The images of the rows of a batch, I slots a row."""

    pixels_BIPX: jax.Array  # uint8, patches of each image
    grid_BI2: jax.Array  # rows and columns of patches; 0 0 in an empty slot
    index_BS: jax.Array  # the vector of the row's own images that stands at a token; -1 at text


def merge_images(
    encoder: Encoder,
    x_BTD: jax.Array,
    images: Images,
    layout: Layout,
    recompute: str = 'none',
) -> tuple[jax.Array, jax.Array]:
    """Encode images and put their vectors in the places of their tokens.

    Return x_BTD and what DeepStack adds to the first layers, [B, T, taps, D].
    """
    vectors = encode(encoder, images, layout, x_BTD.dtype, recompute)
    return place(x_BTD, vectors, images, encoder.config, layout)


def encode(
    encoder: Encoder, images: Images, layout: Layout, dtype: DTypeLike, recompute: str
) -> jax.Array:
    """Return the vectors [rows x slots x V, 1 + taps, D] of all images, on every device.

    `encoder` has a copy of each parameter for each shard of the images, in a first dim. Encoding
    communicates nothing, one all-gather follows; the backward pass has nothing, or with sequence
    parallelism one reduce-scatter.
    """
    shards = layout.num_shards('I')

    def sharded(x: jax.Array) -> jax.Array:
        """Divide [B, slots, ...] into [shards, images, ...], with empty slots after the last."""
        rest = x.shape[2:]
        x = x.reshape(-1, *rest, out_sharding=layout('-' * (1 + len(rest))))
        x = jnp.pad(x, ((0, -len(x) % shards), *((0, 0) for _ in rest)))
        spec = layout('I' + '-' * (1 + len(rest)))
        return x.reshape(shards, -1, *rest, out_sharding=spec)

    def of_shard(encoder: Encoder, pixel_IPX: jax.Array, grid_I2: jax.Array) -> jax.Array:
        return encoder(pixel_IPX, grid_I2, dtype, recompute=recompute)

    with jax.named_scope('vision'):
        (axis,) = layout.mesh_axes('I')
        vectors = jax.vmap(of_shard, spmd_axis_name=axis)(
            encoder, sharded(images.pixels_BIPX), sharded(images.grid_BI2)
        )
    with jax.named_scope('vision_gather'):
        # The dim of images comes first: elsewhere XLA would all-reduce its gradient.
        vectors = vectors.reshape(-1, *vectors.shape[3:], out_sharding=layout('I--'))
        return jax.reshard(vectors, layout('---'))


def place(
    x_BTD: jax.Array, vectors: jax.Array, images: Images, config: VisionConfig, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Put the vectors of images in the places of their tokens.

    Return x_BTD and, [B, T, taps, D], what DeepStack adds to the first layers; no collective.
    """
    with jax.named_scope('vision_place'):
        index_BT = jax.reshard(images.index_BS, layout('BT'))
        own = images.grid_BI2.shape[1] * config.vectors
        first_B1 = jnp.expand_dims(jnp.arange(len(index_BT)) * own, 1)
        at_BT = jnp.where(index_BT >= 0, index_BT + first_B1, 0)
        found = vectors.at[at_BT].get(out_sharding=layout('BT--'))
        found = jnp.where(jnp.expand_dims(index_BT >= 0, (2, 3)), found, 0).astype(x_BTD.dtype)
        is_image = jnp.expand_dims(index_BT >= 0, 2)
        return jnp.where(is_image, found[:, :, 0], x_BTD), found[:, :, 1:]


def merge_images_of_shards(
    encoder: Encoder, x_BTD: jax.Array, images: Images, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Do the same for the rows of all data shards, outside a function that is mapped over them."""

    def of_shard(x_BTD: jax.Array, images: Images) -> tuple[jax.Array, jax.Array]:
        return merge_images(encoder, x_BTD, images, layout.per_shard)

    images = Images(*(jax.reshard(x, layout('B')) for x in images))
    return of_shards(of_shard, layout, x_BTD, images)


def of_shards(function: Callable[..., Any], layout: Layout, *rows: Any) -> Any:
    """Apply a function of a data shard's rows to those of all shards, and join its results.

    The first dim of each array is the rows.
    """
    shards = layout.sizes_of(layout.mapped)

    def divide(x: jax.Array) -> jax.Array:
        spec = layout.stacked('-' * x.ndim, layout.mapped)
        return x.reshape(*shards, -1, *x.shape[1:], out_sharding=spec)

    def join(x: jax.Array) -> jax.Array:
        rest = jax.typeof(x).sharding.spec[len(shards) + 1 :]
        spec = P(*layout('B'), *rest)
        return x.reshape(-1, *x.shape[len(shards) + 1 :], out_sharding=spec)

    return jax.tree.map(join, over_shards(function, layout)(*jax.tree.map(divide, rows)))


def add_deep(x_BTD: jax.Array, deep_BTAD: jax.Array, index: jax.Array | int) -> jax.Array:
    """Add what DeepStack has for the layer with this index; later layers get nothing."""
    taps = deep_BTAD.shape[2]
    if not taps:
        return x_BTD

    def add(x_BTD: jax.Array, deep_BTAD: jax.Array) -> jax.Array:
        at = jnp.minimum(index, taps - 1)
        return x_BTD + jax.lax.dynamic_index_in_dim(deep_BTAD, at, 2, keepdims=False)

    with jax.named_scope('deepstack'):
        return jax.lax.cond(index < taps, add, lambda x_BTD, _: x_BTD, x_BTD, deep_BTAD)
