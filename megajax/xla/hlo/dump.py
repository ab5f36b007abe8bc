"""Compile without jax's cache, and return the arrays in memory at the peak."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

from megajax.xla.hlo.buffers import Buffer, buffers_at_peak


def compile_with_buffers(
    compile_with: Callable[[dict[str, Any]], Compiled], options: Mapping[str, Any]
) -> tuple[Compiled, tuple[Buffer, ...]]:
    """Call `compile_with` with compiler options, and also return the buffers at the peak.

    XLA writes the buffers to files as it compiles, so a program from jax's cache would have none.
    """
    with tempfile.TemporaryDirectory() as folder, without_cache():
        dump = {'xla_dump_to': folder, 'xla_dump_hlo_as_text': True}
        compiled = compile_with({**options, **dump})
        return compiled, buffers_at_peak(Path(folder))


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Disable jax's compilation cache while the context is open."""
    before: bool = jax.config.values['jax_enable_compilation_cache']
    _enable_cache(False)
    try:
        yield
    finally:
        _enable_cache(before)


def _enable_cache(enable: bool) -> None:
    jax.config.update('jax_enable_compilation_cache', enable)
    # jax reads the cache's settings only once, when it first compiles.
    compilation_cache.reset_cache()
