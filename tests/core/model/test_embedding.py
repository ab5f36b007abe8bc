"""Token embeddings with a scale: where it applies, and in which precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import by_name, graph_of, make_config, on_mesh, random_params

SCALE = 2560**0.5  # which bf16 rounds to 50.5
both_dtypes = pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])


@both_dtypes
def test_the_scale_multiplies_tokens_in_fp32_but_neither_positions_nor_a_tied_head(
    dtype: str,
) -> None:
    config = make_config(model={'embedding_scale': SCALE, 'dropout': 0.0})
    token_BS = np.arange(32).reshape(2, 16)
    with on_mesh(config):
        model = nnx.merge(graph_of(config), random_params(config, std=0.05))
        x_BSD = model.embed(jnp.asarray(token_BS), dtype)
    arrays = {name: np.asarray(x) for name, x in by_name(nnx.state(model)).items()}
    tokens_BSD = arrays['embedding.table'].astype(dtype)[token_BS].astype(np.float32)
    expected = tokens_BSD * np.float32(SCALE) + arrays['position.table'][:16]
    np.testing.assert_array_equal(x_BSD, expected.astype(dtype))
    np.testing.assert_array_equal(model.head_Vd, arrays['embedding.table'])


@both_dtypes
def test_the_gradient_of_the_table_is_scaled_in_fp32(dtype: str) -> None:
    config = make_config('llama', model={'embedding_scale': SCALE})
    with on_mesh(config):
        model = nnx.merge(graph_of(config), random_params(config, std=0.05))
        graph, params = nnx.split(model)

        def total(params: nnx.State) -> jax.Array:
            token_BS = jnp.zeros((1, 1), int)
            return nnx.merge(graph, params).embed(token_BS, dtype).astype(jnp.float32).sum()

        gradient = np.asarray(by_name(jax.jit(jax.grad(total))(params))['embedding.table'])
    np.testing.assert_array_equal(gradient[0], np.full(64, SCALE, np.float32))
    assert not gradient[1:].any()
