import random
import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import exhaustive

from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.execution_counts import UnknownLoopError
from megajax.xla.hlo.program import Program

SHAPE = (8, 16)
BYTES = 8 * 16 * 4
SIZES = {
    (2, 4): {'data': 2, 'model': 4, 'data+model': 8},
    (4, 2): {'data': 4, 'model': 2, 'data+model': 8},
}


def step(kind: str, axis: str, sizes: dict[str, int]) -> Callable[[jax.Array], jax.Array]:
    """A function that keeps the shape, with one collective that nothing can be joined with or moved
    before.
    """
    names, n = tuple(axis.split('+')), sizes[axis]
    ring = [(i, (i + 1) % n) for i in range(n)]
    send = {
        'all-reduce': lambda x: lax.psum(x, names),
        'all-gather': lambda x: lax.all_gather(x, names).sum(0),
        'reduce-scatter': lambda x: jnp.tile(lax.psum_scatter(x, names, tiled=True), (n, 1)),
        'all-to-all': lambda x: lax.all_to_all(x, names, 0, 0, tiled=True),
        'collective-permute': lambda x: lax.ppermute(x, names, ring),
    }[kind]
    return lambda x: jnp.sin(send(x))


KINDS = 'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute'


def total(found: list[Collective]) -> Counter:
    counts = Counter()
    for one in found:
        counts[one.kind, one.axis] += one.times
    return counts


@pytest.mark.parametrize('mesh', SIZES)
@pytest.mark.parametrize('axis', ['data', 'model', 'data+model'])
@pytest.mark.parametrize('kind', KINDS)
def test_a_collective_comes_back_with_its_axis_shapes_and_the_bytes_of_a_ring(
    kind, axis, mesh, read
):
    [one] = read(step(kind, axis, SIZES[mesh]), mesh=mesh)
    n = SIZES[mesh][axis]
    rows = {'all-gather': 8 * n, 'reduce-scatter': 8 // n}.get(kind, 8)
    sent = {'all-reduce': 2 * (n - 1) / n, 'all-gather': n - 1, 'collective-permute': 1}.get(
        kind, (n - 1) / n
    )
    assert (one.kind, one.axis, one.times, one.at_most) == (kind, axis, 1, False)
    assert (one.operand.bytes, one.result.bytes) == (BYTES, rows * 16 * 4)
    assert one.wire_bytes == sent * BYTES
    assert (one.synchronous, one.overlapped_flops, one.is_scalar) == (True, 0, False)
    assert __file__ in one.source


@pytest.mark.parametrize(('mesh', 'axis'), [((8, 1), 'data'), ((1, 8), 'model')])
def test_an_axis_of_one_device_sends_nothing_and_is_not_named(mesh, axis, read):
    found = read(
        lambda x: lax.psum(
            jnp.sin(lax.psum(x, 'data')) + jnp.cos(lax.psum(x, 'model')), ('data', 'model')
        ),
        mesh=mesh,
    )
    assert {one.axis for one in found if one.wire_bytes} == {axis}
    assert {one.axis for one in found if not one.wire_bytes} <= {''}


def test_groups_within_an_axis_are_along_it_and_send_what_their_own_size_asks(read):
    [one] = read(lambda x: lax.psum(x, 'model', axis_index_groups=[[0, 1], [2, 3]]))
    assert (one.axis, one.wire_bytes) == ('model', BYTES)


def repeat(function: Callable, times: int, how: str) -> Callable:
    match how:
        case 'scan':
            return lambda x: lax.scan(lambda x, _: (function(x), None), x, None, length=times)[0]
        case 'fori_loop':
            return lambda x: lax.fori_loop(0, times, lambda _, x: function(x), x)
        case 'unrolled in part':
            return lambda x: lax.scan(
                lambda x, _: (function(x), None), x, None, length=times, unroll=2
            )[0]
        case 'unrolled':
            return lambda x: lax.scan(
                lambda x, _: (function(x), None), x, None, length=times, unroll=True
            )[0]
        case 'remat':
            return lambda x: lax.scan(
                lambda x, _: (jax.checkpoint(function)(x), None), x, None, length=times
            )[0]
    raise ValueError(how)


LOOPS = 'scan', 'fori_loop', 'unrolled in part', 'unrolled', 'remat'


@pytest.mark.parametrize('how', LOOPS)
def test_a_scan_of_three_in_a_loop_of_five_runs_fifteen_times(how, read):
    psum = step('all-reduce', 'model', SIZES[2, 4])
    found = read(repeat(repeat(psum, 3, 'scan'), 5, how))
    assert total(found) == {('all-reduce', 'model'): 15}
    assert len(found) == {'unrolled in part': 3, 'unrolled': 5}.get(how, 1)


def random_program(
    random: random.Random, sizes: dict[str, int], depth: int = 3
) -> tuple[Callable, Counter]:
    """Steps one after another, some of them loops of steps, and what they send."""
    parts, expected = [], Counter()
    for _ in range(random.randint(1, 3)):
        if depth and random.random() < 0.5:
            times, (inner, counts) = random.randint(2, 5), random_program(random, sizes, depth - 1)
            parts.append(repeat(inner, times, random.choice(LOOPS)))
            expected += Counter({key: times * count for key, count in counts.items()})
        else:
            kind, axis = random.choice(KINDS), random.choice([*sizes])
            parts.append(step(kind, axis, sizes))
            expected[kind, axis] += 1

    def run(x: jax.Array) -> jax.Array:
        for part in parts:
            x = part(x)
        return x

    return run, expected


@pytest.mark.parametrize('seed', [*range(8), *map(exhaustive, range(8, 16))])
def test_of_random_nested_loops_every_run_of_every_collective_is_counted(seed, read):
    source = random.Random(seed)
    mesh = source.choice([*SIZES])
    program, expected = random_program(source, SIZES[mesh])
    found = read(program, mesh=mesh)
    assert total(found) == expected
    assert sum(one.times * one.operand.bytes for one in found) == expected.total() * BYTES


def test_the_gradient_of_a_scan_sends_on_the_way_back_as_often(read):
    def loss(x: jax.Array) -> jax.Array:
        return repeat(step('collective-permute', 'model', SIZES[2, 4]), 6, 'scan')(x).sum()

    assert total(read(jax.grad(loss))) == {('collective-permute', 'model'): 12}


def times(found: list[Collective]) -> dict[tuple[str, str], tuple[int, bool]]:
    return {(one.kind, one.axis): (one.times, one.at_most) for one in found}


def either(predicate: Callable[[jax.Array], jax.Array]) -> Callable:
    """A step that reduces over `model` (more bytes) where the predicate holds, and else over
    `data`.
    """
    reduce, gather = (
        step('all-reduce', 'model', SIZES[2, 4]),
        step('collective-permute', 'data', SIZES[2, 4]),
    )
    return lambda i, x: lax.cond(predicate(i), reduce, gather, x)


PREDICATES = {
    'even': (lambda i: i % 2 == 0, 4),
    'first': (lambda i: i == 0, 1),
    'not the last': (lambda i: i + 1 < 7, 6),
    'of two': (lambda i: (i > 1) & ~(i == 4), 4),
    'of a table': (lambda i: jnp.array([True, False, False, True, True, True, False])[i], 4),
    'of a long table': (
        lambda i: jnp.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7])[2 * i] > 4,
        4,
    ),
    'of a clamped number': (lambda i: jnp.clip(3 * i - 8, 0, 5) == 5, 2),
    'of bits': (lambda i: (i.astype(jnp.uint32) << 1) >> 2 == 1, 2),
    'of a negative remainder': (lambda i: jnp.sign(lax.rem(i - 3, 2)) < 0, 2),
}


@pytest.mark.parametrize('name', PREDICATES)
def test_a_branch_that_hangs_on_the_loops_counter_is_counted_where_it_runs(name, read):
    predicate, expected = PREDICATES[name]
    found = read(lambda x: lax.fori_loop(0, 7, either(predicate), x))
    assert times(found) == {
        ('all-reduce', 'model'): (expected, False),
        ('collective-permute', 'data'): (7 - expected, False),
    }


def test_a_branch_of_a_switch_is_counted_where_it_runs_in_a_scan_in_a_scan(read):
    kinds = 'all-reduce', 'all-gather', 'reduce-scatter'
    branches = [step(kind, 'model', SIZES[2, 4]) for kind in kinds]

    def inner(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return lax.switch(number, branches, x), None

    def outer(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return lax.scan(inner, x, number + jnp.arange(4) % 2)[0], None

    found = read(lambda x: lax.scan(outer, x, jnp.array([0, 1, 1, 5]))[0])  # 5 is the last branch
    assert times(found) == {
        (kind, 'model'): (count, False) for kind, count in zip(kinds, (2, 6, 8), strict=True)
    }


def test_a_loop_as_long_as_the_outer_loops_counter_is_counted(read):
    psum = step('all-reduce', 'model', SIZES[2, 4])
    found = read(
        lambda x: lax.fori_loop(0, 5, lambda i, x: lax.fori_loop(0, i, lambda _, x: psum(x), x), x)
    )
    assert total(found) == {('all-reduce', 'model'): 10}


def test_in_a_loop_too_long_to_walk_the_branch_that_sends_most_counts_as_at_most(read):
    found = read(lambda x: lax.fori_loop(0, 30_000, either(lambda i: i % 2 == 0), x))
    assert times(found) == {
        ('all-reduce', 'model'): (30_000, True),
        ('collective-permute', 'data'): (0, False),
    }


def test_of_branches_that_hang_on_data_the_one_that_sends_most_counts_as_at_most(read):
    found = read(lambda x: lax.fori_loop(0, 3, lambda _, x: either(lambda _: x[0, 0] > 0)(0, x), x))
    assert times(found) == {
        ('all-reduce', 'model'): (3, True),
        ('collective-permute', 'data'): (0, False),
    }


def test_a_loop_of_unknown_length_is_an_error_with_its_place_unless_its_length_is_given(read):
    psum, gather = step('all-reduce', 'model', SIZES[2, 4]), step('all-gather', 'data', SIZES[2, 4])

    def loop(x: jax.Array) -> jax.Array:
        return gather(lax.while_loop(lambda x: x.sum() < 5, repeat(psum, 3, 'scan'), x))

    with pytest.raises(
        UnknownLoopError,
        match=rf'give a trip_count, .*shard_map/while at {re.escape(__file__)}:\d+',
    ):
        read(loop)
    assert times(read(loop, trip_count=6)) == {
        ('all-reduce', 'model'): (18, False),
        ('all-gather', 'data'): (1, False),
    }


def test_loops_of_unknown_length_in_a_scope_can_count_as_not_entered(read):
    psum, gather = step('all-reduce', 'model', SIZES[2, 4]), step('all-gather', 'data', SIZES[2, 4])

    def loops(x: jax.Array) -> jax.Array:
        with jax.named_scope('rare'):
            x = lax.while_loop(lambda x: x.sum() < 5, psum, x)
        return lax.while_loop(lambda x: x.sum() < 5, gather, x)

    assert times(read(loops, skipped='rare', trip_count=6)) == {
        ('all-reduce', 'model'): (0, False),
        ('all-gather', 'data'): (6, False),
    }


def test_a_loop_of_unknown_length_that_sends_nothing_is_no_error(read):
    found = read(lambda x: lax.psum(lax.while_loop(lambda x: x.sum() < 5, jnp.sin, x), 'model'))
    assert total(found) == {('all-reduce', 'model'): 1}


def test_what_the_condition_of_a_loop_sends_is_counted(read):
    def small(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (state[0] < 7) & (lax.psum(state[1], 'data').sum() < jnp.inf)

    def loop(x: jax.Array) -> jax.Array:
        return lax.while_loop(
            small, lambda state: (state[0] + 1, jnp.sin(lax.psum(state[1], 'model'))), (0, x)
        )[1]

    assert total(read(loop, trip_count=7)) == {
        ('all-reduce', 'model'): 7,
        ('all-reduce', 'data'): 8,
    }


def test_arrays_that_one_instruction_sends_are_told_apart(read):
    found = read(lambda x: lax.psum((x, x[:2] * 2, x[:, :3] * 3, x[0, 0]), 'model')[:3])
    assert sorted(one.operand.shape for one in found if not one.is_scalar) == [
        (2, 16),
        (8, 3),
        (8, 16),
    ]
    assert len({one.instruction for one in found}) == 1
    assert sum(one.wire_bytes for one in found if not one.is_scalar) == 1.5 * 4 * (128 + 32 + 24)


def test_an_array_that_its_author_joined_from_two_is_one(read):
    found = read(lambda x: lax.psum(jnp.concatenate([x.ravel(), x[0]]), 'model'))
    assert [one.operand.shape for one in found] == [(144,)]


@pytest.mark.parametrize(
    ('dtype', 'width'), [(jnp.int8, 1), (jnp.bfloat16, 2), (jnp.int32, 4), (jnp.float32, 4)]
)
def test_bytes_are_those_of_the_dtype(dtype, width, read):
    [one] = read(lambda x: lax.all_gather(x, 'model'), dtype=dtype)
    assert one.wire_bytes == 3 * 128 * width


def permutes(name: str, reader: str) -> set[str]:
    """The paths of k and v, which one permute sends on; `reader` is the path of what reads them."""
    square, path = 'f32[8,8]{1,0}', 'metadata={op_name="jit(f)/load/slice"}'
    read = f'metadata={{op_name="{reader}"}}' if reader else 'metadata={}'
    text = f"""HloModule jit_f, is_scheduled=true

ENTRY %main (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {{
  %p = {square} parameter(0)
  %q = {square} parameter(1)
  %k = {square} negate(%p), {path}
  %v = {square} negate(%q), {path}
  %sent = ({square}, {square}) collective-permute(%k, %v), \
source_target_pairs={{{{0,1}},{{1,0}}}}, metadata={{op_name="{name}"}}
  %k.1 = {square} get-tuple-element(%sent), index=0
  %v.1 = {square} get-tuple-element(%sent), index=1
  %s = {square} dot(%k.1, %k.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {read}
  ROOT %o = {square} dot(%s, %v.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {read}
}}
"""
    return {one.op_name for one in collectives(Program(text), {'context': 2})}


def test_a_permute_that_joins_arrays_belongs_to_what_reads_them() -> None:
    """XLA joins those of k and v in a ring, whose operands an earlier pass may have stored."""
    backward = 'jit(f)/transpose(jvp(attention))/dot_general'
    assert permutes('', backward) == {backward}
    assert permutes('', '') == {'jit(f)/load/slice'}
    named = 'jit(f)/(attention/k:attention/v)/ppermute'
    assert permutes(named, backward) == {
        'jit(f)/attention/k/ppermute',
        'jit(f)/attention/v/ppermute',
    }
