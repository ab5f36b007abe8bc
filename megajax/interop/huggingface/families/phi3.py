"""Phi-3 and Phi-4: Llama with one tensor for each fused projection. Imports no jax."""

from functools import partial

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import find_rope, read_parameters

OLD_NAMES = ('su', 'yarn')  # older names of longrope
ATTENTION, MLP = 'model.layers.{}.self_attn.', 'model.layers.{}.mlp.'
# A tensor of Phi-3, and the tensors of Llama that it contains, one below the other.
JOINED = {
    f'{ATTENTION}qkv_proj.weight': tuple(f'{ATTENTION}{x}_proj.weight' for x in 'qkv'),
    f'{MLP}gate_up_proj.weight': tuple(f'{MLP}{x}_proj.weight' for x in ('gate', 'up')),
}


def _own(read: Reader) -> Keys:
    read.only('resid_pdrop', 0, default=0)
    read.only('embd_pdrop', 0, default=0)
    return llama.read_window(read, default=None)


def _rope(read: Reader) -> Keys:
    key, given, theta = find_rope(read)
    original = read.get('original_max_position_embeddings', 4096)
    kind = given.get('rope_type', given.get('type', 'default'))
    if kind in OLD_NAMES:
        kind = 'longrope'
    if kind not in ('default', 'longrope'):
        read.refuse(f'{key}.rope_type', kind, 'only "default" and "longrope" are supported')
        return {}
    given = {**given, 'rope_type': kind, 'original_max_position_embeddings': original}
    return read_parameters(read, key, given, theta, fraction=1.0)


def _write_config(model: ModelConfig) -> Keys:
    scaling = model.rope_scaling
    return llama.write_config(model) | {
        'sliding_window': model.window,
        'resid_pdrop': 0.0,
        'embd_pdrop': 0.0,
        'partial_rotary_factor': model.rotary_fraction,
        'original_max_position_embeddings': scaling.original_max_seq_len
        if scaling
        else model.max_seq_len,
    }


FAMILIES = (
    llama.LIKE_LLAMA(
        name='phi3',
        architecture='Phi3ForCausalLM',
        read_config=partial(llama.read_config, own=_own, grouped=False, norm_eps=1e-5, rope=_rope),
        write_config=_write_config,
        joined=JOINED,
    ),
)
