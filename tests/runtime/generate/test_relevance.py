"""Generation sees of a picture what relevance has paid for, and nothing at its empty places."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import exhaustive, make_batch, on_mesh, random_params
from vlm import RELEVANCE, relevant

from megajax.core.config import Config
from megajax.core.model.computation import IN_FP32
from megajax.core.model.images import Images
from megajax.core.model.rows import Rows
from megajax.core.model.shard_copies import copy_to_shards
from megajax.core.model.transformer import model_graph
from megajax.core.parallel.layout import Layout
from megajax.runtime.generate.generator import Generator, PromptImages, Request
from megajax.runtime.generate.sampling import Sampling

NEW, LENGTHS = 5, (408, 414)  # tokens after each prompt, and of each
config_on = functools.partial(relevant, model={'max_seq_len': 448})


def prompts(config: Config) -> tuple[list[list[int]], list[PromptImages]]:
    """Two prompts of one picture each, with text before and after it."""
    batch = make_batch(config)
    batch['pixels'][:, :, :400] //= 3
    tokens = [batch['tokens'][row, :length].tolist() for row, length in enumerate(LENGTHS)]
    images = [
        PromptImages(
            batch['pixels'][row],
            batch['image_grid'][row],
            batch['image_index'][row, :length],
            positions(length),
        )
        for row, length in enumerate(LENGTHS)
    ]
    return tokens, images


def positions(length: int) -> np.ndarray:
    """Those of a row: all places of the picture are at 1 until relevance moves them."""
    text = np.where(np.arange(length) <= 400, np.minimum(np.arange(length), 1), 0)
    text[401:] = 41 + np.arange(length - 401)
    return np.repeat(text[:, None], 3, 1).astype(np.int32)


@functools.cache
def uncached() -> list[list[int]]:
    """The likeliest tokens, each from a pass over all tokens before it, on one device."""
    config = config_on()
    texts, beside = prompts(config)
    layout, length = Layout.of(config).per_shard, max(LENGTHS) + NEW
    token_BS = np.zeros((len(texts), length), np.int32)
    index_BS = np.full_like(token_BS, -1)
    is_question_BS = np.zeros_like(token_BS, bool)
    for row, (text, images) in enumerate(zip(texts, beside, strict=True)):
        token_BS[row, : len(text)], index_BS[row, : len(text)] = text, images.index_S
        is_question_BS[row, : len(text)] = images.index_S < 0
    of_rows = Images(
        np.stack([x.pixels_IPX for x in beside]),
        np.stack([x.grid_I2 for x in beside]),
        index_BS,
        is_question_BS,
    )
    position_BS = jnp.stack([positions(length)] * len(texts))

    @jax.jit
    def logits(params: nnx.State, token_BS: jax.Array) -> jax.Array:
        model = nnx.merge(model_graph(config.model, layout), copy_to_shards(params, layout))
        images = jax.tree.map(jnp.asarray, of_rows)
        x_BSD, _ = model.hidden(token_BS, IN_FP32, Rows(position_BS), images=images)
        return (x_BSD @ model.head_Vd.T)[..., : config.model.vocab_size]

    with on_mesh(config):
        params = random_params(config, std=0.3)
        for step in range(NEW):
            found = np.asarray(logits(params, token_BS)).argmax(-1)
            for row, length in enumerate(LENGTHS):
                token_BS[row, length + step] = found[row, length + step - 1]
    return [token_BS[row, length : length + NEW].tolist() for row, length in enumerate(LENGTHS)]


@pytest.mark.slow
@pytest.mark.parametrize(('data', 'model'), [(2, 2), exhaustive(1, 1), exhaustive(1, 4)])
def test_the_cache_changes_nothing_and_the_budget_is_kept(data: int, model: int) -> None:
    expected = uncached()
    config = config_on(data, model)
    request = Request(max_tokens=NEW, sampling=Sampling(temperature=0), to_eod=False)
    with on_mesh(config):
        generator = Generator(config, random_params(config, std=0.3))
        *_, made = generator.stream(*prompts(config)[:1], request, prompts(config)[1])
    assert [row.ids for row in made] == expected
    for row in made:
        assert row.region_tokens.shape == (1, 2)
        assert row.region_tokens.min() >= 64
        assert row.region_tokens.sum() <= RELEVANCE['total_tokens']
