"""Convert the layer types in config.json to and from `model.layers`. Imports no jax."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.core.config import ModelConfig
from megajax.core.config.layer import shortest_pattern
from megajax.core.config.values import fault
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_parameters, write_parameters

FULL, SLIDING = 'full_attention', 'sliding_attention'


def replaced_by(layers: Sequence[Mapping[str, Any]]) -> Keys:
    """Return the keys of `model` for layers with these keys: no pattern if all are equal."""
    if all(layer == layers[0] for layer in layers):
        return dict(layers[0]) if layers else {}
    return {'layers': shortest_pattern(layers)}


def num_layers(read: Reader) -> int:
    """Return num_hidden_layers; 0 if it is not valid, which is reported with the sizes."""
    number = read.keys.get('num_hidden_layers')
    return number if type(number) is int and not fault('model.num_layers', number) else 0


def read_types(read: Reader, default: Callable[[int], str]) -> list[str]:
    """Read `layer_types`; if it is missing, the type of each layer is `default(index)`.

    Returns no layers if a value is not supported.
    """
    types, number = read.get('layer_types', None), num_layers(read)
    if types is None:
        return [default(index) for index in range(number)]
    if not isinstance(types, list):
        read.refuse('layer_types', types, 'only a list is supported')
    elif other := [kind for kind in types if kind not in (FULL, SLIDING)]:
        read.refuse('layer_types', other[0], f'only "{FULL}" and "{SLIDING}" are supported')
    elif number and len(types) != number:
        why = f'{len(types)} layers, but num_hidden_layers is {number}; list each layer once'
        read.refuse('layer_types', types, why)
    else:
        return types
    return []


def read_windows(
    read: Reader, window: int | None, default: Callable[[int], str], **sliding: Any
) -> list[Keys]:
    """Read `layer_types` as keys of each layer; sliding layers get the window and `sliding`."""
    types = read_types(read, default)
    if window is None and SLIDING in types:
        why = 'needs a sliding_window, and use_sliding_window=true where the family has that key'
        read.refuse('layer_types', SLIDING, why)
    return [{'window': window, **sliding} if kind == SLIDING else {} for kind in types]


def optional_window(read: Reader, default: int | None) -> int | None:
    """Read `sliding_window` for a family whose windows need use_sliding_window."""
    read.only('use_sliding_window', True, False, default=False)
    window = read.get('sliding_window', default)
    if window is None or read.keys.get('use_sliding_window') is not True:
        return None
    checked = read.checked('sliding_window', window, 'model.window')
    return None if checked is None else int(checked)


def read_types_with_ropes(
    read: Reader, default: Callable[[int], str], theta: Mapping[str, tuple[str | None, float]]
) -> Keys:
    """Read the layers of a family that has a window and a rope for each type of layer.

    transformers 5 has an object for each type in `rope_parameters`, and earlier versions have
    `rope_scaling` for layers with full attention. `default` returns a layer's type from its index.
    For each type, `theta` has the key of theta in earlier versions, and its default.
    """
    window = read.take('sliding_window', 'model.window', 4096)
    objects = {'rope_scaling': read.get('rope_scaling', None) or {}}
    objects['rope_parameters'] = read.get('rope_parameters', None) or {}
    for key, given in objects.items():
        flat = (
            key == 'rope_parameters' and isinstance(given, Mapping) and given.keys() - theta.keys()
        )
        if flat or not isinstance(given, Mapping):
            why = f'only an object with {FULL} and {SLIDING} is supported'
            read.refuse(key, given, why if flat else 'only an object is supported')
            objects[key] = {}
    full, sliding = (_read_rope_of(read, kind, objects, *theta[kind]) for kind in (FULL, SLIDING))
    other = {key: value for key, value in sliding.items() if value != full.get(key)}
    return {**full, **replaced_by(read_windows(read, window, default, **other))}


def _read_rope_of(
    read: Reader, kind: str, objects: Mapping[str, Keys], old_key: str | None, default: float
) -> Keys:
    key, given = f'rope_parameters.{kind}', objects['rope_parameters'].get(kind) or {}
    if not isinstance(given, Mapping):
        read.refuse(key, given, 'only an object is supported')
        given = {}
    if kind == FULL and objects['rope_scaling']:
        key, given = 'rope_scaling', {**given, **objects['rope_scaling']}
    theta = read.take(old_key, 'model.rope_theta', default) if old_key else default
    keys = {'rope_theta': theta or default, **given}
    return {'rope_scaling': None} | read_parameters(read, key, keys, default, per_layer=True)


def type_of(layer: ModelConfig) -> str:
    """Return the type of a layer."""
    return FULL if layer.window is None else SLIDING


def first_layer(model: ModelConfig, kind: str) -> ModelConfig | None:
    """Return the config of the first layer of a type; None if there is none."""
    return next((layer for layer in model.layer_configs if type_of(layer) == kind), None)


def write_windows(model: ModelConfig, unused: int | None = None) -> Keys:
    """Return `layer_types` and `sliding_window`, which is the same for all layers.

    `sliding_window` is `unused` if no layer has a window.
    """
    sliding = first_layer(model, SLIDING)
    return {
        'sliding_window': sliding.window if sliding else unused,
        'layer_types': [*map(type_of, model.layer_configs)],
    }


def write_ropes(model: ModelConfig) -> Keys:
    """Return `rope_parameters`, with an object for each type of layer in the model.

    There is always one for full attention, to which transformers 5 adds `rope_scaling`.
    """
    layers = {kind: first_layer(model, kind) for kind in (FULL, SLIDING)}
    layers[FULL] = layers[FULL] or layers[SLIDING]
    return {kind: write_parameters(layer) for kind, layer in layers.items() if layer}
