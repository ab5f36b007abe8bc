"""Qwen3-VL is read and written by name: its config in both forms, and its tensors bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import by_name, on_mesh, slow

from megajax.core.config import Config, ConfigError, ModelConfig, load
from megajax.interop.folder import settings
from megajax.interop.huggingface.directories import (
    _name_image_token,
    export_huggingface,
    import_huggingface,
)
from megajax.interop.huggingface.families import read_family, write_family
from megajax.interop.huggingface.tensors import read_tensors
from megajax.interop.huggingface.weights import from_huggingface
from megajax.runtime.data.text.tokenizer import byte_tokenizer

TEXT = {
    'model_type': 'qwen3_vl_text',
    'vocab_size': 512,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'max_position_embeddings': 512,
    'rms_norm_eps': 1e-6,
}
SECTIONS = {'mrope_section': [4, 2, 2], 'mrope_interleaved': True, 'rope_type': 'default'}
OLD_ROPE = {'rope_theta': 5e6, 'rope_scaling': SECTIONS}
NEW_ROPE = {'rope_parameters': {**SECTIONS, 'rope_theta': 5e6}}
VISION = {
    'model_type': 'qwen3_vl_vision',
    'depth': 4,
    'hidden_size': 24,
    'intermediate_size': 40,
    'num_heads': 2,
    'patch_size': 4,
    'temporal_patch_size': 2,
    'spatial_merge_size': 2,
    'out_hidden_size': 32,
    'num_position_embeddings': 36,
    'deepstack_visual_indexes': [0, 2],
}


def config_json(tied: bool = False, **changes: Any) -> dict[str, Any]:
    """A config.json of transformers 5; `changes` are merged into its objects."""
    keys: dict[str, Any] = {
        'model_type': 'qwen3_vl',
        'architectures': ['Qwen3VLForConditionalGeneration'],
        'text_config': TEXT | NEW_ROPE,
        'vision_config': VISION,
        'image_token_id': 500,
        'video_token_id': 501,
        'vision_start_token_id': 502,
        'vision_end_token_id': 503,
        'tie_word_embeddings': tied,
    }
    for key, value in changes.items():
        keys[key] = keys[key] | value if isinstance(value, dict) else value
    return keys


def shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of that model, as transformers saves them."""
    text, block, visual = 'model.language_model', 'model.visual.blocks', 'model.visual'
    found: dict[str, tuple[int, ...]] = {
        f'{text}.embed_tokens.weight': (512, 32),
        f'{text}.norm.weight': (32,),
        f'{visual}.patch_embed.proj.weight': (24, 3, 2, 4, 4),
        f'{visual}.patch_embed.proj.bias': (24,),
        f'{visual}.pos_embed.weight': (36, 24),
    }
    for n in range(3):
        layer = f'{text}.layers.{n}'
        found |= {f'{layer}.self_attn.{x}_norm.weight': (16,) for x in 'qk'}
        found |= {f'{layer}.self_attn.{x}_proj.weight': (32, 32) for x in 'kv'}
        found |= {f'{layer}.self_attn.q_proj.weight': (64, 32)}
        found |= {f'{layer}.self_attn.o_proj.weight': (32, 64)}
        found |= {f'{layer}.mlp.{x}_proj.weight': (48, 32) for x in ('gate', 'up')}
        found |= {f'{layer}.mlp.down_proj.weight': (32, 48)}
        found |= {f'{layer}.{x}_layernorm.weight': (32,) for x in ('input', 'post_attention')}
    modules = {f'{block}.{n}.attn.qkv': (72, 24) for n in range(4)}
    modules |= {f'{block}.{n}.attn.proj': (24, 24) for n in range(4)}
    modules |= {f'{block}.{n}.mlp.linear_fc1': (40, 24) for n in range(4)}
    modules |= {f'{block}.{n}.mlp.linear_fc2': (24, 40) for n in range(4)}
    mergers = {f'{visual}.deepstack_merger_list.{n}': 96 for n in range(2)}
    for name, normed in {f'{visual}.merger': 24, **mergers}.items():
        modules |= {f'{name}.linear_fc1': (96, 96), f'{name}.linear_fc2': (32, 96)}
        found |= {f'{name}.norm.{kind}': (normed,) for kind in ('weight', 'bias')}
    for n in range(4):
        norms = (f'{block}.{n}.norm{i}.{kind}' for i in (1, 2) for kind in ('weight', 'bias'))
        found |= dict.fromkeys(norms, (24,))
    for name, (out, inputs) in modules.items():
        found |= {f'{name}.weight': (out, inputs), f'{name}.bias': (out,)}
    return found if tied else found | {'lm_head.weight': (512, 32)}


def tensors(tied: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype('f4') for name, shape in shapes(tied).items()}


def config_of(keys: dict[str, Any], **mesh: int) -> Config:
    sections = settings(read_family(keys, '')[1], Path(), None)
    sections['train'] |= {'seq_len': 64, 'dtype': 'float32'}
    sections['vision'] |= {'max_patches': 16}
    return Config.model_validate(sections | {'mesh': mesh})


def test_both_forms_of_a_config_are_read_alike_and_leave_no_key() -> None:
    new = read_family(config_json(), '')
    text = config_json()['text_config']
    del text['rope_parameters']
    old = config_json() | {'text_config': text | OLD_ROPE}
    old['vision_config'] = VISION | {'model_type': 'qwen3_vl', 'in_channels': 3}
    assert read_family(old, '') == new
    assert new[0] == 'qwen3_vl'
    assert new[2] == []
    assert (new[1]['rope_theta'], new[1]['mrope_section']) == (5e6, [4, 2, 2])
    assert new[1]['vision']['image_token'] == 500
    assert new[1]['vision']['positions'] == 6


@pytest.mark.parametrize('rope', [{}, {'rope_scaling': SECTIONS}, {'rope_parameters': SECTIONS}])
def test_theta_is_required(rope: dict[str, Any]) -> None:
    keys = config_json() | {'text_config': TEXT | rope}
    with pytest.raises(ConfigError, match=r'text_config: (rope_parameters\.)?rope_theta: required'):
        read_family(keys, '')


@pytest.mark.parametrize('preset', ['qwen3_vl_2b', 'qwen3_vl_4b', 'qwen3_vl_8b', 'qwen3_vl_32b'])
def test_a_preset_is_written_and_read_back(preset: str) -> None:
    model = load(preset).model
    family, keys = write_family(model)
    assert family == 'qwen3_vl'
    assert keys['vision_config']['num_position_embeddings'] == 2304
    read = ModelConfig(**read_family(json.loads(json.dumps(keys)), '')[1])
    assert read.model_copy(update={'vision': None}) == model.model_copy(update={'vision': None})


def test_a_model_without_vision_is_not_qwen3_vl() -> None:
    with pytest.raises(ConfigError, match='qwen3_vl does not support models without vision'):
        write_family(load('qwen3_8b').model, 'qwen3_vl')


def test_no_family_of_text_takes_a_model_that_sees() -> None:
    with pytest.raises(ConfigError, match='qwen3 does not support vision'):
        write_family(load('qwen3_vl_2b').model.model_copy(update={'position': 'rope'}), 'qwen3')


@pytest.mark.parametrize(
    ('changes', 'problem'),
    [
        ({'model_type': 'qwen3_vl_moe'}, 'model_type: "qwen3_vl_moe": experts are not'),
        ({'model_type': 'qwen2_5_vl'}, 'model_type: "qwen2_5_vl": windows in the encoder'),
        ({'model_type': 'mllama'}, 'model_type: "mllama": an encoder of tiles'),
        ({'text_config': {'num_experts': 128}}, 'text_config: num_experts: 128'),
        ({'text_config': {'attention_bias': True}}, 'text_config: attention_bias: true'),
        ({'vision_config': {'hidden_act': 'silu'}}, 'vision_config: hidden_act: "silu"'),
        ({'vision_config': {'num_position_embeddings': 37}}, 'num_position_embeddings: 37'),
        ({'vision_config': {'out_hidden_size': 64}}, 'only hidden_size=32 is supported'),
        ({'vision_config': 3}, 'vision_config: 3: only an object'),
        (
            {
                'text_config': {
                    'rope_parameters': {**NEW_ROPE['rope_parameters'], 'mrope_interleaved': False}
                }
            },
            'rope_parameters.mrope_interleaved: false',
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(changes, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_family(config_json(**changes), 'config.json')


def test_an_unknown_key_of_an_object_is_reported() -> None:
    assert read_family(config_json(vision_config={'window_size': 112}), '')[2] == [
        'vision_config.window_size'
    ]


@pytest.mark.parametrize('tied', [False, slow(True)])
def test_import_then_export_gives_the_same_tensors_bit_for_bit(tied: bool, tmp_path: Path) -> None:
    folder, expected = tmp_path / 'model', tensors(tied)
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(config_json(tied)))
    save_file(expected, folder / 'model.safetensors')
    (folder / 'video_preprocessor_config.json').write_text('{"fps": 2}')
    import_huggingface(
        folder,
        tmp_path / 'run',
        [
            'mesh.model=2',
            'vision.max_patches=16',
            'vision.min_patches=8',
        ],
    )
    assert export_huggingface(tmp_path / 'run', tmp_path / 'out') == ('qwen3_vl', 'float32')
    written = read_tensors(tmp_path / 'out')
    assert written.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(written[name], x, name)
    assert (tmp_path / 'out' / 'video_preprocessor_config.json').read_text() == '{"fps": 2}'
    again = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert read_family(again, '') == read_family(config_json(tied), '')
    size = json.loads((tmp_path / 'out' / 'preprocessor_config.json').read_text())['size']
    assert size == {'shortest_edge': 8 * 16, 'longest_edge': 16 * 16}
    config = import_huggingface(tmp_path / 'out', tmp_path / 'again', ['vision.max_patches=16'])
    assert config.vision.min_patches == 8


NAMES = {'eos_token': '<|endoftext|>', 'clean_up_tokenization_spaces': False}


@pytest.mark.parametrize(
    ('image', 'written', 'expected'),
    [
        ('<image>', {}, {'extra_special_tokens': {'image_token': '<image>'}}),
        ('<|image_pad|>', {}, {}),
        ('<image>', NAMES, {'extra_special_tokens': {'image_token': '<image>'}}),
        (
            '<image>',
            NAMES | {'extra_special_tokens': ['<image>']},
            {'extra_special_tokens': ['<image>'], 'image_token': '<image>'},
        ),
        ('<image>', NAMES | {'image_token': '<a>'}, {'image_token': '<a>'}),
    ],
)
def test_the_token_for_an_image_is_named_if_it_is_not_the_usual_one(
    image: str, written: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / 'tokenizer_config.json'
    file.write_text(json.dumps(written))
    _name_image_token(file, image)
    assert image_names(file) == expected


def test_an_export_names_its_token_for_an_image(tmp_path: Path) -> None:
    folder = tmp_path / 'model'
    folder.mkdir()
    keys = config_json() | {'image_token_id': 257}
    (folder / 'config.json').write_text(json.dumps(keys))
    save_file(tensors(), folder / 'model.safetensors')
    byte_tokenizer(('<image>',)).save(folder / 'tokenizer.json')
    import_huggingface(folder, tmp_path / 'run', ['vision.max_patches=16'])
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    found = image_names(tmp_path / 'out' / 'tokenizer_config.json')
    assert found == {'extra_special_tokens': {'image_token': '<image>'}}


def image_names(file: Path) -> dict[str, Any]:
    """What a tokenizer_config.json says of the token for an image."""
    return {key: x for key, x in json.loads(file.read_text()).items() if 'image' in str((key, x))}


def test_transformers_finds_the_token_for_an_image(tmp_path: Path) -> None:
    transformers = pytest.importorskip('transformers', reason="it is in the extra 'test-hf'")
    byte_tokenizer(('<image>',)).save(tmp_path / 'tokenizer.json')
    file = tmp_path / 'tokenizer_config.json'
    for extra in ({}, {'extra_special_tokens': ['<image>']}):
        file.write_text(json.dumps({'tokenizer_class': 'PreTrainedTokenizerFast'} | extra))
        _name_image_token(file, '<image>')
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert (theirs.image_token, theirs.image_token_id) == ('<image>', 257)


def test_the_encoders_heads_have_their_own_queries_keys_and_values() -> None:
    there, config = tensors(), config_of(config_json())
    with on_mesh(config):
        here = by_name(from_huggingface(config, there, source=''))
        qkv = np.asarray(here['vision.layers.attention.qkv.weight'])
        patch = np.asarray(here['vision.patch.weight'])
        up = np.asarray(here['vision.deep_mergers.up.weight'])
    for layer in range(4):
        rows = there[f'model.visual.blocks.{layer}.attn.qkv.weight'].reshape(3, 2, 12, 24)
        for head in range(2):
            for column in range(3):
                np.testing.assert_array_equal(
                    qkv[layer, :, head, column], rows[column, head].T, strict=True
                )
    kernel = there['model.visual.patch_embed.proj.weight']
    np.testing.assert_array_equal(patch, kernel.reshape(24, 3, 2, 16).transpose(1, 2, 3, 0))
    fc1 = there['model.visual.deepstack_merger_list.1.linear_fc1.weight']
    np.testing.assert_array_equal(up[1], fc1.T)


def test_tying_inside_text_config_alone_is_refused_because_releases_of_transformers_differ() -> (
    None
):
    keys = config_json(text_config={'tie_word_embeddings': True})
    assert read_family(keys | {'tie_word_embeddings': True}, '')[1]['tie_embeddings'] is True
    assert read_family(keys, '')[1]['tie_embeddings'] is False
    del keys['tie_word_embeddings']
    with pytest.raises(ConfigError, match=r'text_config: tie_word_embeddings: true: .* put it out'):
        read_family(keys, '')
    del keys['text_config']['tie_word_embeddings']
    assert read_family(keys, '')[1]['tie_embeddings'] is False
