"""Steps in an order: what reads what, after barriers, and whose turn it is."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from megajax.core.model.overlap.barriers import Box, Clock, Meeting, in_turn


def reached(function, *arrays: jax.Array, result: int) -> set[str]:
    """The primitives that one result of a function depends on."""
    jaxpr = jax.make_jaxpr(function)(*arrays).jaxpr
    needed, found = {jaxpr.outvars[result]}, set[str]()
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            found.add(equation.primitive.name)
            needed.update(x for x in equation.invars if not isinstance(x, Literal))
    return found


X = jnp.ones(4)


def test_a_step_comes_after_the_last_one_although_it_does_not_read_its_result() -> None:
    def steps(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        clock = Clock()
        first = clock.tick('a', jnp.sin, Box(x))
        return first.value, clock.tick('b', jnp.cos, Box(y)).value

    assert 'sin' in reached(steps, X, X, result=1)
    assert 'cos' not in reached(steps, X, X, result=0)


def test_a_step_comes_after_all_results_of_the_last_one() -> None:
    def steps(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        clock = Clock()
        results = clock.ticks('a', lambda x: (jnp.sin(x), jnp.tan(x)), Box(x))
        beside = clock.tick('b', jnp.cos, Box(y)).value
        return beside, *(box.value for box in results)

    assert {'sin', 'tan'} <= reached(steps, X, X, result=0)


def test_a_collective_starts_after_the_last_step_and_the_next_does_not_wait_for_it() -> None:
    def steps(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        clock = Clock()
        clock.tick('a', jnp.sin, Box(x))
        sent = clock.send('a', jnp.tan, Box(y))
        beside = clock.tick('b', jnp.cos, Box(y)).value
        return sent.value, beside, clock.tick('c', jnp.exp, sent).value

    assert 'sin' in reached(steps, X, X, result=0)
    assert 'tan' not in reached(steps, X, X, result=1)
    assert {'tan', 'cos'} <= reached(steps, X, X, result=2)


def test_the_next_step_can_wait_for_a_collective_that_it_does_not_read() -> None:
    def steps(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        clock = Clock()
        first = clock.tick('a', jnp.sin, Box(x))
        sent = clock.send('a', jnp.tan, Box(x))
        clock.wait('a', sent)
        return first.value, clock.tick('b', jnp.cos, Box(x)).value

    assert 'tan' in reached(steps, X, result=1)


def test_what_a_step_returns_twice_is_one_box() -> None:
    def steps(x: jax.Array) -> jax.Array:
        one, same = Clock().ticks('a', lambda x: (y := jnp.sin(x), y), Box(x))
        assert one is same
        return one.value

    jax.eval_shape(steps, X)


def test_parts_take_turns_and_each_starts_one_turn_later() -> None:
    said = []

    def part(name: str) -> Iterator[None]:
        for turn in range(3):
            said.append(f'{name}{turn}')
            yield
        return name

    assert in_turn(part(name) for name in 'ab') == ['a', 'b']
    assert said == ['a0', 'a1', 'b0', 'a2', 'b1', 'b2']


def test_parts_meet_again_and_again_and_do_other_things_meanwhile() -> None:
    meeting, said = Meeting(2), []

    def part(index: int) -> Iterator[None]:
        total = 0
        for turn in range(2):
            if index:
                yield  # this one comes late
            boxes = yield from meeting.join(
                index,
                [Box(10 * turn + index)],
                lambda *boxes: [Box(sum(box.value for box in boxes))],
                lambda: said.append(index),
            )
            total += boxes[0].value
        return total

    assert in_turn(map(part, range(2))) == [1 + 21] * 2
    assert {*said} == {0}
