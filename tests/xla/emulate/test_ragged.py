"""`jax.lax.ragged_all_to_all`, executed for devices that do not have it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from xla.emulate.texts import executed, module, random

import megajax
from megajax.core.hardware.targets import has_compiler
from megajax.xla.emulate.result import GpuRun


def ragged(
    sizes: np.ndarray, groups: list[list[int]], slices: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the operands of an exchange on four devices, and what arrives by its definition.

    `sizes` are the rows of each slice: [sender, rank of the receiver * slices + slice].
    """
    rows, room = sizes.sum(1).max(), 20
    x, out = random(4, rows, 3), random(4, room, 3, seed=1)
    starts, places = np.zeros_like(sizes), np.zeros_like(sizes)
    expected, filled = out.copy(), [1] * 4  # the first row of an output is nobody's
    for group in groups:
        for sender in group:
            begin = np.cumsum(sizes[sender]) - sizes[sender]
            starts[sender] = begin
            for slot, size in enumerate(sizes[sender]):
                receiver = group[slot // slices]
                place = places[sender, slot] = filled[receiver]
                filled[receiver] += size
                sent = x[sender, begin[slot] : begin[slot] + size]
                expected[receiver, place : place + size] = sent
    return [x, out, starts, sizes, places, sizes], expected


@pytest.mark.parametrize(
    ('groups', 'slices'), [([[0, 1, 2, 3]], 1), ([[2, 0], [1, 3]], 1), ([[0, 3], [2, 1]], 2)]
)
def test_a_ragged_exchange_writes_each_slice_where_its_sender_says(
    groups: list[list[int]], slices: int
) -> None:
    count = len(groups[0]) * slices
    sizes = np.random.default_rng(count).integers(0, 4, (4, count), dtype=np.int32)
    operands, expected = ragged(sizes, groups, slices)
    rows, numbers = operands[0].shape[1], f's32[{count}]{{0}}'
    types = f'f32[{rows},3]{{1,0}}', 'f32[20,3]{1,0}', *[numbers] * 4
    lines = [f'%p{place} = {type_} parameter({place})' for place, type_ in enumerate(types)]
    wide = f's64[{count}]{{0}}'
    lines += [f'%n{place} = {wide} convert(%p{place})' for place in range(2, 6)]
    given = '%p0, %p1, %n2, %n3, %n4, %n5'
    listed = ','.join('{' + ','.join(map(str, group)) + '}' for group in groups)
    lines += [
        f'%start = (({types[0]}, {types[1]}, {wide}, {wide}, {wide}, {wide}), {types[1]}) '
        f'ragged-all-to-all-start({given}), channel_id=1, replica_groups={{{listed}}}',
        f'%done = {types[1]} ragged-all-to-all-done(%start)',
    ]
    [made] = executed(module(lines), *operands)
    np.testing.assert_array_equal(made, expected)


@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
def test_a_function_that_sends_ragged_rows_is_compared_with_a_reference_alone() -> None:
    mesh = jax.make_mesh((4,), ('expert',), axis_types=(jax.sharding.AxisType.Auto,))
    sizes = np.random.default_rng(1).integers(0, 4, (4, 4), dtype=np.int32)
    operands, expected = ragged(sizes, [[0, 1, 2, 3]], 1)
    operands[5] = sizes.T
    flat = [x.reshape(-1, *x.shape[2:]) for x in operands]

    def send(*shards: jax.Array) -> jax.Array:
        return jax.lax.ragged_all_to_all(*shards, axis_name='expert')

    def run(reference: object) -> GpuRun:
        spec = jax.P('expert')
        function = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec))
        return megajax.inspect.run(function, *flat, mesh=mesh, reference=reference)

    arrived = jnp.asarray(expected.reshape(-1, 3))
    assert run(lambda *_: arrived).ok
    assert not run(lambda *_: arrived.at[3].add(0.01)).ok
    with pytest.raises(ValueError, match='pass reference='):
        run(None)
