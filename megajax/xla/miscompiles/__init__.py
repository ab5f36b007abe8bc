"""Known miscompiles of XLA: detectors, repros that test the installed compiler, and workarounds.

`detect(text)` runs every detector on a compiled program's text; `docs/miscompiles.md` describes
each entry.
"""

from megajax.xla.miscompiles.entry import Miscompile, Repro, Sighting
from megajax.xla.miscompiles.guard import (
    check_compiled,
    mesh_target,
    reject_affected,
    reject_pipelined_sends,
    target_of,
    workarounds,
)
from megajax.xla.miscompiles.probe import Answer, ask, confirmed
from megajax.xla.miscompiles.register import REGISTER, detect, detect_in

__all__ = [
    'REGISTER',
    'Answer',
    'Miscompile',
    'Repro',
    'Sighting',
    'ask',
    'check_compiled',
    'confirmed',
    'detect',
    'detect_in',
    'mesh_target',
    'reject_affected',
    'reject_pipelined_sends',
    'target_of',
    'workarounds',
]
