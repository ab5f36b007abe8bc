"""Whose training step it is: what it sends, what that can run beside, and which attention it has."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from megajax.config import Config
from megajax.counts.flops import fits_flash, uses_flash
from megajax.counts.megatron import DTYPES, GATHER, REDUCE, SCATTER, Expected, Site, expected
from megajax.counts.parameters import num_parameters
from megajax.counts.products import Phase
from megajax.hlo.program import Array
from megajax.plan.communication import communication
from megajax.plan.launches import num_launches
from megajax.plan.overlap import NOTHING, Beside, beside

ProgramName = Literal['megajax', 'megatron']
Attention = Literal[
    'flash', 'flash_2'
]  # cuDNN's, or FlashAttention-2, as `hardware/records.py` has their rates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Who runs the step."""

    collectives: Callable[[Config], list[Expected]]
    beside: Callable[[Expected, Config], Beside]
    uses_flash: Callable[[Config], bool]
    attention: Attention = 'flash'  # where it uses it
    gradient_bytes: int = 4  # of each element that is reduced over `data`
    adds_shards: bool = False  # of the gradients of microbatches, rather than the whole
    recomputes_last: bool = (
        False  # the last product of a layer too, which its backward pass does not need
    )
    num_launches: Callable[[Config], int] = lambda _: (
        0
    )  # kernels of a step; 0 where nobody has counted them
    pads_shards: bool = True  # of ZeRO-1, so that any number of GPUs along `data` can hold them


def fully_sharded(config: Config) -> list[Expected]:
    """Of FSDP: each microbatch gathers all weights for either pass and reduce-scatters their gradients, in 16 bits.

    Zhao et al. (2023), PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel.
    """
    weights = Array(DTYPES[config.train.dtype], (num_parameters(config.model, padded=True),))

    def send(name: str, phase: Phase, kind: str) -> Expected:
        site = Site(name, phase, 'data')
        return Expected(
            site=site,
            kind=kind,
            array=weights,
            times=config.train.microbatches,
            size=config.mesh.data,
        )

    if config.mesh.data == 1:
        return []
    return [
        send('parameters', 'forward', GATHER),
        send('parameters', 'backward', GATHER),
        send('gradients', 'backward', SCATTER),
    ]


def _beside_its_layer(one: Expected, config: Config) -> Beside:
    """Megatron-Core with --tp-comm-overlap, --overlap-grad-reduce and --overlap-param-gather."""
    if one.site.axis == 'data':
        return _beside_everything(one, config)
    if (
        one.kind == REDUCE
    ):  # only those of sequence parallelism take turns with the product that they belong to
        return NOTHING
    parts = {'attention': ('qkv', 'out'), 'mlp': ('up', 'down'), 'head': ('head',)}.get(
        one.site.name, ()
    )
    return Beside(1.0, tuple(_names(parts, one.site.phase)))


def _beside_everything(one: Expected, config: Config) -> Beside:
    """The traffic of data parallelism, which is prefetched or put off: weights for a pass, gradients after it."""
    phase: Phase = one.site.phase
    if phase == 'step':
        phase = 'forward' if one.site.name == 'parameters' else 'backward'
    names = (*_names(('head', 'qkv', 'out', 'up', 'down'), phase), 'attention')
    return Beside(1.0, names, phase)


def _names(products: tuple[str, ...], phase: Phase) -> Iterator[str]:
    """Of these products as `work.py` calls them in a pass."""
    for name in products:
        yield from (f'{name} input', f'{name} weight') if phase == 'backward' else (name,)


MEGAJAX = Program(
    collectives=communication,
    beside=beside,
    uses_flash=uses_flash,
    num_launches=num_launches,
    pads_shards=False,
)
MEGATRON = Program(
    collectives=expected,
    beside=_beside_its_layer,
    uses_flash=lambda config: fits_flash(config.train.dtype, config.model.head_dim),
    recomputes_last=True,
)
MEGATRON_WITHOUT_OVERLAP = dataclasses.replace(MEGATRON, beside=lambda *_: NOTHING)
# As the papers of 2019 to 2022 ran it: attention in parts, gradients in fp16, nothing overlaps.
MEGATRON_2021 = Program(
    collectives=expected,
    beside=lambda *_: NOTHING,
    uses_flash=lambda _: False,
    gradient_bytes=2,
    recomputes_last=True,
)
FSDP = dataclasses.replace(
    MEGATRON,
    collectives=fully_sharded,
    beside=_beside_everything,
    attention='flash_2',
    adds_shards=True,
    recomputes_last=False,  # PyTorch stops where the backward pass has what it needs
)
FSDP_IN_JAX = dataclasses.replace(FSDP, attention='flash')
BY_NAME: dict[ProgramName, Program] = {'megajax': MEGAJAX, 'megatron': MEGATRON}
