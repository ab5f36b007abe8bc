"""Which part of the training step a collective belongs to: by the named scopes in its path, and gradients by their shape."""

import functools
import re
from math import prod

from megajax.config import Config, ModelConfig
from megajax.counts.megatron import Site
from megajax.counts.parameters import dim_sizes, parameters, shape_of
from megajax.counts.products import Phase
from megajax.hlo.collectives import Collective

# In this order: the first that is in the path names the site.
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


def site_of(one: Collective, config: Config) -> Site:
    """The site of a collective; what no scope names is a site of its own, by its path."""
    if one.is_scalar:
        return Site('metrics', 'step', one.axis)
    words = re.findall(r'[\w.]+', one.op_name)
    found = next((scope for scope in _SCOPES if scope in words), None)
    if 'data_parallel' in words or (found != 'loss' and _is_partial_gradient(one, words, config)):
        return Site('gradients', 'step', one.axis)
    if 'data' in one.axes and one.kind in ('all-reduce', 'reduce-scatter'):
        return Site('gradients', 'step', one.axis)
    if one.kind == 'all-gather' and one.axes == ('data',):
        return Site('parameters', 'step', one.axis)
    if found == 'optimizer':
        return Site('optimizer', 'step', one.axis)
    if found in ('head', 'loss'):  # what is reduced per token is the loss's
        tokens = config.microbatch_rows * config.train.seq_len
        found = 'loss' if prod(one.whole.shape) <= tokens else 'head'
        return Site(found, 'forward' if found == 'loss' else phase_of(one.op_name), one.axis)
    if found is None:
        return Site(f'other: {one.op_name or one.instruction}', 'step', one.axis)
    return Site(found, phase_of(one.op_name), one.axis)


def phase_of(op_name: str) -> Phase:
    """By jax's transformations in the path."""
    if 'rematted_computation' in op_name:
        return 'recompute'
    return 'backward' if 'transpose(' in op_name else 'forward'


def _is_partial_gradient(one: Collective, words: list[str], config: Config) -> bool:
    """Whether it adds up the gradient of a parameter whose shards make parts of it.

    XLA joins these small arrays in one buffer, whose parts may have the path of another array or
    none. The loss's numbers, one for each token, can be as many; as part of what the head makes
    they have both names.
    """
    dims = one.operand.dims
    tokens = config.microbatch_rows * config.train.seq_len
    if 'loss' in words and len(dims) > 1 and prod(dims) == tokens:
        return False
    is_sum = one.kind == 'all-reduce' and one.operand.dtype == 'f32'
    return is_sum and prod(one.operand.shape) in _partial_sizes(config.model)


@functools.cache
def _partial_sizes(model: ModelConfig) -> frozenset[int]:
    """Elements of the parameters that are applied along a sharded dim, of all layers and of one."""
    sizes, found = dim_sizes(model), set[int]()
    for _, parameter in parameters(model):
        if parameter.partial:
            size = prod(shape_of(parameter.dims, sizes))
            found |= {size, size // model.num_layers} if parameter.is_stacked else {size}
    return frozenset(found)
