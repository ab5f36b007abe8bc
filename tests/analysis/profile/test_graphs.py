"""Kernels of a CUDA graph are found by their own names and by the schedule, as a trace of an H200
has them.
"""

from megajax.analysis.profile.graphs import Schedule
from megajax.analysis.profile.trace import Event
from megajax.xla.hlo.program import Program

GRAPH = 'command_buffer_1'
# Two layers: a norm, whose kernel the second layer shares, two products side by side, attention
# and a copy; then a loop, whose body adds and multiplies.
PROGRAM = """HloModule jit_train_step, is_scheduled=true

%norm.1 (a: bf16[8,16]) -> bf16[8,16] {
  %a = bf16[8,16]{1,0} parameter(0), metadata={op_name="layers/{first}"}
  ROOT %n = bf16[8,16]{1,0} negate(%a), metadata={op_name="layers/\\"first\\""}
}
%norm.2 (b: bf16[8,16]) -> bf16[8,16] {
  %b = bf16[8,16]{1,0} parameter(0)
  ROOT %m = bf16[8,16]{1,0} negate(%b)
}
%twice (c: bf16[8,16]) -> bf16[8,16] {
  %c = bf16[8,16]{1,0} parameter(0)
  ROOT %d = bf16[8,16]{1,0} add(%c, %c)
}
%body (x: bf16[8,16]) -> bf16[8,16] {
  %x = bf16[8,16]{1,0} parameter(0)
  %loop_add_fusion = bf16[8,16]{1,0} fusion(%x), kind=kLoop, calls=%twice
  ROOT %call.9 = bf16[8,16]{1,0} custom-call(%loop_add_fusion), custom_call_target="__cublas$gemm"
}
%condition (x: bf16[8,16]) -> pred[] {
  %x = bf16[8,16]{1,0} parameter(0)
  ROOT %true = pred[] constant(true)
}
ENTRY %main (p: bf16[8,16]) -> bf16[8,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  %loop_norm_fusion.1 = bf16[8,16]{1,0} fusion(%p), kind=kLoop, calls=%norm.1
  %call.1 = bf16[8,16]{1,0} custom-call(%loop_norm_fusion.1), custom_call_target="__cublas$gemm"
  %call.2 = bf16[8,16]{1,0} custom-call(%call.1), custom_call_target="__cublas$gemm"
  %heads.1 = bf16[8,16]{1,0} custom-call(%call.2), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %loop_norm_fusion.2 = bf16[8,16]{1,0} fusion(%heads.1), kind=kLoop, calls=%norm.2
  %copy.1 = bf16[8,16]{1,0} copy(%loop_norm_fusion.2)
  %call.3 = bf16[8,16]{1,0} custom-call(%copy.1), custom_call_target="__cublas$gemm"
  ROOT %loop = bf16[8,16]{1,0} while(%call.3), condition=%condition, body=%body
}
"""
LAYERS = [
    ('loop_norm_fusion_1', 'loop_norm_fusion.1'),
    ('Memset 0', 'call.1'),
    ('nvjet_tst_128x128', 'call.1'),
    ('nvjet_tst_256x128', 'call.2'),
    ('Memset 0', 'heads.1'),
    ('void cudnn::fusion::compute_dot_do_o', 'heads.1'),
    ('cudnn_generated_sdpa_bprop', 'heads.1'),
    ('loop_norm_fusion_1', 'loop_norm_fusion.2'),
    ('memcpy128', 'copy.1'),
    ('Memset 0', 'call.3'),
    ('nvjet_tst_128x128', 'call.3'),
]
LOOP = [('loop_add_fusion', 'loop_add_fusion'), ('nvjet_tst_64x64', 'call.9')]
STEP = LAYERS + 3 * LOOP


def events(kernels: list[tuple[str, str]]) -> list[Event]:
    return [
        Event(GRAPH, 'jit_train_step', 2 * place, 2 * place + 1, kernel)
        for place, (kernel, _) in enumerate(kernels)
    ]


def by_time(ran: list[Event]) -> list[str]:
    found = Schedule(Program(PROGRAM)).named(ran)
    return [event.name for event in sorted(found, key=lambda event: event.start)]


def test_every_kernel_of_two_steps_has_the_name_of_its_instruction():
    assert by_time(events(2 * STEP)) == [instruction for _, instruction in 2 * STEP]


def test_what_a_trace_names_keeps_its_name_and_says_where_the_graph_goes_on():
    ran = events(STEP)
    ran[7] = ran[7]._replace(name='loop_norm_fusion.2', kernel='another')
    ran[2] = ran[2]._replace(name='elsewhere', kernel='MemcpyH2D')
    expected = [instruction for _, instruction in STEP]
    expected[1:4] = ['call.1', 'elsewhere', 'call.1']
    assert by_time(ran) == expected


def test_a_kernel_that_fits_no_call_keeps_the_name_of_its_graph():
    strange = [*STEP[:1], ('memcpy128', GRAPH), ('ncclDevKernel_AllReduce', GRAPH), *STEP[1:]]
    assert by_time(events(strange)) == [instruction for _, instruction in strange]
    assert by_time(events([('nvjet_tst_128x128', '')])) == [GRAPH]
