"""gpt-oss: experts with biases and a clamped gate, sliding windows, and attention sinks.

Its experts may be packed in MXFP4. Imports no jax.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama, mixtral
from megajax.interop.huggingface.family import There
from megajax.interop.huggingface.layers import (
    FULL,
    SLIDING,
    read_windows,
    replaced_by,
    write_windows,
)
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_parameters, read_rope, write_parameters

if TYPE_CHECKING:
    import numpy as np

LAYER = 'model.layers.{}.'
EXPERTS = f'{LAYER}mlp.experts'
# Matrices of experts are [expert, in, out], and the columns of gate and up alternate.
TENSORS = mixtral.AROUND | {
    'layers.attention.sinks': [There(f'{LAYER}self_attn.sinks', 'N')],
    'layers.experts.router.weight': [There(f'{LAYER}mlp.router.weight', 'XD')],
    'layers.experts.router.bias': [There(f'{LAYER}mlp.router.bias', 'X')],
    'layers.experts.up.weight': [There(f'{EXPERTS}.gate_up_proj', 'XD(AU)')],
    'layers.experts.up.bias': [There(f'{EXPERTS}.gate_up_proj_bias', 'X(AU)')],
    'layers.experts.down.weight': [There(f'{EXPERTS}.down_proj', 'XAD')],
    'layers.experts.down.bias': [There(f'{EXPERTS}.down_proj_bias', 'XD')],
}
WINDOW, THETA = 128, 150000.0
CLAMP = {'swiglu_limit': 7.0, 'swiglu_alpha': 1.702}
# The defaults of rope_parameters.
YARN = {'rope_type': 'yarn', 'factor': 32.0, 'original_max_position_embeddings': 4096}
YARN |= {'beta_fast': 32.0, 'beta_slow': 1.0, 'truncate': False}


def _own(read: Reader) -> Keys:
    read.only('attention_bias', True, default=True)
    for key, value in CLAMP.items():
        read.only(key, value, default=value)
    window = read.take('sliding_window', 'model.window', WINDOW)
    layers = read_windows(read, window, lambda index: FULL if index % 2 else SLIDING)
    return {
        'activation': 'clamped_swiglu',
        'attention_sinks': True,
        'bias': True,
        'qkv_bias': True,
        'experts': {'router_bias': True},
        **replaced_by(layers),
    }


def _rope(read: Reader) -> Keys:
    if any(read.get(key, None) is not None for key in ('rope_parameters', 'rope_scaling')):
        return read_rope(read, theta=THETA)
    return read_parameters(read, 'rope_parameters', YARN, read.get('rope_theta', THETA))


def _write_config(model: ModelConfig) -> Keys:
    return {
        **mixtral.write_config(model, 'num_local_experts'),
        **write_windows(model, WINDOW),
        'rope_parameters': write_parameters(model),
        'attention_bias': True,
        **CLAMP,
    }


def _unpacked(tensors: Mapping[str, 'np.ndarray'], source: str) -> dict[str, Any]:
    from megajax.interop.huggingface.mxfp4 import unpack  # here, because it imports numpy

    return unpack(tensors, source)


FAMILIES = (
    llama.LIKE_LLAMA(
        name='gpt_oss',
        architecture='GptOssForCausalLM',
        read_config=partial(
            mixtral.read_config,
            own=_own,
            count=128,
            active=4,
            head_dim=64,
            norm_eps=1e-5,
            rope=_rope,
        ),
        write_config=_write_config,
        tensors=TENSORS,
        packings={'mxfp4': _unpacked},
    ),
)
