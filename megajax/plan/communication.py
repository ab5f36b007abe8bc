"""The collectives of a training step that XLA places, counted without compiling.

They are Megatron's (`counts/megatron.py`) without those that XLA can omit.
`tests/plan/test_compiled.py` compares the bytes with compiled steps; they are exactly equal.
"""

import dataclasses
from collections.abc import Iterator

from megajax.config import Config
from megajax.counts.grid import over_grid
from megajax.counts.megatron import (
    GATHER,
    HLO_DTYPES,
    REDUCE,
    Expected,
    Site,
    expected,
    few_kv_heads,
    over_data,
    passes,
)
from megajax.counts.parameters import own_counts
from megajax.hlo.program import Array

ALL_TO_ALL = 'all-to-all'


def communication(config: Config) -> list[Expected]:
    """Return every collective of a step of `config` that XLA places, except those of scalars.

    Those of tensor parallelism come before those of data parallelism.
    """
    return [*over_tensor(config), *over_data_shards(config)]


def over_tensor(config: Config) -> list[Expected]:
    """Return the collectives of a tensor-parallel group."""
    if config.mesh.is_grid:
        return [*over_grid(config)]
    gathered = [*few_kv_heads(config)]
    kept = list[Expected]()
    for collective in expected(config):
        # Megatron gathers the full QKV; here the queries are exchanged instead.
        if collective in gathered:
            gathered.remove(collective)
        elif (
            collective.site.axis == 'model'
            and not _is_kept_from_forward(collective, kept)
            and not _is_last_of_layer(collective)
        ):
            kept.append(collective)
    return [*_first_tokens(config, kept), *_exchanged_heads(config)]


def over_data_shards(config: Config) -> list[Expected]:
    """Return the collectives of data parallelism."""
    return [*over_data(config, own_counts(config))]


def wire_bytes(config: Config) -> dict[str, float]:
    """Return the bytes that a device sends in a step, by mesh axes: `row+model` is over both."""
    sent = dict.fromkeys(config.mesh.sizes, 0.0)
    for collective in communication(config):
        axis = collective.site.axis
        sent[axis] = sent.get(axis, 0.0) + collective.wire_bytes * collective.times
    return sent


def _is_kept_from_forward(collective: Expected, before: list[Expected]) -> bool:
    """Whether it gathers an input that XLA has kept since the forward pass or recomputation.

    Megatron gathers a layer's input again for the weight gradient.
    """
    return (
        collective.site.phase == 'backward'
        and collective.kind == GATHER
        and (collective.site.name == 'head' or collective in before)
    )


def _is_last_of_layer(collective: Expected) -> bool:
    """Whether it is a layer's last reduction, in recomputation.

    XLA omits it, because the backward pass does not need a layer's output.
    """
    site = collective.site
    return site.name == 'mlp' and site.phase == 'recompute' and collective.kind != GATHER


def _first_tokens(config: Config, kept: list[Expected]) -> Iterator[Expected]:
    """Yield the collectives, with BERT's second gather of the sequence replaced by a smaller one.

    BERT's pooler reads the first token of each row. Megatron gathers the full sequence once more
    for it; here only the first tokens are sent.
    """
    for collective in kept:
        site = collective.site
        if not config.model.is_bert or (site.name, site.phase, collective.kind) != (
            'head',
            'forward',
            GATHER,
        ):
            yield collective
            continue
        runs = config.train.microbatches
        yield dataclasses.replace(collective, times=runs)
        first = Array('f32', (config.microbatch_rows, config.model.hidden_size))
        yield dataclasses.replace(collective, kind=REDUCE, array=first, times=runs)


def _exchanged_heads(config: Config) -> Iterator[Expected]:
    """Yield the collectives for fewer key/value heads than devices (`model/attention.py`)."""
    model, shards = config.model, config.mesh.model
    layers = model.num_layers * config.train.microbatches
    if model.num_kv_heads >= shards:
        return

    def heads(count: int) -> Array:
        return Array(
            HLO_DTYPES[config.train.dtype],
            (config.microbatch_rows, config.train.seq_len, count, model.head_dim),
        )

    for phase in passes(config):
        site = Site('attention', phase, 'model')
        # The queries of a device.
        yield Expected(
            site=site,
            kind=ALL_TO_ALL,
            array=heads(model.num_heads // shards),
            times=layers,
            size=shards,
        )
        # Keys and values; in the backward pass, the gradients of the shards' copies.
        copied = heads(shards if phase == 'backward' else model.num_kv_heads)
        yield Expected(site=site, kind=GATHER, array=copied, times=2 * layers, size=shards)
