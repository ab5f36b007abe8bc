"""An entry of the register: a known miscompile, its detector, and a program that shows it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.stages import Lowered

from megajax.core.config import Config
from megajax.xla.hlo.program import Instruction, Program

Option = str | bool
Options = Mapping[str, Option]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repro:
    """A small program that decides whether the installed compiler has the fault.

    `lower` gets `num_devices` devices; GPUs need not be present. The compiled program has the fault
    if the entry's detector fires on its text or, if `is_wrong` is given, if its results are wrong.
    """

    num_devices: int
    lower: Callable[[Sequence[Any]], Lowered]
    options: Options = dataclasses.field(default_factory=dict)  # options that the fault needs
    is_wrong: Callable[[Any], bool] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Miscompile:
    """A fault of XLA, in words and as code.

    If `is_certain` is false, `detect` may also fire on a correct program: a finding then counts
    only if the installed compiler has the fault. A config that `bites` accepts is refused if the
    compiler has the fault and `workaround`, a set of compiler options, does not cure it.
    """

    name: str
    what: str  # description of the fault
    where: str  # affected pattern in a user's program
    platform: Literal['gpu', 'cpu']  # platform of the faulty compiler
    source: str  # upstream issue
    effect: Literal['wrong', 'slow'] = 'wrong'
    is_certain: bool = True
    detect: Callable[[Program], Iterator[Instruction]]
    repro: Repro
    workaround: Options | None = None
    remedy: str  # advice to the reader of a finding
    bites: Callable[[Config], bool] = lambda config: False
    bitten_keys: tuple[str, ...] = ()  # config keys that decide whether a config is affected


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sighting:
    """An instruction of a compiled program that shows a known miscompile."""

    entry: Miscompile
    instruction: str
    op_name: str
    source: str

    def __str__(self) -> str:
        source = self.source or 'no source line'
        place = f'{self.instruction} at {self.op_name or "no path"} ({source})'
        return f'{place}: {self.entry.what} ({self.entry.source}): {self.entry.remedy}'


def find(entry: Miscompile, program: Program) -> list[Sighting]:
    """Every place in a compiled program that shows this miscompile."""
    return [
        Sighting(
            entry=entry,
            instruction=instruction.name,
            op_name=instruction.op_name,
            source=program.source(instruction),
        )
        for instruction in entry.detect(program)
    ]
