"""Count the collectives that XLA places in a training step, without compiling it.

They are Megatron's collectives (`core/counts/megatron.py`), without the ones that XLA can omit.
`tests/analysis/plan/test_compiled.py` checks that the bytes equal those of compiled steps exactly.
"""

import dataclasses
from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.counts.collective import (
    EXCHANGE,
    GATHER,
    HLO_DTYPES,
    REDUCE,
    Expected,
    Site,
    activation,
    heads,
    passes,
)
from megajax.core.counts.context import halos, of_full_layers, own_over_context
from megajax.core.counts.cross_attention import cross_layers, is_left_out
from megajax.core.counts.data_parallel import groups, over_data
from megajax.core.counts.experts import over_experts
from megajax.core.counts.grid import over_grid
from megajax.core.counts.megatron import few_kv_heads, over_model
from megajax.core.counts.muon import exchanges
from megajax.core.counts.runs import Runs
from megajax.core.counts.stages import between_lockstep_stages, gradients_of_lockstep_stages
from megajax.core.counts.vision import (
    counts_over_data,
    encoder_in_parallel,
    images_over_devices,
    relevance_over_devices,
)
from megajax.xla.hlo.program import Array


def communication(config: Config) -> list[Expected]:
    """Return every collective that XLA places in a step of `config`, except collectives of scalars.

    The order is tensor, expert, context, pipeline and data parallelism.
    """
    return [*in_passes(config), *over_data_shards(config)]


def in_passes(config: Config) -> list[Expected]:
    """Return the collectives of the forward and backward passes, which do not depend on ZeRO."""
    mesh = config.mesh
    return [
        *over_tensor(config),
        *_over_experts(config, is_of_step=False),
        *(_over_context(config) if mesh.context > 1 else ()),
        *(between_lockstep_stages(config) if mesh.stages > 1 else ()),
    ]


def _over_experts(config: Config, *, is_of_step: bool) -> Iterator[Expected]:
    """Yield the collectives of experts: in the passes, or the routers' sums once per step.

    Recomputation and the backward pass share the gather of the numbers of rows that each device
    sends.
    """
    for collective in over_experts(config, Runs.of_stages(config).layers):
        site = collective.site
        is_shared = site.phase == 'recompute' and collective.kind == GATHER
        if (site.phase == 'step') == is_of_step and not is_shared:
            yield collective


def over_tensor(config: Config) -> list[Expected]:
    """Return the collectives of a tensor-parallel group."""
    if config.mesh.is_grid:
        return [*over_grid(config)]
    runs = Runs.of_stages(config)
    gathered = [*few_kv_heads(config, runs)]
    cross, encoder = [*cross_layers(config, runs)], [*encoder_in_parallel(config, runs)]
    kept = list[Expected]()
    for collective in over_model(config, runs):
        # Megatron gathers the full QKV; megajax exchanges the queries instead.
        if collective in gathered:
            gathered.remove(collective)
        elif not (
            _is_kept_from_forward(collective, kept, config)
            or collective in encoder
            or (collective in cross and is_left_out(collective, config))
            # The gates of cross-attention need the layer's output.
            or (config.mesh.stages == 1 and _is_last_of_layer(collective, config, cross))
        ):
            kept.append(collective)
    return [
        *_first_tokens(config, kept),
        *_exchanged_heads(config, runs.layers),
        *(images_over_devices(config) if config.vision else ()),
        *relevance_over_devices(config),
    ]


def _over_context(config: Config) -> Iterator[Expected]:
    """Yield the exchanges of keys and values, and of their gradients.

    The fp32 gradients come from a kernel in bf16 or fp16 and are cast back, so XLA sends the first
    and the last hop of a ring in 16 bits. A layer's backward pass shares its gathers (of a ring,
    the first hop) with the layer's recomputation.
    """
    mesh, dtype = config.mesh, HLO_DTYPES[config.train.dtype]
    is_ring = mesh.context_exchange == 'ring'
    layers = Runs.of_stages(config).layers
    if mesh.exchanges_heads:
        yield from own_over_context(config, layers)
        return
    yield from halos(config, layers)
    for sent in of_full_layers(config, layers):
        hop = sent.times // (mesh.context - 1) if sent.array.dtype == dtype else sent.times
        if sent.site.phase == 'recompute' and mesh.stages == 1:
            if is_ring and mesh.context > 2:
                yield dataclasses.replace(sent, times=sent.times - hop)
        elif is_ring and sent.array.dtype != dtype:
            at_ends = 2 * sent.times // mesh.context
            ends = sent.array._replace(dtype=dtype)
            yield dataclasses.replace(sent, array=ends, times=at_ends)
            if sent.times > at_ends:
                yield dataclasses.replace(sent, times=sent.times - at_ends)
        else:
            yield sent


def over_data_shards(config: Config) -> list[Expected]:
    """Return the collectives of data parallelism and of the optimizer."""
    if config.mesh.stages > 1:
        of_parameters = [*gradients_of_lockstep_stages(config)]
    else:
        of_parameters = []
        for of_experts, axes in groups(config):
            every, learned = counts_over_data(config, of_experts)
            of_parameters += over_data(config, every, axes, learned=learned)
    return [*of_parameters, *exchanges(config), *_over_experts(config, is_of_step=True)]


def wire_bytes(config: Config) -> dict[str, float]:
    """Return the bytes that a device sends in a step, by mesh axes; `row+model` is over both."""
    sent = dict.fromkeys(config.mesh.sizes, 0.0)
    for collective in communication(config):
        axis = collective.site.axis
        sent[axis] = sent.get(axis, 0.0) + collective.wire_bytes * collective.times
    return sent


def _is_kept_from_forward(collective: Expected, before: list[Expected], config: Config) -> bool:
    """Return whether a collective gathers an input that XLA still has from an earlier pass.

    The earlier pass is the forward pass or recomputation.

    Megatron gathers a layer's input again for the weight gradient. A layer of experts saves its
    input sharded, so that only recomputation has it.
    """
    if collective.site.name == 'experts' and config.train.recompute != 'full':
        return False
    return (
        collective.site.phase == 'backward'
        and collective.kind == GATHER
        and (collective.site.name == 'head' or collective in before)
    )


def _is_last_of_layer(collective: Expected, config: Config, cross: list[Expected]) -> bool:
    """Return whether a collective is the last one of a recomputed layer whose output is not read.

    XLA omits it, because the backward pass does not need a layer's output. Exceptions are pipeline
    stages, which recompute all of their layers in one pass, and layers whose output a norm reads.
    """
    site = collective.site
    is_last = (
        site.name in ('mlp', 'experts') and site.phase == 'recompute' and collective.kind != GATHER
    )
    return is_last and not config.overlap.repeats_outputs and collective not in cross


def _first_tokens(config: Config, kept: list[Expected]) -> Iterator[Expected]:
    """Yield the collectives, with BERT's second gather of the sequence replaced by a smaller one.

    BERT's pooler reads the first token of each sequence. Megatron gathers the full sequence once
    more for the pooler; megajax sends only the first tokens.
    """
    if not config.model.is_bert:
        yield from kept
        return
    for collective in kept:
        site = collective.site
        if (site.name, site.phase, collective.kind) != ('head', 'forward', GATHER):
            yield collective
            continue
        runs = config.train.microbatches
        if config.mesh.stages == 1:
            yield dataclasses.replace(collective, times=runs)
        elif collective.array != activation(config):
            yield collective  # gathers the stages' parts of the tokens
            continue
        dtype = 'f32' if config.mesh.stages == 1 else HLO_DTYPES[config.train.dtype]
        first = Array(dtype, (config.microbatch_rows, config.model.hidden_size))
        yield dataclasses.replace(collective, kind=REDUCE, array=first, times=runs)


def _exchanged_heads(config: Config, layers: int) -> Iterator[Expected]:
    """Yield the collectives that are needed if there are fewer key/value heads than devices.

    See `core/model/attention.py`.
    """
    model, shards = config.model, config.mesh.model
    if model.num_kv_heads >= shards:
        return
    for phase in passes(config):
        site = Site('attention', phase, 'model')
        # The queries of one device.
        own = heads(config, model.num_heads // shards)
        yield Expected.over(config, site, EXCHANGE, own, layers)
        # The keys and values; in the backward pass, the gradients of the shards' copies.
        copied = heads(config, shards if phase == 'backward' else model.num_kv_heads)
        yield Expected.over(config, site, GATHER, copied, 2 * layers)
