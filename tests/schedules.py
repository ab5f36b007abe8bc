"""Schedules written by hand: products, transfers between their start and their end, and a loop."""

from megajax.xla.hlo.program import Program

DOT = 'f32[16,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}'
FLOPS = 2 * 16 * 32 * 64
ARGUMENTS = 'p: f32[8,16], a: f32[16,64], b: f32[64,32]'
PARAMETERS = """%p = f32[8,16]{1,0} parameter(0)
  %a = f32[16,64]{1,0} parameter(1)
  %b = f32[64,32]{1,0} parameter(2)"""
ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
TRIPS = 'backend_config={"known_trip_count":{"n":"5"}}'
STATE = '(s32[], f32[8,16]{1,0}, f32[16,64]{1,0}, f32[64,32]{1,0})'


def start(name: str) -> str:
    return f'%{name} = f32[8,16]{{1,0}} all-reduce-start(%p), replica_groups={{}}, to_apply=%add'


def done(name: str) -> str:
    return f'%{name}.done = f32[8,16]{{1,0}} all-reduce-done(%{name})'


def product(name: str) -> str:
    return f'%{name} = {DOT}'


def program(*lines: str, before: str = '') -> Program:
    """An entry of these lines; `before` are other computations."""
    body = '\n  '.join(lines)
    return Program(f"""HloModule jit_f, is_scheduled=true

{ADD}
{before}
ENTRY %main ({ARGUMENTS}) -> f32[8,16] {{
  {PARAMETERS}
  {body}
  ROOT %result = f32[8,16]{{1,0}} negate(%p)
}}
""")


def body(*lines: str) -> str:
    """The body and the condition of a loop with these lines."""
    inside = '\n  '.join(lines)
    return f"""%body (state: {STATE}) -> {STATE} {{
  %state = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %p = f32[8,16]{{1,0}} get-tuple-element(%state), index=1
  %a = f32[16,64]{{1,0}} get-tuple-element(%state), index=2
  %b = f32[64,32]{{1,0}} get-tuple-element(%state), index=3
  {inside}
  ROOT %next = {STATE} tuple(%i, %p, %a, %b)
}}

%condition (state: {STATE}) -> pred[] {{
  %state = {STATE} parameter(0)
  ROOT %more = pred[] constant(true)
}}
"""


LOOP = (
    '%zero = s32[] constant(0)',
    f'%first = {STATE} tuple(%zero, %p, %a, %b)',
    f'%loop = {STATE} while(%first), condition=%condition, body=%body, {TRIPS}',
)
