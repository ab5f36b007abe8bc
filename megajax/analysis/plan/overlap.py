"""List the matmuls that each collective overlaps in the program that XLA compiles for GPUs.

The lists were read from `megajax inspect --target h100` with jax 0.10.2. For each site and kind,
the tables give the share of the bytes that are sent while matmuls run, and name these matmuls. The
same share of the matmuls runs meanwhile. Nothing else overlaps: neither the embedding tables of
ZeRO-2 and ZeRO-3, nor the traffic that a step sends once over `data`. The hidden time is the
smaller of the times of the transfers and of the matmuls (`transfers.py`).

XLA's scheduler decides based on the sizes of a model. Over `model`, it overlaps a transfer in one
program and not in a similar one, so the shares in a loop are means of 66 compiled steps that fit.
In these, the share of the bytes over `model` that overlaps is off by 6.5 points on average, and
within 10 points in 91%; this is the error of the fit. Llama 3 8B on 8x8, without sequence
parallelism and recomputation, overlaps 1%, and the plan says 50%. In 48 held-out steps with
pipeline stages, context parallelism or images, the share is off by 6.6 points on average
(`benchmarks/plan_overlap.py`). The share of the time that matmuls hide is within 5 points for GPT-2
345M, and within 13 points for the 8.3B model, and for Llama 3 8B with full recomputation. Of the
bytes over `data` from ZeRO-2 on, the share is within 9 points without tensor parallelism, and 10
points off on average in 30 compiled steps (`benchmarks/plan_memory.py`). In a step that does not
fit, nothing overlaps.
"""

import functools
from typing import NamedTuple

from megajax.core.config import Config, ModelConfig
from megajax.core.counts.collective import GATHER, PERMUTE, REDUCE, SCATTER, Expected
from megajax.core.counts.parameters import dim_sizes, elements, own_counts, parameters
from megajax.core.counts.product import Phase
from megajax.core.counts.runs import ticks


class HiddenBy(NamedTuple):
    """The share of a collective's transfers that can be hidden, and the matmuls that hide them.

    The same share of the matmuls hides them, unless `of_products` is given.
    """

    share: float
    products: tuple[str, ...]
    phase: Phase | None = None  # phase of the matmuls; None for the phase of the collective
    of_products: float | None = None


NOTHING = HiddenBy(0.0, ())
RING_SHARE = 0.5  # share of a ring's hops that overlap
_ATTENTION, _MLP = ('qkv weight', 'out weight'), ('up weight', 'down weight')
_BACKWARD = {
    ('head', REDUCE): HiddenBy(1.0, ('head weight',)),
    ('head', SCATTER): HiddenBy(1.0, ('head weight',)),
    ('attention', REDUCE): HiddenBy(1.0, _ATTENTION),
    # XLA puts a gradient of a weight between its start and its end in about half of the programs.
    ('attention', GATHER): HiddenBy(0.5, ('up weight',)),
    ('attention', SCATTER): HiddenBy(1.0, ('out weight',)),
    ('mlp', REDUCE): HiddenBy(1.0, _MLP),
}
# With full recomputation, the attention of a layer is reduced before its MLP. In about half of the
# programs it overlaps a matmul of the backward pass, and the reduction after the MLP nothing.
_FULL = {
    'recompute': {('attention', REDUCE): HiddenBy(0.5, ('down input',), 'backward')},
    'backward': {key: value for key, value in _BACKWARD.items() if key != ('mlp', REDUCE)},
}
# The halves of a microbatch alternate (train.overlap=batch_split). A layer's last half overlaps
# nothing.
_BACKWARD_OF_HALVES = _BACKWARD | {
    ('attention', REDUCE): HiddenBy(0.5, (*_ATTENTION, 'attention')),
    ('attention', GATHER): HiddenBy(0.5, _ATTENTION),
    ('mlp', REDUCE): HiddenBy(1.0, _MLP),
    ('mlp', SCATTER): HiddenBy(1.0, _MLP),
    ('mlp', GATHER): HiddenBy(1.0, ('down input', 'attention')),
}
_FORWARD_OF_HALVES = {
    ('attention', REDUCE): HiddenBy(0.5, ('attention', 'out')),
    ('attention', SCATTER): HiddenBy(0.5, ('attention', 'out')),
    ('mlp', REDUCE): HiddenBy(0.5, ('down',)),
    ('mlp', SCATTER): HiddenBy(0.5, ('down',)),
}
_RECOMPUTE_OF_HALVES = _FORWARD_OF_HALVES | {
    ('attention', REDUCE): HiddenBy(1.0, ('attention', 'out', 'up')),
    ('mlp', GATHER): HiddenBy(0.5, ('up',)),
}


# ZeRO-2 and ZeRO-3: the shares of the layers' weights and gradients over `data` that overlap.
# Tensor parallelism's traffic takes their place, more so without recomputation
# (`benchmarks/results`).
_OVER_DATA = {
    'alone': {'forward': 0.81, 'recompute': 0.88, 'backward': 0.73, 'gradients': 1.0},
    'tensor': {'forward': 0.35, 'recompute': 0.75, 'gradients': 0.7},
    'tensor, no recomputation': {'forward': 0.2, 'backward': 0.2, 'gradients': 0.15},
    'grid': {'forward': 0.1, 'recompute': 0.6, 'backward': 0.2, 'gradients': 0.35},
    'halves': {'forward': 0.88, 'recompute': 0.88, 'backward': 0.88, 'gradients': 0.92},
}


# In the overlap schedule (`core/model/overlap/`) the layers' traffic overlaps all matmuls of its
# pass, except transfers next to a short one; halves of the tokens wait for each other if attention
# needs both. In a loop, the first and the last transfer of a layer overlap nothing.
_IN_ORDER = {'batch_split': 0.92, 'sequence_split': 0.75}
_IN_LOOP = 0.8
_OF_LAYER = 'qkv', 'attention', 'out', 'up', 'down'


def _hidden_by_others(collective: Expected, config: Config) -> HiddenBy | None:
    """Return what hides the traffic of layers in the overlap schedule; None for other traffic."""
    site, phase = collective.site, collective.site.phase
    in_loop = 1.0 if config.train.unroll is True else _IN_LOOP
    if is_over_data(collective):
        if site.name == 'parameters' and phase == 'step' and config.overlap.gathers_ahead:
            phase = 'forward'
        if phase == 'step':
            return None
        # The backward pass gathers only the layers.
        layers_alone = site.name == 'parameters' and phase == 'backward'
        share = in_loop if layers_alone else in_loop * _in_order_over_data(config)
        return HiddenBy(share, in_pass(phase), phase, of_products=in_loop)
    if site.axis == 'model' and site.name in ('attention', 'mlp') and config.overlap.num_parts > 1:
        return HiddenBy(in_loop * _IN_ORDER[config.train.overlap], in_pass(phase))
    return None


def _in_order_over_data(config: Config) -> float:
    """Return the share of a pass's traffic over `data` that overlaps matmuls.

    The matrices of the first layer's attention are needed before any matmul, and their gradients
    come last.
    """
    counts = own_counts(config)
    head = counts.tables / 2 if config.overlap.has_head else 0.0
    others = counts.layers * (1 - _share_of_first_attention(config.model))
    return (others + head) / (counts.layers + counts.tables)


@functools.cache
def _share_of_first_attention(model: ModelConfig) -> float:
    """Return the share of the first layer's attention in the matrices of all layers."""
    sizes = dim_sizes(model)
    matrices = [(name, x) for name, x in parameters(model) if x.is_stacked and x.is_matrix]
    first = sum(elements(x.dims_of_layer, sizes) for name, x in matrices if '.attention.' in name)
    return first / sum(elements(x.dims, sizes) for _, x in matrices)


@functools.cache
def in_pass(phase: Phase, names: tuple[str, ...] = _OF_LAYER) -> tuple[str, ...]:
    """Return the names of the matmuls in a pass, by default of those in a layer."""
    gradients = (' input', ' weight') if phase == 'backward' else ('',)
    return tuple(
        f'{name}{of}' for name in names for of in (gradients if name != 'attention' else ('',))
    )


def is_over_data(collective: Expected) -> bool:
    """Return whether a collective is data-parallel, even if over context or stages."""
    axes = {*collective.site.axis.split('+')}
    is_of_weights = collective.site.name in ('parameters', 'gradients')
    return bool({'data', 'replica'} & axes) or (is_of_weights and not {'row', 'model'} & axes)


def hidden_by_ticks(collective: Expected, config: Config) -> HiddenBy:
    """Return what hides the transfers between stages in 1F1B: the other pass of the same tick.

    Nothing hides them in ticks with only one pass, i.e. at both ends and in GPipe.
    """
    mesh = config.mesh
    if collective.kind != PERMUTE or config.train.schedule == 'gpipe':
        return NOTHING
    alone = mesh.virtual_stages * mesh.stages - 1
    other: Phase = 'backward' if collective.site.phase == 'forward' else 'forward'
    return HiddenBy(1 - alone / ticks(config), in_pass(other), other)


def _shares_over_data(config: Config) -> dict[str, float]:
    if config.mesh.tensor_parallel == 1:
        return _OVER_DATA['alone']
    if config.overlap.is_split:
        return _OVER_DATA['halves']
    if config.mesh.is_grid:
        return _OVER_DATA['grid']
    is_full = config.train.recompute == 'full'
    return _OVER_DATA['tensor' if is_full else 'tensor, no recomputation']


def _hidden_by_layers(collective: Expected, config: Config) -> HiddenBy:
    """Return what hides the traffic of weights and gradients; the collectives also carry tables."""
    if collective.site.phase == 'step':
        return NOTHING
    shares, recomputed = _shares_over_data(config), config.train.recompute == 'full'
    counts = own_counts(config)
    layers = counts.layers / (counts.layers + counts.tables)
    if collective.site.name == 'gradients':
        products = 'qkv input', 'qkv weight', 'out weight'
        return HiddenBy(shares['gradients'] * layers, products, 'backward')
    if collective.site.phase == 'forward':
        return HiddenBy(shares['forward'] * layers, ('attention', 'up'), 'forward')
    # The backward pass gathers only the layers. With full recomputation, both share the gathers.
    if recomputed:
        return HiddenBy(shares['recompute'], ('attention', 'out', 'up'), 'recompute')
    return HiddenBy(shares['backward'], ('down weight', 'up weight'), 'backward')


def _hidden_by_blocks(collective: Expected, config: Config) -> HiddenBy:
    """Return what hides a ring's hop: a block of attention. Nothing hides a gather."""
    if collective.kind != PERMUTE:
        return NOTHING
    return HiddenBy(RING_SHARE, ('attention',))


def hidden_by(collective: Expected, config: Config) -> HiddenBy:
    """Return the matmuls that a collective of a step of `config` overlaps.

    In compiled programs, under 10% of the collectives of 2-D tensor parallelism overlap; the
    prediction counts none.
    """
    overlap = config.overlap
    if overlap.in_order and (others := _hidden_by_others(collective, config)):
        return others
    if is_over_data(collective):
        return _hidden_by_layers(collective, config)
    if config.mesh.is_grid:
        return NOTHING
    key = collective.site.name, collective.kind
    if collective.site.axis == 'stage':
        return hidden_by_ticks(collective, config)
    if collective.site.axis == 'context':
        return _hidden_by_blocks(collective, config)
    if overlap.is_split:
        tables = {
            'forward': _FORWARD_OF_HALVES,
            'recompute': _RECOMPUTE_OF_HALVES,
            'backward': _BACKWARD_OF_HALVES,
        }
        return tables.get(collective.site.phase, {}).get(key, NOTHING)
    tables = _FULL if config.train.recompute == 'full' else {'backward': _BACKWARD}
    return tables.get(collective.site.phase, {}).get(key, NOTHING)
