"""Cache compiled programs on disk (`run.compile_cache`), so that a run restarts faster.

Process 0 writes each program that took more than a second to compile, and jax reads it at a later
start. On GPUs XLA also stores its autotuner's choices there, so that a resumed run uses the same
kernels.

On several CPU devices a cached program may hang. Collectives must be executed in the same order on
all devices. XLA keeps their order by a resource that they share, but when it reads a program back,
each loop, branch and call gets a resource of its own (`FromProto` in XLA's
`backends/cpu/runtime/thunk_proto_serdes.cc`). A collective in a loop and one outside it can then
wait for each other on different devices. In addition, the cache keys differ by process on CPUs, so
only process 0 would read anything.
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

    With `auto` this is the run's folder, unless jax's own settings already name a cache or the
    devices are several CPU devices. Raises ConfigError for a folder that cannot be written.
    """
    before: str | None = jax.config.values['jax_compilation_cache_dir']
    chosen = config.compile_cache
    may_hang = jax.default_backend() == 'cpu' and jax.device_count() > 1
    if chosen == 'none' or (chosen == 'auto' and (before or may_hang)):
        yield
        return
    if may_hang:
        logger.warning(
            'run.compile_cache=%s: XLA may hang in a program that it reads from a cache on several '
            'CPU devices; use run.compile_cache=auto or none',
            chosen,
        )
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
        # another run that starts now may delete it first
        with contextlib.suppress(FileNotFoundError):
            if not _is_whole(entry.read_bytes()):
                logger.warning('%s is damaged: the program is compiled again', entry)
                entry.unlink()


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
