"""Norms of queries and keys over all heads compared with numpy, and gains of 1 + w."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import exhaustive, make_config, on_mesh, relative_error

from megajax.core.config import Config, load
from megajax.core.counts.parameters import parameters
from megajax.core.model.attention import Attention
from megajax.core.model.norm import make_norm, norm_queries_and_keys
from megajax.core.model.parameters import Parameters
from megajax.core.parallel.layout import Layout

ROWS, LENGTH = 2, 3


def attention(config: Config) -> Attention:
    parameters = Parameters.of(config.model, Layout.of(config))['layers']['attention']
    return Attention(config.model, parameters, key=jax.random.key(0))


def by_hand(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """Over all that a token has; with a bias, its mean is subtracted first."""
    flat = x.reshape(*x.shape[:2], -1).astype(np.float64)
    flat -= 0 if bias is None else flat.mean(-1, keepdims=True)
    mean_square = (flat**2).mean(-1, keepdims=True)
    normed = flat / np.sqrt(mean_square + eps) * weight.reshape(-1)
    return (normed + (0 if bias is None else bias.reshape(-1))).reshape(x.shape)


@pytest.mark.parametrize(
    ('shards', 'sizes'),
    [
        exhaustive(1, {}),
        (2, {}),
        exhaustive(4, {}),
        exhaustive(2, {'zero_centered_norm': True}),
        exhaustive(2, {'norm': 'layernorm'}),
        (4, {'norm': 'layernorm', 'zero_centered_norm': True}),
    ],
)
def test_the_statistics_are_those_of_all_heads_also_where_devices_share_a_head(
    shards: int, sizes: dict[str, Any]
) -> None:
    config = make_config('olmo2', 1, shards, model=sizes)
    random, model = np.random.default_rng(0), config.model
    shape = model.num_kv_heads, model.queries_per_kv, model.head_dim
    with on_mesh(config):
        module = attention(config)
        for norm in (module.query_norm, module.key_norm):
            for vector in filter(None, (norm.weight, norm.bias)):
                value = random.random(vector.shape, np.float32)
                vector.set_value(jax.device_put(value, vector[...].sharding))
        q = random.normal(0.5, 1, (ROWS, LENGTH, *shape)).astype(np.float32)
        k = random.normal(-2, 9, (ROWS, LENGTH, shape[0], shape[2])).astype(np.float32)
        placed = (jax.device_put(x, module.layout(dims)) for x, dims in ((q, 'RSKGH'), (k, 'RSKH')))
        made = jax.jit(norm_queries_and_keys)(*placed, module.query_norm, module.key_norm)
        for x, norm, result in zip((q, k), (module.query_norm, module.key_norm), made, strict=True):
            gain = np.asarray(norm.weight[...]) + model.zero_centered_norm
            bias = None if norm.bias is None else np.asarray(norm.bias[...])
            expected = by_hand(x, gain, bias, model.norm_eps)
            assert relative_error(np.asarray(result), expected) < 1e-6


def test_scales_of_all_heads_are_sharded_as_the_columns_that_they_scale() -> None:
    for shards, dims in ((2, ('K', None)), (4, (None, 'H'))):
        config = make_config('olmo2', 1, shards)
        with on_mesh(config):
            module = attention(config)
            spec = module.key_norm.weight[...].sharding.spec
        assert tuple(spec) == tuple('model' if dim else None for dim in dims)


@pytest.mark.parametrize('kind', ['rmsnorm', 'layernorm'])
def test_a_zero_centered_norm_multiplies_by_one_plus_its_weight(kind: str) -> None:
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, 4, 64)), jnp.bfloat16)
    w = jnp.asarray(random.normal(0, 0.05, 64), jnp.float32)
    results = []
    for zero_centered, weight in ((True, w), (False, 1 + w)):
        sizes = {'norm': kind, 'qk_norm': False, 'zero_centered_norm': zero_centered}
        config = make_config('olmo2', model=sizes)
        with on_mesh(config):
            norm = make_norm(config.model, Parameters.of(config.model, Layout.of(config))['norm'])
            norm.weight[...] = weight
            results.append(norm(x))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize('qk_norm', [True, 'all'])
def test_zero_centered_weights_of_every_norm_of_the_decoder_begin_at_zero(qk_norm: object) -> None:
    changed = {'norm': 'rmsnorm', 'norm_position': 'both', 'qk_norm': qk_norm}
    model = load('qwen3_vl_2b').model.model_copy(update=changed)
    norms = {
        zero_centered: {
            name: one.value
            for name, one in parameters(
                model.model_copy(update={'zero_centered_norm': zero_centered})
            )
            if name.endswith('norm.weight')
        }
        for zero_centered in (False, True)
    }
    assert {*norms[False].values()} == {1.0}
    in_encoder = {name for name, value in norms[True].items() if value}
    assert in_encoder == {name for name in norms[True] if name.startswith('vision.')} != set()
