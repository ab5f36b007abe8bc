"""What the instructions of a trace compute or send, also those that count as never run."""

from pathlib import Path

import pytest
from analysis.profile.gpu_run import FIRST, PROGRAM, SECOND, write_gpu_run

from megajax.analysis.profile import profile

LOOP = """
%body (state: (f32[8,16], f32[16,64])) -> (f32[8,16], f32[16,64]) {
  %state = (f32[8,16]{1,0}, f32[16,64]{1,0}) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%state), index=0
  %w = f32[16,64]{1,0} get-tuple-element(%state), index=1
  %sent = f32[8,16]{1,0} all-to-all(%x), replica_groups={{0,1}}, dimensions={0}
  %late = f32[8,64]{1,0} dot(%sent, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (f32[8,16]{1,0}, f32[16,64]{1,0}) tuple(%sent, %w)
}

%more (state: (f32[8,16], f32[16,64])) -> pred[] {
  %state = (f32[8,16]{1,0}, f32[16,64]{1,0}) parameter(0)
  ROOT %is_left = pred[] constant(false)
}

ENTRY """
IN_ENTRY = """  %both = (f32[8,16]{1,0}, f32[16,64]{1,0}) tuple(%p, %a)
  %rounds = (f32[8,16]{1,0}, f32[16,64]{1,0}) while(%both), condition=%more, body=%body, \
metadata={op_name="jit(train_step)/later_rounds/while"}
  %reduce = """


def test_later_rounds_of_experts_are_matmuls_and_transfers_if_they_run(tmp_path: Path) -> None:
    program = PROGRAM.replace('ENTRY ', LOOP).replace('  %reduce = ', IN_ENTRY)
    late = [('sent', 70, 80), ('late', 80, 90)]
    devices = [*FIRST, *late], [*SECOND, *late]
    result = profile(write_gpu_run(tmp_path / 'run', [[*devices]], program=program))
    kernels, exposed = result.devices[0].kernels, result.devices[0].exposed
    assert (kernels, exposed) == pytest.approx((4e-5, 3e-5))
    assert [line.what for line in result.products] == ['[16, 64] [64, 32]', '[8, 16] [16, 64]']
    late = result.products[1]
    assert late.flops == 2 * 8 * 16 * 64
    kinds = {line.kind: line.wire_bytes for line in result.collectives}
    assert kinds.keys() == {'all-reduce', 'all-to-all'}
    assert kinds['all-to-all'] > 0
