"""Seconds of collectives at the rates of a GPU: on which link, and how much of them is hidden."""

import pytest

from megajax.analysis.inspect.overlap import product_seconds, rates_of, transfer_seconds
from megajax.core.config import load
from megajax.core.hardware.records import hardware, hardware_names
from megajax.core.hardware.targets import GPUS
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.products import Product
from megajax.xla.hlo.program import Program

H100 = hardware('h100')
DOT = 'bf16[4096,4096]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}'
DOT_SECONDS = 2 * 4096**3 / (0.8 * 989.4e12)
BOTH = '(bf16[8192,4096]{1,0}, bf16[4096,4096]{1,0})'
MODEL, DATA = '[2,4]<=[8]', '[4,2]<=[2,4]T(1,0)'
TEXT = """HloModule jit_f, is_scheduled=true

%add (x: bf16[], y: bf16[]) -> bf16[] {{
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}}

ENTRY %main (p: bf16[8192,4096], q: bf16[4096,4096], a: bf16[4096,4096]) -> bf16[4096,4096] {{
  %p = bf16[8192,4096]{{1,0}} parameter(0)
  %q = bf16[4096,4096]{{1,0}} parameter(1)
  %a = bf16[4096,4096]{{1,0}} parameter(2)
  %start = {both} all-reduce-start(%p, %q), replica_groups={groups}, to_apply=%add
  %product = {dot}
  %done = {both} all-reduce-done(%start)
  ROOT %result = bf16[4096,4096]{{1,0}} negate(%product)
}}
"""


@pytest.mark.parametrize(
    ('groups', 'per_host', 'bandwidth'),
    [(MODEL, 8, 370e9), (MODEL, 2, 2 * 48.5e9), (DATA, 8, 370e9), (DATA, 4, 48.5e9)],
)
def test_a_transfer_takes_its_bytes_at_the_rate_of_its_link(groups, per_host, bandwidth):
    program = Program(TEXT.format(groups=groups, dot=DOT, both=BOTH))
    placed = collectives(program, {'data': 2, 'model': 4})
    size = 4 if groups == MODEL else 2
    seconds = transfer_seconds(program, placed, H100, per_host)
    for (on_wire, _), elements in zip(seconds, (8192 * 4096, 4096 * 4096), strict=True):
        assert on_wire == pytest.approx(2 * (size - 1) / size * 2 * elements / bandwidth)


def test_a_transfer_between_hosts_of_one_gpu_needs_no_link_inside_a_host():
    program = Program(TEXT.format(groups=DATA, dot=DOT, both=BOTH))
    placed = collectives(program, {'data': 2, 'model': 4})
    alone = H100.model_copy(update={'inside_host': None})
    assert transfer_seconds(program, placed, alone, 1) == transfer_seconds(program, placed, H100, 1)


def test_arrays_that_xla_joined_share_what_is_hidden_by_their_bytes():
    program = Program(TEXT.format(groups=MODEL, dot=DOT, both=BOTH))
    placed = collectives(program, {'data': 2, 'model': 4})
    (first, hidden), (second, less) = transfer_seconds(program, placed, H100, 8)
    assert first + second > DOT_SECONDS
    assert hidden + less == pytest.approx(DOT_SECONDS)
    assert hidden == pytest.approx(2 * less)


def test_every_gpu_that_a_step_is_compiled_for_has_rates():
    assert {*GPUS} <= {*hardware_names()}
    for target in GPUS:
        gpu = hardware(target)
        rates = rates_of(load('tiny', ['train.dtype=bfloat16']), gpu)
        assert rates.products == gpu.peak_flops['bfloat16'] * gpu.reference.matmul


def test_a_causal_kernel_computes_half_at_its_own_rate_and_fp32_has_its_own_peak():
    full = Product(10**12, 'bf16', is_attention=True)
    assert product_seconds(full, H100) == pytest.approx(1 / (0.5 * 989.4))
    assert product_seconds(full._replace(is_causal=True), H100) == product_seconds(full, H100) / 2
    bf16, f32 = (product_seconds(Product(10**12, dtype), H100) for dtype in ('bf16', 'f32'))
    assert f32 == pytest.approx(2 * bf16)
