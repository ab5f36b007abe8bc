"""An array that a loop stores for later is found in its buffer; one that is only read is not."""

import jax
import jax.numpy as jnp
import pytest

from megajax.xla.hlo.loop_residuals import stored_in
from megajax.xla.hlo.program import Program

LENGTH, SIZE = 5, 48


def stacked(keep: bool):
    def layer(x, w):
        w = jnp.sin(w)  # stands for a gathered weight: one instruction makes it
        return x @ w, (w.T if keep else jnp.sum(w))

    return lambda x, ws: jax.lax.scan(layer, x, ws)


@pytest.mark.parametrize('keep', [True, False])
def test_only_what_is_stored_unchanged_is_found(keep):
    text = (
        jax.jit(stacked(keep))
        .lower(jnp.ones((7, SIZE)), jnp.ones((LENGTH, SIZE, SIZE)))
        .compile({'xla_disable_hlo_passes': 'fusion'})
        .as_text()
    )
    program = Program(text)
    buffers = [
        stored_in(program, computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.op_name.endswith('/sin')  # newer compilers wrap it in a fusion
    ]
    assert buffers
    shapes = {buffer.shape for buffer in buffers if buffer is not None}
    assert shapes == ({(LENGTH, SIZE, SIZE)} if keep else set())
