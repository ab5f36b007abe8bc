"""SmolLM3: Llama in which some layers have no position encoding. Imports no jax."""

from functools import partial

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.layers import (
    FULL,
    SLIDING,
    num_layers,
    optional_window,
    read_windows,
    replaced_by,
    write_windows,
)
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_rope


def _own(read: Reader) -> Keys:
    rotated, window = _read_rotated(read), optional_window(read, None)
    layers = read_windows(
        read,
        window,
        # Slicing also works if `rotated` is too short, which is already reported as a problem.
        lambda index: FULL if window is None or all(rotated[index : index + 1]) else SLIDING,
    )
    positions = ({} if is_rotated else {'position': 'none'} for is_rotated in rotated)
    both = [{**keys, **position} for keys, position in zip(layers, positions, strict=False)]
    return {**llama.read_biases(read), **replaced_by(both)}


def _read_rotated(read: Reader) -> list[int]:
    """Read which layers have rotary embeddings, as a list with 1 or 0 for each layer."""
    given, interval = read.get('no_rope_layers', None), read.get('no_rope_layer_interval', 4)
    number = num_layers(read)
    if given is None:
        if type(interval) is int and interval > 0:
            return [int((index + 1) % interval > 0) for index in range(number)]
        read.refuse('no_rope_layer_interval', interval, 'only a number of layers is supported')
    elif not isinstance(given, list) or any(x not in (0, 1) for x in given):
        read.refuse('no_rope_layers', given, 'only a list of 1 and, without rope, 0 is supported')
    elif len(given) < number:
        why = f'{len(given)} layers, but num_hidden_layers is {number}; list each layer once'
        read.refuse('no_rope_layers', given, why)
    else:
        return given[:number]
    return []


def _write_config(model: ModelConfig) -> Keys:
    windows = write_windows(model)
    return {
        **llama.write_config(model),
        **windows,
        'use_sliding_window': SLIDING in windows['layer_types'],
        'no_rope_layers': [int(layer.rotates) for layer in model.layer_configs],
        'attention_bias': model.bias,
        'mlp_bias': model.bias,
    }


FAMILIES = (
    llama.LIKE_LLAMA(
        name='smollm3',
        architecture='SmolLM3ForCausalLM',
        read_config=partial(
            llama.read_config, own=_own, tied=True, rope=partial(read_rope, theta=2e6)
        ),
        write_config=_write_config,
    ),
)
