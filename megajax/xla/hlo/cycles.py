"""Sum the cycles that XLA for TPUs estimates for the instructions of a compiled program."""

import re

from megajax.xla.hlo.program import Program

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(program: Program) -> int:
    """Return XLA's estimate of the cycles of one run, in all instructions for which it has one.

    It has none for collectives and for most copies. Instructions inside of a fusion do not count,
    because the fusion's estimate includes them.
    """
    fused = {
        name
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == 'fusion'
        for name in instruction.called
    }
    return sum(
        program.times[computation.name] * int(match[1])
        for computation in program.computations.values()
        if computation.name not in fused
        for instruction in computation.instructions
        if (match := _CYCLES.search(instruction.attributes))
    )
