"""An entry of the register: a known miscompile, its detector, and an affected program."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered
from jax.typing import DTypeLike

from megajax.core.config import Config
from megajax.xla.hlo.program import Instruction, Program

Option = str | bool
Options = Mapping[str, Option]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repro:
    """A small program that decides whether the installed compiler has the bug.

    `lower` gets `num_devices` devices; no GPU is needed. The compiler has the bug if the entry's
    detector fires on the compiled text or, if `is_wrong` is given, if the results are wrong.
    """

    num_devices: int
    lower: Callable[[Sequence[Any]], Lowered]
    options: Options = dataclasses.field(default_factory=dict)  # options that trigger the bug
    is_wrong: Callable[[Any], bool] | None = None


def replicated(
    devices: Sequence[Any], *shapes: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> list[jax.ShapeDtypeStruct]:
    """Return arrays of these shapes, each of them whole on every device."""
    sharding = NamedSharding(Mesh(np.array(devices), ('x',)), P())
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Miscompile:
    """A bug of XLA, in words and as code.

    If `is_certain` is false, `detect` may also fire on a correct program, and a finding is dropped
    if the installed compiler does not have the bug. A config for which `affects` is true is
    rejected if the compiler has the bug and the compiler options in `workaround` do not avoid it.
    """

    name: str
    what: str  # description of the bug
    where: str  # affected pattern in a user's program
    platform: Literal['gpu', 'cpu']  # platform of the compiler with the bug
    source: str  # upstream issue
    effect: Literal['wrong', 'slow'] = 'wrong'
    is_certain: bool = True
    detect: Callable[[Program], Iterator[Instruction]]
    # Details of a finding, such as its size.
    detail: Callable[[Program, Instruction], str] = lambda program, instruction: ''
    repro: Repro
    workaround: Options | None = None
    remedy: str  # advice to the user for a finding
    affects: Callable[[Config], bool] = lambda config: False
    affected_keys: tuple[str, ...] = ()  # config keys that decide whether a config is affected


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sighting:
    """An instruction of a compiled program that matches a known miscompile."""

    entry: Miscompile
    instruction: str
    op_name: str
    source: str
    detail: str = ''
    doubt: str = ''  # why it is not known whether the compiler has the bug

    def __str__(self) -> str:
        source = self.source or 'no source line'
        place = f'{self.instruction} at {self.op_name or "no path"} ({source})'
        what = f'{self.entry.what}, {self.detail}' if self.detail else self.entry.what
        doubt = f'; unknown whether this compiler has the bug: {self.doubt}' if self.doubt else ''
        return f'{place}: {what} ({self.entry.source}): {self.entry.remedy}{doubt}'


def find(entry: Miscompile, program: Program) -> list[Sighting]:
    """Return every instruction of a compiled program that matches this miscompile."""
    return [
        Sighting(
            entry=entry,
            instruction=instruction.name,
            op_name=instruction.op_name,
            source=program.source(instruction),
            detail=entry.detail(program, instruction),
        )
        for instruction in entry.detect(program)
    ]
