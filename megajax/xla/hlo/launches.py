"""The instructions of a compiled program that are launched as kernels of their own."""

from collections.abc import Iterator

from megajax.xla.hlo.program import Computation, Instruction, Program

_NAMES_MEMORY = {
    'parameter',
    'constant',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'add-dependency',
    'opt-barrier',
}
_DECIDES = {'while', 'conditional', 'call', 'partition-id', 'replica-id'}
# Opcodes that wait for earlier launches, or for the launches of a computation that they call.
_WAITS = {'after-all', 'async-update', 'async-start', 'async-done'}
_WITHOUT_KERNEL = _NAMES_MEMORY | _DECIDES | _WAITS


def launching(program: Program) -> Iterator[Computation]:
    """Yield the computations whose instructions are launched individually, not inside a kernel."""
    todo, seen = [program.entry], set[str]()
    while todo:
        computation = todo.pop()
        if computation.name in seen:
            continue
        seen.add(computation.name)
        yield computation
        for instruction in computation.instructions:
            if instruction.opcode in ('while', 'conditional', 'call', 'async-start'):
                todo += [program.computations[name] for name in instruction.called]


def is_launched(instruction: Instruction) -> bool:
    """Return whether an instruction is a kernel, a library call, a copy or a collective."""
    return instruction.opcode not in _WITHOUT_KERNEL and not instruction.opcode.endswith('-done')
