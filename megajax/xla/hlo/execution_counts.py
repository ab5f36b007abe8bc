"""Count how often each computation of a program executes.

Trip counts of nested loops are multiplied. If a branch of a conditional communicates or multiplies
and the predicate follows from loop counters, only the branch that is taken counts. If the predicate
is unknown, the branch that sends the most bytes counts each time; of several, the one with the most
FLOPs. If no branch communicates or multiplies, all branches count. A loop of unknown length that
does neither, or for which there is no `trip_count`, counts as one step.
"""

from collections import Counter
from functools import cached_property

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.evaluate import Run
from megajax.xla.hlo.groups import device_groups
from megajax.xla.hlo.products import product_of
from megajax.xla.hlo.program import Computation, Instruction, Program
from megajax.xla.hlo.transfers import arrays_of, kind_of, ring_bytes, whole_of, widest

MAX_STEPS = 20_000  # most loop steps that are followed; beyond these, predicates count as unknown


class UnknownLoopError(HloError):
    """A loop that communicates, and whose trip count neither the compiler nor the caller knows."""


class Runs:
    """The number of executions of each computation in one execution of the program.

    `trip_count` is the number of steps of loops of unknown length. `at_most` has the computations
    in branches that might not run, and `unknown_loops` the places of loops that multiply and count
    as one step; they are complete after `times` has been read.
    """

    def __init__(self, program: Program, trip_count: int | None):
        self._program, self._trip_count = program, trip_count
        self._steps_left = MAX_STEPS
        self._fixed: dict[str, Counter[str]] = {}
        self._own_work: dict[str, tuple[float, int]] = {}
        self.at_most = set[str]()
        self.unknown_loops = list[str]()

    @cached_property
    def times(self) -> dict[str, int]:
        """The number of executions by computation name."""
        counts = self._walk(Run(self._program, self._program.entry))
        return {name: counts[name] for name in self._program.computations}

    def _walk(self, run: Run) -> Counter[str]:
        """Count the runs of computations in one run of a computation."""
        counts = Counter(self._of_fixed(run.computation))
        for instruction in self._open(run.computation):
            if instruction.opcode == 'while':
                counts += self._of_loop(run, instruction)
            elif instruction.opcode == 'conditional':
                counts += self._of_conditional(run, instruction)
            else:
                for place in range(len(instruction.called)):
                    counts += self._walk(self._inside(run, instruction, place))
        return counts

    def _of_loop(self, run: Run, instruction: Instruction) -> Counter[str]:
        loop = run.loop(instruction)
        steps = loop.trip_count
        steps = self._trip_count if steps is None else steps
        if steps is None:
            steps = self._of_unknown(instruction)
        counts = Counter[str]()
        for which, times in (('body', steps), ('condition', steps + 1)):
            called = self._program.computations[instruction.attribute(which) or '']
            if not self._open(called):
                counts += _multiplied(self._of_fixed(called), times)
            elif times > self._steps_left:
                counts += _multiplied(self._walk(Run(self._program, called)), times)
            else:
                self._steps_left -= times
                for step in range(times):
                    counts += self._walk(loop.run(which, step))
        return counts

    def _of_unknown(self, instruction: Instruction) -> int:
        """Return the steps that a loop of unknown length counts as."""
        known = [part for part in (instruction.op_name, self._program.source(instruction)) if part]
        place = ' at '.join(known) or instruction.line
        if not self._sending.isdisjoint(instruction.called):
            raise UnknownLoopError(
                f'the loop {instruction.name} communicates, and XLA does not know its trip count: '
                f'give a trip_count, or a fixed number of steps to {place}'
            )
        if place not in self.unknown_loops:
            self.unknown_loops.append(place)
        return 1

    def _of_conditional(self, run: Run, instruction: Instruction) -> Counter[str]:
        if (branch := run.branch(instruction)) is not None:
            return self._walk(self._inside(run, instruction, branch))
        walked = [
            self._walk(self._inside(run, instruction, place))
            for place in range(len(instruction.called))
        ]
        most = max(walked, key=self._work)
        self.at_most |= {*most}
        return most

    def _inside(self, run: Run, instruction: Instruction, place: int) -> Run:
        inside = run.inside(instruction, place)
        assert inside is not None
        return inside

    def _work(self, counts: Counter[str]) -> tuple[float, int]:
        """Return the bytes that these runs of computations send, and their FLOPs."""
        works = [(times, self._own(name)) for name, times in counts.items()]
        sent = sum(times * own_bytes for times, (own_bytes, _) in works)
        return sent, sum(times * own_flops for times, (_, own_flops) in works)

    def _own(self, name: str) -> tuple[float, int]:
        """Return the bytes and FLOPs of a computation itself, without the computations it calls."""
        if name not in self._own_work:
            computation = self._program.computations[name]
            sent, flops = 0.0, 0
            for instruction in computation.instructions:
                if kind := kind_of(instruction):
                    size = widest(device_groups(instruction, self._program.num_devices))
                    for _, operand, result in arrays_of(computation, instruction):
                        sent += ring_bytes(kind, whole_of(kind, operand, result), size)
                if product := product_of(computation, instruction):
                    flops += product.flops
            self._own_work[name] = sent, flops
        return self._own_work[name]

    def _of_fixed(self, computation: Computation) -> Counter[str]:
        """Count, in one run of a computation, the runs that do not depend on a predicate."""
        if computation.name not in self._fixed:
            counts = Counter([computation.name])
            for instruction in computation.instructions:
                if not self._is_open(instruction):
                    for name in instruction.called:
                        inside = self._of_fixed(self._program.computations[name])
                        counts += _multiplied(inside, _runs(instruction, name))
            self._fixed[computation.name] = counts
        return self._fixed[computation.name]

    def _open(self, computation: Computation) -> list[Instruction]:
        """Return the instructions whose calls work a data-dependent number of times."""
        return [
            instruction
            for instruction in computation.instructions
            if instruction.called and self._is_open(instruction)
        ]

    def _is_open(self, instruction: Instruction) -> bool:
        if _runs(instruction, '') == 0:
            return False
        decisive = self._working if _decides(instruction) else self._deciding
        return not decisive.isdisjoint(instruction.called)

    @cached_property
    def _sending(self) -> set[str]:
        """The names of computations that communicate, themselves or in their calls."""
        computations = self._program.computations.values()
        own = {each.name for each in computations if any(map(kind_of, each.instructions))}
        return self._with_callers(own)

    @cached_property
    def _working(self) -> set[str]:
        """The names of computations that communicate or multiply, themselves or in their calls."""
        own = {
            computation.name
            for computation in self._program.computations.values()
            for instruction in computation.instructions
            if product_of(computation, instruction)
        }
        return self._sending | self._with_callers(own)

    @cached_property
    def _deciding(self) -> set[str]:
        """The names of computations with data-dependent work, and of their callers."""
        own = {
            computation.name
            for computation in self._program.computations.values()
            for instruction in computation.instructions
            if _decides(instruction) and not self._working.isdisjoint(instruction.called)
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


def _decides(instruction: Instruction) -> bool:
    """Return whether a value decides how often an instruction executes its computations."""
    return instruction.opcode == 'conditional' or (
        instruction.opcode == 'while' and instruction.trip_count is None
    )


def _multiplied(counts: Counter[str], times: int) -> Counter[str]:
    return Counter({name: count * times for name, count in counts.items()})


def _runs(caller: Instruction, name: str) -> int:
    """Return how often an instruction executes the computation `name` that it calls."""
    if caller.opcode in ('async-update', 'async-done'):
        # Older versions of XLA repeat here the name of the computation that async-start started.
        return 0
    if caller.opcode != 'while':
        return 1
    runs = 1 if caller.trip_count is None else caller.trip_count
    return runs + 1 if caller.attribute('condition') == name else runs
