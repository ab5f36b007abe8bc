"""Reading and writing the settings of the rotary embedding. Imports no jax."""

from collections.abc import Iterable, Mapping
from typing import Any

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.reader import Keys, Reader

ROPE = frozenset(
    {'rope_type', 'type', 'rope_theta', 'factor', 'low_freq_factor', 'high_freq_factor'}
    | {'original_max_position_embeddings', 'partial_rotary_factor'}
)


def read_rope(read: Reader, own: Iterable[str] = ()) -> Keys:
    """Read theta and scaling of the rotary embedding.

    transformers 5 has them in `rope_parameters`, earlier versions in `rope_theta` and
    `rope_scaling`. They may also have a family's `own` names, which the family reads itself.
    """
    read.only('partial_rotary_factor', 1, default=1)
    old = read.get('rope_theta', 10000.0), read.get('rope_scaling', None) or {}
    new = read.get('rope_parameters', None)
    key, scaling = ('rope_scaling', old[1]) if new is None else ('rope_parameters', new)
    if not isinstance(scaling, Mapping):
        read.refuse(key, scaling, 'only an object is supported')
        return {}
    for name in scaling.keys() - ROPE - {*own}:
        per_layer = isinstance(scaling[name], Mapping)
        why = 'only one rope for all layers is supported' if per_layer else 'is not supported'
        read.refuse(f'{key}.{name}', scaling[name], why)
    where = f'{key}.rope_theta' if 'rope_theta' in scaling else 'rope_theta'
    theta = read.checked(where, scaling.get('rope_theta', old[0]), 'model.rope_theta')
    if theta is None:
        return {}
    theta = float(theta)
    if new is not None and 'rope_theta' not in {*scaling, *read.keys}:
        read.problems.append(f'{read.file}: {key}.rope_theta: required, and missing')
    kind = scaling.get('rope_type', scaling.get('type', 'default'))
    if scaling.get('partial_rotary_factor', 1) != 1:
        read.refuse(
            f'{key}.partial_rotary_factor', scaling['partial_rotary_factor'], 'only 1 is supported'
        )
    if kind == 'default':
        return {'rope_theta': theta}
    if kind not in ('linear', 'llama3'):
        read.refuse(f'{key}.rope_type', kind, 'only "default", "linear" and "llama3" are supported')
        return {}
    wanted = {'factor': 'factor'}
    if kind == 'llama3':
        wanted |= {'low_freq_factor': 'low_freq_factor', 'high_freq_factor': 'high_freq_factor'}
        wanted |= {'original_max_seq_len': 'original_max_position_embeddings'}
    if missing := [name for name in wanted.values() if name not in scaling]:
        read.problems.append(
            f'{read.file}: {key}.{missing[0]}: required by rope_type {kind}, and missing'
        )
        return {}
    return {
        'rope_theta': theta,
        'rope_scaling': {'type': kind}
        | {
            ours: read.checked(f'{key}.{name}', _number(scaling[name]), f'rope_scaling.{ours}')
            for ours, name in wanted.items()
        },
    }


def _number(x: Any) -> Any:
    return int(x) if isinstance(x, float) and x.is_integer() else x


def write_scaling(model: ModelConfig) -> Keys | None:
    """Return `rope_scaling`, or None if the model has none."""
    scaling = model.rope_scaling
    if scaling is None:
        return None
    keys: Keys = {'rope_type': scaling.type, 'factor': scaling.factor}
    if scaling.type == 'llama3':
        keys |= {
            'low_freq_factor': scaling.low_freq_factor,
            'high_freq_factor': scaling.high_freq_factor,
        }
        keys |= {'original_max_position_embeddings': scaling.original_max_seq_len}
    return keys
