"""A Qwen3-VL of transformers gives transformers' logits and text for rows with images.

`qwen3_vl` holds a tiny random model and what transformers made of it (`make_qwen3_vl.py`).
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from interop.stored import LIMIT
from support import exhaustive, on_mesh, slow

from megajax.core.config import Config
from megajax.core.model.computation import IN_FP32
from megajax.core.model.images import Images
from megajax.core.model.rows import Rows
from megajax.core.model.shard_copies import copy_to_shards
from megajax.core.model.transformer import model_graph
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.pipeline_ops import over_shards
from megajax.core.train.zero import gather_once
from megajax.interop.folder import settings
from megajax.interop.huggingface.families import read_family
from megajax.interop.huggingface.tensors import read_tensors
from megajax.interop.huggingface.weights import from_huggingface
from megajax.runtime.data.patches import PatchSize, place_images
from megajax.runtime.generate.generator import Generator, PromptImages, Request
from megajax.runtime.generate.sampling import Sampling

FOLDER = Path(__file__).parent / 'qwen3_vl'
GRIDS = [[4, 6], [2, 4]], [[2, 2], [6, 4]]  # as in make_qwen3_vl.py
SIZE = PatchSize(patch_size=4, merge_size=2, max_patches=24)


def config_of(tied: bool, data: int, model: int, sequence_parallel: bool) -> Config:
    keys = json.loads((FOLDER / 'config.json').read_text()) | {'tie_word_embeddings': tied}
    sections: dict[str, Any] = settings(read_family(keys, '')[1], Path(), None)
    sections['vision'] |= {'images': 2, 'max_patches': SIZE.max_patches}
    sections['train'] |= {'seq_len': stored()['tokens'].shape[1], 'dtype': 'float32'}
    mesh = {'data': data, 'model': model, 'sequence_parallel': sequence_parallel}
    return Config.model_validate(sections | {'mesh': mesh})


def stored() -> dict[str, np.ndarray]:
    with np.load(FOLDER / 'logits.npz') as arrays:
        return dict(arrays)


def rows(config: Config) -> tuple[np.ndarray, np.ndarray, Images]:
    """Tokens, positions and images of the stored rows."""
    arrays, used = stored(), 0
    tokens = arrays['tokens'].astype(np.int32)
    pixels = np.zeros((2, 2, SIZE.max_patches, 3 * SIZE.patch_size**2), np.uint8)
    places = []
    for row, grids in enumerate(GRIDS):
        for slot, (height, width) in enumerate(grids):
            count = height * width
            pixels[row, slot, :count] = arrays['patches'][used : used + count]
            used += count
        token = config.vision.image_token
        places.append(place_images(tokens[row], grids, image_token=token, patches=SIZE))
    index, positions = map(np.stack, zip(*places, strict=True))
    return tokens, positions, Images(pixels, np.array(GRIDS, np.int32), index)


def logits(config: Config, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Of the vocabulary, [B, S, V], with the rows over `data`."""
    layout = Layout.of(config)

    def of_shard(params: nnx.State, token_BS: Any, position_BS: Any, images: Images) -> jax.Array:
        model = nnx.merge(model_graph(config.model, layout.per_shard), params)
        x_BTD, _ = model.hidden(token_BS, IN_FP32, Rows(position_BS), images=images)
        x_BSD = jax.reshard(x_BTD, layout.per_shard('BSd'))
        return jnp.einsum('bsd,vd->bsv', x_BSD, model.head_Vd)

    def forward(params: nnx.State, *rows: Any) -> jax.Array:
        params = copy_to_shards(gather_once(params, config, layout), layout)
        return over_shards(of_shard, layout, (None, 0, 0, 0))(params, *rows)

    def by_shard(x: np.ndarray) -> jax.Array:
        x = x.reshape(config.mesh.data, -1, *x.shape[1:])
        return jax.device_put(x, jax.P('data', *(None,) * (x.ndim - 1)))

    with on_mesh(config):
        params = from_huggingface(config, tensors, source='', family='qwen3_vl')
        made = np.asarray(jax.jit(forward)(params, *jax.tree.map(by_shard, rows(config))))
    return made.reshape(-1, *made.shape[2:])[:, :, : config.model.vocab_size]


@pytest.mark.parametrize(
    ('tied', 'data', 'model', 'sequence_parallel'),
    [
        slow(False, 1, 1, False),
        (True, 2, 2, False),
        exhaustive(False, 1, 4, True),
        slow(True, 1, 1, False),
        slow(False, 2, 4, False),
    ],
)
def test_logits_are_those_of_transformers(tied, data, model, sequence_parallel) -> None:
    config = config_of(tied, data, model, sequence_parallel)
    tensors = read_tensors(FOLDER)
    if tied:
        tensors.pop('lm_head.weight')
    expected = stored()['tied' if tied else 'untied']
    error = np.abs(logits(config, tensors) - expected).max()
    assert error < LIMIT
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize(('data', 'model'), [exhaustive(1, 1), slow(2, 2)])
def test_the_likeliest_text_after_a_picture_is_that_of_transformers(data: int, model: int) -> None:
    config = config_of(False, data, model, False)
    tokens, positions, images = rows(config)
    prompts, beside = [], []
    for row in range(len(tokens)):
        length = tokens.shape[1] - row  # the second lacks its last token
        prompts.append(tokens[row, :length].tolist())
        pixels, grid, index = (x[row] for x in images[:3])
        beside.append(PromptImages(pixels, grid, index[:length], positions[row, :length]))
    expected = stored()['new']
    greedy = Request(max_tokens=expected.shape[1], sampling=Sampling(temperature=0), to_eod=False)
    with on_mesh(config):
        params = from_huggingface(config, read_tensors(FOLDER), source='', family='qwen3_vl')
        *_, made = Generator(config, params).stream(prompts, greedy, beside)
    assert [row.ids for row in made] == expected.tolist()
