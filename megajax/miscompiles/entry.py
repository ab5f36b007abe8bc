"""One entry of the register: a known miscompile, its detector, and a program that shows it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.stages import Lowered

from megajax.config import Config
from megajax.hlo.program import Instruction, Program

Option = str | bool
Options = Mapping[str, Option]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repro:
    """A small program that decides whether the compiler at hand has the fault.

    `lower` gets `num_devices` devices; GPUs need not be there. The compiled text shows the fault
    if the entry's detector fires on it; where `is_wrong` is given, running the program decides.
    """

    num_devices: int
    lower: Callable[[Sequence[Any]], Lowered]
    options: Options = dataclasses.field(default_factory=dict)  # without which the fault hides
    is_wrong: Callable[[Any], bool] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Miscompile:
    """A fault of XLA, in words and as code.

    Where `is_certain` is false, a right program may compile to what `detect` finds: a finding then
    counts if the compiler at hand has the fault. A config that `bites` is refused where the
    compiler has the fault and `workaround`, which are compiler options, does not cure it.
    """

    name: str
    what: str  # happens
    where: str  # in a user's program
    platform: Literal['gpu', 'cpu']  # whose compiler the repro asks
    source: str  # upstream
    effect: Literal['wrong', 'slow'] = 'wrong'
    is_certain: bool = True
    detect: Callable[[Program], Iterator[Instruction]]
    repro: Repro
    workaround: Options | None = None
    remedy: str  # for whoever reads a finding
    bites: Callable[[Config], bool] = lambda config: False
    bitten_keys: tuple[str, ...] = ()  # of the config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """An instruction of a compiled program that shows a known miscompile."""

    entry: Miscompile
    instruction: str
    op_name: str
    source: str

    def __str__(self) -> str:
        source = self.source or 'no source line'
        place = f'{self.instruction} at {self.op_name or "no path"} ({source})'
        return f'{place}: {self.entry.what} ({self.entry.source}): {self.entry.remedy}'


def find(entry: Miscompile, program: Program) -> list[Finding]:
    """Every place of a compiled program that shows one miscompile."""
    return [
        Finding(
            entry=entry,
            instruction=instruction.name,
            op_name=instruction.op_name,
            source=program.source(instruction),
        )
        for instruction in entry.detect(program)
    ]
