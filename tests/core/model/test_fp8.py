"""A product in fp8 is that of rounded operands, and counts the exponents of what it multiplies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import Setting
from support import on_mesh, random_params, relative_error, slow

from megajax.core.model import fp8
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import make_mesh
from megajax.core.train.feed import abstract_batch
from megajax.core.train.gradients import make_gradients

FORMATS = pytest.mark.parametrize('form', [fp8.E4M3, fp8.E5M2], ids=['e4m3', 'e5m2'])


@FORMATS
def test_what_is_beyond_the_largest_number_becomes_that(form: fp8.Format) -> None:
    largest = float(jnp.finfo(form.dtype).max)
    x = jnp.array([1.0, largest, 2 * largest, -3 * largest])
    rounded = fp8.quantize(x, jnp.float32(1), form).astype(jnp.float32)
    np.testing.assert_array_equal(rounded, [1, largest, largest, -largest])


@FORMATS
def test_what_is_not_finite_is_not_lost(form: fp8.Format) -> None:
    x = jnp.array([np.inf, -np.inf, np.nan])
    assert np.isnan(fp8.quantize(x, jnp.float32(1), form).astype(jnp.float32)).all()


@FORMATS
def test_a_scale_moves_a_tensor_into_the_range_of_its_format(form: fp8.Format) -> None:
    x = 1e-9 * jax.random.normal(jax.random.key(0), (1000,))
    scale = jnp.ldexp(jnp.float32(1), form.top - fp8.exponent(jnp.max(jnp.abs(x))))
    restored = fp8.divided(fp8.quantize(x, scale, form).astype(jnp.float32), scale)
    half_of_the_last_bit = float(jnp.finfo(form.dtype).eps) / 2
    is_normal = np.abs(x) >= float(jnp.finfo(form.dtype).smallest_normal) / float(scale)
    assert is_normal.mean() > 0.98
    errors = np.abs(restored - x)[is_normal] / np.abs(x)[is_normal]
    assert errors.max() <= half_of_the_last_bit


def test_exponents_are_those_of_numpy() -> None:
    x = np.array([1.0, 1.99, 2.0, 0.5, 3e-20, 448.0], np.float32)
    np.testing.assert_array_equal(fp8.exponent(jnp.array(x)), np.frexp(x)[1] - 1)
    assert fp8.place(jnp.float32(0)) == -1
    assert fp8.place(jnp.float32(np.inf)) == fp8.place(jnp.float32(np.nan)) == 127


def count(x: jax.Array, scale: float) -> jax.Array:
    """The counts of a tensor that is rounded with a scale, on one device."""
    with jax.set_mesh(make_mesh()):
        narrow = fp8.quantize(x, jnp.float32(scale), fp8.E4M3)
        return fp8.count(narrow, scale, Layout())


def test_the_count_of_a_tensor_is_at_the_exponent_of_its_largest_number() -> None:
    x = jnp.array([[3.0, -40.0], [0.0, 7.0]])
    counts = count(x, scale=8.0)
    assert counts.sum() == counts[5 - fp8.FIRST_EXPONENT] == 1  # 40 is between 2^5 and 2^6


def test_a_number_that_was_cut_is_counted_as_larger_than_its_scale_expects() -> None:
    counts = count(jnp.array([1000.0]), scale=2.0**fp8.E4M3.top)  # for numbers below 2
    assert np.flatnonzero(counts) + fp8.FIRST_EXPONENT == 2


@pytest.mark.parametrize(
    'setting',
    [
        Setting('llama', 2, 2, sequence_parallel=True, dtype='fp8'),
        slow(Setting('gpt', 2, 2, sequence_parallel=True, dtype='fp8', shard='weights')),
        slow(Setting('llama', 2, 2, dtype='fp8', overlap='batch_split', unroll=True)),
    ],
    ids=str,
)
def test_each_product_of_a_layer_rounds_its_three_operands_once(setting: Setting) -> None:
    config = setting.config
    with on_mesh(config):
        params = random_params(config, std=0.05)
        scales = jnp.ones((2, 4, 3))
        given = params, abstract_batch(config), jax.random.key(0), None, scales
        text = jax.jit(make_gradients(config)).lower(*given).as_text()
    converts = [line for line in text.splitlines() if 'stablehlo.convert' in line]
    made = {
        form: sum(f'-> tensor<{form}' in line.replace(dims_of(line), '') for line in converts)
        for form in ('f8E4M3FN', 'f8E5M2')
    }
    # Weights are rounded once a step, for all layers at once; what a layer multiplies in its
    # passes, in the body of a loop that is written once or for each part of each layer.
    copies = 4 if setting.unroll else 1
    assert made == {'f8E4M3FN': 4 + 4 * copies, 'f8E5M2': 4 * copies}


def dims_of(line: str) -> str:
    """The dims of the type that a line of StableHLO converts to, such as `2x16x64x`."""
    result = line.rsplit('-> tensor<', 1)[-1]
    return result[: max(result.rfind('x') + 1, 0)]


def test_products_are_off_by_the_rounding_of_their_operands() -> None:
    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, (256, 256)) for key in keys)
    scales = [jnp.ldexp(jnp.float32(1), 6 - fp8.exponent(jnp.max(jnp.abs(y)))) for y in (x, w)]
    narrow = [fp8.quantize(y, s, fp8.E4M3) for y, s in zip((x, w), scales, strict=True)]
    exact, rounded = x @ w, narrow[0].astype(jnp.float32) @ narrow[1].astype(jnp.float32)
    error = fp8.divided(rounded, scales[0] * scales[1]) - exact
    # Each factor is off by at most 1/16, 1/28 in the root mean square; errors of both add up.
    assert 0.01 < float(jnp.std(error) / jnp.std(exact)) < 0.06
    assert relative_error(rounded / (scales[0] * scales[1]), exact) < 0.06
