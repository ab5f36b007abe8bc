"""Where an array goes is told by the path of the product that reads it, also through fusions."""

import pytest

from megajax.xla.hlo.op_paths import destination, origin, paths
from megajax.xla.hlo.program import Program

DOT = 'f32[8,32]{1,0} dot(%read, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}'


LAST = f'ROOT %dot = {DOT}, metadata={{op_name="jit(f)/mlp/dot_general"}}'


def program(between: str, last: str = LAST) -> Program:
    """A gather whose result a dot reads after `between` has handed it on."""
    return Program(f"""HloModule jit_f, is_scheduled=true

%transposed (inside: f32[16,8]) -> f32[8,16] {{
  %inside = f32[16,8]{{1,0}} parameter(0)
  ROOT %turned = f32[8,16]{{1,0}} transpose(%inside), dimensions={{1,0}}
}}

ENTRY %main (p: f32[4,8], w: f32[16,32]) -> f32[8,32] {{
  %p = f32[4,8]{{1,0}} parameter(0)
  %w = f32[16,32]{{1,0}} parameter(1)
  %gather = f32[16,8]{{1,0}} all-gather(%p), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
  %kept = f32[1,16,8]{{2,1,0}} reshape(%gather), \
metadata={{op_name="jit(f)/layers/while/body/dynamic_update_slice"}}
  %read = f32[8,16]{{1,0}} {between}
  {last}
}}
""")


@pytest.mark.parametrize(
    'between',
    [
        'fusion(%gather), kind=kLoop, calls=%transposed',
        (
            'fusion(%gather), kind=kLoop, calls=%transposed, '
            'metadata={op_name="jit(f)/attention/transpose"}'
        ),
        'transpose(%gather), dimensions={1,0}',
        'opt-barrier(%gather), metadata={op_name="jit(f)/optimization_barrier"}',
    ],
    ids=['fusion', 'fusion of another site', 'transpose', 'barrier'],
)
def test_the_product_behind_what_hands_an_array_on_is_its_destination(between):
    text = program(between)
    assert (
        destination(text, text.entry, text.entry.by_name['gather'], 0) == 'jit(f)/mlp/dot_general'
    )


def test_the_first_of_two_products_is_the_destination_also_behind_a_transpose():
    """As with a recomputed array: the weight gradient reads it later, and without a transpose."""
    path = 'jit(f)/rematted_computation/mlp/dot_general'
    later = DOT.replace('%read', '%same').replace('={1}', '={0}', 1)
    text = program(
        'fusion(%gather), kind=kLoop, calls=%transposed',
        f'%same = f32[16,8]{{1,0}} bitcast(%gather)\n'
        f'  %flat = f32[8,16]{{1,0}} bitcast(%read)\n'
        f'  %dot = {DOT.replace("%read", "%flat")}, metadata={{op_name="{path}"}}\n'
        f'  ROOT %later = {later}, metadata={{op_name="jit(f)/mlp/dot_general"}}',
    )
    assert destination(text, text.entry, text.entry.by_name['gather'], 0) == path


def test_without_a_product_the_first_reader_is_its_destination():
    text = program('sine(%gather), metadata={op_name="jit(f)/norm/sin"}')
    assert destination(text, text.entry, text.entry.by_name['gather'], 0) == 'jit(f)/norm/sin'


def test_a_reader_that_jax_names_after_a_call_without_a_name_says_nothing():
    text = program('sine(%gather), metadata={op_name="jit(f)/layers/while/body/jit"}')
    assert destination(text, text.entry, text.entry.by_name['gather'], 0) == ''


def test_a_reader_is_found_however_many_ways_lead_to_it():
    """Each of 60 sums doubles the ways, of which there are 2^60."""
    square = 'f32[8,8]{1,0}'
    sums = [
        f'%left{i} = {square} copy(%sum{i})\n  %right{i} = {square} copy(%sum{i})\n'
        f'  %sum{i + 1} = {square} fusion(%left{i}, %right{i}), kind=kLoop, calls=%added'
        for i in range(60)
    ]
    body = '\n  '.join(sums)
    text = Program(f"""HloModule jit_f, is_scheduled=true

%added (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {{
  %a = {square} parameter(0)
  %b = {square} parameter(1)
  ROOT %both = {square} add(%a, %b)
}}

ENTRY %main (p: f32[2,8]) -> f32[8,8] {{
  %p = f32[2,8]{{1,0}} parameter(0)
  %sum0 = {square} all-gather(%p), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
  {body}
  ROOT %sine = {square} sine(%sum60), metadata={{op_name="jit(f)/norm/sin"}}
}}
""")
    gather = text.entry.by_name['sum0']
    assert destination(text, text.entry, gather, 0) == 'jit(f)/norm/sin'


def test_what_a_loop_returns_comes_from_where_its_body_made_it():
    carried = '(s32[], f32[8])'
    text = Program(f"""HloModule jit_f, is_scheduled=true

%body (b: {carried}) -> {carried} {{
  %b = {carried} parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[8]{{0}} get-tuple-element(%b), index=1
  %y = f32[8]{{0}} add(%x, %x), metadata={{op_name="jit(f)/layers/while/body/attention/add"}}
  %copied = f32[8]{{0}} copy(%y)
  ROOT %next = {carried} tuple(%i, %copied)
}}

%goes_on (c: {carried}) -> pred[] {{
  %c = {carried} parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (p: {carried}) -> f32[8] {{
  %p = {carried} parameter(0)
  %loop = {carried} while(%p), condition=%goes_on, body=%body, \
metadata={{op_name="jit(f)/layers/while"}}
  %out = f32[8]{{0}} get-tuple-element(%loop), index=1
  ROOT %negated = f32[8]{{0}} negate(%out)
}}
""")
    found = origin(text, text.entry, text.entry.by_name['negated'])
    assert found == 'jit(f)/layers/while/body/attention/add'


@pytest.mark.parametrize(
    ('op_name', 'found'),
    [
        ('jit(f)/(a/dot:b/dot)', ['jit(f)/a/dot', 'jit(f)/b/dot']),
        ('jit(f)/(jvp(a):vmap(jvp(a)))/dot', ['jit(f)/jvp(a)/dot', 'jit(f)/vmap(jvp(a))/dot']),
        ('jit(f)/vmap(a/(b:c))/dot', ['jit(f)/vmap(a/b)/dot', 'jit(f)/vmap(a/c)/dot']),
        ('jit(f)/(a:b:c)/dot', ['', '']),
        ('jit(f)/dot', ['', '']),
    ],
)
def test_joined_operands_have_each_its_own_path(op_name: str, found: list[str]) -> None:
    assert paths(op_name, 2) == found
