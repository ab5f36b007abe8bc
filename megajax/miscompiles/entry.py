"""One entry of the register: a known miscompile, how a compiled text shows it, and a program that shows it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.stages import Lowered

from megajax.config import Config
from megajax.hlo.program import Instruction, Program

Option = str | bool | int
Options = Mapping[str, Option]
Platform = Literal['gpu', 'cpu']
Effect = Literal['wrong', 'slow']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repro:
    """A small program that decides whether the compiler at hand has the fault.

    `lower` gets `num_devices` devices, which for a GPU need not be there. Its compiled text shows the fault if the entry's detector
    fires on it. Where no text of the repro can decide, `is_wrong` runs a compiled program and says whether its result is wrong.
    """

    num_devices: int
    lower: Callable[[Sequence[Any]], Lowered]
    options: Options = dataclasses.field(default_factory=dict)
    is_wrong: Callable[[Any], bool] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Miscompile:
    """A fault of XLA.

    `platform` is the compiler that `repro` asks. `is_certain` says that no right program compiles to what `detect` finds; otherwise
    a finding counts where the compiler at hand has the fault. `workaround` are compiler options that cure it; `bites` says which
    configs of megajax have the fault, for those that are refused where nothing cures it, and `refusal` why, and what to do.
    """

    name: str
    what: str
    where: str
    platform: Platform
    source: str
    effect: Effect = 'wrong'
    is_certain: bool = True
    detect: Callable[[Program], Iterator[Instruction]]
    repro: Repro
    workaround: Options | None = None
    remedy: str
    bites: Callable[[Config], bool] = lambda config: False
    bitten_keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """An instruction of a compiled program that shows a known miscompile."""

    entry: Miscompile
    instruction: str
    op_name: str
    source: str

    def __str__(self) -> str:
        place = f'{self.instruction} at {self.op_name or "no path"} ({self.source or "no source line"})'
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
