"""How often each computation of a program runs.

Trip counts of nested loops are multiplied in. A branch that sends something counts where it runs,
by the value of its predicate where that follows from the counters of loops; else the branch that
sends most bytes counts each time. Every other branch counts as run.
"""

from collections import Counter
from functools import cached_property

from megajax.hlo.evaluate import Run
from megajax.hlo.groups import device_groups
from megajax.hlo.program import Computation, HloError, Instruction, Program
from megajax.hlo.transfers import arrays_of, kind_of, ring_bytes, whole_of, widest

MAX_STEPS = 20_000  # of loops that are walked step by step; beyond it predicates count as unknown


class UnknownLoopError(HloError):
    """A loop sends something, and neither the compiler nor its caller knows how often it runs."""


class Runs:
    """Runs of each computation in one run of the program.

    `trip_count` is that of loops of unknown length. `at_most` are computations in branches that
    may not run, known once `times` is.
    """

    def __init__(self, program: Program, trip_count: int | None):
        self._program, self._trip_count = program, trip_count
        self._steps_left = MAX_STEPS
        self._fixed: dict[str, Counter[str]] = {}
        self.at_most = set[str]()

    @cached_property
    def times(self) -> dict[str, int]:
        """By the computation's name."""
        counts = self._walk(Run(self._program, self._program.entry))
        return {name: counts[name] for name in self._program.computations}

    def _walk(self, run: Run) -> Counter[str]:
        """The runs in one run of a computation."""
        counts = Counter(self._of_fixed(run.computation))
        for one in self._open(run.computation):
            if one.opcode == 'while':
                counts += self._of_loop(run, one)
            elif one.opcode == 'conditional':
                counts += self._of_conditional(run, one)
            else:
                for place in range(len(one.called)):
                    counts += self._walk(self._inside(run, one, place))
        return counts

    def _of_loop(self, run: Run, one: Instruction) -> Counter[str]:
        loop = run.loop(one)
        steps = loop.trip_count
        steps = self._trip_count if steps is None else steps
        if steps is None:
            known = [part for part in (one.op_name, self._program.source(one)) if part]
            raise UnknownLoopError(
                f'the loop {one.name} sends something and XLA does not know how often it runs: '
                f'give a trip_count, or a fixed number of steps to {" at ".join(known) or one.line}'
            )
        counts = Counter[str]()
        for which, times in (('body', steps), ('condition', steps + 1)):
            called = self._program.computations[one.attribute(which) or '']
            if not self._open(called):
                counts += _multiplied(self._of_fixed(called), times)
            elif times > self._steps_left:
                counts += _multiplied(self._walk(Run(self._program, called)), times)
            else:
                self._steps_left -= times
                for step in range(times):
                    counts += self._walk(loop.run(which, step))
        return counts

    def _of_conditional(self, run: Run, one: Instruction) -> Counter[str]:
        if (branch := run.branch(one)) is not None:
            return self._walk(self._inside(run, one, branch))
        walked = [self._walk(self._inside(run, one, place)) for place in range(len(one.called))]
        most = max(walked, key=self._bytes)
        self.at_most |= {*most}
        return most

    def _inside(self, run: Run, one: Instruction, place: int) -> Run:
        inside = run.inside(one, place)
        assert inside is not None
        return inside

    def _bytes(self, counts: Counter[str]) -> float:
        computations = self._program.computations
        return sum(times * self._own_bytes(computations[name]) for name, times in counts.items())

    def _own_bytes(self, computation: Computation) -> float:
        """Bytes that the instructions of a computation send themselves, without what they call."""
        total = 0.0
        for one in computation.instructions:
            if kind := kind_of(one):
                size = widest(device_groups(one, self._program.num_devices))
                for _, operand, result in arrays_of(computation, one):
                    total += ring_bytes(kind, whole_of(kind, operand, result), size)
        return total

    def _of_fixed(self, computation: Computation) -> Counter[str]:
        """The runs in one run of a computation that hang on no predicate."""
        if computation.name not in self._fixed:
            counts = Counter([computation.name])
            for one in computation.instructions:
                if not self._is_open(one):
                    for name in one.called:
                        inside = self._of_fixed(self._program.computations[name])
                        counts += _multiplied(inside, _runs(one, name))
            self._fixed[computation.name] = counts
        return self._fixed[computation.name]

    def _open(self, computation: Computation) -> list[Instruction]:
        """The instructions that run something as often as a value says, and it sends something."""
        return [one for one in computation.instructions if one.called and self._is_open(one)]

    def _is_open(self, one: Instruction) -> bool:
        if _runs(one, '') == 0:
            return False
        decisive = self._sending if _decides(one) else self._deciding
        return not decisive.isdisjoint(one.called)

    @cached_property
    def _sending(self) -> set[str]:
        """Computations that send something, or call one that does."""
        computations = self._program.computations.values()
        own = {each.name for each in computations if any(map(kind_of, each.instructions))}
        return self._with_callers(own)

    @cached_property
    def _deciding(self) -> set[str]:
        """Computations where a value decides what is sent, or that call one."""
        own = {
            computation.name
            for computation in self._program.computations.values()
            for one in computation.instructions
            if _decides(one) and not self._sending.isdisjoint(one.called)
        }
        return self._with_callers(own)

    def _with_callers(self, names: set[str]) -> set[str]:
        reached, ahead = set[str](), [*names]
        while ahead:
            name = ahead.pop()
            if name not in reached:
                reached.add(name)
                ahead += [caller.name for caller, _ in self._program.callers.get(name, ())]
        return reached


def _decides(one: Instruction) -> bool:
    """Whether a value says how often it runs what it calls."""
    return one.opcode == 'conditional' or (one.opcode == 'while' and one.trip_count is None)


def _multiplied(counts: Counter[str], times: int) -> Counter[str]:
    return Counter({name: count * times for name, count in counts.items()})


def _runs(caller: Instruction, name: str) -> int:
    """How often an instruction runs what it calls."""
    if caller.opcode in ('async-update', 'async-done'):
        return 0  # older XLAs name again what async-start has started
    if caller.opcode != 'while':
        return 1
    runs = 1 if caller.trip_count is None else caller.trip_count
    return runs + 1 if caller.attribute('condition') == name else runs
