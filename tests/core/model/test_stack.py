"""The loop over the layers of a model: what its backward pass reads from memory."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from steps import Setting, batch_of
from support import abstract_state, on_mesh

from megajax.core.train.gradients import make_loss_and_gradients


def bytes_of_loops(jaxpr: Any) -> Iterator[int]:
    """What each loop of a program writes for every iteration."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'scan':
            body, length = equation.params['jaxpr'].jaxpr, equation.params['length']
            yield sum(
                x.aval.size * x.aval.dtype.itemsize
                for x, of_one in zip(equation.outvars, body.outvars, strict=True)
                if x.aval.shape == (length, *of_one.aval.shape)  # not carried
            )
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from bytes_of_loops(getattr(value, 'jaxpr', value))


def is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, 'jaxpr', value), 'eqns')


@pytest.mark.parametrize('num_layers', [6, 7])
def test_full_recomputation_saves_the_inputs_of_a_patterns_layers_and_no_weights(
    num_layers: int,
) -> None:
    setting = Setting('windows', 1, 1, recompute='full', num_layers=num_layers)
    config = setting.config
    with on_mesh(config):
        params, batch = abstract_state(config).params, batch_of(setting)
        loss_and_gradients = make_loss_and_gradients(config)
        program = jax.make_jaxpr(loss_and_gradients)(params, batch, jax.random.key(0))
    forward = next(bytes_of_loops(program.jaxpr))
    tokens = config.train.batch_size * config.train.seq_len
    assert forward == 4 * 6 * tokens * config.model.hidden_size
