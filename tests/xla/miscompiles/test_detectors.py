"""Each detector fires on a text that has its fault and is silent on one that has not; the texts are
written by hand.
"""

import jax
import jax.numpy as jnp
import pytest

import megajax
from megajax.analysis.inspect import known_miscompiles
from megajax.xla.hlo.errors import HloError
from megajax.xla.miscompiles import REGISTER, ask, confirmed, detect
from megajax.xla.miscompiles.dense_ragged_dot import DENSE_RAGGED_DOT
from megajax.xla.miscompiles.double_matmul import DOUBLE_MATMUL
from megajax.xla.miscompiles.empty_permute import EMPTY_PERMUTE
from megajax.xla.miscompiles.entry import Miscompile
from megajax.xla.miscompiles.lost_indices import LOST_INDICES
from megajax.xla.miscompiles.misplaced_bias import MISPLACED_BIAS
from megajax.xla.miscompiles.scaled_bias import SCALED_BIAS
from megajax.xla.miscompiles.sliced_scatter import SLICED_SCATTER
from megajax.xla.miscompiles.small_dot import SMALL_DOT
from megajax.xla.miscompiles.split_cycles import SPLIT_CYCLES

from . import texts

DOUBLE = texts.small_dot(16_385, 3)  # of fp64 it is too much, of fp32 not
# the sum over all partitions of the only replica
SUMMED = texts.scatter('{{0}}').replace('HloModule m', 'HloModule m, num_partitions=4')
PRODUCTS = texts.products('layers/dot')
REPEATED = 'f32[2,8,4]{2,1,0} broadcast(%x), dimensions={1,2}'
IN_RANGE = 'compare(%number, %end), direction=LT'
CONVERTED = '%id = u32[] partition-id()', '%n = s32[] partition-id()\n  %id = u32[] convert(%n)'
WRONG = [
    (DENSE_RAGGED_DOT, texts.masked(REPEATED, IN_RANGE)),
    (EMPTY_PERMUTE, texts.permute('')),
    (SCALED_BIAS, texts.product(1.5, 'BIAS')),
    (SCALED_BIAS, texts.product(1.5, 'BIAS_GELU_AUX')),
    (MISPLACED_BIAS, texts.product(1, 'BIAS', rows=8)),
    (MISPLACED_BIAS, texts.product(1, 'BIAS', rows=16, columns=16, starts=True)),
    (SPLIT_CYCLES, texts.ring('{1,0},{3,2}', '{0,1},{2,3}', 2)),
    (SPLIT_CYCLES, texts.ring('{1,0},{3,2}', '{0,1},{2,3}', 2).replace(*CONVERTED)),
    (DOUBLE_MATMUL, texts.products('layers/dot')),
    (DOUBLE_MATMUL, texts.power_iteration('%x')),
    (DOUBLE_MATMUL, texts.power_iteration('%again')),
    (SLICED_SCATTER, texts.scatter('{{0,2},{1,3}}')),
    (SLICED_SCATTER, SUMMED.replace('use_global_device_ids=true, ', '')),
    (SMALL_DOT, texts.small_dot(32_769, 3)),
    (SMALL_DOT, texts.small_dot(40_000, 2)),
    (SMALL_DOT, DOUBLE.replace('f32', 'f64')),
    (LOST_INDICES, texts.top_k('zeros')),
    (LOST_INDICES, texts.top_k('zeros').replace('[4,2]', '[4,1]')),
]
RIGHT = [
    texts.masked('f32[2,8,4]{2,1,0} reshape(%w)', IN_RANGE),  # no row is repeated
    texts.masked(REPEATED, 'compare(%number, %segment), direction=LT', kept='%zeros'),
    texts.masked(REPEATED, 'compare(%segment, %end), direction=EQ'),  # a mask of segments
    texts.masked(REPEATED, IN_RANGE).replace('constant(0)', 'constant(1)'),
    DOUBLE,
    texts.permute('{0,0},{1,1}'),
    texts.permute('').replace('/add_any', '/ppermute'),  # the function's own
    texts.product(1.5, 'DEFAULT', rows=8),
    texts.product(1, 'BIAS'),
    texts.product(1, 'BIAS', rows=8, columns=16, starts=True),
    texts.product(1, 'BIAS').replace('(f32[4,8]{1,0}, s8', '(f32[8]{0}, s8'),  # a vector
    texts.ring('{1,0}', '{0,1}', 0),
    texts.ring('{1,0},{3,2}', '{0,1},{2,3},{1,0}', 2),
    texts.products('rematted_computation/layers/dot'),
    texts.scatter('{{0,1},{2,3}}'),
    texts.small_dot(32_768, 3),
    texts.small_dot(40_000, 64),
    texts.scalar_dot(),
    texts.small_dot(40_000, 4),
    texts.small_dot(40_000, 1),
    DOUBLE.replace('f32', 'f64').replace('16385', '16384'),
    texts.small_dot(40_000, 3).replace('reduce(%squares', 'reduce(%unrelated'),
    texts.products('layers/other'),
    texts.power_iteration('%updated'),
    PRODUCTS.replace('(%all, %i, %null, %null)', '(%all, %null, %i, %null)'),
    PRODUCTS.replace('fusion(%all, %i, %x)', 'fusion(%all, %i, %other)'),
    texts.ring('{1,0},{3,2}', '{0,1},{2,3}', 2).replace('direction=EQ', 'direction=NE'),
    texts.top_k('zeros').replace('/top_k', '/fill'),
    texts.scatter('{{0,2},{1,3}}').replace('{0, 0, 32, 32}', '{...}'),
    texts.top_k('sorted'),
]


@pytest.mark.parametrize(('entry', 'text'), WRONG, ids=lambda value: getattr(value, 'name', ''))
def test_a_text_that_has_a_fault_shows_it_and_no_other(entry: Miscompile, text: str) -> None:
    findings = detect(text)
    assert [finding.entry for finding in findings] == [entry]


@pytest.mark.parametrize('text', RIGHT, ids=range(len(RIGHT)))
def test_a_right_text_shows_none(text: str) -> None:
    assert detect(text) == []


def test_a_finding_names_the_instruction_path_source_line_upstream_issue_and_fix() -> None:
    (line,) = known_miscompiles(texts.permute(''))
    assert line.startswith('permute at jit(f)/add_any (model.py:7): ')
    assert 'openxla/xla#45218' in line
    assert 'xla_disable_hlo_passes=all-gather-to-collective-permute-simplifier' in line


def test_an_element_of_a_tuple_in_a_dump_is_read_as_its_own_instruction() -> None:
    """jax 0.12's XLA dumps `%tuple#1` in place of a get-tuple-element."""
    element = '%data = f32[4]{0} get-tuple-element(%done), index=0\n  '
    text = texts.ring('{1,0},{3,2}', '{0,1},{2,3}', 2)
    assert element in text
    short = text.replace(element, '').replace('%data', '%done#0')
    if jax.__version_info__ >= (0, 12):
        assert [SPLIT_CYCLES.source in line for line in known_miscompiles(short)] == [True]
    else:
        with pytest.raises(HloError, match='use the version of jax that wrote the text'):
            known_miscompiles(short)


def test_a_permute_without_pairs_and_a_top_k_of_one_element_are_right_if_asked_for() -> None:
    mesh = jax.make_mesh((1,), ('stage',))
    x = jnp.ones((8, 1), device=jax.NamedSharding(mesh, jax.P('stage')))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P('stage'), out_specs=jax.P('stage'))
    def passed_on(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, 'stage', [])

    for function in passed_on, jax.jit(lambda x: jax.lax.top_k(x, 1)):
        compiled = function.lower(x).compile()
        assert detect(compiled.as_text() or '') == []


@pytest.mark.parametrize('count', [1, 8])
def test_a_ragged_dot_on_cpus_and_each_of_its_gradients_repeat_the_rows_for_each_expert(
    count: int,
) -> None:
    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.square(jax.lax.ragged_dot(x, w, sizes)).sum()

    arrays = jnp.ones((64, 32)), jnp.ones((count, 32, 16)), jnp.full(count, 64 // count)
    lines = known_miscompiles(jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile())
    assert len(lines) == (3 if count > 1 else 0)
    assert all(f'{count} times the FLOPs' in line for line in lines)


def test_what_a_right_program_shows_too_counts_only_if_the_compiler_has_the_fault() -> None:
    text, faults = texts.small_dot(40_000, 3), int(ask(SMALL_DOT, 'cpu').is_faulty is not False)
    assert len(detect(text)) == 1
    assert len(known_miscompiles(text)) == len(confirmed(detect(text), 'cpu')) == faults
    rows = jax.ShapeDtypeStruct((40_000, 3), jnp.float32)
    mesh = jax.make_mesh((1,), ('x',))
    squares = jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))
    assert len(megajax.inspect(squares, rows, mesh=mesh).known_miscompiles) <= faults
    biased = texts.product(1.5, 'BIAS')
    assert len(known_miscompiles(biased)) == int(ask(SCALED_BIAS, 'h100').is_faulty is not False)


def test_a_compiled_function_is_read_as_its_text_is() -> None:
    compiled = jax.jit(jnp.sin).lower(jnp.ones(8)).compile()
    assert known_miscompiles(compiled) == known_miscompiles(compiled.as_text()) == []


def test_every_entry_has_a_name_of_its_own_a_source_and_a_fix() -> None:
    assert len({entry.name for entry in REGISTER}) == len(REGISTER)
    for entry in REGISTER:
        assert entry.source
        assert entry.remedy
        assert bool(entry.affected_keys) == (entry is EMPTY_PERMUTE)
