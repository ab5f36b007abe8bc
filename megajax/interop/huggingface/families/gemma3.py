"""Gemma 3, text only: Llama with a norm on both sides of each sublayer. Imports no jax."""

from functools import partial

from megajax.core.config import ModelConfig
from megajax.core.config.values import fault
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
from megajax.interop.huggingface.settings import check_heads

LAYER = 'model.layers.{}.'
TENSORS = llama.TENSORS | {
    'layers.attention.output_norm.weight': [There(f'{LAYER}post_attention_layernorm.weight', 'D')],
    'layers.mlp.norm.weight': [There(f'{LAYER}pre_feedforward_layernorm.weight', 'D')],
    'layers.mlp.output_norm.weight': [There(f'{LAYER}post_feedforward_layernorm.weight', 'D')],
}
GELU = 'gelu_pytorch_tanh'
LOCAL_THETA = 'rope_local_base_freq'
THETA = {FULL: ('rope_theta', 1e6), SLIDING: (LOCAL_THETA, 1e4)}


def _own(read: Reader) -> Keys:
    check_heads(read)
    read.only('hidden_activation', GELU, default=GELU)
    read.only('attention_bias', False, default=False)
    read.only('final_logit_softcapping', None, default=None)
    read.only('attn_logit_softcapping', None, default=None)
    read.only('use_bidirectional_attention', False, None, default=False)
    for key in ('cache_implementation', '_sliding_window_pattern'):
        read.get(key, None)
    # An integer, like a head dim; the scale of the scores is its inverse square root.
    scalar = read.take('query_pre_attn_scalar', 'model.head_dim', 256)
    hidden = read.keys.get('hidden_size')  # `llama.read_config` checks this key
    if type(hidden) is not int or fault('model.hidden_size', hidden):
        hidden = 1
    return {
        'activation': 'geglu',
        'norm_position': 'both',
        'zero_centered_norm': True,
        'qk_norm': True,
        'query_scale': (scalar or 1) ** -0.5,
        'embedding_scale': hidden**0.5,
    }


def _layers(read: Reader) -> Keys:
    period = read.get('sliding_window_pattern', 6)
    if type(period) is not int or period < 1:
        read.refuse('sliding_window_pattern', period, 'only a number of layers is supported')
        period = 1
    return read_types_with_ropes(
        read, lambda index: SLIDING if (index + 1) % period else FULL, THETA
    )


def _write_config(model: ModelConfig) -> Keys:
    sliding = first_layer(model, SLIDING)
    keys = llama.write_config(first_layer(model, FULL) or model)
    del keys['hidden_act']
    return {
        **keys,
        **write_windows(model, model.max_seq_len),
        'hidden_activation': GELU,
        'query_pre_attn_scalar': round(model.query_scale**-2),
        'attention_bias': False,
        'rope_parameters': write_ropes(model),
        LOCAL_THETA: sliding.rope_theta if sliding else THETA[SLIDING][1],
    }


FAMILIES = (
    llama.LIKE_LLAMA(
        name='gemma3_text',
        architecture='Gemma3ForCausalLM',
        read_config=partial(llama.read_config, own=_own, head_dim=256, tied=True, rope=_layers),
        write_config=_write_config,
        tensors=TENSORS,
    ),
)
