"""EXAONE 4: Llama with norms after the sublayers, and QK norm per head.

In a model with windows, layers with full attention have no position encoding. Imports no jax.
"""

from functools import partial

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import There
from megajax.interop.huggingface.layers import (
    FULL,
    SLIDING,
    read_windows,
    replaced_by,
    write_windows,
)
from megajax.interop.huggingface.reader import Keys, Reader

LAYER = 'model.layers.{}.'
TENSORS = llama.TENSORS | {
    'layers.attention.norm.weight': [There(f'{LAYER}post_attention_layernorm.weight', 'D')],
    'layers.mlp.norm.weight': [There(f'{LAYER}post_feedforward_layernorm.weight', 'D')],
}


def _own(read: Reader) -> Keys:
    window = read.take('sliding_window', 'model.window', 4096)
    period = read.get('sliding_window_pattern', 4)
    has_types = read.keys.get('layer_types') is not None
    if not has_types and window and (type(period) is not int or period < 1):
        read.refuse('sliding_window_pattern', period, 'only a number of layers is supported')
        period = 1
    layers = read_windows(
        read, window, lambda index: SLIDING if window and (index + 1) % period else FULL
    )
    if window:
        layers = [keys or {'position': 'none'} for keys in layers]
    return {'norm_position': 'after', 'qk_norm': True, **replaced_by(layers)}


def _write_config(model: ModelConfig) -> Keys:
    return llama.write_config(model) | write_windows(model)


FAMILIES = (
    llama.LIKE_LLAMA(
        name='exaone4',
        architecture='Exaone4ForCausalLM',
        read_config=partial(llama.read_config, own=_own, norm_eps=1e-5),
        write_config=_write_config,
        tensors=TENSORS,
    ),
)
