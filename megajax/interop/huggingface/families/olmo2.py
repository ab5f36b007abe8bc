"""OLMo 2 and 3: Llama with norms after the sublayers, and with QK norm.

Imports no jax.
"""

from functools import partial

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import There
from megajax.interop.huggingface.layers import (
    FULL,
    SLIDING,
    first_layer,
    read_types_with_ropes,
    write_ropes,
    write_windows,
)
from megajax.interop.huggingface.reader import Keys, Reader

LAYER = 'model.layers.{}.'
TENSORS = llama.TENSORS | {
    'layers.attention.norm.weight': [There(f'{LAYER}post_attention_layernorm.weight', 'D')],
    'layers.mlp.norm.weight': [There(f'{LAYER}post_feedforward_layernorm.weight', 'D')],
    'layers.attention.query_norm.weight': [There(f'{LAYER}self_attn.q_norm.weight', '(KGH)')],
    'layers.attention.key_norm.weight': [There(f'{LAYER}self_attn.k_norm.weight', '(KH)')],
}
THETA = 500000.0  # the default of OLMo 3


def _own(read: Reader) -> Keys:
    read.only('attention_bias', False, default=False)
    return {'norm_position': 'after', 'qk_norm': 'all'}


def _layers_of_olmo3(read: Reader) -> Keys:
    theta = read.get('rope_theta', THETA)
    if read.get('rope_parameters', None) is None and theta != THETA:
        why = 'transformers 5 and 4 apply it to different layers; give rope_parameters instead'
        read.refuse('rope_theta', theta, why)
    return read_types_with_ropes(
        read,
        lambda index: SLIDING if (index + 1) % 4 else FULL,
        {FULL: ('rope_theta', THETA), SLIDING: (None, THETA)},
    )


def _write_olmo2(model: ModelConfig) -> Keys:
    return llama.write_config(model) | {'attention_bias': False}


def _write_olmo3(model: ModelConfig) -> Keys:
    layers = {**write_windows(model, model.max_seq_len), 'rope_parameters': write_ropes(model)}
    return _write_olmo2(first_layer(model, FULL) or model) | layers


LIKE_OLMO2 = partial(llama.LIKE_LLAMA, tensors=TENSORS)
FAMILIES = (
    LIKE_OLMO2(
        name='olmo2',
        architecture='Olmo2ForCausalLM',
        read_config=partial(llama.read_config, own=_own, grouped=False, norm_eps=1e-5),
        write_config=_write_olmo2,
    ),
    LIKE_OLMO2(
        name='olmo3',
        architecture='Olmo3ForCausalLM',
        read_config=partial(
            llama.read_config, own=_own, grouped=False, norm_eps=1e-5, rope=_layers_of_olmo3
        ),
        write_config=_write_olmo3,
    ),
)
