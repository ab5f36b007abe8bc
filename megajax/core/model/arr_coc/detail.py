"""Choose the detail of the regions of images by their relevance to the question.

Each device measures the texture of the regions of its own images, and the texture, a few KB, is
all-gathered. Scorers, balance and budget then run on every device, and each image is encoded at
the levels of its regions.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.core.config import VisionConfig
from megajax.core.model.arr_coc import budget
from megajax.core.model.arr_coc.levels import at_levels
from megajax.core.model.arr_coc.relevance import Relevance, RelevanceNetworks, query
from megajax.core.model.arr_coc.texture import region_texture
from megajax.core.parallel.image_shards import over_images
from megajax.core.parallel.layout import UNSHARDED, Layout

if TYPE_CHECKING:
    from megajax.core.model.images import Images


class Detail(NamedTuple):
    """The detail of the regions of images, [B, I, regions]."""

    level: jax.Array  # an index of `budget.SIDES`
    gate: jax.Array  # factor of each region's detail


def detail_of(
    networks: RelevanceNetworks,
    config: VisionConfig,
    x_BTD: jax.Array,
    images: 'Images',
    layout: Layout,
) -> Detail:
    """Return the detail of every image, by its relevance to the question in its sequence."""
    rows, slots, regions = *images.grid_BI2.shape[:2], networks.config.num_regions
    shape = rows, slots, regions
    found = relevance_of(networks, config, x_BTD, images, layout)
    total = networks.config.total_tokens
    with jax.named_scope('budget'):
        level = jax.vmap(lambda x: budget.budget(x, total))(found.relevance)
    dims = layout('---')
    return Detail(
        level.reshape(shape, out_sharding=dims), found.gate.reshape(shape, out_sharding=dims)
    )


def relevance_of(
    networks: RelevanceNetworks,
    config: VisionConfig,
    x_BTD: jax.Array,
    images: 'Images',
    layout: Layout,
) -> Relevance:
    """Return the relevance of the regions of all images, one row per image slot of each sequence.

    Each data shard measures the texture of its own images; all-gathering the texture sends a few
    KB.
    """
    assert images.is_question_BS is not None
    rows, slots = images.grid_BI2.shape[:2]

    def of_shard(_: None, pixel_IPX: jax.Array, grid_I2: jax.Array) -> jax.Array:
        def of_image(pixels: jax.Array, grid: jax.Array) -> jax.Array:
            sizes = {'patch_size': config.patch_size, 'merge_size': config.merge_size}
            return region_texture(pixels, grid, networks.config.regions, **sizes)

        return jax.vmap(of_image)(pixel_IPX, grid_I2)

    with jax.named_scope('texture'):
        texture = over_images(of_shard, layout)(None, images.pixels_BIPX, images.grid_BI2)
        texture = texture.reshape(-1, *texture.shape[2:], out_sharding=layout('I--'))
        texture = jax.reshard(texture, layout('---'))[: rows * slots]
    with jax.named_scope('query'):
        query_BD = query(x_BTD, jax.reshard(images.is_question_BS, layout('BT')))
        query_BD = _for_slots(query_BD, slots, layout)
    return networks(texture, query_BD, layout, _keys_of_slots(images.key_B, slots))


def chosen(
    numbers_IPX: jax.Array, detail: Detail, config: VisionConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the patches of images at their levels, their rows and columns, and which are used.

    `numbers_IPX` are the patches at the finest level. The last result is 1 for each patch in use,
    else 0.
    """
    relevance, merge = config.relevance, config.merge_size
    assert relevance is not None
    regions, total = relevance.regions, relevance.total_tokens
    within = jnp.stack(jnp.divmod(jnp.arange(config.unit), merge), 1)  # [unit, 2]

    def of_image(numbers_PX: jax.Array, level: jax.Array, gate: jax.Array) -> Any:
        placed = budget.places(level, total, regions)
        sizes = {'patch_size': config.patch_size, 'merge_size': merge}
        patches = at_levels(numbers_PX, level, gate, placed, regions, **sizes)
        unit_V2 = jnp.stack([placed.row, placed.column], 1)
        place = jnp.expand_dims(unit_V2, 1) * merge + jnp.expand_dims(within, 0)
        place = place.reshape(-1, 2, out_sharding=UNSHARDED('--'))
        is_there = jnp.broadcast_to(jnp.expand_dims(placed.region >= 0, 1), (total, config.unit))
        is_there = is_there.reshape(-1, out_sharding=UNSHARDED('-'))
        return patches, jnp.maximum(place, 0), is_there.astype(jnp.int32)

    with jax.named_scope('budget'):
        patches, place, segment = jax.vmap(of_image)(numbers_IPX, detail.level, detail.gate)
        return patches, place, segment


def places_of(
    detail: Detail, at_BS: jax.Array, is_image_BS: jax.Array, config: VisionConfig
) -> tuple[jax.Array, jax.Array]:
    """Return the row and column [B, S, 2] of each token in its image, and which tokens are in use.

    `at_BS` is the index of a token's vector among the vectors of all images.
    """
    relevance = config.relevance
    assert relevance is not None
    total, grid = relevance.total_tokens, relevance.regions
    none = UNSHARDED('---')
    level = detail.level.reshape(-1, detail.level.shape[2], out_sharding=UNSHARDED('--'))
    every = jax.vmap(lambda level: budget.places(level, total, grid))(level)
    stacked = jnp.stack([every.row, every.column], 2).reshape(-1, 2, out_sharding=UNSHARDED('--'))
    place_BS2 = stacked.at[at_BS].get(out_sharding=none)
    is_used_BS = (place_BS2[:, :, 0] >= 0) & is_image_BS
    return jnp.where(jnp.expand_dims(is_used_BS, 2), place_BS2, 0), is_used_BS


def _keys_of_slots(key_B: jax.Array | None, slots: int) -> jax.Array | None:
    """Return a key for each image slot of each sequence."""
    if key_B is None:
        return None
    of_slots = [
        jax.vmap(lambda key, slot=slot: jax.random.fold_in(key, slot))(key_B)
        for slot in range(slots)
    ]
    return jnp.stack(of_slots, 1).reshape(-1)


def _for_slots(x_BD: jax.Array, slots: int, layout: Layout) -> jax.Array:
    """Repeat the vector of each sequence for each of its image slots."""
    rows, size = x_BD.shape
    repeated = jnp.broadcast_to(jnp.expand_dims(x_BD, 1), (rows, slots, size))
    return repeated.reshape(rows * slots, size, out_sharding=layout('--'))
