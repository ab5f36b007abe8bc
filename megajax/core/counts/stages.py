"""The sends of pipeline parallelism: in Megatron's schedule, and in lock step.

Megatron's ranks differ: the first has the embedding, the last has the head, and a rank sends only
what it has computed. For each site, the rank that sends most is counted. In megajax all stages run
one program (`core/train/pipeline.py`): they send in every tick, including the bubble's, every stage
looks up the embedding, and all of them share the head.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial

from megajax.core.config import Config
from megajax.core.counts.collective import (
    EXCHANGE,
    GATHER,
    PERMUTE,
    REDUCE,
    Expected,
    Site,
    activation,
    axes_text,
)
from megajax.core.counts.data_parallel import SHARDS, groups, over_data
from megajax.core.counts.layers import SUBLAYERS
from megajax.core.counts.parameters import Counts, megatron_counts, own_counts, parameters
from megajax.core.counts.product import Phase
from megajax.core.counts.runs import ticks
from megajax.xla.hlo.program import Array

FIRST = 'embedding', 'position', 'token_type'  # the modules of Megatron's first stage
EVERY_TICK = 'every stage does so in every tick, those of the bubble too'
# Files and functions of Megatron-Core, below megatron/core.
SOURCES = {
    'sends': 'pipeline_parallel/schedules.py forward_backward_pipelining_without_interleaving, '
    'p2p_communication.py send_forward_recv_backward',
    'interleaved': 'pipeline_parallel/schedules.py forward_backward_pipelining_with_interleaving, '
    'p2p_communication.py send_forward_backward_recv_forward_backward',
    'tied': 'distributed/finalize_model_grads.py _allreduce_word_embedding_grads',
}


def between_stages(config: Config) -> Iterator[Expected]:
    """Yield the sends of a Megatron rank to its neighbors; the first and last rank send less."""
    runs = config.train.microbatches * config.mesh.virtual_stages
    source = SOURCES['interleaved' if config.mesh.virtual_stages > 1 else 'sends']
    yield from _sends(config, runs, source)


def between_lockstep_stages(config: Config) -> Iterator[Expected]:
    """Yield the collectives of a device along `stage`, in each tick and around the head.

    Before the head, each stage gets its part of the last stage's tokens. After the head, the
    gradients of all parts are gathered on every stage, although only the last one needs them.
    """
    yield from _sends(config, ticks(config), EVERY_TICK)
    tokens, stages = _head_tokens(config, config.mesh.stages), config.mesh.stages
    array = tokens._replace(shape=(stages * tokens.shape[1], tokens.shape[2]))
    kinds: dict[Phase, str] = {'forward': EXCHANGE, 'backward': GATHER}
    for phase, kind in kinds.items():
        site, source = Site('head', phase, 'stage'), 'the stages share the tokens of the head'
        yield Expected.over(config, site, kind, array, config.train.microbatches, source)
    if config.train.has_delayed_scales:
        site, source = Site('parameters', 'step', 'stage'), 'all stages have the scales of all'
        linears = 2 * len(SUBLAYERS)
        exponents = Array('s32', (config.model.num_layers, linears, 3))  # of x, W and dy
        yield Expected.over(config, site, GATHER, exponents, 1, source)


def _sends(config: Config, times: int, source: str) -> Iterator[Expected]:
    phases: tuple[Phase, ...] = 'forward', 'backward'
    for phase in phases:
        site, array = Site('stage', phase, 'stage'), residual_of_device(config)
        yield Expected.over(config, site, PERMUTE, array, times, source)


def residual_of_device(config: Config) -> Array:
    """Return a device's part of the residual stream of a microbatch.

    Without sequence parallelism, each device of a tensor-parallel group has the whole stream.
    """
    stream = activation(config)
    rows, tokens, size = stream.shape
    shards = config.mesh.model if config.mesh.sequence_parallel else 1
    return stream._replace(shape=(rows, tokens // shards, size))


def head_input(config: Config, parts: int) -> Array:
    """Return the head's input on one of `parts` stages, for a tensor-parallel group."""
    if parts == 1:
        return activation(config)
    part = _head_tokens(config, parts)
    shards = config.mesh.model if config.mesh.sequence_parallel else 1
    return part._replace(shape=(1, shards * part.shape[1], part.shape[2]))


def _head_tokens(config: Config, parts: int) -> Array:
    """Return the tokens [1, T, D] of a device's part of a head, padded to the same number."""
    stream = residual_of_device(config)
    rows, tokens, size = stream.shape
    return stream._replace(shape=(1, -(-rows * tokens // parts), size))


def gradients_of_stages(config: Config) -> Iterator[Expected]:
    """Yield Megatron's collectives of data parallelism on the rank with the most parameters.

    If the embedding is tied, the first and the last rank both have it, and sum its gradients.
    """
    mesh, model = config.mesh, config.model
    others = {name.split('.')[0] for name, _ in parameters(model)} - {'layers', *FIRST}
    last = (*others, *(('embedding',) if model.tie_embeddings else ()))
    for of_experts, axes in groups(config):
        layers, learned = (
            megatron_counts(
                model,
                mesh.model,
                mesh.stages,
                ('layers',),
                learned=only,
                experts=mesh.experts,
                of_experts=of_experts,
            )
            for only in (False, True)
        )
        yield from over_data(config, layers, axes, learned=learned)
    of_end = partial(megatron_counts, model, mesh.model, mesh.stages)
    ends = (tuple(sorted(modules)) for modules in (FIRST, last))
    end = max(ends, key=lambda modules: of_end(modules).all)
    for sent in over_data(config, of_end(end), learned=of_end(end, learned=True)):
        yield dataclasses.replace(sent, site=_with_stages(config, sent.site))
    if model.tie_embeddings and not model.is_decoder_frozen:
        table = megatron_counts(model, mesh.model, 1, ('embedding',)).all
        yield Expected(
            site=_with_stages(config, Site('gradients', 'step', axes_text(config, *SHARDS))),
            kind=REDUCE,
            array=Array('f32', (table,)),
            times=1,
            size=2,
            source=SOURCES['tied'],
        )


def gradients_of_lockstep_stages(config: Config) -> Iterator[Expected]:
    """Yield data parallelism's collectives; all stages have the parameters outside the layers."""
    for of_experts, axes in groups(config):
        layers, learned = (
            own_counts(config, ('layers',), learned=only, of_experts=of_experts)
            for only in (False, True)
        )
        yield from over_data(config, layers, axes, learned=learned)
    outside, learned = (outside_counts(config, learned=only) for only in (False, True))
    for sent in over_data(config, outside, ('stage', *SHARDS), learned=learned):
        yield dataclasses.replace(sent, source='all stages have what is outside the layers')


def outside_counts(config: Config, *, learned: bool = False) -> Counts:
    """Count a device's parameters outside the layers; `learned` is as in `count`."""
    modules = {name.split('.')[0] for name, _ in parameters(config.model)} - {'layers'}
    return own_counts(config, tuple(sorted(modules)), learned=learned)


def _with_stages(config: Config, site: Site) -> Site:
    """Return megajax's site for a sum that Megatron runs over `data` alone, outside the layers."""
    axes = (*site.axis.split('+'), *(() if site.axis == 'replica' else ('stage',)))
    return site._replace(axis=axes_text(config, *axes))
