"""Find arrays that a loop saves, such as the residuals of a scan for the backward pass."""

from megajax.xla.hlo.op_paths import SAME
from megajax.xla.hlo.program import Array, Computation, Instruction, Program

_UPDATE = 'dynamic-update-slice'


def stored_in(program: Program, computation: Computation, producer: Instruction) -> Array | None:
    """Return the stacked buffer into which a loop writes an instruction's array, or None.

    Only casts, copies and reshapes of the array are followed, whether fused or not.
    """
    ahead, seen = [producer], {producer.name}
    for source in ahead:
        for user in computation.users.get(source.name, ()):
            place = next(i for i, name in enumerate(user.operands) if name == source.name)
            if user.opcode == _UPDATE and place == 1:
                return user.results[0]
            if user.opcode == 'fusion':
                inside = program.computations[user.called[0]]
                buffer = stored_in(program, inside, inside.parameters[place])
                if buffer is not None:
                    return buffer
                passes_on = all(each.opcode in (*SAME, 'parameter') for each in inside.instructions)
            else:
                passes_on = user.opcode in SAME or user.opcode.endswith('-done')
            if passes_on and user.name not in seen:
                seen.add(user.name)
                ahead.append(user)
    return None
