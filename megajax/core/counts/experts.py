"""The collectives of mixtures of experts (`core/model/expert_passes.py`).

Megatron-Core's `MoEAlltoAllTokenDispatcher` (transformer/moe/token_dispatcher.py) has the same two
all-to-alls in each pass. Imports no jax.
"""

from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.counts.collective import (
    EXCHANGE,
    GATHER,
    REDUCE,
    Expected,
    Site,
    activation,
    axes_text,
    passes,
)
from megajax.core.counts.expert_rows import ROOM, rows_sent
from megajax.core.counts.layers import num_with_experts
from megajax.xla.hlo.program import Array

DISPATCHER = 'transformer/moe/token_dispatcher.py MoEAlltoAllTokenDispatcher'
ROUNDS = f'buffers of {ROOM} times a balanced load (docs/experts.md)'
BALANCE = 'transformer/moe/moe_utils.py save_to_aux_losses_tracker'
NUM_STATISTICS = 4  # statistics of a router, for each expert (`core/model/router.py`)


def over_experts(config: Config, runs: int) -> Iterator[Expected]:
    """Yield the collectives over `expert` for this many runs of layers, and the routers' sums.

    Without a capacity, only the first round counts, because a balanced load needs no other.
    """
    if config.model.experts is None:
        return
    _, (rows, length, _) = activation(config)
    parts = config.overlap.num_parts  # each part has its own all-to-alls
    slots = rows_sent(config, rows * length // parts, config.mesh.experts)
    yield from _in_passes(config, runs * parts, slots, ROUNDS)
    yield from _of_routers(config)


def of_megatron(config: Config, runs: int) -> Iterator[Expected]:
    """Yield Megatron's collectives.

    Without a capacity, Megatron sends exactly the tokens, which here have a balanced load.
    """
    experts = config.model.experts
    if experts is None:
        return
    _, (rows, length, _) = activation(config)
    slots = rows * length * experts.active
    if experts.capacity is not None:
        slots = rows_sent(config, rows * length, config.mesh.experts)
    yield from _in_passes(config, runs, slots, DISPATCHER)
    yield from _of_routers(config)


def _of_routers(config: Config) -> Iterator[Expected]:
    """Yield the sums of the routers' statistics, once a step."""
    experts = config.model.experts
    assert experts is not None
    layers = num_with_experts(config.model)
    sums, stages = (NUM_STATISTICS, experts.count), config.mesh.stages
    if axis := axes_text(config, 'replica', 'data', 'expert', 'context'):
        reduced, site = Array('f32', (layers // stages, *sums)), Site('gradients', 'step', axis)
        yield Expected.over(config, site, REDUCE, reduced, 1, BALANCE)
    if stages > 1:
        site = Site('parameters', 'step', 'stage')
        yield Expected.over(config, site, GATHER, Array('f32', (layers, *sums)), 1, BALANCE)


def _in_passes(config: Config, runs: int, slots: int, source: str) -> Iterator[Expected]:
    """Yield the two all-to-alls of each pass, of buffers with this many rows."""
    experts, devices = config.model.experts, config.mesh.experts
    assert experts is not None
    if devices == 1:
        return
    dtype, (_, _, size) = activation(config)
    runs = num_with_experts(config.model, runs)
    for phase in passes(config):
        site = Site('experts', phase, 'expert')
        sent = Array(dtype, (slots, size))
        yield Expected.over(config, site, EXCHANGE, sent, 2 * runs, source)
        if experts.capacity is None:
            counts = Array('s32', (devices, experts.count))
            yield Expected.over(config, site, GATHER, counts, runs, source)
