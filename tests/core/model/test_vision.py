"""The vision encoder: places and positions of patches, and rotary angles of several numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import make_config, on_mesh

from megajax.core.config import ModelConfig
from megajax.core.counts.vision_parameters import POSITION_STD
from megajax.core.model.parameters import Parameters
from megajax.core.model.rotary import position_frequencies, rotate
from megajax.core.model.vision import Encoder, PatchPosition, numbers_of, places

VISION = {
    'num_layers': 2,
    'hidden_size': 16,
    'num_heads': 2,
    'patch_size': 2,
    'merge_size': 2,
    'positions': 5,
    'max_patches': 24,
}


def model(**sizes: object) -> ModelConfig:
    config = make_config('llama', vision=VISION | sizes, train={'batch_size': 8, 'seq_len': 32})
    return config.model


def test_the_patches_of_a_unit_are_neighbors_and_units_are_in_raster_order() -> None:
    vision = model().vision
    assert vision is not None
    place, is_there = places(jnp.array([[4, 6], [2, 2], [0, 0]]), vision)
    rows = np.array([(0, 0), (0, 1), (1, 0), (1, 1)])
    units = [(row, column) for row in (0, 2) for column in (0, 2, 4)]
    np.testing.assert_array_equal(place[0], np.concatenate([rows + unit for unit in units]))
    np.testing.assert_array_equal(is_there.sum(1), [24, 4, 0])


@pytest.mark.parametrize('grid', [(4, 6), (2, 12), (2, 2)])
def test_positions_are_bilinear_between_those_of_the_table(grid: tuple[int, int]) -> None:
    config = model()
    vision = config.vision
    assert vision is not None
    with on_mesh(make_config('llama')):

        @jax.jit
        def vectors(grid: jax.Array) -> tuple[jax.Array, ...]:
            parameters = Parameters.of_encoder(config)['position']
            position = PatchPosition(parameters, vision, key=jax.random.key(0))
            place, _ = places(grid, vision)
            return position(place, grid), place, position.table[...]

        found, place, table = map(np.asarray, vectors(np.array([grid], np.int32)))
    found, table = found[0, : grid[0] * grid[1]], table.reshape(5, 5, -1)
    at = [np.linspace(0, 4, size) for size in grid]
    for x, (row, column) in zip(found, place[0], strict=False):
        y, z = at[0][row], at[1][column]
        low, left = int(y), int(z)
        high, right = min(low + 1, 4), min(left + 1, 4)
        expected = (
            (1 - (y - low)) * (1 - (z - left)) * table[low, left]
            + (1 - (y - low)) * (z - left) * table[low, right]
            + (y - low) * (1 - (z - left)) * table[high, left]
            + (y - low) * (z - left) * table[high, right]
        )
        np.testing.assert_allclose(x, expected, atol=1e-6)


def test_places_start_as_the_sum_of_a_row_and_a_column() -> None:
    config = model()
    with on_mesh(make_config('llama')):
        parameters = Parameters.of_encoder(config)['position']
        position = PatchPosition(parameters, config.vision, key=jax.random.key(0))
    table = np.asarray(position.table[...]).reshape(5, 5, -1)
    columns = table - table[:, :1]
    np.testing.assert_allclose(columns, np.broadcast_to(columns[:1], columns.shape), atol=1e-6)
    assert table[1:, 1:].std() == pytest.approx(POSITION_STD, rel=0.3)


def encoded(encoder: Encoder, config: ModelConfig, pixels: jax.Array, grid: jax.Array) -> jax.Array:
    place, segment = places(grid, config.vision)
    return encoder(numbers_of(pixels, grid, config.vision), grid, place, segment)


def test_a_patch_sees_its_whole_image_and_nothing_in_the_empty_places_of_its_slot() -> None:
    config = model(deepstack=(0,))
    random = np.random.default_rng(0)
    pixels = random.integers(256, size=(2, 24, 12)).astype(np.uint8)
    grid = jnp.array([[4, 4], [2, 2]])
    with on_mesh(make_config('llama')):
        make = functools.partial(Encoder, config, key=jax.random.key(0))
        encode = jax.jit(lambda pixels, grid: encoded(make(), config, pixels, grid))
        first = encode(pixels, grid)
        # New arrays: a step that was only dispatched may still read the one that it was given.
        padded = pixels.copy()
        padded[0, 16:], padded[1, 4:] = 0, 255
        second = encode(padded, grid)
        other = padded.copy()
        other[0, 12:16] = 0  # the last unit of the first image
        third = encode(other, grid)
    np.testing.assert_array_equal(first[0, :4], second[0, :4])
    np.testing.assert_array_equal(first[1, :1], second[1, :1])
    assert not np.allclose(third[0, 0], second[0, 0])
    assert first.shape == (2, 6, 2, config.hidden_size)


def test_recomputation_keeps_less_for_the_backward_pass() -> None:
    config = model(num_layers=1)
    pixels = jnp.zeros((2, 24, 12), jnp.uint8)
    grid = jnp.array([[4, 4], [2, 2]])

    def kept(recompute: str) -> list[jax.Array]:
        place, segment = places(grid, config.vision)
        graph, params = nnx.split(Encoder(config, key=jax.random.key(0)))
        numbers = numbers_of(pixels, grid, config.vision)

        def encode(params: nnx.State) -> jax.Array:
            return nnx.merge(graph, params)(numbers, grid, place, segment, recompute=recompute)

        return jax.tree.leaves(jax.vjp(encode, params)[1])

    with on_mesh(make_config('llama')):
        none, selective, full = (
            sum(x.size for x in jax.eval_shape(functools.partial(kept, recompute)))
            for recompute in ('none', 'selective', 'full')
        )
    assert full < selective < none


def test_each_pair_turns_with_one_number_of_a_position() -> None:
    config = ModelConfig(
        num_layers=1, hidden_size=64, num_heads=1, vocab_size=8, max_seq_len=8,
        position='mrope', mrope_section=(12, 10, 10), rope_theta=5e6,
    )  # fmt: skip
    number = np.asarray(position_frequencies(config) > 0)
    assert (number.sum(0) == 1).all()
    assert number.sum(1).tolist() == [12, 10, 10]
    # Row and column take every third pair from the second and third on.
    assert number[:, :6].argmax(0).tolist() == [0, 1, 2, 0, 1, 2]


def test_text_turns_as_with_a_single_number() -> None:
    sizes = {'num_layers': 1, 'hidden_size': 64, 'num_heads': 1, 'vocab_size': 8, 'max_seq_len': 8}
    rope = ModelConfig(**sizes, position='rope')
    mrope = ModelConfig(**sizes, position='mrope', mrope_section=(12, 10, 10))
    rotated = jax.jit(rotate, static_argnums=3)
    x = np.random.default_rng(0).normal(size=(1, 5, 1, 64)).astype(np.float32)
    position = np.arange(5)[None] + 3
    alike = np.repeat(position[..., None], 3, axis=-1)
    expected = rotated(x, x, position, rope)
    for one in (position, alike):
        for found, wanted in zip(rotated(x, x, one, mrope), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
