"""Evaluate integers that depend only on constants, loop counters and the device's number.

`Run` is one run of a computation. Its values are computed only on request, and are None if they
depend on data.
"""

from collections.abc import Callable
from functools import cached_property
from math import prod

import numpy as np

from megajax.xla.hlo.integers import (
    INTEGER_DTYPES,
    REDUCTIONS,
    Value,
    apply,
    constant,
    dtype_of,
    numbers,
)
from megajax.xla.hlo.program import Computation, Instruction, Program

# A function of a parameter's number and, if the parameter is a tuple, the index in the tuple.
Given = Callable[[int, int | None], Value]

MAX_ELEMENTS = 1 << 16
MAX_STEPS = 100_000  # most steps of a loop whose length is known only from its condition
# Opcodes for which called computations, or parts of a tuple, are evaluated only on request.
_LAZY = {
    'parameter', 'get-tuple-element', 'fusion', 'call', 'conditional',
    'while', 'tuple', 'copy-start', 'copy-done',
}  # fmt: skip


class Run:
    """One run of a computation on `device`; `given` returns the values of its parameters."""

    def __init__(
        self,
        program: Program,
        computation: Computation,
        *,
        given: Given | None = None,
        device: int | None = None,
    ):
        self.program, self.computation, self.device = program, computation, device
        self._given = given or (lambda number, place: None)
        self._values: dict[str, Value] = {}
        self._loops: dict[str, Loop] = {}

    def value(self, name: str) -> Value:
        """Return the value of an instruction whose result is a single array."""
        ahead = [name]  # a stack instead of recursion, because an unrolled loop can be a long chain
        while ahead:
            instruction = self.computation.by_name[ahead[-1]]
            if instruction.name in self._values or not _is_small(instruction):
                self._values.setdefault(instruction.name, None)
                ahead.pop()
                continue
            before = () if instruction.opcode in _LAZY else instruction.operands
            if missing := [operand for operand in before if operand not in self._values]:
                ahead += missing
            else:
                self._values[instruction.name] = self._compute(instruction)
                ahead.pop()
        return self._values[name]

    def part(self, name: str, place: int) -> Value:
        """Return the value at an index in the result of an instruction that returns a tuple."""
        instruction = self.computation.by_name[name]
        match instruction.opcode:
            case 'tuple':
                return self.value(instruction.operands[place])
            case 'parameter':
                return self._given(int(instruction.inputs), place)
            case 'opt-barrier' if len(instruction.operands) == 1:
                return self.part(instruction.operands[0], place)
            case 'while' if (steps := self.loop(instruction).trip_count) is not None:
                return self.loop(instruction).carried(place, steps)
            case 'fusion' | 'call' | 'conditional' if (
                inside := self.inside(instruction)
            ) is not None:
                return inside.part(inside.computation.root.name, place)
        return None

    def loop(self, instruction: Instruction) -> 'Loop':
        """Return the loop of a while instruction: the runs of its body and condition."""
        return self._loops.setdefault(instruction.name, Loop(self, instruction))

    def branch(self, conditional: Instruction) -> int | None:
        """Return the index of the branch that a conditional runs; None if it is unknown."""
        chosen = self.value(conditional.operands[0])
        if chosen is None:
            return None
        if chosen.dtype == np.bool_:
            return 0 if chosen else 1
        last = len(conditional.called) - 1
        return int(chosen) if 0 <= chosen <= last else last

    def inside(self, instruction: Instruction, branch: int | None = None) -> 'Run | None':
        """Return the run of the computation that a fusion, call or conditional branch names.

        None if it is unknown which branch runs.
        """
        first = 0
        if instruction.opcode == 'conditional':
            branch = self.branch(instruction) if branch is None else branch
            if branch is None:
                return None
            first = 1 + branch

        def given(number: int, place: int | None) -> Value:
            name = instruction.operands[first + number]
            return self.value(name) if place is None else self.part(name, place)

        called = self.program.computations[instruction.called[branch or 0]]
        return Run(self.program, called, given=given, device=self.device)

    def _compute(self, instruction: Instruction) -> Value:
        match instruction.opcode:
            case 'constant':
                return constant(instruction)
            case 'parameter':
                return self._given(int(instruction.inputs), None)
            case 'partition-id' | 'replica-id':
                return None if self.device is None else np.array(self.device, dtype_of(instruction))
            case 'get-tuple-element':
                return self.part(instruction.operands[0], int(instruction.attribute('index') or 0))
            case 'copy-done':
                return self.value(self.computation.by_name[instruction.operands[0]].operands[0])
            case 'while' if (steps := self.loop(instruction).trip_count) is not None:
                return self.loop(instruction).carried(None, steps)
            case 'fusion' | 'call' | 'conditional' if (
                inside := self.inside(instruction)
            ) is not None:
                return inside.value(inside.computation.root.name)
        if instruction.opcode in _LAZY:
            return None
        if instruction.opcode == 'reduce':
            return self._reduce(instruction)
        return apply(instruction, [self._values[name] for name in instruction.operands])

    def _reduce(self, instruction: Instruction) -> Value:
        root = self.program.computations[instruction.called[0]].root
        array, start = (self._values[name] for name in instruction.operands[:2])
        operation = REDUCTIONS.get(root.opcode)
        if operation is None or array is None or start is None or len(instruction.operands) > 2:
            return None
        dims = tuple(numbers(instruction, 'dimensions'))
        reduced = operation.reduce(array, axis=dims, dtype=array.dtype)
        return operation(reduced, start).astype(dtype_of(instruction))


class Loop:
    """The runs of a while instruction's body and condition, step by step."""

    def __init__(self, run: Run, instruction: Instruction):
        self._run, self._instruction = run, instruction
        self._carried: dict[int | None, list[Value]] = {}
        self._runs: dict[tuple[str, int], Run] = {}

    @cached_property
    def trip_count(self) -> int | None:
        """The number of steps, as given by the compiler or else by the condition.

        None if neither gives it.
        """
        if self._instruction.trip_count is not None:
            return self._instruction.trip_count
        for step in range(MAX_STEPS):
            condition = self.run('condition', step)
            continues = condition.value(condition.computation.root.name)
            if continues is None:
                return None
            if not continues:
                return step
        return None

    def run(self, which: str, step: int) -> Run:
        """Return the run of 'body' or 'condition' in a step."""
        if (which, step) not in self._runs:
            program, device = self._run.program, self._run.device
            called = program.computations[self._instruction.attribute(which) or '']

            def given(_: int, place: int | None) -> Value:
                return self.carried(place, step)

            self._runs[which, step] = Run(program, called, given=given, device=device)
        return self._runs[which, step]

    def carried(self, place: int | None, step: int) -> Value:
        """Return the value at the start of a step; `place` is None if the loop has one array."""
        values = self._carried.setdefault(place, [])
        if not values:
            values.append(_of(self._run, self._instruction.operands[0], place))
        while len(values) <= step:
            body = self.run('body', len(values) - 1)
            values.append(_of(body, body.computation.root.name, place))
        return values[step]


def run_of(program: Program, computation: Computation, device: int) -> Run:
    """Make a run of a computation with the values that its callers pass.

    If a loop calls the computation, only values that the loop never changes are known.
    """
    calls = program.callers.get(computation.name, ())
    callers = [call for call in calls if not call[1].opcode.startswith('async-')]
    if len(callers) != 1:
        return Run(program, computation, device=device)
    home, caller = callers[0]
    outside = run_of(program, home, device)
    if caller.opcode != 'while':
        branch = caller.called.index(computation.name)
        if caller.opcode not in ('fusion', 'call', 'conditional'):
            return Run(program, computation, device=device)
        return outside.inside(caller, branch) or Run(program, computation, device=device)
    body = program.computations[caller.attribute('body') or '']

    def given(_: int, place: int | None) -> Value:
        if place is None or not _is_kept(body, place):
            return None
        return outside.part(caller.operands[0], place)

    return Run(program, computation, given=given, device=device)


def _is_kept(body: Computation, place: int) -> bool:
    """Return whether a loop's body passes on the carried value at an index unchanged."""
    if body.root.opcode != 'tuple':
        return False
    producer = body.by_name[body.root.operands[place]]
    while producer.opcode == 'copy':
        producer = body.by_name[producer.operands[0]]
    if producer.opcode != 'get-tuple-element' or producer.attribute('index') != str(place):
        return False
    return body.by_name[producer.operands[0]].opcode == 'parameter'


def _is_small(instruction: Instruction) -> bool:
    """Return whether the result of an instruction is a single, small array of integers."""
    is_integer = len(instruction.results) == 1 and instruction.results[0].dtype in INTEGER_DTYPES
    return is_integer and prod(instruction.results[0].shape) <= MAX_ELEMENTS


def _of(run: Run, name: str, place: int | None) -> Value:
    return run.value(name) if place is None else run.part(name, place)
