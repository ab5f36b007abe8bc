"""Find the one config key that makes a step fit in GPU memory."""

from collections.abc import Iterator
from typing import NamedTuple

from megajax.analysis.plan.describe import needs
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.search import memory_on, usable_memory
from megajax.analysis.plan.time import step_time
from megajax.core.config import Config
from megajax.core.config.divisors import divisors
from megajax.core.config.optim import ZERO_STAGES
from megajax.core.config.overlap_rules import resolved
from megajax.core.config.rules import incompatibilities
from megajax.core.hardware.memory import USABLE
from megajax.core.hardware.records import hardware

RECOMPUTE = 'none', 'selective', 'full'


class OneKey(NamedTuple):
    """A key with its new value, and the memory and time of a step with it."""

    text: str  # the key and its value, such as train.recompute=full
    bytes: int
    slower: float  # the share by which a step takes longer; negative if the step is faster


def remedy(config: Config, needed: int, *, gpu: str, gpus_per_host: int) -> str:
    """Say which key makes a compiled step fit if it needs more memory than is usable.

    Return an empty string if the step fits. `needed` is in bytes.
    """
    available = int(USABLE * hardware(gpu).memory)
    if needed <= available:
        return ''
    cluster = Cluster.of(hardware(gpu), config.mesh.num_devices, gpus_per_host)
    reason = f'does not fit: {needs(needed, available)}'
    key = one_key(config, cluster, excess=needed - available)
    if key is None:
        return f'{reason}; no single key makes it fit; run megajax plan to search all layouts'
    time = f'{abs(key.slower):.1%} {"slower" if key.slower > 0 else "faster"}'
    return f'{reason}; use {key.text}, predicted to need {key.bytes / 1e9:.1f} GB and to be {time}'


def one_key(config: Config, cluster: Cluster, *, excess: int = 0) -> OneKey | None:
    """Return the key that makes a step fit and costs the least time; None if no key does.

    The key saves at least `excess` bytes, because the plan may underestimate the compiled step.
    Keys that do not change any result of the training run come before `optim.moments_dtype`, which
    rounds AdamW's moments between steps.
    """
    available, before = usable_memory(cluster), resolved(config, on_gpu=True)
    seconds = step_time(before, cluster).total
    most = memory_on(before, cluster).total - excess
    for keys in (_exact(config), _rounding(config)):
        fitting = [
            OneKey(text, needed, step_time(candidate, cluster).total / seconds - 1)
            for text, candidate in _candidates(config, keys)
            if (needed := memory_on(candidate, cluster).total) <= available and needed <= most
        ]
        if fitting:
            return min(fitting, key=lambda key: key.slower)
    return None


def _candidates(config: Config, keys: Iterator[tuple[str, object]]) -> Iterator[tuple[str, Config]]:
    for key, value in keys:
        candidate = changed(config, **{key.replace('.', '__'): value})
        if not incompatibilities(candidate):
            text = str(value).lower() if isinstance(value, bool) else value
            yield f'{key}={text}', resolved(candidate, on_gpu=True)


def _exact(config: Config) -> Iterator[tuple[str, object]]:
    """Yield keys that save memory without changing any result, with their possible values."""
    mesh, train = config.mesh, config.train
    for recompute in RECOMPUTE[RECOMPUTE.index(train.recompute) + 1 :]:
        yield 'train.recompute', recompute
    for times in divisors(config.microbatch_rows)[1:]:
        yield 'train.microbatches', times * train.microbatches
    if mesh.data_shards > 1:
        for shard in ZERO_STAGES[ZERO_STAGES.index(config.optim.shard) + 1 :]:
            yield 'optim.shard', shard
    if mesh.model > 1 and not mesh.sequence_parallel:
        yield 'mesh.sequence_parallel', True


def _rounding(config: Config) -> Iterator[tuple[str, object]]:
    if config.optim.moments_dtype == 'float32':
        yield 'optim.moments_dtype', 'bfloat16'
