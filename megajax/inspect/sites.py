"""The part of the training step that a collective belongs to.

The named scopes in its path decide, and for gradients of some parameters their size.
"""

import functools
import re
from math import prod

from megajax.config import Config, ModelConfig
from megajax.counts.megatron import Site
from megajax.counts.parameters import dim_sizes, parameters, shape_of
from megajax.counts.products import Phase
from megajax.hlo.collectives import Collective

# In order of precedence: the first scope that is in the path names the site.
_SCOPES = ('optimizer', 'embedding', 'attention', 'mlp', 'head', 'loss', 'norm')
ORDER = (
    'parameters',
    'embedding',
    'attention',
    'mlp',
    'norm',
    'head',
    'loss',
    'gradients',
    'optimizer',
    'metrics',
)


def site_of(collective: Collective, config: Config) -> Site:
    """The site of a collective; without a scope in its path, a site named after the path."""
    op_name, axis = collective.op_name, collective.axis
    if collective.is_scalar:
        return Site('metrics', 'step', axis)
    words = re.findall(r'[\w.]+', op_name)
    scope = next((scope for scope in _SCOPES if scope in words), None)
    is_partial = scope != 'loss' and _is_partial_gradient(collective, words, config)
    if 'data_parallel' in words or is_partial:
        return Site('gradients', 'step', axis)
    if 'data' in collective.axes and collective.kind in ('all-reduce', 'reduce-scatter'):
        return Site('gradients', 'step', axis)
    if collective.kind == 'all-gather' and collective.axes == ('data',):
        return Site('parameters', 'step', axis)
    if scope == 'optimizer':
        return Site('optimizer', 'step', axis)
    if scope in ('head', 'loss'):  # a reduction of one number per token belongs to the loss
        tokens = config.microbatch_rows * config.train.seq_len
        scope = 'loss' if prod(collective.whole.shape) <= tokens else 'head'
        return Site(scope, 'forward' if scope == 'loss' else phase_of(op_name), axis)
    if scope is None:
        return Site(f'other: {op_name or collective.instruction}', 'step', axis)
    return Site(scope, phase_of(op_name), axis)


def phase_of(op_name: str) -> Phase:
    """The phase of a path, by jax's transformations in it."""
    if 'rematted_computation' in op_name:
        return 'recompute'
    return 'backward' if 'transpose(' in op_name else 'forward'


def _is_partial_gradient(collective: Collective, words: list[str], config: Config) -> bool:
    """Whether a collective reduces the partial gradients of a parameter.

    XLA joins these small arrays into one buffer, whose parts may have the path of another array or
    none. The loss's arrays, with one number per token, can have the same size; where they belong to
    the head, both names are in their paths.
    """
    dims = collective.operand.dims
    tokens = config.microbatch_rows * config.train.seq_len
    if 'loss' in words and len(dims) > 1 and prod(dims) == tokens:
        return False
    is_sum = collective.kind == 'all-reduce' and collective.operand.dtype == 'f32'
    return is_sum and prod(collective.operand.shape) in _partial_sizes(config.model)


@functools.cache
def _partial_sizes(model: ModelConfig) -> frozenset[int]:
    """Numbers of elements of the parameters that are applied along a sharded dim.

    Each stacked parameter has two: in all layers, and in one layer.
    """
    sizes, partial_sizes = dim_sizes(model), set[int]()
    for _, parameter in parameters(model):
        if parameter.partial:
            size = prod(shape_of(parameter.dims, sizes))
            partial_sizes |= {size, size // model.num_layers} if parameter.is_stacked else {size}
    return frozenset(partial_sizes)
