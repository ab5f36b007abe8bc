"""Minimize a config whose compiled step is wrong."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from megajax.analysis.inspect.one_device import IN_FP32, updated
from megajax.core.config import Config
from megajax.core.config.optim import ZERO_STAGES
from megajax.core.config.schema import SECTIONS

# Values that use less of megajax, in the order in which they are tried.
_PLAINER: tuple[dict[str, dict[str, Any]], ...] = (
    {'train': IN_FP32},
    {'train': {'microbatches': 1}},
    {'train': {'recompute': 'none'}},
    {'train': {'overlap': 'none', 'unroll': False}},
    {'optim': {'reduce_dtype': 'float32'}},
    {'mesh': {'replicas': 1}},
    {'mesh': {'model_rows': 1}},
    {'model': {'dropout': 0.0, 'attention_dropout': 0.0}},
    {'loss': {'label_smoothing': 0.0, 'z_loss': 0.0}},
    {'model': {'qk_norm': False}},
    {'model': {'norm_position': 'before'}},
    {'data': {'document_mask': False}},
    {'mesh': {'sequence_parallel': False}},
    {'model': {'layers': ()}},
    {'model': {'window': None}},
    {'model': {'num_layers': 1}},
)


def smallest(config: Config, is_wrong: Callable[[Config], bool]) -> Config:
    """Return the smallest config that is still wrong: remove options, then halve sizes.

    Options come first: with a hidden size of 1, a result can be wrong only because of an option
    that has nothing to do with the fault. Each call of `is_wrong` compiles and executes a step.
    """
    tried = {config}
    while True:
        for simpler in itertools.chain(_plainer(config), _without(config), _smaller(config)):
            if simpler in tried:
                continue
            tried.add(simpler)
            if is_wrong(simpler):
                config = simpler
                break
        else:
            return config


def _plainer(config: Config) -> Iterator[Config]:
    mesh, train, shard = config.mesh, config.train, config.optim.shard
    yield from _changed(
        config,
        *_PLAINER,
        *({'optim': {'shard': stage}} for stage in ZERO_STAGES[: ZERO_STAGES.index(shard)]),
        {'mesh': {'data': mesh.data // 2}, 'train': {'batch_size': train.batch_size // 2}},
        {'mesh': {'model': mesh.model // 2}},
    )


def _smaller(config: Config) -> Iterator[Config]:
    model, mesh, train = config.model, config.mesh, config.train
    heads = {
        'num_heads': model.num_heads // 2,
        'num_kv_heads': max(model.num_kv_heads // 2, 1),
    }
    yield from _changed(
        config,
        {'model': heads},
        {'model': {'num_kv_heads': model.num_heads}},
        {'model': {'hidden_size': model.hidden_size // 2}},
        {'model': {'ffn_size': model.ffn_size // 2}},
        {'train': {'seq_len': train.seq_len // 2}},
        {'train': {'batch_size': mesh.data * mesh.model_rows * train.microbatches}},
    )


def _changed(config: Config, *changes: dict[str, dict[str, Any]]) -> Iterator[Config]:
    """Yield the config with each of these changes, if it is valid and different."""
    for change in changes:
        with contextlib.suppress(ValueError):
            simpler = updated(config, **change)
            if simpler != config:
                yield simpler


def _without(config: Config) -> Iterator[Config]:
    """Yield the config without each group and each key that it gives, such as model.activation.

    Sizes stay, whose defaults are larger, and so do keys that have a plainer value.
    """
    written = config.model_dump(exclude_unset=True)
    for section, keys in written.items():
        left = {name: dict(values) for name, values in written.items()}
        if Config.model_fields[section].default is None:
            del left[section]
            yield from _valid(left)
            continue
        fields = SECTIONS[section].model_fields
        for key, value in keys.items():
            is_kept = any(key in change.get(section, {}) for change in _PLAINER)
            is_kept |= fields[key].default_factory is not None
            if not (is_kept or _is_larger(fields[key].default, value)):
                others = {name: x for name, x in keys.items() if name != key}
                yield from _valid(left | {section: others})
            for inner in value if isinstance(value, dict) else ():
                group = {name: x for name, x in value.items() if name != inner}
                yield from _valid(left | {section: keys | {key: group}})


def _is_larger(default: Any, value: Any) -> bool:
    return type(default) is type(value) is int and default > value


def _valid(written: dict[str, Any]) -> Iterator[Config]:
    with contextlib.suppress(ValueError):
        yield Config.model_validate(written)
