"""GLM-4.5: sigmoid routers, a shared expert, and an MLP in the first layers. Imports no jax."""

from functools import partial
from typing import Any

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama, mixtral
from megajax.interop.huggingface.family import GATE, UP, There
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_rope

LAYER = 'model.layers.{}.mlp.'
SHARED = f'{LAYER}shared_experts'
TENSORS = mixtral.tensors('mlp', 'gate_proj', 'up_proj', 'down_proj', dense=True) | {
    'layers.experts.router.selection_bias': [There(f'{LAYER}gate.e_score_correction_bias', 'X')],
    'layers.experts.shared_up.weight': [
        There(f'{SHARED}.gate_proj.weight', '(UM)D', GATE),
        There(f'{SHARED}.up_proj.weight', '(UM)D', UP),
    ],
    'layers.experts.shared_down.weight': [There(f'{SHARED}.down_proj.weight', 'DM')],
}
WIDTH, COUNT = 'moe_intermediate_size', 'n_routed_experts'
ROUTING = {  # keys of config.json, with the key of `experts` and the default for each
    'routed_scaling_factor': ('scale', 1.0),
    'n_group': ('groups', 1),
    'topk_group': ('active_groups', 1),
    'norm_topk_prob': ('normalize', True),
    'first_k_dense_replace': ('first_dense', 1),
}


def _own(read: Reader) -> Keys:
    read.get('num_nextn_predict_layers', 1)  # layers for multi-token prediction are not read
    read.get('num_mtp_layers', 1)
    width = read.take(WIDTH, 'experts.ffn_size', 1408)
    shared = read.get('n_shared_experts', 1)
    if type(shared) is not int or shared < 1:
        read.refuse(
            'n_shared_experts',
            shared,
            'its layers have a shared expert: only a number above 0 is supported',
        )
        shared = 1
    experts: dict[str, Any] = {
        key: read.take(name, f'experts.{key}', default) for name, (key, default) in ROUTING.items()
    }
    experts |= {
        'count': read.take(COUNT, 'experts.count', 128),
        'ffn_size': width,
        'shared_ffn_size': width and width * shared,
        'scores': 'sigmoid',
        'selection_bias': True,
    }
    return {
        'qkv_bias': read.take('attention_bias', 'model.qkv_bias', False),
        'qk_norm': read.take('use_qk_norm', 'model.qk_norm', False),
        'experts': experts,
    }


def _write_config(model: ModelConfig) -> Keys:
    keys = mixtral.write_config(model, COUNT, WIDTH)
    keys |= {
        'attention_bias': model.qkv_bias,
        'use_qk_norm': model.qk_norm is True,
        'partial_rotary_factor': model.rotary_fraction,
        'num_mtp_layers': 0,
    }
    if (experts := model.experts) is None:
        return keys
    routing = {name: getattr(experts, key) for name, (key, _) in ROUTING.items()}
    # Without a shared expert, the 1 reads back as another shared_ffn_size, which rejects the model.
    return keys | routing | {'n_shared_experts': experts.shared_ffn_size // experts.ffn_size or 1}


FAMILIES = (
    llama.LIKE_LLAMA(
        name='glm4_moe',
        architecture='Glm4MoeForCausalLM',
        read_config=partial(
            mixtral.read_config,
            own=_own,
            active=8,
            norm_eps=1e-5,
            rope=partial(read_rope, fraction=0.5),
        ),
        write_config=_write_config,
        tensors=TENSORS,
        has_more_layers=True,
    ),
)
