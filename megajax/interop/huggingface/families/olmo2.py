"""OLMo 2: Llama with norms after the sublayers, and of queries and keys. Imports no jax."""

from functools import partial

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import There
from megajax.interop.huggingface.reader import Keys, Reader

LAYER = 'model.layers.{}.'
TENSORS = llama.TENSORS | {
    'layers.attention.norm.weight': [There(f'{LAYER}post_attention_layernorm.weight', 'D')],
    'layers.mlp.norm.weight': [There(f'{LAYER}post_feedforward_layernorm.weight', 'D')],
    'layers.attention.query_norm.weight': [There(f'{LAYER}self_attn.q_norm.weight', '(KGH)')],
    'layers.attention.key_norm.weight': [There(f'{LAYER}self_attn.k_norm.weight', '(KH)')],
}


def _own(read: Reader) -> Keys:
    read.only('attention_bias', False, default=False)
    return {'norm_position': 'after', 'qk_norm': 'all'}


def _write_config(model: ModelConfig) -> Keys:
    return llama.write_config(model) | {'attention_bias': False}


FAMILIES = (
    llama.LIKE_LLAMA(
        name='olmo2',
        architecture='Olmo2ForCausalLM',
        read_config=partial(llama.read_config, own=_own, grouped=False, norm_eps=1e-5),
        write_config=_write_config,
        tensors=TENSORS,
    ),
)
