"""A permute that hands a device zeros is an error of the audit; what may not run has rows that say
so.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from support import make_config

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import CompiledStep
from megajax.analysis.inspect.report import to_text
from megajax.analysis.inspect.result import Inspection
from megajax.xla.hlo.dump import without_cache

AXES = 'data', 'model'


def inspected(function: Callable[[jax.Array], jax.Array]) -> Inspection:
    """Of a step that is nothing but a function of shards, on 2x4 devices."""
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def run(x: jax.Array) -> jax.Array:
        with jax.named_scope('mlp'):
            return jnp.sin(function(x))

    specs = {'in_specs': jax.P(*AXES), 'out_specs': jax.P(*AXES)}
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs))
    with without_cache():  # whose programs have the source lines of the day they were compiled
        text = mapped.lower(jax.ShapeDtypeStruct((16, 64), jnp.float32)).compile().as_text()
    step = CompiledStep(
        text=text,
        mesh=dict(mesh.shape),
        devices_per_host=8,
        arguments=0,
        temporaries=0,
        outputs=0,
        parameters=[],
        optimizer=[],
        jax_version=jax.__version__,
        seconds=0.0,
    )
    return audit(make_config('gpt', 2, 4), step, 'cpu')


def permuted(*pairs: tuple[int, int]) -> Inspection:
    return inspected(lambda x: jax.lax.ppermute(x, 'model', pairs))


@pytest.mark.parametrize(
    ('pairs', 'rule', 'sentence'),
    [
        (
            ((0, 1), (1, 2), (2, 3)),
            'permute without a source',
            'devices 0, 4 have no source and get zeros',
        ),
        (
            ((2, 2),),
            'permute without a source',
            'devices 0, 1, 3, 4, 5, 7 have no source and get zeros',
        ),
    ],
)
def test_a_permute_that_loses_data_is_an_error_with_its_place(pairs, rule, sentence):
    found = permuted(*pairs)
    [error] = [one for one in found.findings if one.level == 'error']
    assert error.rule == rule
    assert error.message.startswith('1 x of f32[8,16] at ')
    assert error.message.endswith(sentence)
    assert 'mlp/ppermute (' in error.message
    assert f'{__file__}:' in error.message
    assert not found.ok
    assert to_text(found).rstrip().endswith('1 lint error')


def test_a_permute_without_pairs_is_found_once_and_is_no_miscompile_if_it_was_asked_for():
    [error] = [one for one in permuted().findings if one.level == 'error']
    assert error.rule == 'permute without pairs'
    assert error.message.endswith('it has no pairs, so every device gets zeros')


@pytest.mark.parametrize(
    ('pairs', 'axis', 'sent'),
    [([(i, i) for i in range(4)], '', 0), ([(i, 3 - i) for i in range(4)], 'model', 512)],
)
def test_a_permute_that_gives_every_device_a_source_has_a_row_whatever_it_sends(pairs, axis, sent):
    found = permuted(*pairs)
    assert not [one for one in found.findings if one.level == 'error']
    [row] = [row for row in found.rows if row.placed]
    assert (row.site, row.axis, row.wire_bytes) == ('mlp', axis, sent)
    assert [(one.kind, one.array, one.times) for one in row.placed] == [
        ('collective-permute', 'f32[8,16]', 1)
    ]


def test_the_row_of_a_branch_that_may_not_be_taken_says_at_most():
    def branch(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, 'model'), jnp.cos, x)

    found = inspected(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: branch(x), x))
    [row] = [row for row in found.rows if row.placed]
    assert [(one.times, one.at_most) for one in row.placed] == [(3, True)]
    assert [(one.times, one.at_most) for one in found.collectives] == [(3, True)]
    assert 'at most 3 AR f32[8,16]' in to_text(found)


def test_a_loop_of_unknown_length_that_sends_something_is_an_error_with_its_place():
    with pytest.raises(ValueError, match=rf'give a trip_count, .*mlp/while at {__file__}:'):
        inspected(
            lambda x: jax.lax.while_loop(
                lambda x: x.sum() < 1, lambda x: jax.lax.psum(x, 'model'), x
            )
        )
