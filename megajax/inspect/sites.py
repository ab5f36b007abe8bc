"""Which part of the training step a collective belongs to, by the named scopes in its path."""

import re
from typing import NamedTuple

from megajax.inspect.collectives import Collective
from megajax.inspect.result import Phase


class Site(NamedTuple):
    """A part of the step, a phase of it, and the mesh axis."""

    name: str
    phase: Phase
    axis: str


# In this order: the first that is in the path names the site.
_SCOPES = ('optimizer', 'embedding', 'attention', 'mlp', 'head', 'loss', 'norm')
ORDER = ('embedding', 'attention', 'mlp', 'norm', 'head', 'loss', 'gradients', 'optimizer', 'metrics')


def site_of(one: Collective) -> Site:
    """The site of a collective; what no scope names is a site of its own, by its path."""
    words = re.findall(r'[\w.]+', one.op_name)
    if one.is_scalar:
        return Site('metrics', 'step', one.axis)
    if 'data_parallel' in words or ('data' in one.axes and 'optimizer' not in words):
        return Site('gradients', 'step', one.axis)
    found = next((scope for scope in _SCOPES if scope in words), None)
    if found is None:
        return Site(f'other: {one.op_name or one.instruction}', 'step', one.axis)
    return Site(found, 'step' if found == 'optimizer' else phase_of(one.op_name), one.axis)


def phase_of(op_name: str) -> Phase:
    """By jax's transformations in the path."""
    if 'rematted_computation' in op_name:
        return 'recompute'
    return 'backward' if 'transpose(' in op_name else 'forward'
