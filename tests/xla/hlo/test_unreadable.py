import random
import re

import jax
import jax.numpy as jnp
import pytest

from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Program

GROUPS = 'replica_groups={{0,1}}'
TEXT = f"""HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

ENTRY %main (p: f32[8,16]) -> f32[8,16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %one = f32[8,16]{{1,0}} negate(%p), metadata={{op_name="jit(f)/neg[}}]"}}
  ROOT %sent = f32[8,16]{{1,0}} all-reduce(%one), {GROUPS}, to_apply=%add
}}
"""


def read(text: str) -> int:
    return len(collectives(Program(text), {'data': 2}))


def test_the_text_that_the_others_are_made_of_is_read():
    assert read(TEXT) == 1


def test_an_instruction_keeps_the_text_of_its_result_and_between_its_brackets():
    constant = '%table = (s32[4]{0}, f32[]) constant(({0, 32, 64, 96}, 2.5))'
    main = Program(TEXT.replace('%one =', f'{constant}\n  %one =')).entry.by_name
    assert (main['one'].type, main['one'].inputs) == ('f32[8,16]{1,0}', '%p')
    assert (main['p'].inputs, main['p'].operands) == ('0', ())
    assert (main['table'].type, main['table'].inputs) == (
        '(s32[4]{0}, f32[])',
        '({0, 32, 64, 96}, 2.5)',
    )


@pytest.mark.parametrize(
    ('old', 'new', 'line'),
    [
        (' negate(%p)', ' Negate(%p)', '%one = f32[8,16]{1,0} Negate(%p)'),
        (' negate(%p)', ' 2negate(%p)', '%one = f32[8,16]{1,0} 2negate(%p)'),
        (' negate(%p)', ' negate', '%one = f32[8,16]{1,0} negate, metadata='),
        (' negate(%p)', ' negate(%p', '%one = f32[8,16]{1,0} negate(%p, metadata='),
        (
            '%one = f32[8,16]{1,0} negate(%p)',
            '%one f32[8,16]{1,0} negate(%p)',
            '%one f32[8,16]{1,0} negate(%p)',
        ),
        (
            '%one = f32[8,16]{1,0} negate',
            '%one = (f32[8,16]{1,0} negate',
            '%one = (f32[8,16]{1,0} negate(%p)',
        ),
        ('%one = f32[8,16]', '%one = f33[8,16]', 'f33: %one = f33[8,16]{1,0} negate(%p)'),
        ('%one = f32[8,16]', '%one = b2x4y[8,16]', 'b2x4y: %one = b2x4y[8,16]{1,0} negate(%p)'),
        ('%one = f32[8,16]', '%one = f32[8,?]', '%one = f32[8,?]{1,0} negate(%p)'),
        ('%one = f32[8,16]{1,0}', '%one = f32', '%one = f32 negate(%p)'),
        (' negate(%p)', ' negate(p)', '%one = f32[8,16]{1,0} negate(p)'),
        (
            ' negate(%p)',
            ' negate(%q)',
            'q, which main does not have: %one = f32[8,16]{1,0} negate(%q)',
        ),
        (' negate(%p)', ' negate(%p#1)', 'p#1, which main does not have: %one = f32[8,16]'),
        (
            ' negate(%p)',
            ' fusion(%p), calls=%fused',
            'fused, which the text does not have: %one = f32[8,16]{1,0} fusion(%p)',
        ),
        (
            ' negate(%p)',
            ' fusion(%p), calls=',
            'one does not name what it calls: %one = f32[8,16]{1,0} fusion(%p)',
        ),
        (
            ' negate(%p)',
            ' while(%p), body=%add',
            'one does not name what it calls: %one = f32[8,16]{1,0} while(%p)',
        ),
        ('%p = f32[8,16]{1,0} parameter(0)', '%p = f32[8,16]{1,0} parameter()', '%p = f32[8,16]'),
        ('%one = f32[8,16]', f'%one = f32[{"9" * 5000}]', 'a number of 5000 digits: 999'),
        ('to_apply=%add', 'to_apply=%mul', 'mul, which the text does not have: ROOT %sent'),
        (GROUPS, 'dimensions={0}', 'ROOT %sent = f32[8,16]{1,0} all-reduce(%one)'),
        (
            ' all-reduce(',
            ' all-reduce-scatter(',
            'ROOT %sent = f32[8,16]{1,0} all-reduce-scatter(%one)',
        ),
        (
            ' all-reduce(',
            ' all-gather-v2-start(',
            'ROOT %sent = f32[8,16]{1,0} all-gather-v2-start(%one)',
        ),
        (' all-reduce(', ' send(', 'remove the option: ROOT %sent = f32[8,16]{1,0} send(%one)'),
        (
            'ENTRY %main (p: f32[8,16]) -> f32[8,16] {',
            'ENTRY %main (p: f32[8,16]) {',
            'ENTRY %main (p: f32[8,16]) {',
        ),
        (
            '%add (x: f32[], y: f32[]) -> f32[] {',
            '%add (x: f32[], y: f32[]) {',
            '%add (x: f32[], y: f32[]) {',
        ),
        ('ROOT %sent', '%sent', 'main has no ROOT'),
        ('ENTRY %main', '%main', 'has 0'),
        ('%add (x', 'ENTRY %add (x', 'has 2'),
    ],
)
def test_what_is_not_understood_raises_with_its_line(old, new, line):
    assert TEXT.count(old) == 1
    with pytest.raises(HloError, match=re.escape(line)):
        read(TEXT.replace(old, new))


def test_a_collective_that_nothing_runs_raises_with_its_line():
    sent = TEXT[TEXT.index('ENTRY') :].replace('ENTRY %main', '%lost')
    with pytest.raises(HloError, match=r'lost, which nothing calls: ROOT %sent'):
        read(TEXT.replace('ENTRY', f'{sent}\nENTRY', 1))


def test_a_text_that_ends_anywhere_before_its_last_bracket_raises():
    whole = TEXT.rstrip()
    for end in range(len(whole)):
        with pytest.raises(HloError):
            read(whole[:end])


def test_a_compiled_text_cut_at_random_raises():
    mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    with_loop = jax.shard_map(
        lambda x: jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(jax.lax.psum(x, 'data')), x),
        mesh=mesh, in_specs=jax.P('data'), out_specs=jax.P('data'), check_vma=False,
    )  # fmt: skip
    text = (
        jax.jit(with_loop)
        .lower(jax.ShapeDtypeStruct((8, 4), jnp.float32))
        .compile()
        .as_text()
        .rstrip()
    )
    [one] = collectives(Program(text), {'data': 8})
    assert one.times == 5
    source = random.Random(0)
    for _ in range(100):
        with pytest.raises(HloError):
            Program(text[: source.randrange(len(text))])
