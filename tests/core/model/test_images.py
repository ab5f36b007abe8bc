"""The tokens of images in a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
from support import on_mesh
from vlm import relevant

from megajax.core.model.arr_coc.budget import SIDES
from megajax.core.model.arr_coc.detail import Detail
from megajax.core.model.images import Images, place
from megajax.core.model.rows import Rows
from megajax.core.parallel.layout import Layout


def test_routers_count_the_text_and_the_image_tokens_that_relevance_uses() -> None:
    config = relevant()
    vision = config.model.vision
    assert vision is not None
    level = np.array([[[0, 2]], [[1, 1]], [[0, 0]]])
    rows, text, padding = len(level), 5, 3
    index = np.full((rows, text + vision.vectors + padding), -1)
    index[:2, text : text + vision.vectors] = np.arange(vision.vectors)  # the last row has no image
    real = np.ones(index.shape, np.float32)
    real[:, -padding:] = 0

    @jax.jit
    def counted(index_BS: jax.Array, level: jax.Array, real_BS: jax.Array) -> jax.Array | None:
        images = Images(jnp.zeros((rows, 1, 1, 1)), jnp.zeros((rows, 1, 2)), index_BS)
        vectors = jnp.zeros((rows * vision.vectors, 1, 8))
        x_BTD, detail = jnp.zeros((*index_BS.shape, 8)), Detail(level, jnp.ones(level.shape))
        merged = place(x_BTD, vectors, images, vision, Layout.of(config).per_shard, detail)
        return merged.rows(Rows(real_BS=real_BS)).real_BS

    with on_mesh(config):
        found = np.asarray(counted(index, level, real))
    in_use = np.square(SIDES)[level].sum((1, 2))
    in_use[2] = vision.vectors  # text in place of an image
    np.testing.assert_array_equal(found.sum(1), text + in_use)
    assert (in_use[:2] < vision.vectors).all()
    assert not found[:, -padding:].any()
