"""Integers worked out from the text of a program are those that the program computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from megajax.xla.hlo.evaluate import Run, run_of
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.text import program_text

TABLE = jnp.array([3, -1, 4, 1, -5, 9, 2, -6, 5, 3, -5, 8])

FUNCTIONS = {
    'arithmetic': lambda i, x: (
        (x * 7 - i) // 3 + x % 5 + lax.rem(x, jnp.int32(4)) + lax.div(x, jnp.int32(-3))
    ),
    'bits': lambda i, x: (x << 3) ^ (x >> 1) | lax.shift_right_logical(x, jnp.int32(5)) & ~i,
    'comparisons': lambda i, x: jnp.where(
        (x > i) & (x <= 3) | (x == -5), jnp.clip(x, -2, 4), jnp.sign(x) * jnp.abs(i)
    ),
    'narrow': lambda i, x: (
        (x.astype(jnp.int8) * 100).astype(jnp.uint16) - (i > 0).astype(jnp.uint16)
    ),
    'unsigned': lambda i, x: (x.astype(jnp.uint32) // 3 - i.astype(jnp.uint32)) % 7,
    'table': lambda i, x: TABLE[i] + lax.dynamic_slice(TABLE, (i,), (3,)).sum() + x,
    'update': lambda i, x: lax.dynamic_update_slice(
        jnp.concatenate([x, TABLE[::-1]]), x[1:4] * 2, (i,)
    ),
    'shapes': lambda i, x: (
        (x.reshape(3, 4).T + jnp.arange(4)[:, None] + i).max(1) * jnp.array([1, -1, 1, -1])
    ),
    'any and all': lambda i, x: (x > i).any() | (x < -3).all() | (jnp.minimum(x, i).min() == i),
    'branches': lambda i, x: lax.switch(i, [lambda x: x + 1, lambda x: x * 2, jnp.negative], x),
    'loop': lambda i, x: lax.fori_loop(
        0, 9, lambda j, x: jnp.where(j % 3 == 0, x + TABLE[j], x - i), x
    ),
    'loop by its condition': lambda i, x: (
        lax.while_loop(lambda n: n * n < 50 + i, lambda n: n + 2, jnp.int32(0)) + x
    ),
    'loop in a loop': lambda i, x: lax.fori_loop(
        0, 4, lambda j, x: lax.fori_loop(0, j, lambda k, x: x + k * i, x), x
    ),
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_a_value_is_that_which_the_program_computes(name):
    function = jax.jit(FUNCTIONS[name])
    source = np.random.default_rng(0)
    text = Program(program_text(function.lower(jnp.int32(0), jnp.zeros(12, jnp.int32)).compile()))
    for _ in range(20):
        given = source.integers(-2, 12, dtype=np.int32), source.integers(-9, 9, 12, dtype=np.int32)
        value = Run(
            text, text.entry, given=lambda number, _, given=given: np.asarray(given[number])
        ).value(text.entry.root.name)
        assert value is not None
        expected = np.asarray(function(*given))
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    'function',
    [
        lambda i, x: x + i,
        lambda i, x: x.astype(jnp.float32).astype(jnp.int32) + i,
        lambda i, x: lax.while_loop(lambda n: n < x[0], lambda n: n + 1, i),
        lambda i, x: lax.cond(x[0] > 0, lambda: i + 1, lambda: i + 2),
    ],
)
def test_what_hangs_on_data_has_no_value(function):
    text = Program(
        program_text(jax.jit(function).lower(jnp.int32(0), jnp.zeros(12, jnp.int32)).compile())
    )
    run = Run(
        text, text.entry, given=lambda number, _: np.array(3, np.int32) if number == 0 else None
    )
    assert run.value(text.entry.root.name) is None


def test_what_does_not_hang_on_data_has_one_beside_it():
    text = Program("""
ENTRY %main (p: pred[], n: s32[]) -> pred[] {
  %p = pred[] parameter(0)
  %n = s32[] parameter(1)
  %no = pred[] constant(false)
  %yes = pred[] constant(true)
  %both = pred[] and(%p, %no)
  %either = pred[] or(%yes, %p)
  %one = s32[] constant(1)
  %zero = s32[] constant(0)
  %chosen = s32[] select(%either, %one, %n)
  %undefined = s32[] divide(%one, %zero)
  ROOT %unknown = pred[] and(%p, %yes)
}
""")
    run = Run(text, text.entry)
    names = ('both', 'either', 'chosen', 'undefined', 'unknown')
    assert {name: run.value(name) for name in names} == {
        'both': False, 'either': True, 'chosen': 1, 'undefined': None, 'unknown': None,
    }  # fmt: skip


@pytest.mark.parametrize(('chosen', 'value'), [('true', 5), ('false', 7)])
def test_of_two_computations_the_first_is_that_for_true(chosen, value):
    text = Program(f"""
%yes (x: s32[]) -> s32[] {{
  ROOT %five = s32[] constant(5)
}}

%no (y: s32[]) -> s32[] {{
  ROOT %seven = s32[] constant(7)
}}

ENTRY %main () -> s32[] {{
  %chosen = pred[] constant({chosen})
  %zero = s32[] constant(0)
  ROOT %either = s32[] conditional(%chosen, %zero, %zero), branch_computations={{%yes, %no}}
}}
""")
    assert Run(text, text.entry).value('either') == value


@pytest.mark.parametrize(
    'calls',
    [
        '%y = u32[4] fusion(%x), kind=kLoop, calls=%inner',
        '%y = u32[4] call(%x), to_apply=%inner',
        '%y = u32[4] map(%x), dimensions={0}, to_apply=%inner',
        '%y = u32[4] custom-call(%x), custom_call_target="f", called_computations={%inner}',
        '%z = u32[4] call(%x), to_apply=%inner\n  %y = u32[4] call(%z), to_apply=%inner',
        '%y = u32[4] while(%x), condition=%goes_on, body=%inner',
        '%y = u32[4] copy(%x)',
    ],
    ids=['fusion', 'call', 'map', 'custom-call', 'two calls', 'while', 'none'],
)
def test_a_device_knows_its_number_in_a_computation_wherever_it_is_called_from(calls):
    text = Program(f"""
%inner (p: u32[4]) -> u32[4] {{
  %p = u32[4] parameter(0)
  %id = u32[] partition-id()
  %two = u32[] constant(2)
  %twice = u32[] multiply(%id, %two)
  ROOT %same = u32[4] copy(%p)
}}

%goes_on (q: u32[4]) -> pred[] {{
  %q = u32[4] parameter(0)
  ROOT %no = pred[] constant(false)
}}

ENTRY %main (x: u32[4]) -> u32[4] {{
  %x = u32[4] parameter(0)
  {calls}
  ROOT %all = u32[4] copy(%x)
}}
""")
    for device in (0, 3):
        assert run_of(text, text.computations['inner'], device).value('twice') == 2 * device
