"""Phi-3 and Phi-4: Llama with one tensor for each fused projection. Imports no jax."""

from functools import partial

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_rope

ATTENTION, MLP = 'model.layers.{}.self_attn.', 'model.layers.{}.mlp.'
# A tensor of Phi-3, and the tensors of Llama that it joins, one below the other.
JOINED = {
    f'{ATTENTION}qkv_proj.weight': tuple(f'{ATTENTION}{x}_proj.weight' for x in 'qkv'),
    f'{MLP}gate_up_proj.weight': tuple(f'{MLP}{x}_proj.weight' for x in ('gate', 'up')),
}


def _own(read: Reader) -> Keys:
    read.only('resid_pdrop', 0, default=0)
    read.only('embd_pdrop', 0, default=0)
    read.get('original_max_position_embeddings', None)  # of longrope, which is rejected
    return llama.read_window(read, default=None)


def _rope(read: Reader) -> Keys:
    keys = read_rope(read, own=('short_factor', 'long_factor'))
    if scaling := keys.pop('rope_scaling', None):
        read.refuse('rope_scaling', scaling['type'], 'Phi has "longrope", which is not supported')
    return keys


def _write_config(model: ModelConfig) -> Keys:
    own = {'sliding_window': model.window, 'resid_pdrop': 0.0, 'embd_pdrop': 0.0}
    return llama.write_config(model) | own | {'original_max_position_embeddings': model.max_seq_len}


FAMILIES = (
    llama.LIKE_LLAMA(
        name='phi3',
        architecture='Phi3ForCausalLM',
        read_config=partial(llama.read_config, own=_own, grouped=False, norm_eps=1e-5, rope=_rope),
        write_config=_write_config,
        joined=JOINED,
    ),
)
