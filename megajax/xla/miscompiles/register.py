"""The register of known miscompiles, and functions that run all of its detectors."""

from megajax.xla.hlo.program import Program
from megajax.xla.miscompiles.dense_ragged_dot import DENSE_RAGGED_DOT
from megajax.xla.miscompiles.double_matmul import DOUBLE_MATMUL
from megajax.xla.miscompiles.empty_permute import EMPTY_PERMUTE
from megajax.xla.miscompiles.entry import Miscompile, Sighting, find
from megajax.xla.miscompiles.lost_indices import LOST_INDICES
from megajax.xla.miscompiles.misplaced_bias import MISPLACED_BIAS
from megajax.xla.miscompiles.scaled_bias import SCALED_BIAS
from megajax.xla.miscompiles.sliced_scatter import SLICED_SCATTER
from megajax.xla.miscompiles.small_dot import SMALL_DOT
from megajax.xla.miscompiles.split_cycles import SPLIT_CYCLES

REGISTER: tuple[Miscompile, ...] = (
    EMPTY_PERMUTE,
    SCALED_BIAS,
    MISPLACED_BIAS,
    SPLIT_CYCLES,
    DOUBLE_MATMUL,
    SLICED_SCATTER,
    LOST_INDICES,
    SMALL_DOT,
    DENSE_RAGGED_DOT,
)


def detect(text: str) -> list[Sighting]:
    """Return every instruction in a compiled program's text that matches a known miscompile.

    Findings of an entry with `is_certain=False` may be correct: `confirmed` asks the compiler.
    """
    return detect_in(Program(text))


def detect_in(program: Program) -> list[Sighting]:
    """Run all detectors on a program that is already parsed."""
    return [finding for entry in REGISTER for finding in find(entry, program)]
