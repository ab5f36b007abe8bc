"""Qwen3-VL without experts: Qwen3 with a vision encoder. Imports no jax."""

import json
import math

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import HEAD, Family, There
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import find_rope, read_parameters, write_scaling
from megajax.interop.huggingface.settings import Names, read_names, write_names

MROPE = 'mrope_section', 'mrope_interleaved'
ROPE = {'rope_type': 'axial', 'rope_theta': 10000.0}  # rotary embedding of the encoder
GELU = 'gelu_pytorch_tanh'
IMAGE_TOKEN = 151655  # the id in Qwen3's tokenizer, used if config.json has none
OTHER_TOKENS = 'vision_start_token_id', 'vision_end_token_id', 'video_token_id'

BLOCK = 'model.visual.blocks.{}'
MERGERS = {'merger': 'model.visual.merger', 'deep_mergers': 'model.visual.deepstack_merger_list.{}'}
LAYERS = {
    'attention.norm': ('norm1', 'Ⓓ', 'Ⓓ'),
    # The rows are all queries, then all keys, then all values: C comes before the heads.
    'attention.qkv': ('attn.qkv', '(ⒸⓀⒽ)Ⓓ', '(ⒸⓀⒽ)'),
    'attention.out': ('attn.proj', 'Ⓓ(ⓃⒽ)', 'Ⓓ'),
    'mlp.norm': ('norm2', 'Ⓓ', 'Ⓓ'),
    'mlp.up': ('mlp.linear_fc1', 'ⒻⒹ', 'Ⓕ'),
    'mlp.down': ('mlp.linear_fc2', 'ⒹⒻ', 'Ⓓ'),
}


def _both(here: str, there: str, weight: str, bias: str) -> dict[str, list[There]]:
    """Return the weight and the bias of a module, with the dims of their tensors."""
    return {
        f'{here}.weight': [There(f'{there}.weight', weight)],
        f'{here}.bias': [There(f'{there}.bias', bias)],
    }


def _merger(here: str, there: str, normed: str) -> dict[str, list[There]]:
    return {
        **_both(f'vision.{here}.norm', f'{there}.norm', normed, normed),
        **_both(f'vision.{here}.up', f'{there}.linear_fc1', 'ⓦⓌ', 'Ⓦ'),
        **_both(f'vision.{here}.down', f'{there}.linear_fc2', 'ⒺⓌ', 'Ⓔ'),
    }


def _of_text(rows: list[There]) -> list[There]:
    return [
        row._replace(name=row.name.replace('model.', 'model.language_model.', 1)) for row in rows
    ]


TENSORS = {
    **{path: _of_text(rows) for path, rows in llama.TENSORS.items()},
    'vision.patch.weight': [There('model.visual.patch_embed.proj.weight', 'ⒹⓎⓆⓍ', is_square=True)],
    'vision.patch.bias': [There('model.visual.patch_embed.proj.bias', 'Ⓓ')],
    'vision.position.table': [There('model.visual.pos_embed.weight', 'ⓈⒹ')],
    **{
        path: rows
        for here, (there, weight, bias) in LAYERS.items()
        for path, rows in _both(f'vision.layers.{here}', f'{BLOCK}.{there}', weight, bias).items()
    },
    **_merger('merger', MERGERS['merger'], 'Ⓓ'),
    **_merger('deep_mergers', MERGERS['deep_mergers'], 'Ⓦ'),
}
NAMES: Names = {
    'num_layers': ('depth', 27),
    'hidden_size': ('hidden_size', 1152),
    'num_heads': ('num_heads', 16),
    'ffn_size': ('intermediate_size', 4304),
    'patch_size': ('patch_size', 16),
    'frames': ('temporal_patch_size', 2),
    'merge_size': ('spatial_merge_size', 2),
}


def _read_config(read: Reader) -> Keys:
    text, vision = read.section('text_config'), read.section('vision_config')
    for key in OTHER_TOKENS:
        read.get(key, None)
    model = llama.read_config(text, own=_own, head_dim=128, rope=_read_mrope)
    # Tying is a setting of the whole model; in released models, both objects have the same value.
    if model['tie_embeddings'] and 'tie_word_embeddings' not in read.keys:
        why = 'transformers 5 ignores it and transformers 4 does not; put it outside text_config'
        text.refuse('tie_word_embeddings', True, why)
    model['tie_embeddings'] = read.take('tie_word_embeddings', 'model.tie_embeddings', False)
    return {
        **model,
        'position': 'mrope',
        'vision': _read_vision(vision, model['hidden_size'])
        | {'image_token': read.take('image_token_id', 'vision.image_token', IMAGE_TOKEN)},
    }


def _own(text: Reader) -> Keys:
    text.only('attention_bias', False, default=False)
    text.only('num_experts', None, 0, default=None)
    return {'qk_norm': True}


def _read_mrope(text: Reader) -> Keys:
    """Read theta, scaling and the sections of the rotary embedding."""
    key, given, theta = find_rope(text)
    # The default of transformers 5 is 500,000, but the released models have 5,000,000.
    if key == 'rope_scaling' and 'rope_theta' not in {*given, *text.keys}:
        where = 'here or in rope_parameters'
        text.problems.append(f'{text.file}: rope_theta: required, {where}, and missing')
    keys = read_parameters(text, key, given, theta, own=MROPE)
    if 'mrope_section' in given:
        section = f'{key}.mrope_section'
        keys['mrope_section'] = text.checked(section, given['mrope_section'], 'model.mrope_section')
    if given.get('mrope_interleaved', True) is not True:
        interleaved = given['mrope_interleaved']
        text.refuse(f'{key}.mrope_interleaved', interleaved, 'only true is supported')
    return keys


def _read_vision(vision: Reader, hidden_size: int | None) -> Keys:
    vision.only('hidden_act', GELU, default=GELU)
    vision.only('in_channels', 3, default=3)
    rope = vision.get('rope_parameters', None) or ROPE
    if rope != ROPE:
        vision.refuse('rope_parameters', rope, f'only {json.dumps(ROPE)} is supported')
    positions = vision.take('num_position_embeddings', 'vision.positions', 2304)
    side = math.isqrt(positions or 0)
    if positions and side**2 != positions:
        vision.refuse('num_position_embeddings', positions, 'only a square is supported')
    width = vision.get('out_hidden_size', 3584)
    if hidden_size is not None and width != hidden_size:
        vision.refuse('out_hidden_size', width, f'only hidden_size={hidden_size} is supported')
    return {
        **read_names(vision, NAMES, 'vision'),
        'positions': side,
        'deepstack': vision.take('deepstack_visual_indexes', 'vision.deepstack', [8, 16, 24]),
    }


def _write_config(model: ModelConfig) -> Keys:
    vision = model.vision
    assert vision is not None
    scaling = write_scaling(model) or {'rope_type': 'default'}
    sections = {'mrope_section': list(model.mrope_section), 'mrope_interleaved': True}
    text = llama.write_config(model) | {'rope_scaling': scaling | sections}
    return {
        'text_config': {'model_type': 'qwen3_vl_text', 'attention_bias': model.bias, **text},
        'vision_config': {
            'model_type': 'qwen3_vl',
            'hidden_act': GELU,
            'in_channels': 3,
            **write_names(vision, NAMES),
            'num_position_embeddings': vision.positions**2,
            'deepstack_visual_indexes': list(vision.deepstack),
            'out_hidden_size': model.hidden_size,
        },
        'image_token_id': vision.image_token,
        'tie_word_embeddings': model.tie_embeddings,
    }


FAMILIES = (
    Family(
        name='qwen3_vl',
        architecture='Qwen3VLForConditionalGeneration',
        read_config=_read_config,
        write_config=_write_config,
        tensors=TENSORS,
        copies={HEAD: 'embed_tokens.weight'},
        prefix='model.',
        sees=True,
    ),
)
