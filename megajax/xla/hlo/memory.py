"""The bytes that the kernels of a compiled program read and write in a GPU's memory."""

from collections.abc import Iterator
from math import prod

from megajax.xla.hlo.program import DTYPE_BITS, Array, Computation, Instruction, Program
from megajax.xla.hlo.starts import opcode_of, results_of

_READS_PART = 'dynamic-slice', 'slice', 'gather'
# Opcodes that change an operand in place, with the index of the operand that is written.
_WRITES_PART = {'dynamic-update-slice': 1, 'scatter': 2}
_WITHOUT_NUMBERS = 's8', 'u8'  # dtypes of a library call's workspace


def bytes_moved(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that one kernel reads and writes; arrays updated in place do not count."""
    if instruction.opcode in ('fusion', 'fusion-start'):
        return _of_fusion(program.computations[instruction.called[0]])
    if instruction.opcode in _READS_PART:
        return 2 * _size(instruction.results)
    if instruction.opcode == 'copy-start':  # its results include the operand
        return 2 * _size(computation.by_name[instruction.operands[0]].results)
    if instruction.opcode in _WRITES_PART:
        written = instruction.operands[_WRITES_PART[instruction.opcode]]
        return 2 * _size(computation.by_name[written].results)
    read = sum(_size(computation.by_name[name].results) for name in instruction.operands)
    results = results_of(computation, instruction)
    if opcode_of(instruction) == 'custom-call':
        results = tuple(array for array in results if array.dtype not in _WITHOUT_NUMBERS)
    return read + _size(results)


def _of_fusion(computation: Computation) -> int:
    read = sum(_read(computation, parameter) for parameter in computation.parameters.values())
    outputs = _outputs(computation)
    return read + sum(_written(computation, computation.by_name[name]) for name in outputs)


def _outputs(computation: Computation) -> tuple[str, ...]:
    root = computation.root
    return root.operands if root.opcode == 'tuple' else (root.name,)


def _read(computation: Computation, parameter: Instruction) -> int:
    whole, parts = _size(parameter.results), 0
    bits = DTYPE_BITS[parameter.results[0].dtype]
    for name, user in _users(computation, parameter.name):
        if user.opcode in _READS_PART and user.operands[0] == name:
            parts += prod(user.results[0].shape) * bits // 8
        elif user.opcode not in _WRITES_PART or user.operands[0] != name:
            return whole
    return min(whole, parts)


def _users(computation: Computation, name: str) -> Iterator[tuple[str, Instruction]]:
    """Yield each reader of a value, with the name by which it reads the value.

    Bitcasts and casts are followed to their own readers, unless their result is an output.
    """
    outputs = _outputs(computation)
    for user in computation.users.get(name, ()):
        if user.opcode in ('bitcast', 'convert') and user.name not in outputs:
            yield from _users(computation, user.name)
        else:
            yield name, user


def _written(computation: Computation, output: Instruction) -> int:
    while output.opcode == 'bitcast':
        output = computation.by_name[output.operands[0]]
    if output.opcode in _WRITES_PART:
        output = computation.by_name[output.operands[_WRITES_PART[output.opcode]]]
    return _size(output.results)


def _size(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays)
