"""A weight that is gathered whole, in the layers' loop or outside, is a finding."""

import dataclasses
from types import SimpleNamespace

import pytest
from inspect_collectives import reduced
from support import make_config

from megajax.analysis.inspect.lint import _gathered_weights
from megajax.core.parallel.placements import Placement
from megajax.xla.hlo.program import Array

PARAMETERS = [
    Placement(name=name, shape=shape, spec=axes, bytes_per_device=0)
    for name, shape, axes in [
        ('layers.mlp.up.weight', (3, 64, 256), (None, None, 'model')),
        ('embedding.table', (1024, 64), (('row', 'model'), None)),
        ('norm.weight', (48,), (None,)),
    ]
]


@pytest.mark.parametrize(
    ('shape', 'name'),
    [
        ((3, 64, 256), 'layers.mlp.up.weight'),
        ((64, 256), 'layers.mlp.up.weight'),
        ((256, 64), 'layers.mlp.up.weight'),
        ((1024, 64), 'embedding.table'),
        ((64,), None),
        ((48,), None),
        ((8, 32, 64), None),
    ],
)
def test_it_is_named_whatever_its_layout_and_nothing_else_is(
    shape: tuple[int, ...], name: str | None
) -> None:
    array = Array('bf16', shape)
    gather = dataclasses.replace(
        reduced('layers/mlp', array),
        kind='all-gather',
        operand=Array('bf16', (shape[0] // 2, *shape[1:])),
    )
    compiled = SimpleNamespace(parameters=PARAMETERS)
    found = [*_gathered_weights(make_config('gpt', 2, 4), compiled, [gather])]
    assert [name in one.message for one in found] == ([True] if name else [])


@pytest.mark.parametrize('rung', ['optimizer', 'gradients', 'weights'])
def test_what_zero_gathers_over_data_is_none(rung: str) -> None:
    whole = Array('bf16', (64, 256))
    gather = dataclasses.replace(
        reduced('layers/mlp', whole),
        kind='all-gather',
        axes=('data',),
        operand=Array('bf16', (32, 256)),
        result=whole,
    )
    compiled = SimpleNamespace(parameters=PARAMETERS)
    config = make_config('gpt', 2, 4, optim={'shard': rung})
    assert not [*_gathered_weights(config, compiled, [gather])]
