"""Generation with cross-attention reads the images of a prompt once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import exhaustive, make_batch, on_mesh, random_params, slow
from vlm import vlm

from megajax.core.config import Config
from megajax.core.model.computation import IN_FP32
from megajax.core.model.images import Images
from megajax.core.model.shard_copies import copy_to_shards
from megajax.core.model.transformer import model_graph
from megajax.core.parallel.layout import Layout
from megajax.runtime.generate.generator import Generator, PromptImages, Request
from megajax.runtime.generate.sampling import Sampling

NEW, LENGTHS = 6, (9, 14)  # tokens after each prompt, and of each


def prompts(config: Config) -> tuple[list[list[int]], list[PromptImages]]:
    batch = make_batch(config)
    tokens = [batch['tokens'][row, :length].tolist() for row, length in enumerate(LENGTHS)]
    images = [
        PromptImages(
            batch['pixels'][row],
            batch['image_grid'][row],
            batch['image_index'][row, :length],
            np.arange(length, dtype=np.int32),
        )
        for row, length in enumerate(LENGTHS)
    ]
    return tokens, images


@functools.cache
def uncached() -> list[list[int]]:
    """The likeliest tokens, each from a pass over all tokens before it, on one device."""
    config = vlm(crossed=True)
    texts, beside = prompts(config)
    layout = Layout.of(config).per_shard
    token_BS = np.zeros((len(texts), max(LENGTHS) + NEW), np.int32)
    index_BS = np.full_like(token_BS, -1)
    for row, (text, images) in enumerate(zip(texts, beside, strict=True)):
        token_BS[row, : len(text)], index_BS[row, : len(text)] = text, images.index_S
    of_rows = Images(
        np.stack([x.pixels_IPX for x in beside]), np.stack([x.grid_I2 for x in beside]), index_BS
    )

    @jax.jit
    def logits(params: nnx.State, token_BS: jax.Array) -> jax.Array:
        model = nnx.merge(model_graph(config.model, layout), copy_to_shards(params, layout))
        x_BSD, _ = model.hidden(token_BS, IN_FP32, images=jax.tree.map(jnp.asarray, of_rows))
        return (x_BSD @ model.head_Vd.T)[..., : config.model.vocab_size]

    with on_mesh(config):
        params = random_params(config, std=0.3)
        for step in range(NEW):
            found = np.asarray(logits(params, token_BS)).argmax(-1)
            for row, length in enumerate(LENGTHS):
                token_BS[row, length + step] = found[row, length + step - 1]
    return [token_BS[row, length : length + NEW].tolist() for row, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(('data', 'model'), [exhaustive(1, 1), exhaustive(2, 2), slow(1, 4)])
def test_the_cache_of_images_changes_nothing(data: int, model: int) -> None:
    expected = uncached()
    config = vlm(data, model, crossed=True)
    request = Request(max_tokens=NEW, sampling=Sampling(temperature=0), to_eod=False)
    with on_mesh(config):
        generator = Generator(config, random_params(config, std=0.3))
        tokens, images = prompts(config)
        *_, made = generator.stream(tokens, request, images)
        unseen = [x._replace(index_S=np.full_like(x.index_S, -1)) for x in images]
        *_, blind = generator.stream(tokens, request, unseen)
    assert [row.ids for row in made] == expected
    assert [row.ids for row in blind] != expected
