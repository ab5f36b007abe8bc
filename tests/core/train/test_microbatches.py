"""The weights of a batch's tokens, and the arrays that it needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from support import make_config, on_mesh

from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import place_batch
from megajax.core.train.microbatches import with_weights


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
