"""The differences between two configs with which trained weights keep their meaning."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megajax.core.config.experts import OF_ROUTING
from megajax.runtime.checkpoint.record import EXPERTS, FIXED, OF_ROWS, Record, config_differences

# Keys that do not change the meaning of the weights.
HARMLESS = (
    'model.dropout',
    'model.attention_dropout',
    'model.init_std',
    'vision.freeze',
    *OF_ROWS,
    *(f'{EXPERTS}.{key}' for key in OF_ROUTING),
    'train.dtype',
    'optim.kind',
)
# Keys of a model with rotary positions that change when the context is lengthened.
ROTARY = ('max_seq_len', 'rope_theta', 'rope_scaling')

Differences = dict[str, tuple[Any, Any]]


def model_differences(there: Record, here: Record) -> tuple[Differences, Differences]:
    """Return the fixed keys that differ: those that keep the weights' meaning, and the others.

    A new run that starts from the weights of `there` may change the first. Adapters that only
    `there` has are merged into its weights, and adapters that only `here` has are new.
    """
    different = config_differences(there, here)
    longer = {*_lengthened(different, here.config['model'])}
    free: Differences = {}
    others: Differences = {}
    for key, pair in different.items():
        if key.startswith(FIXED):
            is_free = key in HARMLESS or (key.startswith('lora.') and None in pair)
            (free if is_free or key in longer else others)[key] = pair
    return free, others


def _lengthened(
    different: Mapping[str, tuple[Any, Any]], model: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the keys of a model whose differences only lengthen its context.

    A shorter `max_seq_len` is one of them: it does not change the weights' meaning. A rotary key
    that moves in the other direction does, as if the weights' own scaling were forgotten.
    """
    pairs = {key: different.get(f'model.{key}', (model[key], model[key])) for key in ROTARY}
    if model['position'] in ('rope', 'mrope'):
        yield from (f'model.{key}' for key, pair in pairs.items() if _lengthens(key, *pair))
    old, new = (layers or () for layers in different.get('model.layers', ((), ())))
    if _without_rotary(old) == _without_rotary(new) and all(
        _lengthens(key, before.get(key, pairs[key][0]), after.get(key, pairs[key][1]))
        for before, after in zip(old, new, strict=True)
        for key in ROTARY
    ):
        yield 'model.layers'


def _lengthens(key: str, old: Any, new: Any) -> bool:
    """Whether a rotary key keeps its value, or changes as it does for a longer context."""
    if old == new or key == 'max_seq_len':
        return True
    if old is None or new is None:  # without rope_scaling, or in a record of an old version
        return old is None and key == 'rope_scaling'
    if key == 'rope_theta':
        return bool(new > old)
    grows = {'factor', 'attention_factor'}  # the second follows from the first
    is_same = all(new.get(name) == x for name, x in old.items() if name not in grows)
    return is_same and new['factor'] > old['factor']


def _without_rotary(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{k: x for k, x in layer.items() if k not in ROTARY} for layer in layers]
