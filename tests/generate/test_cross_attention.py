"""Generation with cross-attention reads the images of a prompt once."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import make_batch, on_mesh, random_params
from vlm import vlm

from megajax.config import Config
from megajax.generate.generator import Generator, PromptImages, Request
from megajax.generate.sampling import Sampling
from megajax.model.computation import IN_FP32
from megajax.model.images import Images
from megajax.model.shard_copies import copy_to_shards
from megajax.model.transformer import model_graph
from megajax.parallel.layout import Layout

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


def uncached(config: Config) -> list[list[int]]:
    """The likeliest tokens, each from a pass over all tokens before it."""
    from flax import nnx

    tokens, images = prompts(config)
    layout = Layout.of(config).per_shard
    texts = []
    with on_mesh(config):
        params = copy_to_shards(random_params(config, std=0.3), layout)
        model = nnx.merge(model_graph(config.model, layout), params)
        for ids, beside in zip(tokens, images, strict=True):
            text = list(ids)
            for _ in range(NEW):
                index = np.full(len(text), -1, np.int32)
                index[: len(ids)] = beside.index_S
                of_row = Images(
                    *(jnp.array(x)[None] for x in (beside.pixels_IPX, beside.grid_I2, index))
                )
                x_BTD = model.hidden(jnp.array([text]), IN_FP32, images=of_row)
                logits = x_BTD[0, -1] @ model.head_Vd.T
                text.append(int(jnp.argmax(logits[: config.model.vocab_size])))
            texts.append(text[len(ids) :])
    return texts


@pytest.mark.parametrize(('data', 'model'), [(1, 1), (2, 2), (1, 4)])
def test_the_cache_of_images_changes_nothing(data: int, model: int) -> None:
    plain = {'model': {'position': 'rope'}}
    expected = uncached(vlm(crossed=True, **plain))
    config = vlm(data, model, crossed=True, **plain)
    request = Request(max_tokens=NEW, sampling=Sampling(temperature=0), to_eod=False)
    with on_mesh(config):
        generator = Generator(config, random_params(config, std=0.3))
        *_, made = generator.stream(*prompts(config)[:1], request, prompts(config)[1])
        *_, blind = generator.stream(prompts(config)[0], request, without_images(config))
    assert [row.ids for row in made] == expected
    assert [row.ids for row in blind] != expected


def without_images(config: Config) -> list[PromptImages]:
    return [x._replace(index_S=np.full_like(x.index_S, -1)) for x in prompts(config)[1]]
