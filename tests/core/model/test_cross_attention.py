"""Cross-attention: the images that a token sees, and the model that closed gates leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import (
    assert_close,
    gather,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    relative_error,
)
from vlm import CROSS_MODEL, vlm

from megajax.core.config import Config
from megajax.core.counts.parameters import parameters
from megajax.core.model.cross_attention import seen
from megajax.core.model.images import Images
from megajax.core.model.merged import merged
from megajax.core.parallel.layout import Layout
from megajax.core.train.evaluation import make_eval_step
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients


@pytest.mark.parametrize('has_documents', [False, True])
def test_a_token_sees_the_images_of_its_document_that_are_not_after_it(has_documents: bool) -> None:
    config = vlm(crossed=True)
    vision = config.vision
    assert vision is not None
    random = np.random.default_rng(0)
    grid = vision.merge_size * random.integers(1, 3, size=(4, vision.images, 2))
    index = np.full((4, 12), -1)
    marks = [(2, 7), (5, 5), (0, 11), (3, None)]  # of the two slots; the second row has one image
    segment = np.repeat([[0], [1]], 6, axis=0).reshape(1, 12).repeat(4, 0)
    for row, (first, second) in enumerate(marks):
        index[row, first] = 0
        if second is not None and second != first:
            index[row, second] = vision.vectors
        else:
            grid[row, 1] = 0
    images = Images(jnp.zeros((4, 2, 16, 48), jnp.uint8), jnp.array(grid), jnp.array(index))
    with on_mesh(make_config('llama')):
        documents = jnp.array(segment) if has_documents else None
        found = np.asarray(seen(images, documents, vision, Layout()))
    for row, token, vector in np.ndindex(found.shape):
        slot, place = divmod(vector, vision.vectors)
        mark = np.flatnonzero(index[row] == slot * vision.vectors)
        sees = mark.size > 0 and mark[0] <= token and place < grid[row, slot].prod() // vision.unit
        if has_documents and sees:
            sees = segment[row, mark[0]] == segment[row, token]
        assert found[row, token, vector] == sees


@pytest.mark.slow
@pytest.mark.exhaustive
def test_adapters_change_it_as_the_weights_with_them_added_would() -> None:
    config, plain = vlm(crossed=True, lora={'rank': 4, 'alpha': 6.0}), vlm(crossed=True)
    dims = {name: x.dims.lower() for name, x in parameters(config.model)}
    batch, key = make_batch(config), jax.random.key(0)
    with on_mesh(config):
        params = random_params(config, std=0.1)
        given = place_batch(batch), key
        (loss, _), found = jax.jit(make_loss_and_gradients(config))(params, *given)
        of_merged = jax.jit(make_loss_and_gradients(plain))
        (expected_loss, _), dense = of_merged(merged(params, config), *given)
    arrays, dense, expected = gather(params), gather(dense), {}
    for linear in (name.removesuffix('.A') for name in dims if name.endswith('.adapter.A')):
        a, b, w = f'{linear}.A', f'{linear}.B', f'{linear.removesuffix("adapter")}weight'
        for of, other in ((a, b), (b, a)):
            letters = f'{dims[w]},{dims[other]}->{dims[of]}'
            expected[of] = 1.5 * np.einsum(letters, dense[w], arrays[other])
    assert {'cross.key_value.adapter.A', 'cross.layers.attention.query.adapter.B'} <= {*expected}
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gather(found), expected, 1e-5)


def test_without_images_or_with_closed_gates_it_is_the_text_model_to_the_bit() -> None:
    config = vlm(crossed=True)
    text = make_config('llama', model=CROSS_MODEL, train={'batch_size': 16, 'seq_len': 24})
    batch, images = make_batch(config), ('pixels', 'image_grid', 'image_index')
    with on_mesh(config):
        params = random_params(config, std=0.2)

    with on_mesh(text):
        evaluate = {text: make_eval_step(text), config: make_eval_step(config)}

    def loss(config: Config, batch: dict[str, np.ndarray], params: nnx.State) -> float:
        with on_mesh(config):
            sums = evaluate[config](params, place_batch(batch))
            return float(sums['nll'] / sums['tokens'])

    parts = params.raw_mapping
    of_text = {name: part for name, part in parts.items() if name not in ('cross', 'vision')}
    no_images = {name: x for name, x in batch.items() if name not in images}
    expected = loss(text, no_images, nnx.State(of_text))
    empty = {'image_grid': 0 * batch['image_grid'], 'image_index': 0 * batch['image_index'] - 1}
    assert loss(config, batch | empty, params) == expected
    assert abs(loss(config, batch, params) - expected) > 1e-3
    params['cross']['layers']['gates'][...] *= 0
    assert loss(config, batch, params) == expected
