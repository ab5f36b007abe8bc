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
from megajax.core.counts.expert_rows import rows_of_experts
from megajax.core.counts.layers import layers_of, stacks
from megajax.xla.hlo.program import Array

DISPATCHER = 'transformer/moe/token_dispatcher.py MoEAlltoAllTokenDispatcher'
BALANCE = 'transformer/moe/moe_utils.py save_to_aux_losses_tracker'
NUM_STATISTICS = 4  # of a router, for each expert (`core/model/router.py`)


def over_experts(config: Config, runs: int) -> Iterator[Expected]:
    """Yield the collectives over `expert` of layers that run this often, and of the routers.

    Without a capacity, a buffer has room for all assignments of a device on each other device.
    """
    experts = config.model.experts
    if experts is None:
        return
    model = config.model
    layers = len(layers_of(model, stacks(model)[-1].dim))
    runs = runs * layers // model.num_layers
    dtype, (rows, length, size) = activation(config)
    devices, assignments = config.mesh.experts, rows * length * experts.active
    if devices > 1:
        slots = devices * assignments
        if experts.capacity is not None:
            own, of_each = rows_of_experts(config, rows * length, {'X': devices})
            slots = own * of_each
        for phase in passes(config):
            site = Site('experts', phase, 'expert')
            sent = Array(dtype, (slots, size))
            yield Expected.over(config, site, EXCHANGE, sent, 2 * runs, DISPATCHER)
            if experts.capacity is None:
                counts = Array('s32', (devices, experts.count))
                yield Expected.over(config, site, GATHER, counts, runs, DISPATCHER)
    sums, stages = (NUM_STATISTICS, experts.count), config.mesh.stages
    if axis := axes_text(config, 'replica', 'data', 'expert', 'context'):
        reduced, site = Array('f32', (layers // stages, *sums)), Site('gradients', 'step', axis)
        yield Expected.over(config, site, REDUCE, reduced, 1, BALANCE)
    if stages > 1:
        site = Site('parameters', 'step', 'stage')
        yield Expected.over(config, site, GATHER, Array('f32', (layers, *sums)), 1, BALANCE)
