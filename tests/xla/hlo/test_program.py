"""Texts of compiled modules as records."""

import jax.numpy as jnp
import pytest

from megajax.xla.hlo.program import Program

FLOATS = [
    jnp.dtype(getattr(jnp, name))
    for name in dir(jnp)
    if name.startswith(('float8_', 'float4_', 'float16', 'float32', 'float64', 'bfloat16'))
]


@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_arrays_of_every_float_of_jax_have_their_size(dtype):
    name = dtype.name.replace('bfloat', 'bf').replace('float', 'f').replace('_', '')
    text = f'ROOT %p = {name}[4,64]{{1,0}} parameter(0)'
    program = Program(f'HloModule f\n\nENTRY %main () -> f32[] {{\n  {text}\n}}\n')
    bits = 4 if 'float4' in dtype.name else 8 * dtype.itemsize
    assert program.entry.root.results[0].bytes == 4 * 64 * bits // 8
