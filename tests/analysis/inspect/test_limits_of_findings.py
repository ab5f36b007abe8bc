"""A step with exactly what Megatron has passes, and one with the least more does not."""

import dataclasses

import pytest
from inspect_collectives import reduced
from support import make_config
from vlm import vlm

from megajax.analysis.inspect.audit import _row
from megajax.analysis.inspect.lint import _reduced_twice, _wide
from megajax.analysis.inspect.sites import site_of
from megajax.core.counts.megatron import expected
from megajax.core.counts.parameters import dim_sizes, parameters, shape_of
from megajax.core.counts.vision import vectors
from megajax.xla.hlo.program import Array

CONFIG = make_config('gpt', 1, 2, train={'dtype': 'bfloat16', 'batch_size': 4})
BACKWARD = 'jit(train_step)/transpose(jvp(attention))/dot_general'
X_BSD = 4, 32, 64
WANTED = expected(CONFIG)
ALLOWED = CONFIG.model.num_layers


@pytest.mark.parametrize(('times', 'findings'), [(ALLOWED - 1, 0), (ALLOWED, 0), (ALLOWED + 1, 1)])
def test_one_reduction_of_an_input_gradient_more_is_found(times: int, findings: int) -> None:
    placed = [reduced(BACKWARD, Array('bf16', X_BSD), times=times)]
    found = [*_reduced_twice(CONFIG, placed, WANTED)]
    assert len(found) == findings
    assert all(
        f'reduced {times} times per step, {ALLOWED} in Megatron' in one.message for one in found
    )


@pytest.mark.parametrize(('times', 'findings'), [(2, 0), (3, 1)])
def test_the_gradient_of_a_weight_that_is_shaped_as_the_images_is_no_second_reduction(
    times: int, findings: int
) -> None:
    config = vlm(1, 2, crossed=True)
    weight = next(x for name, x in parameters(config.model) if name == 'vision.merger.down.weight')
    shape = shape_of(weight.dims, dim_sizes(config.model))
    assert vectors(config).dims == shape
    one = dataclasses.replace(
        reduced(BACKWARD, Array('f32', shape), times=times), kind='reduce-scatter'
    )
    assert len([*_reduced_twice(config, [one], expected(config))]) == findings


@pytest.mark.parametrize(('rows', 'verdict'), [(999, 'less'), (1000, 'equal'), (1001, 'MORE')])
def test_a_thousandth_more_on_the_wire_is_more(rows: int, verdict: str) -> None:
    config = make_config('gpt', 1, 2, train={'dtype': 'bfloat16', 'batch_size': 1000})
    wanted = [
        one
        for one in expected(config)
        if one.site.name == 'attention' and one.site.phase == 'backward'
    ]
    one = reduced(BACKWARD, Array('bf16', (rows, *X_BSD[1:])), times=ALLOWED)
    assert _row(site_of(one, config), [one], wanted).verdict == verdict


@pytest.mark.parametrize(
    ('dtype', 'shape', 'axes', 'is_found'),
    [
        ('f32', X_BSD, ('model',), True),
        ('f32', (2, *X_BSD), ('model',), True),
        ('bf16', X_BSD, ('model',), False),
        ('f32', X_BSD, ('data',), False),  # gradients
        ('f32', X_BSD[:2], ('model',), False),  # a number for each token
        ('f32', (4, 32, 8), ('model',), False),  # some for each
        ('f32', (64, 64), ('model',), False),  # a gradient
    ],
)
def test_activations_in_fp32_on_the_wire_are_found(
    dtype: str, shape: tuple[int, ...], axes: tuple[str, ...], is_found: bool
) -> None:
    one = dataclasses.replace(reduced(BACKWARD, Array(dtype, shape), times=1), axes=axes)
    assert bool([*_wide(CONFIG, [one])]) == is_found
    assert not [*_wide(make_config('gpt', 1, 2), [one])]
