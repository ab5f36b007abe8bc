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


POOL = """HloModule pool

%larger (a: f32[], b: f32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %is_larger = pred[] compare(%a, %b), direction=GE
}

%total (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %sum = f32[] add(%c, %d)
}

ENTRY %main (x: f32[8], y: f32[4], zero: f32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %zero = f32[] parameter(2)
  ROOT %pooled = f32[8]{0} select-and-scatter(%x, %y, %zero), window={size=2 stride=2}, \
select=%larger, scatter=%total
}
"""


def test_a_gradient_of_a_maximum_calls_what_selects_and_what_scatters():
    assert Program(POOL).entry.root.called == ('larger', 'total')
