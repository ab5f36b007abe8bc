"""The record of a collective that a program is expected to run."""

import dataclasses
from math import prod
from typing import NamedTuple, Self

from megajax.core.config import Config
from megajax.core.counts.product import Phase
from megajax.xla.hlo.program import Array
from megajax.xla.hlo.transfers import ring_bytes

HLO_DTYPES = {'float32': 'f32', 'bfloat16': 'bf16', 'float16': 'f16', 'fp8': 'bf16'}
GATHER, REDUCE, SCATTER = 'all-gather', 'all-reduce', 'reduce-scatter'
EXCHANGE, PERMUTE = 'all-to-all', 'collective-permute'


class Site(NamedTuple):
    """The place of a collective: a part of the step, its phase, and the mesh axis."""

    name: str
    phase: Phase
    axis: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """A collective of a step.

    `array` is the full array that is gathered, reduced or scattered over a group of `size` devices.
    `source` is the code that places it, such as a file and function of Megatron-Core, or a paper.
    """

    site: Site
    kind: str
    array: Array
    times: int
    size: int
    source: str = ''

    @classmethod
    def over(
        cls, config: Config, site: Site, kind: str, array: Array, times: int, source: str = ''
    ) -> Self:
        """Return a collective over all devices of the site's axes, such as `row+model`."""
        sizes = config.mesh.sizes
        size = prod([sizes.get(axis, 1) for axis in site.axis.split('+')])
        return cls(site=site, kind=kind, array=array, times=times, size=size, source=source)

    @property
    def wire_bytes(self) -> float:
        """The bytes that a device sends in one execution."""
        return ring_bytes(self.kind, self.array, self.size)


def activation(config: Config) -> Array:
    """Return the residual stream of a microbatch on a data shard, in the compute dtype.

    A context shard has only a part of the tokens.
    """
    tokens = config.train.seq_len // config.mesh.context
    return Array(
        HLO_DTYPES[config.train.dtype], (config.microbatch_rows, tokens, config.model.hidden_size)
    )


def heads(config: Config, count: int) -> Array:
    """Return an array of `count` heads [B, S, heads, H] for the same tokens, unsharded."""
    dtype, (rows, tokens, _) = activation(config)
    return Array(dtype, (rows, tokens, count, config.model.head_dim))


def axes_text(config: Config, *axes: str) -> str:
    """Return the joined names of mesh axes, in mesh order, without axes that have one device."""
    return '+'.join(axis for axis, size in config.mesh.sizes.items() if axis in axes and size > 1)


def passes(config: Config) -> tuple[Phase, ...]:
    """Return the phases of a layer in a step."""
    return (
        ('forward', 'backward', 'recompute')
        if config.train.recompute == 'full'
        else ('forward', 'backward')
    )
