"""GLM-4: Llama with rotary embeddings on a part of each head, in pairs of adjacent dims.

Imports no jax.
"""

from functools import partial

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import There
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_rope

LAYER = 'model.layers.{}.'
# The tensors that gate_up_proj contains, one below the other.
JOINED = {
    f'{LAYER}mlp.gate_up_proj.weight': tuple(f'{LAYER}mlp.{x}_proj.weight' for x in ('gate', 'up'))
}


def _in_pairs(rows: list[There]) -> list[There]:
    return [row._replace(in_pairs='q_proj' in row.name or 'k_proj' in row.name) for row in rows]


TENSORS = {path: _in_pairs(rows) for path, rows in llama.TENSORS.items()}
TENSORS_OF_GLM4 = TENSORS | {
    'layers.attention.output_norm.weight': [There(f'{LAYER}post_self_attn_layernorm.weight', 'D')],
    'layers.mlp.output_norm.weight': [There(f'{LAYER}post_mlp_layernorm.weight', 'D')],
}


def _own(read: Reader, **own: str) -> Keys:
    return {'qkv_bias': read.take('attention_bias', 'model.qkv_bias', True), **own}


def _write_config(model: ModelConfig) -> Keys:
    own = {'attention_bias': model.qkv_bias, 'partial_rotary_factor': model.rotary_fraction}
    return llama.write_config(model) | own


READ = partial(
    llama.read_config, head_dim=128, norm_eps=1.5625e-7, rope=partial(read_rope, fraction=0.5)
)
LIKE_GLM = partial(llama.LIKE_LLAMA, write_config=_write_config, tensors=TENSORS, joined=JOINED)
FAMILIES = (
    LIKE_GLM(
        name='glm',
        architecture='GlmForCausalLM',
        read_config=partial(READ, own=_own),
    ),
    LIKE_GLM(
        name='glm4',
        architecture='Glm4ForCausalLM',
        read_config=partial(READ, own=partial(_own, norm_position='both')),
        tensors=TENSORS_OF_GLM4,
    ),
)
