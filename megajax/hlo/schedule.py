"""What runs while a collective is under way: the matrix products that the schedule puts between its start and its end."""

import re
from math import prod

from megajax.hlo.program import Computation, HloError, Instruction, Program


def overlap(program: Program, computation: Computation, start: Instruction) -> tuple[bool, int]:
    """Whether it is synchronous, and the FLOPs of the matrix products scheduled between its start and its end."""
    home, first = computation, start
    for caller, one in program.callers.get(computation.name, ()):
        if one.opcode == 'async-start':
            home, first = caller, one
    if not first.opcode.endswith('-start') or '"is_sync":true' in first.attributes:
        return True, 0
    order = home.instructions
    begin = order.index(first)
    end = next((i for i, one in enumerate(order) if first.name in one.operands and one.opcode.endswith('-done')), None)
    if end is None:
        raise HloError(f'no end of {first.name}: {first.line}')
    return False, sum(flops(program, home, one) for one in order[begin + 1 : end])


def flops(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Of the matrix products in an instruction and in what it calls, on one device."""
    if instruction.opcode in ('dot', 'custom-call'):
        return _product_flops(computation, instruction)
    if instruction.opcode == 'all-reduce':
        return 0
    times = instruction.trip_count or 1
    inside = (program.computations[name] for name in instruction.called)
    return times * sum(flops(program, called, one) for called in inside for one in called.instructions)


def _product_flops(computation: Computation, instruction: Instruction) -> int:
    operands = [computation.by_name[name].results[0] for name in instruction.operands]
    if 'fmha' in instruction.attributes:
        scores = re.search(r'"intermediate_tensor_shape": ?\{"element_type": ?"\w+", ?"dimensions": ?\[([^\]]*)\]', instruction.attributes)
        size = prod(int(number) for number in re.findall(r'\d+', scores[1])) if scores else 0
        return (10 if 'Backward' in instruction.attributes else 4) * size * operands[0].shape[-1]
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:] ?[{\[]([^}\]]*)[}\]]', instruction.attributes)
    if not contracted:
        return 0
    dims = [int(number) for number in re.findall(r'\d+', contracted[1])]
    return 2 * prod(instruction.results[0].shape) * prod(operands[0].shape[dim] for dim in dims)
