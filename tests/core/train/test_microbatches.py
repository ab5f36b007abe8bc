"""The weights of a batch's tokens, and the arrays that it needs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from support import make_batch, make_config, on_mesh
from vlm import vlm

from megajax.core.config import ConfigError
from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import place_batch
from megajax.core.train.microbatches import check_arrays, with_weights


@pytest.mark.parametrize('dtype', [bool, np.int8, np.float16, jnp.bfloat16])
def test_the_weights_of_tokens_do_not_depend_on_the_dtype_of_the_mask(dtype: DTypeLike) -> None:
    """Also if their number exceeds the range of the dtype."""
    sizes = {'batch_size': 16, 'seq_len': 4096}
    config = make_config('gpt', 2, model={'max_seq_len': 4096, 'dropout': 0.0}, train=sizes)
    mask = np.ones((16, 4096), np.float32)
    mask[0, 0] = 0
    with on_mesh(config):
        layout, tokens = Layout.of(config), np.zeros(mask.shape, np.int32)
        expected, found = (
            jax.jit(lambda batch: with_weights(batch, config, layout)['weights'])(
                place_batch({'tokens': tokens, 'loss_mask': x})
            )
            for x in (mask, mask.astype(dtype))
        )
    np.testing.assert_array_equal(found, expected)
    assert expected.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ('changed', 'message'),
    [
        ({'positions': None}, r'^batch: has no positions; give the array .*, tokens, 3\]$'),
        ({'image_index': None}, r'^batch: has no image_index; give the array image_index \[rows'),
        (
            {'pixels': None, 'image_grid': None},
            r'has no pixels and no image_grid; give the arrays pixels \[rows, images, 16, 48\]',
        ),
        ({'positions': (16, 24)}, r"^batch\['positions'\]: has the shape \(16, 24\); give"),
        ({'pixels': (16, 2, 12, 48)}, r"^batch\['pixels'\]: .* give pixels \[.*, 16, 48\]$"),
    ],
)
def test_images_without_an_array_that_places_them_are_rejected(
    changed: dict[str, Any], message: str
) -> None:
    config = vlm()
    batch: Any = make_batch(config)
    check_arrays(batch, config)
    check_arrays({name: batch[name] for name in ('tokens', 'labels', 'loss_mask')}, config)
    for name, shape in changed.items():
        batch[name] = None if shape is None else np.zeros(shape)
    batch = {name: x for name, x in batch.items() if x is not None}
    with pytest.raises(ConfigError, match=message):
        check_arrays(batch, config)
