"""Summarize the plan of a run in a line or two, and name the keys that would improve it."""

from collections.abc import Iterator
from typing import Any

from megajax.analysis.plan.describe import needs
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.search import Choice, memory_on, search, usable_memory
from megajax.analysis.plan.time import step_time
from megajax.core.config import Config, ConfigError
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.records import Hardware

# A different layout is suggested if it is faster by more than this share.
WORTH = 0.03
# The keys that a search chooses, in the order of the schema.
KEYS = {
    'mesh': (
        'stages',
        'virtual_stages',
        'data',
        'replicas',
        'experts',
        'context',
        'context_exchange',
        'model_rows',
        'model',
        'sequence_parallel',
        'allow_model_across_hosts',
    ),
    'train': ('microbatches', 'schedule', 'recompute', 'overlap', 'unroll'),
    'optim': ('shard',),
}
CHOSEN = [f'{section}.{key}' for section, keys in KEYS.items() for key in keys]


def advice(config: Config, gpu: Hardware, gpus_per_host: int | None = None) -> Iterator[str]:
    """Yield a line on a step's memory and time on the GPUs of its mesh, and one after a search.

    The second line takes seconds to compute. It names the keys that make the config fit, or that
    make it faster. Raises ConfigError if the GPU is unsuitable.
    """
    cluster = Cluster.of(gpu, config.mesh.num_devices, gpus_per_host)
    own, available = resolved(config, on_gpu=True), usable_memory(cluster)
    needed, seconds = memory_on(own, cluster).total, step_time(own, cluster).total
    size, expected = needs(needed, available), f'{_seconds(seconds)} per step expected'
    fits = needed <= available
    yield f'{size}; {expected}' if fits else f'does not fit: {size}'
    try:
        best = search(config, cluster).best
    except ConfigError:
        yield f'does not fit: {size}, and no other layout fits'
        return
    ratio, changes = seconds / best.timed.total, _changes(config, best)
    if not fits:
        step = f'{_seconds(best.timed.total)} per step expected'
        yield f'does not fit: {size}; fits with {changes}, {step}'
    elif ratio <= 1 + WORTH:
        yield f'{size}; {expected}, within {WORTH:.0%} of the fastest layout'
    else:
        yield f'{_unneeded(own, best)}{expected}; {ratio:.2f}x as fast with {changes}'


def layout_keys(layout: Config, before: Config) -> dict[str, dict[str, Any]]:
    """Return the keys, by section, in which `layout` differs from the layout of `before`.

    Overlap and unrolling are `auto` if `auto` resolves to the values in `layout`.
    """
    with_auto = changed(layout, train__overlap='auto', train__unroll='auto')
    chosen = with_auto if resolved(with_auto, on_gpu=True) == layout else layout
    return {
        name: {
            key: value
            for key in keys
            if (value := getattr(getattr(chosen, name), key)) != getattr(getattr(before, name), key)
        }
        for name, keys in KEYS.items()
    }


def _unneeded(own: Config, best: Choice) -> str:
    """Say that the model fits without tensor parallelism, if the fastest layout has none."""
    group = own.mesh.tensor_parallel
    return (
        f'fits without tensor parallelism (model={group}); ' if best.mesh.model == 1 < group else ''
    )


def _changes(config: Config, best: Choice) -> str:
    changes = layout_keys(best.config, config)
    return ' '.join(
        f'{section}.{key}={str(value).lower()}'
        for section, keys in changes.items()
        for key, value in keys.items()
    )


def _seconds(seconds: float) -> str:
    return f'{1000 * seconds:.0f} ms' if seconds < 1 else f'{seconds:.2f} s'
