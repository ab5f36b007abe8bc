"""Models of transformers give transformers' logits on every mesh, and come back bit for bit.

`data` holds tiny random models and what transformers made of some tokens (`make_data.py`);
`test_transformers.py` asks transformers itself, where it is installed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from interop.stored import DATA, LIMIT, NAMES, assert_same_tensors, config_of, logits, tensors_of
from safetensors.numpy import load_file, save_file
from support import by_name, exhaustive, gather, on_mesh, slow

from megajax.core.config import Config, ConfigError
from megajax.core.counts.parameters import num_parameters
from megajax.interop.huggingface.directories import export_huggingface, import_huggingface
from megajax.interop.huggingface.families import ARCHITECTURES, read_family, write_family
from megajax.interop.huggingface.tensors import INDEX, SINGLE, read_tensors
from megajax.interop.huggingface.weights import from_huggingface
from megajax.runtime.checkpoint.digests import find_steps
from megajax.runtime.checkpoint.open import open_model
from megajax.runtime.checkpoint.record import read_record

for_each_family = pytest.mark.parametrize('name', NAMES)
# Their layers are also those of a family whose logits are compared in `make test`.
LATER = {'ministral', 'olmo3', 'olmoe', 'qwen3_moe', 'smollm3'}


@pytest.mark.parametrize('name', [slow(name) if name in LATER else name for name in NAMES])
@pytest.mark.parametrize(
    ('data', 'model'), [exhaustive(1, 1), exhaustive(1, 2), (2, 2), exhaustive(1, 4)]
)
def test_logits_are_those_of_transformers(name: str, data: int, model: int) -> None:
    config, expected = config_of(name, data, model), np.load(DATA / f'{name}.npz')
    family = json.loads((DATA / name / 'config.json').read_text())['model_type']
    with on_mesh(config):
        params = from_huggingface(config, read_tensors(DATA / name), source=name, family=family)
        assert np.abs(logits(config, params, expected['tokens']) - expected['logits']).max() < LIMIT
    assert np.abs(expected['logits']).max() > 1
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    'name', ['mixtral', exhaustive('qwen3_moe'), exhaustive('olmoe'), slow('gpt_oss')]
)
def test_logits_of_experts_on_several_devices_are_those_of_transformers(name: str) -> None:
    config, expected = config_of(name, 4, 2, experts=2), np.load(DATA / f'{name}.npz')
    tokens = np.tile(expected['tokens'], (2, 1))
    with on_mesh(config):
        params = from_huggingface(config, read_tensors(DATA / name), source=name, family=name)
        found = logits(config, params, tokens)
    assert np.abs(found - np.tile(expected['logits'], (2, 1, 1))).max() < LIMIT


@for_each_family
def test_import_then_export_gives_the_same_tensors_bit_for_bit(name: str, tmp_path: Path) -> None:
    import_huggingface(DATA / name, tmp_path / 'run', ['mesh.model=2'])
    family, dtype = export_huggingface(tmp_path / 'run', tmp_path / 'out')
    assert (family, dtype) == (
        json.loads((DATA / name / 'config.json').read_text())['model_type'],
        str(tensors_of(DATA / name)[0].dtype),
    )
    assert_same_tensors(tmp_path / 'out', DATA / name)
    again = read_family(json.loads((tmp_path / 'out' / 'config.json').read_text()), name)
    assert again == (family, config_of(name).model.model_dump(mode='json', exclude_unset=True), [])


def test_an_import_is_a_run_at_step_0(tmp_path: Path) -> None:
    out = tmp_path / 'run'
    config = import_huggingface(
        DATA / 'gpt2', out, ['mesh.data=2', 'train.dtype=float32', 'train.seq_len=8']
    )
    assert find_steps(out / 'checkpoints') == [0]
    assert read_record(out / 'checkpoints' / '0').data == {
        'imported as': 'gpt2',
        'imported in': 'float32',
    }
    opened = open_model(out, ['mesh.data=1', 'mesh.model=4'])
    assert opened.step == 0
    assert opened.tokenizer is not None
    assert opened.tokenizer.vocab_size == 50
    assert opened.config.data.tokenizer == str(out / 'tokenizer.json')
    assert opened.config.model == config.model
    assert sum(x.size for x in gather(opened.params).values()) == num_parameters(
        config.model, padded=True
    )
    expected = np.load(DATA / 'gpt2.npz')
    with jax.set_mesh(opened.mesh):
        assert (
            np.abs(
                logits(opened.config, opened.params, expected['tokens']) - expected['logits']
            ).max()
            < LIMIT
        )
    with pytest.raises(ConfigError, match='run already holds a run, at step 0'):
        import_huggingface(DATA / 'gpt2', out)


def test_each_device_gets_its_part_and_the_padding_is_zero() -> None:
    config = config_of('mistral', 2, 2)
    with on_mesh(config):
        params = by_name(from_huggingface(config, read_tensors(DATA / 'mistral'), source=''))
    table = params['embedding.table']
    assert table.shape == (1024, 16)
    assert {shard.data.shape for shard in table.addressable_shards} == {(512, 16)}
    assert not np.asarray(table)[50:].any()
    np.testing.assert_array_equal(
        np.asarray(table)[:50], read_tensors(DATA / 'mistral')['model.embed_tokens.weight']
    )
    assert {shard.data.shape for shard in params['layers.mlp.up.weight'].addressable_shards} == {
        (2, 16, 2, 12)
    }


def test_host_memory_holds_one_shard_of_one_parameter(tmp_path: Path) -> None:
    keys = json.loads((DATA / 'llama2' / 'config.json').read_text()) | {
        'vocab_size': 8192,
        'hidden_size': 64,
        'head_dim': 16,
    }
    config = Config(model=read_family(keys, '')[1], mesh={'model': 4}, train={'seq_len': 16})
    random, shapes = (
        np.random.default_rng(0),
        {name: x.shape for name, x in read_tensors(DATA / 'llama2').items()},
    )
    grown = {
        name: tuple({50: 8192, 16: 64}.get(size, size) for size in shape)
        for name, shape in shapes.items()
    }
    save_file(
        {name: random.random(shape, np.float32) for name, shape in grown.items()}, tmp_path / SINGLE
    )
    tensors = read_tensors(tmp_path)
    with on_mesh(config):
        tracemalloc.start()  # knows numpy's memory; mapped files are not in it
        params = jax.block_until_ready(from_huggingface(config, tensors, source=''))
        left, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # What is left is the devices' own, which on a CPU is the memory that was filled; what is gone
    # was the host's.
    shard, whole = 4 * 8192 * 64 // 4, sum(x.nbytes for x in tensors.values())
    assert whole > 8 * shard
    assert sum(x.nbytes for x in jax.tree.leaves(params)) >= whole
    assert peak - left < shard


def test_an_export_in_pieces_has_an_index_and_an_exported_tokenizer_reads_the_same(
    tmp_path: Path,
) -> None:
    import_huggingface(DATA / 'gpt2', tmp_path / 'run')
    export_huggingface(tmp_path / 'run' / 'checkpoints' / '0', tmp_path / 'out', shard_bytes=8000)
    files = sorted(path.name for path in (tmp_path / 'out').glob('*.safetensors'))
    assert files == [
        f'model-{n:05}-of-{len(files):05}.safetensors' for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert all(load_file(tmp_path / 'out' / file) for file in files)
    index = json.loads((tmp_path / 'out' / INDEX).read_text())
    assert index['metadata']['total_size'] == sum(x.nbytes for x in tensors_of(DATA / 'gpt2'))
    assert_same_tensors(tmp_path / 'out', DATA / 'gpt2')
    import_huggingface(tmp_path / 'out', tmp_path / 'again')
    first, second = (open_model(tmp_path / run).tokenizer for run in ('run', 'again'))
    assert first is not None
    assert second is not None
    assert first.fingerprint == second.fingerprint
    about = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert about['eos_token_id'] == first.eod == 49


def test_a_tokenizer_that_begins_documents_keeps_its_token(tmp_path: Path) -> None:
    shutil.copytree(DATA / 'gpt2', tmp_path / 'in')
    spec = json.loads((tmp_path / 'in' / 'tokenizer.json').read_text())
    number = spec['model']['vocab']['<s>'] = spec['model']['vocab'].pop('z')
    spec['added_tokens'].insert(0, spec['added_tokens'][0] | {'id': number, 'content': '<s>'})
    (tmp_path / 'in' / 'tokenizer.json').write_text(json.dumps(spec))
    config = json.loads((tmp_path / 'in' / 'config.json').read_text())
    config['tokenizer_class'] = 'PreTrainedTokenizerFast'  # GPT-2's own class has a begin token
    (tmp_path / 'in' / 'config.json').write_text(json.dumps(config))
    import_huggingface(tmp_path / 'in', tmp_path / 'run')
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    about, keys = (
        json.loads((tmp_path / 'out' / name).read_text())
        for name in ('tokenizer_config.json', 'config.json')
    )
    assert (about['bos_token'], about['eos_token']) == ('<s>', '<|endoftext|>')
    assert (keys['bos_token_id'], keys['eos_token_id']) == (number, 49)


def test_names_of_other_versions_of_transformers(tmp_path: Path) -> None:
    """GPT-2 was released without `transformer.` and with its masks, Llama 2 with its frequencies,
    some tied heads are saved too.
    """
    for name, extra in (
        ('gpt2', {f'h.{n}.attn.bias': np.ones((1, 1, 32, 32), np.uint8) for n in range(2)}),
        ('llama2', {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(2, np.float32)}),
        ('llama3', {'lm_head.weight': read_tensors(DATA / 'llama3')['model.embed_tokens.weight']}),
    ):
        tensors = {
            key.removeprefix('transformer.'): x for key, x in read_tensors(DATA / name).items()
        }
        config = config_of(name)
        with on_mesh(config):
            found = gather(from_huggingface(config, tensors | extra, source=name))
            expected = gather(from_huggingface(config, read_tensors(DATA / name), source=name))
        assert all(np.array_equal(found[path], x) for path, x in expected.items())
    wrong = (
        r'lm_head\.weight differs from model\.embed_tokens\.weight, '
        'but tie_word_embeddings says they are tied'
    )
    with on_mesh(config), pytest.raises(ConfigError, match=wrong):
        from_huggingface(
            config, tensors | {'lm_head.weight': np.zeros((50, 16), np.float32)}, source=name
        )


@pytest.mark.parametrize(
    ('name', 'tensor', 'dtype', 'value'),
    [
        ('llama2', 'model.layers.1.self_attn.k_proj.weight', np.float32, np.nan),
        ('mistral', 'model.layers.0.mlp.down_proj.weight', ml_dtypes.bfloat16, -np.inf),
        ('gpt2', 'transformer.wte.weight', np.float16, np.inf),
        ('llama3', 'lm_head.weight', np.float32, np.nan),  # which is a copy of the embedding
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name_and_place(
    name: str, tensor: str, dtype: Any, value: float, tmp_path: Path
) -> None:
    tensors = {key: x.astype(dtype) for key, x in read_tensors(DATA / name).items()}
    bad = 'model.embed_tokens.weight' if tensor == 'lm_head.weight' else tensor
    tensors[bad] = tensors[bad].copy()
    tensors[bad][3, 2] = tensors[bad][3, 4] = value
    shutil.copytree(DATA / name, tmp_path / 'in')
    save_file(tensors | {tensor: tensors[bad]}, tmp_path / 'in' / SINGLE)
    with pytest.raises(ConfigError) as error:
        import_huggingface(tmp_path / 'in', tmp_path / 'run', ['mesh.model=2', 'mesh.data=2'])
    said = f'{bad}: 2 of {tensors[bad].size} numbers are not finite, the first, {value}, at (3, 2)'
    assert str(error.value).startswith(f'{tmp_path}/in: {said}')
    assert not (tmp_path / 'run').exists()


ROPE = {'rope_theta': 5e5}
OLD_SCALING = {'type': 'dynamic', 'factor': 2.0}


@pytest.mark.parametrize(
    ('name', 'key', 'value', 'message'),
    [
        (
            'llama2',
            'model_type',
            'mamba',
            'model_type: "mamba": only gpt2, llama, qwen2, qwen3, mistral',
        ),
        (
            'llama2',
            'architectures',
            ['LlamaForSequenceClassification'],
            'architectures: ["LlamaForSequenceClassification"]: only',
        ),
        (
            'llama2',
            'quantization_config',
            {'bits': 4},
            'quantization_config: {"bits": 4}: quantized weights are not supported; import a model',
        ),
        (
            'llama2',
            'quantization_config',
            {'quant_method': 'fp8'},
            'quantization_config: {"quant_method": "fp8"}: weights quantized as "fp8" are not',
        ),
        (
            'llama2',
            'transformers_weights',
            'other.safetensors',
            'transformers_weights: "other.safetensors": only null is supported',
        ),
        ('llama2', 'num_attention_heads', 3, 'num_attention_heads: 3: does not divide hidden_size'),
        ('gemma3', 'num_attention_heads', 3, 'num_attention_heads: 3: does not divide hidden_size'),
        ('gpt2', 'n_head', 5, 'n_head: 5: does not divide n_embd'),
        ('llama2', 'is_causal', False, 'is_causal: false: only true is supported'),
        ('gemma3', 'is_causal', None, 'is_causal: null: only true is supported'),
        ('gpt2', 'is_causal', False, 'is_causal: false: only true is supported'),
        ('qwen3', 'per_layer_config', {'0': {}}, 'per_layer_config: {"0": {}}: only null is'),
        ('llama2', 'hidden_act', 'gelu', 'hidden_act: "gelu": only "silu" or "swish" is supported'),
        (
            'llama2',
            'mlp_bias',
            True,
            'mlp_bias: true: only the value of attention_bias, false, is supported',
        ),
        ('llama2', 'attention_dropout', 0.1, 'attention_dropout: 0.1: only 0 is supported'),
        (
            'llama2',
            'rope_parameters',
            {'rope_type': 'dynamic', 'factor': 4.0},
            'rope_parameters.rope_type: "dynamic": only',
        ),
        (
            'llama2',
            'rope_parameters',
            {'rope_type': 'default', 'partial_rotary_factor': 0.5},
            'rope_parameters.partial_rotary_factor: 0.5',
        ),
        (
            'llama2',
            'rope_parameters',
            {'rope_type': 'llama3', 'factor': 4.0},
            'rope_parameters.low_freq_factor: required',
        ),
        (
            'llama2',
            'rope_parameters',
            {'full_attention': ROPE},
            'rope_parameters.full_attention: {"rope_theta": 5e5}: only one rope',
        ),
        (
            'llama2',
            'rope_parameters',
            ROPE | {'mrope_section': [2]},
            'rope_parameters.mrope_section: [2]: is not supported',
        ),
        (
            'llama2',
            'rope_parameters',
            {'rope_type': 'default'},
            'rope_parameters.rope_theta: required, and missing',
        ),
        (
            'llama2',
            'rope_parameters',
            {'rope_theta': None},
            'rope_parameters.rope_theta: must be a valid number, not null',
        ),
        (
            'llama2',
            'rope_parameters',
            ['default'],
            'rope_parameters: ["default"]: only an object is supported',
        ),
        (
            'llama2',
            'rope_scaling',
            {'attention_factor': 2.0},
            'rope_scaling.attention_factor: 2.0: is not supported',
        ),
        ('llama2', 'model_type', 'ministral3', 'model_type: "ministral3": queries that are scaled'),
        ('gemma3', 'final_logit_softcapping', 30, 'final_logit_softcapping: 30: only null'),
        ('gemma3', 'use_bidirectional_attention', True, 'use_bidirectional_attention: true: only'),
        ('gemma3', 'query_pre_attn_scalar', 1.5, 'query_pre_attn_scalar: must be a valid integer'),
        ('gemma3', 'rope_parameters', ROPE, 'rope_parameters: {"rope_theta": 5e5}: only an object'),
        ('gemma3', 'model_type', 'gemma3', 'model_type: "gemma3": images are not supported'),
        (
            'olmo3',
            'rope_parameters',
            {'full_attention': ROPE | {'rope_type': 'yarn', 'factor': 8.0}},
            'rope_parameters.full_attention.original_max_position_embeddings: required by',
        ),
        ('olmo3', 'rope_theta', 1e4, 'rope_theta: 10000.0: transformers 5 and 4 apply it'),
        ('smollm3', 'no_rope_layers', [1, 2, 0, 1, 0], 'no_rope_layers: [1, 2, 0, 1, 0]: only'),
        ('smollm3', 'no_rope_layers', [1, 0], 'no_rope_layers: [1, 0]: 2 layers, but num_hidden'),
        (
            'glm4',
            'rope_parameters',
            ROPE | {'partial_rotary_factor': 2.0},
            'rope_parameters.partial_rotary_factor: must be less than or equal to 1',
        ),
        ('qwen3', 'attention_bias', True, 'attention_bias: true: only false is supported'),
        ('mixtral', 'router_jitter_noise', 0.1, 'router_jitter_noise: 0.1: only 0 is supported'),
        ('mixtral', 'num_experts', 8, 'num_experts: 8: only 4 is supported'),
        ('mixtral', 'num_local_experts', 0, 'num_local_experts: must be greater than 0, not 0'),
        ('mixtral', 'output_router_logits', True, 'output_router_logits: true: only false'),
        ('qwen3_moe', 'decoder_sparse_step', 0, 'decoder_sparse_step: 0: only a number of'),
        ('qwen3_moe', 'mlp_only_layers', [0, 1], 'mlp_only_layers: [0, 1]: no layer would have'),
        ('gpt_oss', 'swiglu_limit', 5.0, 'swiglu_limit: 5.0: only 7.0 is supported'),
        ('gpt_oss', 'attention_bias', False, 'attention_bias: false: only true is supported'),
        ('olmoe', 'clip_qkv', 8.0, 'clip_qkv: 8.0: only null is supported'),
        ('olmoe', 'head_dim', 8, 'head_dim: 8: only 4 or null is supported'),
        ('olmo2', 'attention_bias', True, 'attention_bias: true: only false is supported'),
        (
            'gpt2',
            'activation_function',
            'relu',
            'activation_function: "relu": only gelu_new, gelu_pytorch_tanh, gelu are supported',
        ),
        (
            'gpt2',
            'embd_pdrop',
            0.5,
            'embd_pdrop: 0.5: the dropout rates of resid_pdrop and embd_pdrop',
        ),
        (
            'gpt2',
            'scale_attn_by_inverse_layer_idx',
            True,
            'scale_attn_by_inverse_layer_idx: true: only false is supported',
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(
    name: str, key: str, value: Any, message: str
) -> None:
    keys = json.loads((DATA / name / 'config.json').read_text())
    with pytest.raises(ConfigError) as error:
        read_family(
            {name: x for name, x in keys.items() if name != 'rope_parameters' or 'rope' not in key}
            | {key: value},
            'config.json',
        )
    assert f'config.json: {message}' in str(error.value).replace('500000.0', '5e5')


def test_configs_of_transformers_4_are_read_too() -> None:
    keys = json.loads((DATA / 'llama3' / 'config.json').read_text())
    scaling = keys.pop('rope_parameters')
    theta, kind = scaling.pop('rope_theta'), scaling.pop('rope_type')
    assert read_family(keys | {'rope_theta': theta, 'rope_scaling': scaling | {'type': kind}}, '')[
        1
    ] == config_of('llama3').model.model_dump(mode='json', exclude_unset=True)
    with pytest.raises(ConfigError, match=r'rope_scaling.rope_type: "dynamic"'):
        read_family(keys | {'rope_scaling': OLD_SCALING}, '')
    del keys['num_hidden_layers'], keys['vocab_size']
    with pytest.raises(
        ConfigError,
        match=r'num_hidden_layers: required, and missing\n.*vocab_size: required, and missing',
    ):
        read_family(keys, '')


def test_each_model_is_written_as_the_family_that_it_is() -> None:
    for name in NAMES:
        family = json.loads((DATA / name / 'config.json').read_text())['model_type']
        model = config_of(name).model
        assert write_family(model, family)[0] == family
        assert write_family(model)[0] == ('llama' if family in ('mistral', 'phi3') else family)
    other = config_of('llama2').model.model_copy(update={'norm': 'layernorm'})
    with pytest.raises(ConfigError) as error:
        write_family(other)
    assert all(f'{family} does not support ' in str(error.value) for family in ARCHITECTURES)
    assert 'llama does not support model.norm=layernorm;' in str(error.value)


class TestDamage:
    """Each way in which a directory is broken is told with file and tensor, and nothing is
    written.
    """

    @pytest.fixture(autouse=True)
    def folders(self, tmp_path: Path) -> None:
        self.folder, self.out = tmp_path / 'in', tmp_path / 'out'

    def copy(self, name: str) -> None:
        shutil.copytree(DATA / name, self.folder)

    def rewrite(self, change: dict[str, np.ndarray | None]) -> None:
        """llama2 with these tensors, None to leave one out."""
        self.copy('llama2')
        tensors = {
            name: x
            for name, x in (load_file(self.folder / SINGLE) | change).items()
            if x is not None
        }
        save_file(tensors, self.folder / SINGLE)

    def refused(self, *parts: str) -> None:
        with pytest.raises(ConfigError) as error:
            import_huggingface(self.folder, self.out)
        assert all(part in str(error.value) for part in parts), str(error.value)
        assert not self.out.exists()

    def test_a_short_file(self) -> None:
        self.copy('qwen3')
        victim = self.folder / 'model-00002-of-00004.safetensors'
        victim.write_bytes(victim.read_bytes()[:-4])
        self.refused(
            'model-00002-of-00004.safetensors: not a valid safetensors file', 'not fully covered'
        )

    def test_a_bad_header(self) -> None:
        self.copy('llama2')
        content = (self.folder / SINGLE).read_bytes()
        for broken in (
            b'',
            content[:8],
            b'\xff' * 8 + content[8:],
            content[:8] + b'?' + content[9:],
        ):
            (self.folder / SINGLE).write_bytes(broken)
            self.refused('model.safetensors: not a valid safetensors file')

    def test_a_missing_and_an_extra_tensor(self) -> None:
        self.rewrite(
            {
                'model.norm.weight': None,
                'model.layers.2.mlp.gate_proj.weight': np.zeros((24, 16), np.float32),
            }
        )
        self.refused(
            'missing tensors (1 of 21; ',
            ': model.norm.weight',
            'unexpected tensors (1; ',
            ': model.layers.2.mlp.gate_proj.weight',
        )

    def test_a_wrong_shape_and_dtype(self) -> None:
        self.rewrite(
            {
                'model.norm.weight': np.zeros(17, np.float32),
                'lm_head.weight': np.zeros((50, 16), np.int8),
            }
        )
        self.refused(
            'model.norm.weight: expected (16,), got (17,)',
            'lm_head.weight: expected one of float32, float16, bfloat16, got int8',
        )

    def test_more_rows_of_the_vocabulary_than_tokens(self) -> None:
        names = 'model.embed_tokens.weight', 'lm_head.weight'
        self.rewrite({name: np.zeros((56, 16), np.float32) for name in names})
        self.refused(*(f'{name}: expected (50, 16), got (56, 16); set model.v' for name in names))
        config = import_huggingface(self.folder, self.out, ['model.vocab_size=56'])
        assert config.model.vocab_size == 56

    def test_an_index_that_is_wrong(self) -> None:
        self.copy('qwen3')
        index = json.loads((self.folder / INDEX).read_text())
        files = index['weight_map']
        for change, message in (
            (
                {'model.norm.weight': 'model-00009-of-00004.safetensors'},
                'model.norm.weight is said to be in model-00009-of-00004.safetensors',
            ),
            (
                {'model.norm.weight': '../secret.safetensors'},
                "model.norm.weight is said to be in '../secret.safetensors', which is not the name",
            ),
            (
                {'model.norm.weight': '/etc/passwd'},
                "model.norm.weight is said to be in '/etc/passwd'",
            ),
            (
                {'ghost': files['model.norm.weight']},
                f'ghost is said to be in {files["model.norm.weight"]}, which does not hold it',
            ),
            (
                {'model.norm.weight': files['model.embed_tokens.weight']},
                f'{INDEX} says that it is in {files["model.embed_tokens.weight"]}',
            ),
        ):
            (self.folder / INDEX).write_text(json.dumps({'weight_map': files | change}))
            self.refused(message)
        (self.folder / INDEX).write_text(
            json.dumps(
                {
                    'weight_map': {
                        name: file for name, file in files.items() if name != 'model.norm.weight'
                    }
                }
            )
        )
        self.refused('holds model.norm.weight, but model.safetensors.index.json does not list it')
        (self.folder / INDEX).write_text('[]')
        self.refused(f'{INDEX}: not a JSON object')
        (self.folder / INDEX).write_text('{"weight_map": 3}')
        self.refused(f'{INDEX}: not an index of tensors')

    def test_pickles_and_nothing_at_all(self) -> None:
        self.copy('llama2')
        (self.folder / SINGLE).unlink()
        self.refused('there is neither model.safetensors nor model.safetensors.index.json')
        (self.folder / 'pytorch_model.bin').write_bytes(b'\x80\x02.')
        self.refused('pytorch_model.bin is a pickle, which could run any code')
        (self.folder / 'config.json').unlink()
        self.refused('config.json: cannot be read')

    def test_a_tokenizer_with_more_entries_than_the_model(self) -> None:
        self.copy('gpt2')
        keys = json.loads((self.folder / 'config.json').read_text())
        (self.folder / 'config.json').write_text(json.dumps(keys | {'vocab_size': 49}))
        self.refused('model.vocab_size: 49 is below the 50 entries')


@pytest.mark.faults
@pytest.mark.parametrize('moment', ['config.json', 'a tensor', 'an index'])
def test_an_export_that_is_killed_leaves_nothing_under_its_name(
    moment: str, tmp_path: Path
) -> None:
    """(51 of the fault table) A real SIGKILL, sent by the exporting process to itself so that it
    comes at that moment.
    """
    import_huggingface(DATA / 'qwen3', tmp_path / 'run')
    program = f"""
import os, signal
from pathlib import Path
from megajax.interop import folder
from megajax.interop.huggingface import directories
from megajax.interop.huggingface import tensors
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if {moment!r} == 'config.json':
    directories.write_tensors = die
elif {moment!r} == 'a tensor':
    write, count = tensors.np.ascontiguousarray, iter(range(99))
    tensors.np.ascontiguousarray = lambda x: die() if next(count) == 7 else write(x)
else:
    folder.sync = die
directories.export_huggingface(Path('run'), Path('out'), shard_bytes=8000)
"""
    killed = subprocess.run(
        [sys.executable, '-c', program],
        cwd=tmp_path,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / 'out.partial' / 'config.json').is_file()
    assert not (tmp_path / 'out').exists()
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    assert_same_tensors(tmp_path / 'out', DATA / 'qwen3')
    assert not (tmp_path / 'out.partial').exists()
    with pytest.raises(ConfigError, match='out already exists'):
        export_huggingface(tmp_path / 'run', tmp_path / 'out')


# Keys without which a config.json is of another model or of none: sizes, and in OTHERS what a file
# sets to other than the default.
SET = {
    'model_type',
    *('n_layer', 'n_embd', 'n_head', 'n_inner', 'n_positions'),
    *(
        'num_hidden_layers',
        'hidden_size',
        'num_attention_heads',
        'num_key_value_heads',
        'head_dim',
        'intermediate_size',
    ),
    *(
        'vocab_size',
        'max_position_embeddings',
        'rope_parameters',
        'rope_theta',
        'rope_scaling',
        'sliding_window',
    ),
    *('num_experts', 'num_local_experts', 'num_experts_per_tok'),
    *('moe_intermediate_size', 'norm_topk_prob'),
}


OTHERS = {
    'gemma3': {'layer_types', 'query_pre_attn_scalar'},
    'llama3': {'tie_word_embeddings'},
    'llama_bias': {'attention_bias', 'mlp_bias'},
    'ministral': {'layer_types'},
    'mistral': {'rms_norm_eps'},
    'qwen2': {'tie_word_embeddings'},
}


@for_each_family
def test_a_key_that_says_what_is_the_default_can_be_left_out(name: str) -> None:
    keys = json.loads((DATA / name / 'config.json').read_text())
    expected = read_family(keys, name)[:2]
    for key in keys.keys() - SET:
        without = {other: value for other, value in keys.items() if other != key}
        if key not in OTHERS.get(name, set()):
            assert read_family(without, name)[:2] == expected, key


def test_a_joined_tensor_that_is_missing_or_too_small_is_named() -> None:
    config, tensors = config_of('phi3'), read_tensors(DATA / 'phi3')
    name = 'model.layers.1.self_attn.qkv_proj.weight'
    for broken, message in (
        ({key: x for key, x in tensors.items() if key != name}, f'missing tensors: {name}'),
        (tensors | {name: tensors[name][1:]}, rf'{name}: expected \(32, 16\), got \(31, 16\)'),
    ):
        with on_mesh(config), pytest.raises(ConfigError, match=message):
            from_huggingface(config, broken, source='phi3', family='phi3')
