"""Read an asynchronous start, such as `custom-call-start`, as the instruction that it starts."""

from megajax.xla.hlo.program import Array, Computation, Instruction

START = '-start'


def opcode_of(instruction: Instruction) -> str:
    """Return the opcode of an instruction, or of the instruction that it starts."""
    return instruction.opcode.removesuffix(START)


def results_of(computation: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """Return the results of an instruction without the operands, which a start lists first."""
    if not instruction.opcode.endswith(START):
        return instruction.results
    inputs = sum(len(computation.by_name[name].results) for name in instruction.operands)
    return instruction.results[inputs:] or instruction.results
