"""The arrays in temporary memory when most of it is in use, of programs compiled here."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from megajax.core.hardware.targets import compile_without_gpu, gpu_devices, has_compiler
from megajax.xla.hlo.buffers import Buffer, at_peak, buffers_at_peak
from megajax.xla.hlo.dump import compile_with_buffers
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.producers import COPIES, Place, producer
from megajax.xla.hlo.program import Program

SIZE, LAYERS = 256, 5
SQUARE = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
STACK = jax.ShapeDtypeStruct((LAYERS, SIZE, SIZE), jnp.float32)


def loss(w_LDD: jax.Array, x_DD: jax.Array) -> jax.Array:
    def layer(x_DD: jax.Array, w_DD: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope('inside'):
            return jnp.sin(x_DD @ w_DD), None

    return jax.lax.scan(layer, x_DD, w_LDD)[0].sum()


def compiled(
    function: Callable[..., jax.Array], *arguments: jax.ShapeDtypeStruct
) -> tuple[jax.stages.Compiled, tuple[Buffer, ...]]:
    return compile_with_buffers(jax.jit(function).lower(*arguments).compile, {})


@pytest.fixture(scope='module')
def gradient() -> tuple[Program, int, tuple[Buffer, ...]]:
    step, buffers = compiled(jax.grad(loss), STACK, SQUARE)
    return Program(step.as_text()), step.memory_analysis().temp_size_in_bytes, buffers


def test_they_are_all_of_the_temporary_memory_but_what_lies_between_them(gradient) -> None:
    _, temporaries, buffers = gradient
    in_use = sum(buffer.bytes for buffer in buffers)
    assert 0.99 * temporaries <= in_use <= temporaries
    kept = [buffer for buffer in buffers if buffer.bytes == 4 * LAYERS * SIZE**2]
    assert kept, 'a backward pass reads what each layer has stacked'


def test_a_program_that_jax_has_in_its_cache_is_compiled_again(gradient) -> None:
    _, temporaries, buffers = gradient
    for _ in range(2):
        jax.jit(jax.grad(loss)).lower(STACK, SQUARE).compile()
    step, again = compiled(jax.grad(loss), STACK, SQUARE)
    assert step.memory_analysis().temp_size_in_bytes == temporaries
    assert again == buffers


def test_a_stack_is_made_where_each_layer_computes_its_part(gradient) -> None:
    program, _, buffers = gradient
    places = {
        instruction.name: Place(computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions
    }
    made = []
    for buffer in buffers:
        name, index = buffer.names[0]
        part = tuple(int(number) for number in index.split(',') if number)
        place = places[name]._replace(part=part)
        if buffer.bytes == 4 * LAYERS * SIZE**2:
            made.append(producer(program, place).instruction)
    assert any('/inside/' in each.op_name for each in made)
    assert all('dynamic_update_slice' not in each.op_name for each in made)
    assert any(program.source(each).partition(':')[0].endswith('test_buffers.py') for each in made)


def test_a_copy_leads_to_the_parameter_and_a_result_does_not() -> None:
    def function(w_DD: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(w_DD.T.astype(jnp.bfloat16)), jnp.sin(w_DD)

    step, _ = compiled(function, SQUARE)
    program = Program(step.as_text())
    entry = program.entry
    results = [Place(entry, entry.by_name[name]) for name in entry.root.operands]
    copied, made = (producer(program, place, COPIES).instruction for place in results)
    assert (copied.opcode, copied.op_name) == ('parameter', 'w_DD')
    assert made.opcode == 'sine'


def test_an_array_that_is_changed_in_place_counts_once() -> None:
    def function(x_DD: jax.Array) -> jax.Array:
        def body(_: int, y_DD: jax.Array) -> jax.Array:
            return y_DD.at[0].add(1.0)

        return (jax.lax.fori_loop(0, 10, body, jnp.sin(x_DD)) @ x_DD).sum()

    step, buffers = compiled(function, SQUARE)
    temporaries = step.memory_analysis().temp_size_in_bytes
    squares = [each for each in buffers if each.bytes == 4 * SIZE**2]
    assert sum(each.bytes for each in squares) <= temporaries
    assert len(squares) == temporaries // (4 * SIZE**2)


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
def test_on_a_gpu_they_are_the_peak_that_xla_counts() -> None:
    (device,) = gpu_devices('h100', hosts=1, per_host=1)
    here = SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in (STACK, SQUARE)]
    lowered = jax.jit(jax.grad(loss)).lower(*arguments)
    compile_with = functools.partial(compile_without_gpu, lowered.compile)
    step, buffers = compile_with_buffers(compile_with, {})
    memory = step.memory_analysis()
    outside = memory.argument_size_in_bytes + memory.output_size_in_bytes
    in_use = sum(buffer.bytes for buffer in buffers)
    assert outside + in_use == pytest.approx(memory.peak_memory_in_bytes, rel=1e-4)


RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:a
    5:b
  BufferLiveRange:
    a{}:0-5
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, preallocated-temp:
 value: <1 a @0> (size=64,offset=0): f32[16]{0}
"""
VALUES = """Used values:
<1 a @0>
 positions:
  a
 uses:
  b, operand 0
"""


def test_what_it_does_not_understand_is_an_error_with_the_line(tmp_path: Path) -> None:
    assert at_peak(RANGES, ASSIGNMENT, VALUES) == (Buffer((('a', ''),), 'f32[16]', 64, 'b'),)
    with pytest.raises(HloError, match='not an array with an address: value: <1 a @0>'):
        at_peak(RANGES, ASSIGNMENT.replace('offset', 'place'), VALUES)
    with pytest.raises(HloError, match='the live ranges do not include a, which occupies memory'):
        at_peak(RANGES.replace('a{}', 'c{}'), ASSIGNMENT, VALUES)
    with pytest.raises(HloError, match='XLA wrote no file of the kind live-range'):
        buffers_at_peak(tmp_path)
