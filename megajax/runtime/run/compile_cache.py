"""Cache compiled programs on disk (`run.compile_cache`), so that a run restarts faster.

Process 0 writes each program that took more than a second to compile, and jax reads it at a later
start. On CPUs, the cache keys differ by process, so the other processes must compile again. On GPUs
XLA also stores its autotuner's choices there, so that a resumed run uses the same kernels.
"""

import contextlib
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from megajax.core.config import ConfigError, RunConfig

FOLDER = 'compiled'  # name of the cache in the folder of a run
ENTRIES = '*-cache'  # pattern of jax's names for compiled programs
ZSTANDARD = b'\x28\xb5\x2f\xfd'  # the first bytes of a zstd frame

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def compile_cache(config: RunConfig, run_folder: Path) -> Iterator[None]:
    """Let jax cache compiled programs in the folder that the config names.

    With `auto` this is the run's folder, unless jax's own settings already name a cache. Raises
    ConfigError for a folder that cannot be written.
    """
    before: str | None = jax.config.values['jax_compilation_cache_dir']
    if config.compile_cache == 'none' or (config.compile_cache == 'auto' and before):
        yield
        return
    chosen = config.compile_cache
    folder = run_folder / FOLDER if chosen == 'auto' else Path(chosen)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            _drop_damaged(folder)
    except OSError as error:
        raise ConfigError(
            f'run.compile_cache={chosen}: {error}; choose a folder that can be written, or none'
        ) from error
    _use(str(folder))
    try:
        yield
    finally:
        _use(before)


def _use(folder: str | None) -> None:
    jax.config.update('jax_compilation_cache_dir', folder)
    compilation_cache.reset_cache()  # jax reads the folder's name only once, when it first compiles


def _drop_damaged(folder: Path) -> None:
    """Delete incomplete programs, left by a killed process; jax would never replace them."""
    for entry in folder.glob(ENTRIES):
        if not _is_whole(entry.read_bytes()):
            logger.warning('%s is damaged: the program is compiled again', entry)
            entry.unlink(missing_ok=True)


def _is_whole(compressed: bytes) -> bool:
    if compressed.startswith(ZSTANDARD):
        import zstandard  # jax has imported it already

        try:
            zstandard.ZstdDecompressor().decompress(compressed)
        except zstandard.ZstdError:
            return False
        return True
    try:
        zlib.decompress(compressed)
    except zlib.error:
        return False
    return True
