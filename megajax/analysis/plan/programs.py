"""Describe the software whose step can be timed: its collectives, overlap and attention."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from megajax.analysis.plan import communication
from megajax.analysis.plan.experts import exchanges_of_tokens, later_exchanges
from megajax.analysis.plan.launches import num_launches
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.overlap import (
    NOTHING,
    HiddenBy,
    hidden_by,
    hidden_by_ticks,
    in_pass,
    is_over_data,
)
from megajax.base.errors import Problem
from megajax.core.config import Config, ModelConfig
from megajax.core.config.optim import ZERO_STAGES
from megajax.core.config.overlap_rules import without_order
from megajax.core.config.rules import incompatibilities
from megajax.core.counts.collective import (
    GATHER,
    HLO_DTYPES,
    REDUCE,
    SCATTER,
    Expected,
    Site,
    axes_text,
)
from megajax.core.counts.context import over_context
from megajax.core.counts.data_parallel import groups, over_data
from megajax.core.counts.flash import uses_flash
from megajax.core.counts.megatron import expected, over_model
from megajax.core.counts.muon import over_tensor_parallel
from megajax.core.counts.parameters import megatron_counts
from megajax.core.counts.product import Phase
from megajax.core.counts.runs import Runs, ticks
from megajax.core.counts.stages import between_stages, gradients_of_stages
from megajax.core.hardware.records import Capability
from megajax.xla.hlo.program import Array

ProgramName = Literal['megajax', 'megatron', 'torchtitan', 'maxtext']
# cuDNN's flash attention, or FlashAttention-2; `core/hardware/records.py` has their rates.
Attention = Literal['flash', 'flash_2']
Rounding = Literal['current', 'delayed', 'blocks']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Software:
    """The software that runs a training step."""

    name: str
    # Collectives of the passes: of tensor, context and pipeline parallelism; see `sent_in_passes`.
    in_passes: Callable[[Config], list[Expected]]
    over_data: Callable[[Config], list[Expected]]
    hidden_by: Callable[[Expected, Config], HiddenBy]
    uses_flash: Callable[[Config, Capability | None], bool]
    attention: Attention = 'flash'  # the flash attention that it uses, if any
    gradient_bytes: int = 4  # bytes of each gradient element that is reduced over `data`
    accumulated_bytes: int = 12  # bytes moved per accumulated gradient element
    adds_shards: bool = False  # accumulates shards of gradients, not full gradients
    # Whether it also recomputes the last matmul of a layer, which the backward pass does not need.
    recomputes_last: bool = False
    # The number of kernels of a step; 0 if they have not been counted.
    num_launches: Callable[[Config], int] = lambda _: 0
    has_grids: bool = False  # has 2-D tensor parallelism
    has_order: bool = False  # supports `train.overlap`
    # Whether pipeline stages share the head's tokens; otherwise the last stage has them all.
    shares_head: bool = False
    # Whether it sends tokens to experts in buffers, with room for 1.25 times a balanced load.
    sends_buffers: bool = False
    # Whether the GPUs of a tensor-parallel group have different experts, and each sends its own
    # tokens (--expert-tensor-parallel-size 1).
    has_whole_experts: bool = False
    # The ratio of the tokens of the busiest device's experts to the mean over the devices of a
    # layer.
    imbalance: float = 1.0
    # Whether it is megajax, so that settings that only megajax rejects are rejected.
    is_own: bool = False
    # The ratio of its matmuls' seconds to the seconds with today's libraries, fitted to published
    # rates.
    slowdown: float = 1.0
    # Added to the die's `half_size`, because its kernels are less efficient for short dims.
    half_size: float = 0.0
    # How it scales FP8 tensors, whether the same kernel transposes them, and whether
    # tensor-parallel groups gather rounded tensors; see `kernel_time.py`.
    # None: as `train.fp8_scaling` says.
    rounding: Rounding | None = 'current'
    fuses_transpose: bool = True
    rounds_shards: bool = True
    # The ZeRO stages that it has (`optim.shard`), if its weights are replicated at all.
    zero: tuple[str, ...] = ZERO_STAGES
    # The share of each matmul of a forward pass that selective recomputation repeats, in addition
    # to attention's scores.
    repeats: Callable[[ModelConfig], Mapping[str, float]] = lambda _: {}

    def has_zero(self, config: Config) -> bool:
        """Return whether the software has the config's ZeRO stage."""
        mesh = config.mesh
        return config.optim.shard in self.zero or mesh.data * mesh.context == 1

    def problems(self, config: Config) -> list[Problem]:
        """Return a problem for every setting that the software does not support."""
        found = incompatibilities(config, own=self.is_own)
        if not self.has_zero(config):
            message = (
                f'{config.optim.shard} is not supported by --program {self.name}; '
                f'use {" or ".join(self.zero)}'
            )
            found.append(Problem('optim.shard', message))
        if config.mesh.is_grid and not self.has_grids:
            message = (
                f'{config.mesh.model_rows} is 2-D tensor parallelism, which --program {self.name} '
                'does not have; use 1'
            )
            found.append(Problem('mesh.model_rows', message))
        return found

    def evened(self, config: Config) -> Config:
        """Return the config with as many layers in every chunk as in the largest.

        In Megatron the embedding and the head count as layers, so that the chunks with these have
        fewer. megajax rejects such configs.
        """
        chunks = config.mesh.stages * config.mesh.virtual_stages
        layers = config.model.num_layers
        if self.is_own or layers % chunks == 0:
            return config
        return config.model_copy(
            update={
                'model': config.model.model_copy(
                    update={'num_layers': -(-layers // chunks) * chunks}
                )
            }
        )

    def at_experts(self, config: Config) -> Config:
        """Return the config with the layout that its experts have."""
        mesh, train = config.mesh, config.train
        if not self.has_whole_experts or mesh.model == 1:
            return config
        return changed(
            config,
            mesh__data=mesh.data * mesh.model,
            mesh__model=1,
            mesh__sequence_parallel=False,
            mesh__experts=mesh.experts * mesh.model,
            train__batch_size=train.batch_size * mesh.model,
            train__seq_len=train.seq_len // mesh.model,
        )

    def sent_in_passes(self, config: Config) -> list[Expected]:
        """Return all collectives of the passes, including the ones that send tokens to experts."""
        sent = self.in_passes(config)
        if config.model.experts is None:
            return sent
        if self.has_whole_experts:
            sent = [collective for collective in sent if collective.site.name != 'experts']
        to_experts = later_exchanges if self.sends_buffers else exchanges_of_tokens
        return [*sent, *to_experts(self.at_experts(config), self.imbalance)]

    def without_order(self, config: Config) -> Config:
        """Return the config, without megajax's overlap if the software does not support it."""
        return config if self.has_order else without_order(config)


def fully_sharded(config: Config) -> list[Expected]:
    """Return the collectives of FSDP.

    Each microbatch all-gathers all weights for each pass and reduce-scatters their gradients, in
    bf16: Zhao et al. (2023), PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel.
    Experts are sharded over the devices that have the same experts. In a pipeline, the weights of a
    stage stay gathered for all microbatches.
    """
    mesh, runs = config.mesh, config.train.microbatches
    sites: tuple[tuple[str, Phase, str], ...] = (
        ('parameters', 'forward', GATHER),
        ('parameters', 'backward', GATHER),
        ('gradients', 'backward', SCATTER),
    )
    if mesh.stages > 1:
        sites, runs = (sites[0], sites[2]), 1
    return [
        Expected.over(
            config,
            Site(name, phase, axis),
            kind,
            Array(HLO_DTYPES[config.train.compute_dtype], (weights,)),
            runs,
        )
        for of_experts, axes in groups(config)
        if (axis := axes_text(config, *axes))
        for name, phase, kind in sites
        if (
            weights := megatron_counts(
                config.model,
                mesh.model,
                mesh.stages,
                learned=name == 'gradients',
                experts=mesh.experts,
                of_experts=of_experts,
            ).all
        )
    ]


def _hidden_by_its_layer(collective: Expected, config: Config) -> HiddenBy:
    """Return the overlap of Megatron-Core.

    It is the overlap with --tp-comm-overlap, --overlap-grad-reduce and --overlap-param-gather.
    """
    site = collective.site
    if is_over_data(collective):
        return _hidden_by_everything(collective, config)
    if site.axis == 'stage':  # --overlap-p2p-communication needs several chunks per stage
        return hidden_by_ticks(collective, config) if config.mesh.virtual_stages > 1 else NOTHING
    # Only the collectives of sequence parallelism overlap the matmul next to them.
    if collective.kind == REDUCE:
        return NOTHING
    parts = {'attention': ('qkv', 'out'), 'mlp': ('up', 'down'), 'head': ('head',)}.get(
        site.name, ()
    )
    # A matmul in t parts begins with its own shard, while the others arrive. Its last part is
    # scattered after the matmul.
    share = 1 - 1 / config.mesh.model if collective.kind == SCATTER else 1.0
    return HiddenBy(share, in_pass(site.phase, parts))


def _hidden_by_everything(collective: Expected, config: Config) -> HiddenBy:
    """Return the overlap of data parallelism: its traffic is prefetched or deferred.

    Weights are prefetched before a pass needs them, and gradients are reduced after it.
    """
    phase: Phase = collective.site.phase
    if phase == 'step':
        phase = 'forward' if collective.site.name == 'parameters' else 'backward'
    names = 'head', 'qkv', 'out', 'up', 'down', 'attention'
    return HiddenBy(1.0, in_pass(phase, names), phase)


def _hidden_if_over_data(collective: Expected, config: Config) -> HiddenBy:
    """Return the overlap of FSDP; the experts' all-to-alls do not overlap."""
    return _hidden_by_everything(collective, config) if is_over_data(collective) else NOTHING


def _every_second_matmul(model: ModelConfig) -> dict[str, float]:
    """Return the shares of matmuls that torchtitan's selective recomputation repeats."""
    keys = model.num_kv_heads / (model.num_heads + 2 * model.num_kv_heads)
    return {'qkv': keys, 'out': 1.0, 'up': 0.5 if model.is_gated else 0.0}


def _megatron_in_passes(config: Config) -> list[Expected]:
    """Return Megatron's collectives of the passes, including those of bubble ticks.

    Without sequence parallelism, each device of a tensor-parallel group sends a part of a stage's
    output, and the group of the next stage gathers the parts (Narayanan et al., 2021, section 4.1).
    """
    mesh = config.mesh
    if mesh.is_grid:
        return [collective for collective in expected(config) if not is_over_data(collective)]
    count, all_ticks = config.train.microbatches, ticks(config)
    runs = Runs.of_stages(config)._replace(head=count, head_parts=1, embedding=count)
    sent = over_model(config, runs)
    if mesh.context > 1:
        sent += over_context(config, runs.layers)
    if mesh.stages == 1:
        return sent
    for send in between_stages(config):
        send = dataclasses.replace(send, times=all_ticks)
        if mesh.model == 1 or mesh.sequence_parallel:
            sent.append(send)
            continue
        rows, tokens, size = send.array.shape
        part = send.array._replace(shape=(rows, tokens // mesh.model, size))
        inside = Site('stage', send.site.phase, 'model')
        gathered = dataclasses.replace(send, site=inside, kind=GATHER, size=mesh.model)
        sent += [dataclasses.replace(send, array=part), gathered]
    return sent


def _megatron_over_data(config: Config) -> list[Expected]:
    """Return Megatron's collectives of data parallelism and of Muon, without megajax's padding."""
    size, sent = config.model.hidden_size, []
    padded = size + -size % (config.mesh.data_shards * config.mesh.context)
    is_staged = config.mesh.stages > 1
    for collective in gradients_of_stages(config) if is_staged else over_data(config):
        (count,) = collective.array.shape
        if padded > size and collective.kind != REDUCE:
            array = Array(collective.array.dtype, (count // padded * size,))
            collective = dataclasses.replace(collective, array=array)
        sent.append(collective)
    return [*sent, *over_tensor_parallel(config)]


MEGAJAX = Software(
    name='megajax',
    in_passes=communication.in_passes,
    over_data=communication.over_data_shards,
    hidden_by=hidden_by,
    uses_flash=uses_flash,
    num_launches=num_launches,
    has_grids=True,
    has_order=True,
    shares_head=True,
    sends_buffers=True,
    is_own=True,
    # With delayed scaling, XLA also reads each tensor twice.
    fuses_transpose=False,
    rounds_shards=False,
)
MEGATRON = Software(
    name='megatron',
    in_passes=_megatron_in_passes,
    over_data=_megatron_over_data,
    hidden_by=_hidden_by_its_layer,
    uses_flash=partial(uses_flash, with_dropout=True),
    recomputes_last=True,
    accumulated_bytes=8,  # the matmul of the gradient adds to the buffer
    rounding=None,
)
FSDP = dataclasses.replace(
    MEGATRON,
    name='fsdp',
    rounding='current',
    accumulated_bytes=12,
    over_data=fully_sharded,
    hidden_by=_hidden_if_over_data,
    attention='flash_2',
    adds_shards=True,
    recomputes_last=False,  # PyTorch stops recomputing when the backward pass has all that it needs
    zero=('weights',),
)
# MaxText, whose tensor parallelism XLA does not overlap in a loop over layers.
FSDP_IN_JAX = dataclasses.replace(FSDP, name='maxtext', attention='flash', slowdown=1.15)
# With torch.compile, and without its asynchronous tensor parallelism, which is off by default. Its
# selective recomputation repeats every second matmul of a layer: `wk`, `wo` and `w3`.
TORCHTITAN = dataclasses.replace(
    FSDP, name='torchtitan', repeats=_every_second_matmul, slowdown=1.32
)
BY_NAME: dict[ProgramName, Software] = {
    'megajax': MEGAJAX,
    'megatron': MEGATRON,
    'torchtitan': TORCHTITAN,
    'maxtext': FSDP_IN_JAX,
}
