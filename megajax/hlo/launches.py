"""How many kernels a run of a compiled program launches on each device."""

from collections.abc import Iterator

from megajax.hlo.program import Computation, Program

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
_WAITS = {
    'after-all',
    'async-update',
    'async-start',
    'async-done',
}  # for what was launched before, or is inside
_WITHOUT_KERNEL = _NAMES_MEMORY | _DECIDES | _WAITS


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
