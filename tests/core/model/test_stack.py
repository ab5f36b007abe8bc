"""The loop over the layers of a model: what its backward pass reads from memory."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from steps import Setting, batch_of, loss_and_gradients
from support import abstract_state, assert_close, exhaustive, on_mesh, relative_error, slow

from megajax.core.train.gradients import make_loss_and_gradients


def written_by_loops(jaxpr: Any) -> Iterator[list[Any]]:
    """The arrays that each loop of a program writes, with an entry for every iteration."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'scan':
            body, length = equation.params['jaxpr'].jaxpr, equation.params['length']
            yield [
                x.aval
                for x, of_one in zip(equation.outvars, body.outvars, strict=True)
                if x.aval.shape == (length, *of_one.aval.shape)  # not carried
            ]
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from written_by_loops(getattr(value, 'jaxpr', value))


def is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, 'jaxpr', value), 'eqns')


def written_forward(setting: Setting) -> list[Any]:
    """The arrays that the forward pass's loop over layers saves for the backward pass."""
    with on_mesh(setting.config):
        params, batch = abstract_state(setting.config).params, batch_of(setting)
        loss_and_gradients = make_loss_and_gradients(setting.config)
        program = jax.make_jaxpr(loss_and_gradients)(params, batch, jax.random.key(0))
    return next(written_by_loops(program.jaxpr))


@pytest.mark.parametrize('num_layers', [exhaustive(4), 5])
def test_full_recomputation_saves_the_inputs_of_a_patterns_layers_and_no_weights(
    num_layers: int,
) -> None:
    setting = Setting('sinks', 1, 1, recompute='full', num_layers=num_layers)
    config = setting.config
    tokens = config.train.batch_size * config.train.seq_len
    written = sum(x.size * x.dtype.itemsize for x in written_forward(setting))
    assert written == 4 * 4 * tokens * config.model.hidden_size


@pytest.mark.parametrize(
    ('num_layers', 'recompute'),
    [(4, 'none'), exhaustive(4, 'selective'), exhaustive(5, 'none'), (5, 'selective')],
)
def test_a_loop_over_a_pattern_saves_no_weights(num_layers: int, recompute: str) -> None:
    setting = Setting('sinks', 1, 1, recompute=recompute, num_layers=num_layers)
    with on_mesh(setting.config):
        layers = abstract_state(setting.config).params['layers']
    matrices = {x.shape[1:] for x in jax.tree.leaves(layers) if x.ndim > 2}
    assert matrices
    assert not matrices & {x.shape[1:] for x in written_forward(setting)}


def text_of(setting: Setting) -> str:
    """The step before XLA, as text."""
    config = setting.config
    with on_mesh(config):
        given = abstract_state(config).params, batch_of(setting), jax.random.key(0)
        return jax.jit(make_loss_and_gradients(config)).lower(*given).as_text()


def loops_over_layers(text: str, num_layers: int) -> int:
    """The number of loops with an iteration for each layer; experts have loops of their own."""
    condition = rf'stablehlo\.while.*\n +cond {{\n.* = stablehlo\.constant dense<{num_layers}>'
    return len(re.findall(condition, text))


CONTEXT = Setting('llama', 1, 2, context=2, plain=True, recompute='full')
EXPERTS = Setting('experts', 2, 1, experts=2, num_layers=5, recompute='full')


@pytest.mark.parametrize('setting', [CONTEXT, exhaustive(EXPERTS)], ids=str)
def test_separate_layers_are_no_loop_and_are_recomputed_after_a_barrier(setting: Setting) -> None:
    separate = setting._replace(unroll=True)
    assert not separate.config.overlap.in_order
    in_loop, unrolled = map(text_of, (setting, separate))
    num_layers = setting.config.model.num_layers
    assert loops_over_layers(in_loop, num_layers) == 2  # one in each direction
    assert loops_over_layers(unrolled, num_layers) == 0
    # Without a barrier, XLA would merge a layer with its recomputation.
    barriers = (text.count('stablehlo.optimization_barrier') for text in (unrolled, in_loop))
    assert next(barriers) > next(barriers)  # layers share a function


SEPARATE = [
    slow(CONTEXT),
    exhaustive(Setting('llama', 1, 2, stages=2, microbatches=2, num_layers=4, recompute='full')),
    exhaustive(Setting('llama', 2, 2, 'optimizer', stages=2, microbatches=4, num_layers=8)),
    slow(Setting('llama', 2, 2, model_rows=2, sequence_parallel=True, num_kv_heads=4)),
    exhaustive(
        Setting('windows', 2, 2, 'weights', context=2, seq_len=32, num_layers=5, plain=True)
    ),
]


@pytest.mark.parametrize('setting', SEPARATE, ids=str)
def test_separate_layers_have_the_numbers_of_one_device(setting: Setting) -> None:
    expected_loss, expected = loss_and_gradients(setting.on_one_device._replace(microbatches=1))
    loss, gradients = loss_and_gradients(setting._replace(unroll=True))
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, 1e-5)
