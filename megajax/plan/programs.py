"""The programs whose training step is timed: their collectives, overlap and attention."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from megajax.config import Config
from megajax.counts.flops import fits_flash, uses_flash
from megajax.counts.megatron import (
    GATHER,
    HLO_DTYPES,
    REDUCE,
    SCATTER,
    Expected,
    Site,
    expected,
    over_data,
)
from megajax.counts.parameters import num_parameters
from megajax.counts.products import Phase
from megajax.hlo.program import Array
from megajax.plan import communication
from megajax.plan.launches import num_launches
from megajax.plan.overlap import NOTHING, Beside, beside, is_over_data

ProgramName = Literal['megajax', 'megatron']
# cuDNN's flash attention, or FlashAttention-2; `hardware/records.py` has their rates.
Attention = Literal['flash', 'flash_2']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Software:
    """The software that runs the step."""

    over_tensor: Callable[[Config], list[Expected]]  # collectives of a tensor-parallel group
    over_data: Callable[[Config], list[Expected]]
    beside: Callable[[Expected, Config], Beside]
    uses_flash: Callable[[Config], bool]
    attention: Attention = 'flash'  # the flash attention that it uses, if it does
    gradient_bytes: int = 4  # bytes of each gradient element that is reduced over `data`
    adds_shards: bool = False  # adds up shards of the microbatches' gradients, not full gradients
    # Whether it also recomputes the last product of a layer, which the backward pass does not need.
    recomputes_last: bool = False
    # The number of kernels of a step; 0 if they have not been counted.
    num_launches: Callable[[Config], int] = lambda _: 0
    has_grids: bool = False  # has 2-D tensor parallelism


def fully_sharded(config: Config) -> list[Expected]:
    """Return the collectives of FSDP.

    Each microbatch gathers all weights for either pass and reduce-scatters their gradients, in 16
    bits: Zhao et al. (2023), PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel.
    """
    weights = Array(HLO_DTYPES[config.train.dtype], (num_parameters(config.model, padded=True),))

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


def _beside_its_layer(collective: Expected, config: Config) -> Beside:
    """Return the overlap of Megatron-Core.

    With --tp-comm-overlap, --overlap-grad-reduce and --overlap-param-gather.
    """
    site = collective.site
    if is_over_data(collective):
        return _beside_everything(collective, config)
    # Only the collectives of sequence parallelism overlap with the product that they belong to.
    if collective.kind == REDUCE:
        return NOTHING
    parts = {'attention': ('qkv', 'out'), 'mlp': ('up', 'down'), 'head': ('head',)}.get(
        site.name, ()
    )
    return Beside(1.0, tuple(_names(parts, site.phase)))


def _beside_everything(collective: Expected, config: Config) -> Beside:
    """Return the overlap of data parallelism: its traffic is prefetched or deferred.

    Weights are prefetched for a pass, gradients are deferred until after it.
    """
    phase: Phase = collective.site.phase
    if phase == 'step':
        phase = 'forward' if collective.site.name == 'parameters' else 'backward'
    names = (*_names(('head', 'qkv', 'out', 'up', 'down'), phase), 'attention')
    return Beside(1.0, names, phase)


def _names(products: tuple[str, ...], phase: Phase) -> Iterator[str]:
    """Yield the names of these products in a pass, as `counts/products.py` has them."""
    for name in products:
        yield from (f'{name} input', f'{name} weight') if phase == 'backward' else (name,)


def _megatron_over_tensor(config: Config) -> list[Expected]:
    return [collective for collective in expected(config) if not is_over_data(collective)]


def _megatron_over_data(config: Config) -> list[Expected]:
    """Return Megatron's collectives of data parallelism, of matrices without megajax's padding."""
    size, sent = config.model.hidden_size, []
    padded = size + -size % config.mesh.data_shards
    for collective in over_data(config):
        (count,) = collective.array.shape
        if padded > size and collective.kind != REDUCE:
            array = Array(collective.array.dtype, (count // padded * size,))
            collective = dataclasses.replace(collective, array=array)
        sent.append(collective)
    return sent


MEGAJAX = Software(
    over_tensor=communication.over_tensor,
    over_data=communication.over_data_shards,
    beside=beside,
    uses_flash=uses_flash,
    num_launches=num_launches,
    has_grids=True,
)
MEGATRON = Software(
    over_tensor=_megatron_over_tensor,
    over_data=_megatron_over_data,
    beside=_beside_its_layer,
    uses_flash=lambda config: fits_flash(config.train.dtype, config.model.head_dim),
    recomputes_last=True,
)
MEGATRON_WITHOUT_OVERLAP = dataclasses.replace(MEGATRON, beside=lambda *_: NOTHING)
# As the papers of 2019 to 2022 ran it: attention in parts, gradients in fp16, nothing overlaps.
MEGATRON_2021 = Software(
    over_tensor=_megatron_over_tensor,
    over_data=_megatron_over_data,
    beside=lambda *_: NOTHING,
    uses_flash=lambda _: False,
    gradient_bytes=2,
    recomputes_last=True,
)
FSDP = dataclasses.replace(
    MEGATRON,
    over_tensor=lambda _: [],
    over_data=fully_sharded,
    beside=_beside_everything,
    attention='flash_2',
    adds_shards=True,
    recomputes_last=False,  # PyTorch stops where the backward pass has what it needs
)
FSDP_IN_JAX = dataclasses.replace(FSDP, attention='flash')
BY_NAME: dict[ProgramName, Software] = {'megajax': MEGAJAX, 'megatron': MEGATRON}
