"""Attention with a cache is attention to the tokens in the window that are not empty."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import make_config, on_mesh

from megajax.core.parallel.layout import Layout
from megajax.runtime.generate.cache import KeysValues, decode, prefill, write

PROMPT, NEW, SLOTS = 12, 9, 32
FIRST = np.array([0, 7])  # the slots of the first tokens of a long and a short prompt


@pytest.mark.parametrize('window', [None, 1, 5, 11, 12, 15, 40])
def test_a_token_attends_to_the_full_slots_of_its_window(window: int | None) -> None:
    config = make_config('llama', model={'window': window})
    layout, random = Layout.of(config), np.random.default_rng(0)
    q, k, v = (
        random.normal(size=(2, PROMPT + NEW, heads, 8)).astype(np.float32) for heads in (4, 2, 2)
    )
    sinks = random.normal(size=4).astype(np.float32)
    is_empty = random.random((2, SLOTS)) < 0.3
    is_empty[:, PROMPT:] = False
    with on_mesh(config):
        place = functools.partial(jax.device_put, device=layout('B'))
        first_B, empty_BY = place(FIRST), place(is_empty)
        sinks_N = jax.device_put(sinks, layout('N'))
        heads = [
            jax.device_put(x, layout(dims)) for x, dims in ((q, 'BSNH'), (k, 'BSKH'), (v, 'BSKH'))
        ]
        segment_BS = place((np.arange(PROMPT) >= FIRST[:, None]).astype(np.int32))

        @jax.jit
        def read(*prompt: jax.Array) -> KeysValues:
            return prefill(config.model, layout, segment_BS, SLOTS)(*prompt, None)[1]

        @jax.jit
        def one(cache: KeysValues, slot: int, *token: jax.Array) -> tuple[jax.Array, KeysValues]:
            core = decode(config.model, layout, cache, slot, first_B, empty_BY)
            o_B1NH, own = core(*token, sinks_N)
            return o_B1NH, write(config.model, cache, own, slot)

        cache = read(*(x[:, :PROMPT] for x in heads))
        for slot in range(PROMPT, PROMPT + NEW):
            found, cache = one(cache, slot, *(x[:, slot : slot + 1] for x in heads))
            for row, head in np.ndindex(2, 4):
                seen = np.arange(max(FIRST[row], slot + 1 - (window or SLOTS)), slot + 1)
                seen = seen[~is_empty[row, seen]]
                scores = k[row, seen, head // 2] @ q[row, slot, head] * 8**-0.5
                weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(sinks[head]))
                expected = weights @ v[row, seen, head // 2]
                np.testing.assert_allclose(found[row, 0, head], expected, atol=2e-6)


def test_queries_are_scaled_in_fp32_as_in_a_prompt() -> None:
    config = make_config('llama', model={'head_dim': 128})
    layout, scale = Layout.of(config), config.model.query_scale
    # A query whose product with 128**-0.5 is another if the factor is rounded to bf16, whether the
    # compiler then rounds the product or not.
    grid = jnp.arange(1, 2, 2**-7).astype(jnp.bfloat16)
    scaled = (grid.astype(jnp.float32) * scale).astype(jnp.bfloat16)
    unrounded = grid.astype(jnp.float32) * jnp.bfloat16(scale).astype(jnp.float32)
    others = scaled != unrounded.astype(jnp.bfloat16)
    at = int(jnp.argmax(jnp.where(others, jnp.abs(scaled - unrounded), 0)))
    weight = jax.nn.sigmoid(-128 * scaled[at].astype(jnp.float32))  # of the first token
    ones = jnp.ones((2, 2, 4, 128), jnp.bfloat16)
    first = jnp.array([1, 0], jnp.bfloat16)[None, :, None, None]
    with on_mesh(config):
        heads = [
            jax.device_put(x, layout(dims))
            for x, dims in (
                (ones * grid[at], 'BSNH'),
                ((-ones * first)[:, :, :2], 'BSKH'),
                ((ones * first)[:, :, :2], 'BSKH'),
            )
        ]
        segment_BS, first_B = (
            jax.device_put(np.zeros(shape, np.int32), layout('B')) for shape in ((2, 2), 2)
        )

        @jax.jit
        def last(*heads: jax.Array) -> tuple[jax.Array, jax.Array]:
            whole, _ = prefill(config.model, layout, segment_BS, 4)(*heads, None)
            before = [x[:, :1] for x in heads]
            _, cache = prefill(config.model, layout, segment_BS[:, :1], 4)(*before, None)
            core = decode(config.model, layout, cache, jnp.int32(1), first_B)
            one, _ = core(*(x[:, 1:] for x in heads), None)
            return whole[:, 1], one[:, 0]

        for found in last(*heads):
            np.testing.assert_array_equal(found, np.full(found.shape, weight.astype(found.dtype)))
