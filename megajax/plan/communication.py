"""What a training step sends: the collectives that XLA places, counted without compiling.

They are Megatron's (`counts/megatron.py`) but for what XLA can leave out. `tests/plan/test_compiled.py` holds the bytes to those of
compiled steps, to the last one.
"""

import dataclasses
from collections.abc import Iterator

from megajax.config import Config
from megajax.counts.megatron import (
    DTYPES,
    GATHER,
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
    """Every collective of a step of `config` that XLA places, but for those of single numbers."""
    gathered = [*few_kv_heads(config)]
    kept = list[Expected]()
    for one in expected(config):
        if (
            one in gathered
        ):  # Megatron gathers the whole QKV; here the queries change places instead
            gathered.remove(one)
        elif (
            one.site.axis == 'model'
            and not _is_kept_from_forward(one, kept)
            and not _is_last_of_layer(one)
        ):
            kept.append(one)
    return [
        *_first_tokens(config, kept),
        *_exchanged_heads(config),
        *over_data(config, own_counts(config)),
    ]


def wire_bytes(config: Config) -> dict[str, float]:
    """Bytes that a device sends in a step, by mesh axis."""
    found = communication(config)
    return {
        axis: sum(one.wire_bytes * one.times for one in found if one.site.axis == axis)
        for axis in ('data', 'model')
    }


def _is_kept_from_forward(one: Expected, before: list[Expected]) -> bool:
    """Megatron gathers a layer's input again for the weight gradient; XLA keeps it, or the one gathered for recomputation."""
    return (
        one.site.phase == 'backward'
        and one.kind == GATHER
        and (one.site.name == 'head' or one in before)
    )


def _is_last_of_layer(one: Expected) -> bool:
    """The backward pass does not need a layer's result, so its last reduction is not computed again."""
    return one.site.name == 'mlp' and one.site.phase == 'recompute' and one.kind != GATHER


def _first_tokens(config: Config, kept: list[Expected]) -> Iterator[Expected]:
    """BERT's pooler reads the first token of each row: Megatron gathers the whole sequence once more for it, here only that is sent."""
    for one in kept:
        if not config.model.is_bert or (one.site.name, one.site.phase, one.kind) != (
            'head',
            'forward',
            GATHER,
        ):
            yield one
            continue
        runs = config.train.microbatches
        yield dataclasses.replace(one, times=runs)
        first = Array('f32', (config.microbatch_rows, config.model.hidden_size))
        yield dataclasses.replace(one, kind=REDUCE, array=first, times=runs)


def _exchanged_heads(config: Config) -> Iterator[Expected]:
    """With fewer key/value heads than devices (`model/attention.py`)."""
    model, shards, layers = (
        config.model,
        config.mesh.model,
        config.model.num_layers * config.train.microbatches,
    )
    if model.num_kv_heads >= shards:
        return

    def heads(count: int) -> Array:
        return Array(
            DTYPES[config.train.dtype],
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
        # Keys and values; backward, the gradients of the copies that the shards have.
        copied = heads(shards if phase == 'backward' else model.num_kv_heads)
        yield Expected(site=site, kind=GATHER, array=copied, times=2 * layers, size=shards)
