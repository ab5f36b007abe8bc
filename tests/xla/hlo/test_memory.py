"""The bytes that kernels move, of instructions written by hand."""

import pytest
from schedules import product, program, start

from megajax.xla.hlo.kernels import kernels
from megajax.xla.hlo.memory import bytes_moved
from megajax.xla.hlo.program import Program

STACK, LAYER = 8 * 16 * 4, 16 * 4
TEXT = """HloModule jit_f, is_scheduled=true

%read (stack: f32[8,16], x: f32[16], i: s32[]) -> f32[16] {
  %stack = f32[8,16]{1,0} parameter(0)
  %x = f32[16]{0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %slice = f32[1,16]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,16}
  %flat = f32[16]{0} bitcast(%slice)
  ROOT %sum = f32[16]{0} add(%flat, %x)
}

%cast (stack: f32[8,16]) -> bf16[1,16] {
  %stack = f32[8,16]{1,0} parameter(0)
  %low = bf16[8,16]{1,0} convert(%stack)
  ROOT %layer = bf16[1,16]{1,0} slice(%low), slice={[2:3], [0:16]}
}

%narrow (x: f32[16]) -> bf16[1,16] {
  %x = f32[16]{0} parameter(0)
  %low = bf16[16]{0} convert(%x)
  ROOT %row = bf16[1,16]{1,0} bitcast(%low)
}

%write (stack: f32[8,16], x: f32[16], i: s32[]) -> f32[8,16] {
  %stack = f32[8,16]{1,0} parameter(0)
  %x = f32[16]{0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,16]{1,0} bitcast(%x)
  ROOT %new = f32[8,16]{1,0} dynamic-update-slice(%stack, %row, %i, %zero)
}

%unpack (packed: s4[8,16]) -> s8[1,16] {
  %packed = s4[8,16]{1,0} parameter(0)
  %row = s4[1,16]{1,0} slice(%packed), slice={[2:3], [0:16]}
  ROOT %wide = s8[1,16]{1,0} convert(%row)
}

ENTRY %main (s: f32[8,16], x: f32[16], i: s32[]) -> f32[8,16] {
  %s = f32[8,16]{1,0} parameter(0)
  %x = f32[16]{0} parameter(1)
  %i = s32[] parameter(2)
  %loaded = f32[16]{0} fusion(%s, %x, %i), kind=kLoop, calls=%read
  %cast_layer = bf16[1,16]{1,0} fusion(%s), kind=kLoop, calls=%cast
  %narrowed = bf16[1,16]{1,0} fusion(%x), kind=kLoop, calls=%narrow
  %four_bits = s4[8,16]{1,0} constant({...})
  %unpacked = s8[1,16]{1,0} fusion(%four_bits), kind=kLoop, calls=%unpack
  %copying = (f32[16]{0}, f32[16]{0}, u32[]) copy-start(%x)
  %copied = f32[16]{0} copy-done(%copying)
  %doubled = f32[16]{0} add(%loaded, %loaded)
  %called = (f32[16]{0}, s8[64]{0}) custom-call(%doubled), custom_call_target="library"
  %result = f32[16]{0} get-tuple-element(%called), index=0
  ROOT %stored = f32[8,16]{1,0} fusion(%s, %result, %i), kind=kLoop, calls=%write
}
"""


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('loaded', 3 * LAYER + 4),  # the slice, x, the index, and the result
        ('cast_layer', LAYER + LAYER // 2),  # a cast does not read what is sliced off after it
        ('narrowed', LAYER + LAYER // 2),
        ('unpacked', 16 // 2 + 16),
        ('copying', 2 * LAYER),
        ('doubled', 3 * LAYER),
        ('called', 2 * LAYER),  # without the workspace
        ('stored', 2 * LAYER + 4),  # the stack is changed in place
    ],
)
def test_a_kernel_moves_what_it_reads_and_writes(name: str, expected: int) -> None:
    program = Program(TEXT)
    assert bytes_moved(program, program.entry, program.entry.by_name[name]) == expected


def test_products_and_transfers_do_not_count_among_the_others() -> None:
    plain = program()
    more = program(product('c'), start('sent'), '%late = f32[8,16]{1,0} all-reduce-done(%sent)')
    result = 2 * 8 * 16 * 4  # `%result` reads p and writes as much
    for one in (plain, more):
        assert sum(each.times * each.bytes for each in kernels(one) if not each.products) == result
