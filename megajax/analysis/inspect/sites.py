"""Find the part of the training step (the site) that a collective belongs to.

The named scopes in its path decide; for the gradients of some parameters, their size does.
"""

import functools
import re
from math import prod

from megajax.core.config import Config
from megajax.core.counts.collective import Site, activation
from megajax.core.counts.context import keys
from megajax.core.counts.current_scaling import AMAX
from megajax.core.counts.layers import SUBLAYERS
from megajax.core.counts.muon import exchanges
from megajax.core.counts.parameters import dim_sizes, elements, parameters
from megajax.core.counts.product import Phase
from megajax.core.counts.vision import relevance_arrays, shapes, vectors
from megajax.core.model.residuals import RECOMPUTE
from megajax.core.parallel.layout import Layout
from megajax.core.train.pipeline import TO_NEXT, TO_PREVIOUS
from megajax.xla.hlo.collectives import Collective

# In order of precedence: the first of these scopes that is in the path names the site.
SCOPES = (
    *('optimizer', 'embedding', 'cross_attention', 'qk_norm'),
    *(*SUBLAYERS, 'experts', 'head', 'loss', 'norm'),
)
ORDER = (
    *('parameters', AMAX, 'documents', 'stage', 'relevance', 'vision', 'embedding'),
    *('attention', 'qk_norm', 'cross_attention', 'mlp', 'experts', 'norm', 'head', 'loss'),
    *('gradients', 'optimizer', 'metrics'),
)


def site_of(collective: Collective, config: Config) -> Site:
    """Return the site of a collective; without a scope in its path, a site named after the path."""
    op_name, axis = collective.op_name, collective.axis
    words = re.findall(r'[\w.]+', op_name)
    if AMAX in words:
        return Site(AMAX, 'step' if 'parameters' in words else phase_of(op_name), axis)
    if collective.is_scalar:
        return Site('metrics', 'step', axis)
    scope = next((scope for scope in SCOPES if scope in words), None)
    if scope is None and 'vision_place' in words:
        # The embedding's gradient, gathered where the backward pass removes images.
        scope = 'embedding'
    if scope == 'optimizer' and _has_matrices(collective, config):
        return Site('optimizer', 'step', axis)
    if config.vision is not None and (site := _of_encoder(collective, config)) is not None:
        return site
    if (site := _over_stages(collective, words, config)) is not None:
        return site
    if _has_keys(collective, config):
        return Site('attention', phase_of(op_name), axis)
    if collective.axes == ('context',) and (
        collective.operand.dtype == 's32' or (config.model.is_bert and 'reduce_max' in words)
    ):
        return Site('documents', 'step', axis)
    if scope == 'experts' and _has_tokens(collective):
        return Site(scope, phase_of(op_name), axis)
    if (site := _over_data(collective, words, config)) is not None:
        return site
    if config.mesh.is_grid and (site := _over_row(collective, scope, config)) is not None:
        return site
    if scope not in ('loss', 'qk_norm') and _is_partial_gradient(collective, words, config):
        return Site('gradients', 'step', axis)
    if scope == 'optimizer':
        return Site('optimizer', 'step', axis)
    if scope in ('head', 'loss'):  # a reduction of one number per token belongs to the loss
        tokens = prod(activation(config).shape[:2])
        scope = 'loss' if prod(collective.whole.shape) <= tokens else 'head'
        return Site(scope, 'forward' if scope == 'loss' else phase_of(op_name), axis)
    if scope is None:
        return Site(f'other: {op_name or collective.instruction}', 'step', axis)
    return Site(scope, phase_of(op_name), axis)


def _has_matrices(collective: Collective, config: Config) -> bool:
    """Return whether a collective moves the matrices that Muon orthogonalizes."""
    sent = collective.kind, collective.axis
    return sent in {(expected.kind, expected.site.axis) for expected in exchanges(config)}


def _has_tokens(collective: Collective) -> bool:
    """Return whether a collective sends tokens to experts, or the numbers of these tokens."""
    return collective.axes == ('expert',) and (
        collective.kind == 'all-to-all' or collective.operand.dtype == 's32'
    )


def _of_encoder(collective: Collective, config: Config) -> Site | None:
    """Return the site of a vision encoder's collective over `model`, from its arrays.

    XLA moves the gather of image vectors, and its scope, past the slice that reads them.
    """
    axis, dims = collective.axis, collective.whole.dims
    if 'model' not in collective.axes:
        return None
    if config.relevance is not None:
        names: dict[str, tuple[str, ...]] = {'all-gather': ('texture', 'scores', 'gate')}
        if 'query' in re.findall(r'\w+', collective.op_name):
            names['all-reduce'] = ('query',)
        for name in names.get(collective.kind, ()):
            if dims == relevance_arrays(config)[name].dims:
                return Site('relevance', 'backward' if name == 'gate' else 'forward', axis)
    if dims == vectors(config).dims and collective.kind in ('all-gather', 'reduce-scatter'):
        return Site('vision', 'forward' if collective.kind == 'all-gather' else 'backward', axis)
    if tuple(sorted(dims)) not in shapes(config):
        return None
    return Site('parameters' if collective.kind == 'all-gather' else 'gradients', 'step', axis)


def _over_stages(collective: Collective, words: list[str], config: Config) -> Site | None:
    """Return the site of sends between stages; gradients and weights have different sites."""
    if collective.axes != ('stage',):
        return None
    axis, kind = collective.axis, collective.kind
    if kind == 'collective-permute':
        phases: dict[str, Phase] = {TO_NEXT: 'forward', TO_PREVIOUS: 'backward'}
        return next((Site('stage', phases[word], axis) for word in words if word in phases), None)
    if kind == 'all-to-all':
        return Site('head', 'forward', axis)
    # A step gathers weights only once, and the head's tokens in each microbatch.
    if kind == 'all-gather' and collective.times >= config.train.microbatches:
        return Site('head', 'backward', axis)
    return None


def _has_keys(collective: Collective, config: Config) -> bool:
    """Return whether context shards send keys, values or their gradients, or exchange heads."""
    if collective.axes != ('context',):
        return False
    if collective.kind in ('collective-permute', 'all-to-all'):
        return True
    shards, rows, *others = keys(config).dims
    of_parts = {(shards, count, *others) for count in (rows, rows // config.overlap.num_parts)}
    return collective.kind != 'all-reduce' and collective.whole.dims in of_parts


def _over_data(collective: Collective, words: list[str], config: Config) -> Site | None:
    """Return the site of a data-parallel collective; None for other collectives.

    The ZeRO stage decides the phase, because XLA gives an all-gather the path of its reader and a
    reduction the path of the array. ZeRO-1 gathers weights and reduces gradients once per step,
    ZeRO-2 reduce-scatters matrices in the backward pass, and ZeRO-3 gathers weights in both passes.
    """
    axis, shard = collective.axis, config.overlap.shard
    over_shards = {*collective.axes} <= {'stage', 'data', 'expert', 'context'}
    if collective.kind == 'all-gather' and over_shards and axis:
        is_forward = phase_of(collective.op_name) == 'forward'
        passes: tuple[Phase, Phase] = ('forward', 'backward')
        return Site('parameters', passes[not is_forward] if shard == 'weights' else 'step', axis)
    is_sum = collective.kind in ('all-reduce', 'reduce-scatter')
    if is_sum and {'replica', 'stage', 'data', 'expert', 'context'} & {*collective.axes}:
        is_early = shard in ('gradients', 'weights') and collective.kind == 'reduce-scatter'
        return Site('gradients', 'backward' if is_early else 'step', axis)
    return Site('gradients', 'step', axis) if 'data_parallel' in words else None


def _over_row(collective: Collective, scope: str | None, config: Config) -> Site | None:
    """Return the site of a collective over `row` whose path does not show it."""
    if collective.axes != ('row',):
        return None
    if collective.kind == 'all-reduce':
        # A norm sums one number for each token of a device; any other sum is a vector's gradient.
        length, rows = config.train.seq_len // config.mesh.model, config.microbatch_rows
        tokens = [
            sorted(size for size in (count, length) if size > 1) for count in (rows, rows // 2)
        ]
        is_norm = sorted(collective.operand.dims) in tokens
        return Site('norm', 'forward', 'row') if is_norm else Site('gradients', 'backward', 'row')
    is_recomputed = scope == 'mlp' and phase_of(collective.op_name) == 'recompute'
    is_for_norm = is_recomputed and config.overlap.repeats_outputs
    if collective.kind == 'all-gather' and (is_recomputed or scope is None) and not is_for_norm:
        # The recomputed activation, gathered only for a weight gradient. From ZeRO-2 on, the matmul
        # of this gradient has the path of the reduction over `data`.
        return Site('mlp', 'backward', 'row')
    return None


def phase_of(op_name: str) -> Phase:
    """Return the phase of a path, from jax's transformations in it.

    `jax.checkpoint` puts `checkpoint/` before its scope of recomputation. The overlap schedule uses
    that scope as the outermost one of a sublayer that it recomputes; the gradient of this sublayer
    has the path of a scope inside another sublayer's or its own.
    """
    before, scope, after = op_name.partition('rematted_computation')
    is_outermost = not {*SCOPES} & {*re.findall(r'\w+', before)}
    if scope and 'transpose(' not in after and (before.endswith('checkpoint/') or is_outermost):
        return 'recompute'
    if 'transpose(' in op_name:
        return 'backward'
    return 'recompute' if RECOMPUTE in re.findall(r'\w+', op_name) else 'forward'


def _is_partial_gradient(collective: Collective, words: list[str], config: Config) -> bool:
    """Return whether a collective reduces the partial gradients of a parameter.

    XLA joins these small arrays into one buffer, whose parts may have the path of a different array
    or none. The loss's arrays, with one number per token, can have the same size; if they belong to
    the head, both names are in their paths.
    """
    dims = collective.operand.dims
    tokens = prod(activation(config).shape[:2])
    if 'loss' in words and len(dims) > 1 and prod(dims) == tokens:
        return False
    is_sum = collective.kind == 'all-reduce' and collective.operand.dtype == 'f32'
    return is_sum and prod(collective.operand.shape) in _partial_sizes(config)


@functools.cache
def _partial_sizes(config: Config) -> frozenset[int]:
    """Return the per-device sizes of the parameters that are applied along a sharded dim.

    Each stacked parameter has two sizes: in all layers, and in one layer.
    """
    model, shards = config.model, Layout.of(config).shards
    sizes, partial_sizes = dim_sizes(model), set[int]()
    for _, parameter in parameters(model):
        if parameter.summed and parameter.owner == 'decoder':
            for dims in (parameter.dims, parameter.dims_of_layer):
                partial_sizes.add(elements(dims, sizes, shards))
    return frozenset(partial_sizes)
