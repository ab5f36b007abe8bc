"""The text of a compiled program, including the tables on which control flow depends."""

import re
from math import prod

from jax._src.lib import hlo  # type: ignore[attr-defined]
from jax.stages import Compiled

MAX_ELEMENTS = 1_000_000  # elements in all abbreviated constants; more would take too long to write
_ABBREVIATED = re.compile(r' (\w+)\[([\d,]*)\]\S* constant\(\{\.\.\.\}\)')


def program_text(compiled: Compiled) -> str:
    """Return HLO text that includes the tables of integers that XLA abbreviates as `{...}`.

    If the tables have more than MAX_ELEMENTS elements in total, they stay abbreviated.
    """
    text = compiled.as_text()
    assert text is not None
    abbreviated = _ABBREVIATED.findall(text)
    sizes = [prod(int(size) for size in dims.split(',') if size) for _, dims in abbreviated]
    has_table = any(re.match('[su][0-9]|pred', dtype) for dtype, _ in abbreviated)
    if not has_table or sum(sizes) > MAX_ELEMENTS:
        return text
    executable = compiled.runtime_executable()
    assert executable is not None
    [module] = executable.hlo_modules()
    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    return module.to_string(options)
