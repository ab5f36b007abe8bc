"""A permute that hands a device zeros is an error of the audit, and has a row even where it sends nothing."""

import jax
import jax.numpy as jnp
import pytest
from support import make_config

from megajax.inspect.audit import audit
from megajax.inspect.compile import CompiledStep
from megajax.inspect.report import to_text
from megajax.inspect.result import Inspection

AXES = 'data', 'model'


def inspected(*pairs: tuple[int, int]) -> Inspection:
    """Of a step that is nothing but a permute over `model`, on 2x4 devices."""
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def send(x: jax.Array) -> jax.Array:
        with jax.named_scope('mlp'):
            return jnp.sin(jax.lax.ppermute(x, 'model', pairs))

    function = jax.shard_map(send, mesh=mesh, in_specs=jax.P(*AXES), out_specs=jax.P(*AXES), check_vma=False)
    text = jax.jit(function).lower(jax.ShapeDtypeStruct((16, 64), jnp.float32)).compile().as_text()
    memory = {'arguments': 0, 'temporaries': 0, 'outputs': 0, 'parameters': [], 'optimizer': []}
    step = CompiledStep(text=text, mesh=dict(mesh.shape), devices_per_host=8, jax_version=jax.__version__, seconds=0.0, **memory)
    return audit(make_config('gpt', 2, 4), step, 'cpu')


@pytest.mark.parametrize(
    ('pairs', 'rule', 'sentence'),
    [
        ((), 'permute without pairs', 'it has no pairs, so every device gets zeros'),
        (((0, 1), (1, 2), (2, 3)), 'permute without a source', 'devices 0, 4 have no source and get zeros'),
        (((2, 2),), 'permute without a source', 'devices 0, 1, 3, 4, 5, 7 have no source and get zeros'),
    ],
)
def test_a_permute_that_loses_data_is_an_error_with_its_place(pairs, rule, sentence):
    found = inspected(*pairs)
    [error] = [one for one in found.findings if one.level == 'error']
    assert error.rule == rule
    assert error.message.startswith('1 x of f32[8,16] at ')
    assert error.message.endswith(sentence)
    assert 'mlp/ppermute (' in error.message
    assert f'{__file__}:' in error.message
    assert not found.ok
    assert '1 lint errors' in to_text(found)


@pytest.mark.parametrize(('pairs', 'axis', 'sent'), [([(i, i) for i in range(4)], '', 0), ([(i, 3 - i) for i in range(4)], 'model', 512)])
def test_a_permute_that_gives_every_device_a_source_has_a_row_whatever_it_sends(pairs, axis, sent):
    found = inspected(*pairs)
    assert not [one for one in found.findings if one.level == 'error']
    [row] = [row for row in found.rows if row.placed]
    assert (row.site, row.axis, row.wire_bytes) == ('mlp', axis, sent)
    assert [(one.kind, one.array, one.times) for one in row.placed] == [('collective-permute', 'f32[8,16]', 1)]
