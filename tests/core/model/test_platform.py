"""A single row in 16 bits is multiplied beside rows of zeros, and gives what it gives elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.model.platform import FAST_ROWS, with_fast_rows
from megajax.core.model.product import product
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import make_mesh
from megajax.runtime.generate.sampling import head_logits


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_a_row_alone_is_multiplied_as_it_is_beside_others(dtype: jnp.dtype) -> None:
    random, layout = np.random.default_rng(0), Layout()
    x_BSD, w_DF = (random.normal(size=shape).astype(dtype) for shape in ((4, 1, 64), (64, 96)))

    @jax.jit
    def products(x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = head_logits(x_BSD[:, 0], jnp.asarray(w_DF).T, layout)
        return product('BSD,DF->BSF', x_BSD, jnp.asarray(w_DF), layout, dtype), logits

    with jax.set_mesh(make_mesh()):
        (every, logits), (alone, of_one) = products(x_BSD), products(x_BSD[:1])
    assert alone.shape == (1, 1, 96)
    np.testing.assert_allclose(*(np.float32(y) for y in (alone, every[:1])), rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(of_one, logits[:1], rtol=1e-5, atol=1e-5)


def test_only_a_single_row_in_16_bits_gets_company() -> None:
    with jax.set_mesh(make_mesh()):
        x = jnp.ones((1, 1, 8), jnp.bfloat16)
        assert with_fast_rows(x, 1, rows=1).shape == (1, FAST_ROWS, 8)
        assert with_fast_rows(x, 1, rows=2) is x
        assert with_fast_rows(wide := x.astype(jnp.float32), 1, rows=1) is wide
