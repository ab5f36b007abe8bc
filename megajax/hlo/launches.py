"""How many kernels a run of a compiled program launches on each device."""

from collections.abc import Iterator

from megajax.hlo.program import Computation, Program

# What only names memory, decides what runs, or waits for what was launched before.
_WITHOUT_KERNEL = frozenset(
    'parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id '
    'replica-id opt-barrier add-dependency async-update async-start async-done'.split()
)


def num_launches(program: Program) -> int:
    """Kernels, calls of libraries, copies and collectives; each counted as often as it runs.

    A call of a library is one, though cuDNN's backward pass of attention launches several.
    """
    return sum(program.times[one.name] * _own(one) for one in _launching(program))


def _launching(program: Program) -> Iterator[Computation]:
    """The computations whose instructions are launched one by one: not those inside of a kernel."""
    todo, seen = [program.entry], set[str]()
    while todo:
        computation = todo.pop()
        if computation.name in seen:
            continue
        seen.add(computation.name)
        yield computation
        for one in computation.instructions:
            if one.opcode in ('while', 'conditional', 'call', 'async-start'):
                todo += [program.computations[name] for name in one.called]


def _own(computation: Computation) -> int:
    return sum(
        one.opcode not in _WITHOUT_KERNEL and not one.opcode.endswith('-done')
        for one in computation.instructions
    )
