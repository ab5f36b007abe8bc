"""Read and write the settings of the rotary embedding. Imports no jax."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megajax.base.render.text import shorten
from megajax.core.config import ModelConfig
from megajax.interop.huggingface.reader import Keys, Reader

ROPE = frozenset(
    {'rope_type', 'type', 'rope_theta', 'factor', 'low_freq_factor', 'high_freq_factor'}
    | {'original_max_position_embeddings', 'partial_rotary_factor'}
)
LENGTH = {'original_max_seq_len': 'original_max_position_embeddings'}
FREQUENCIES = {name: name for name in ('low_freq_factor', 'high_freq_factor')}
# For each type, the required keys of `rope_scaling`, with their names in transformers.
REQUIRED: Mapping[str, Mapping[str, str]] = {
    'linear': {'factor': 'factor'},
    'llama3': {'factor': 'factor', **FREQUENCIES, **LENGTH},
    'yarn': {'factor': 'factor', **LENGTH},
    'longrope': {
        **{name: name for name in ('factor', 'short_factor', 'long_factor')},
        **LENGTH,
    },
}
OPTIONAL = {
    'yarn': ('beta_fast', 'beta_slow', 'attention_factor', 'truncate'),
    'longrope': ('attention_factor',),
}
# vLLM's names of longrope's attention_factor, which it does not read.
MSCALES = 'short_mscale', 'long_mscale'


def read_rope(
    read: Reader, own: Iterable[str] = (), *, theta: float = 10000.0, fraction: float | None = None
) -> Keys:
    """Read the rotary embedding of a model in which all layers have the same embedding.

    In transformers 5 the settings are in `rope_parameters`, in earlier versions in `rope_theta` and
    `rope_scaling`. They may also include a family's `own` names, which the family itself reads.
    `theta` and `fraction` are the family's defaults for rope_theta and partial_rotary_factor. If
    `fraction` is None, transformers rotates all dims of a head in this family.
    """
    key, given, of_model = find_rope(read, theta)
    return read_parameters(read, key, given, of_model, own, fraction=fraction)


def find_rope(read: Reader, theta: float = 10000.0) -> tuple[str, Mapping[str, Any], Any]:
    """Return the key of the object of rotary settings, the object, and rope_theta outside it."""
    of_model, old = read.get('rope_theta', theta), read.get('rope_scaling', None) or {}
    new = read.get('rope_parameters', None)
    # If both exist, transformers 5 uses rope_scaling, as earlier versions do.
    key, given = ('rope_scaling', old) if old or new is None else ('rope_parameters', new)
    if not isinstance(given, Mapping):
        read.refuse(key, given, 'only an object is supported')
        return key, {}, of_model
    if key == 'rope_parameters' and 'rope_theta' not in {*given, *read.keys}:
        read.problems.append(f'{read.file}: {key}.rope_theta: required, and missing')
    return key, given, of_model


def read_parameters(
    read: Reader,
    key: str,
    given: Mapping[str, Any],
    theta: Any,
    own: Iterable[str] = (),
    *,
    fraction: float | None = None,
    per_layer: bool = False,
) -> Keys:
    """Read one object of rotary settings, which is in config.json under `key`.

    Returns `rope_theta`, `rope_scaling` if there is a scaling and, in a family with a `fraction`,
    `rotary_fraction`. `theta` is the default for an object without rope_theta. `per_layer` means
    that transformers has one such object for each type of layer.
    """
    kind = given.get('rope_type', given.get('type', 'default'))
    is_known = isinstance(kind, str) and kind in REQUIRED
    wanted, optional = (REQUIRED[kind], OPTIONAL.get(kind, ())) if is_known else ({}, ())
    if kind == 'longrope':
        own = *own, *MSCALES
        _check_mscales(read, key, given)
    for name in given.keys() - ROPE - {*own, *wanted.values(), *optional}:
        is_nested = isinstance(given[name], Mapping)
        why = 'only one rope for all layers is supported' if is_nested else 'is not supported'
        read.refuse(f'{key}.{name}', given[name], why)
    where = f'{key}.rope_theta' if 'rope_theta' in given else 'rope_theta'
    theta = read.checked(where, given.get('rope_theta', theta), 'model.rope_theta')
    if theta is None:
        return {}
    keys: Keys = {'rope_theta': float(theta), **_read_fraction(read, key, given, fraction)}
    if kind == 'default':
        return keys
    if not is_known:
        supported = f'only "default", {", ".join(map(json.dumps, REQUIRED))} are supported'
        read.refuse(f'{key}.rope_type', kind, supported)
        return {}
    if kind == 'longrope' and given.get('factor') is None:
        given = {**given, 'factor': _growth(read, given)}
    if missing := [name for name in wanted.values() if name not in given]:
        read.problems.append(
            f'{read.file}: {key}.{missing[0]}: required by rope_type {kind}, and missing'
        )
        return {}
    # If each type of layer has an object, transformers ignores the length outside.
    if 'original_max_seq_len' in wanted and not per_layer:
        _check_length(read, key, given)
    if per_layer and given.get('truncate', True) is not True:  # transformers ignores it
        read.refuse(f'{key}.truncate', given['truncate'], 'only true is supported for each layer')
    # In transformers, null means the default, but for `truncate` it means false.
    for name in optional:
        if name in given and (name == 'truncate' or given[name] is not None):
            wanted = {**wanted, name: name}
    scaling = {
        ours: read.checked(f'{key}.{name}', _number(given[name]), f'rope_scaling.{ours}')
        for ours, name in wanted.items()
    }
    return keys | {'rope_scaling': {'type': kind} | scaling}


def _check_length(read: Reader, key: str, given: Mapping[str, Any]) -> None:
    """Reject a length outside the object of rotary settings that differs from the one in it.

    In this case, transformers 5 uses the length outside, and earlier versions the one inside.
    """
    name = LENGTH['original_max_seq_len']
    inside = given[name]
    if (outside := read.get(name, inside)) != inside:
        where = f'{key}.{name}={shorten(json.dumps(inside))}'
        read.refuse(name, outside, f'differs from {where}: put the right one there, and omit this')


def _check_mscales(read: Reader, key: str, given: Mapping[str, Any]) -> None:
    """Reject a factor of the scores for vLLM that differs from the one for transformers."""
    expected = given.get('attention_factor')
    for name in MSCALES:
        if (value := given.get(name, expected)) != expected:
            where = f'attention_factor, {shorten(json.dumps(expected))},'
            read.refuse(f'{key}.{name}', value, f'only the value of {where} is supported')


def _growth(read: Reader, given: Mapping[str, Any]) -> float | None:
    """Return the factor by which longrope extends sequences; None if a length is not a number."""
    lengths = read.keys.get('max_position_embeddings'), given.get(LENGTH['original_max_seq_len'])
    try:
        return max(lengths[0] / lengths[1], 1.0)  # type: ignore[operator]
    except (TypeError, ZeroDivisionError):
        return None


def _read_fraction(
    read: Reader, key: str, given: Mapping[str, Any], fraction: float | None
) -> Keys:
    name = 'partial_rotary_factor'
    own = read.get(name, 1 if fraction is None else fraction)
    where, value = (f'{key}.{name}', given[name]) if name in given else (name, own)
    if fraction is not None:
        return {'rotary_fraction': read.checked(where, value, 'model.rotary_fraction')}
    if value != 1:
        read.refuse(where, value, 'only 1 is supported')
    return {}


def _number(x: Any) -> Any:
    return int(x) if isinstance(x, float) and x.is_integer() else x


def write_parameters(model: ModelConfig) -> Keys:
    """Return the rotary settings of a model as one object, as in transformers 5.

    The object has no partial_rotary_factor; a family that supports this key writes it itself.
    """
    return {
        **(write_scaling(model) or {'rope_type': 'default'}),
        'rope_theta': model.rope_theta,
    }


def write_scaling(model: ModelConfig) -> Keys | None:
    """Return `rope_scaling`; None if the model has none."""
    scaling = model.rope_scaling
    if scaling is None:
        return None
    optional = {name: name for name in OPTIONAL.get(scaling.type, ())}
    wanted = {**REQUIRED[scaling.type], **optional}
    mscales = MSCALES if scaling.type == 'longrope' else ()
    return {
        'rope_type': scaling.type,
        **{name: getattr(scaling, ours) for ours, name in wanted.items()},
        **dict.fromkeys(mscales, scaling.attention_factor),
    }
