"""transformers and megajax, face to face, on settings that `data` does not have; where transformers
is installed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason="torch is in the extra 'test-hf'")
transformers = pytest.importorskip('transformers', reason="transformers is in the extra 'test-hf'")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from chains import CHATML, END, TURNS  # noqa: E402
from interop.make_data import SIZES, logits_of, random_model  # noqa: E402
from interop.stored import DATA, LIMIT, NAMES, assert_same_tensors, logits  # noqa: E402
from support import make_config, on_mesh, random_params, relative_error, slow, start_token  # noqa: E402

from megajax.core.config import Config  # noqa: E402
from megajax.core.model.embedding import VocabParallelEmbedding  # noqa: E402
from megajax.core.model.norm import make_norm  # noqa: E402
from megajax.core.model.parameters import Parameters  # noqa: E402
from megajax.core.parallel.layout import Layout  # noqa: E402
from megajax.interop.huggingface.directories import export_huggingface, import_huggingface  # noqa: E402
from megajax.runtime.checkpoint.checkpoints import Checkpoints  # noqa: E402
from megajax.runtime.checkpoint.open import open_model  # noqa: E402
from megajax.runtime.data.text.tokenizer import byte_tokenizer, load_tokenizer  # noqa: E402
from megajax.runtime.generate import encode_prompts  # noqa: E402

ROPE = {
    'rope_type': 'llama3',
    'rope_theta': 1e4,
    'factor': 32.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    'gpt2, exact GELU, wide': (
        'gpt2',
        {'vocab_size': 100, 'n_embd': 24, 'n_layer': 3, 'n_head': 4, 'activation_function': 'gelu'},
    ),
    'gpt2, untied': (
        'gpt2',
        {'vocab_size': 100, 'n_embd': 16, 'n_layer': 1, 'n_head': 4, 'tie_word_embeddings': False},
    ),
    'llama, narrow heads': (
        'llama',
        SIZES | {'num_key_value_heads': 2, 'head_dim': 4, 'hidden_size': 24, 'rms_norm_eps': 1e-3},
    ),
    'llama, scaled': (
        'llama',
        SIZES
        | {
            'num_key_value_heads': 1,
            'rope_parameters': ROPE | {'original_max_position_embeddings': 8},
        },
    ),
    'llama, YaRN': (
        'llama',
        SIZES
        | {
            'num_key_value_heads': 1,
            'head_dim': 16,
            'rope_parameters': {
                **{'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'truncate': False},
                **{'original_max_position_embeddings': 8, 'beta_fast': 2.0, 'beta_slow': 0.5},
            },
        },
    ),
    'phi3, longrope of a part': (
        'phi3',
        SIZES
        | {
            **{'num_key_value_heads': 2, 'pad_token_id': None},
            **{'hidden_size': 32, 'original_max_position_embeddings': 32},
            'rope_parameters': {
                **{'rope_type': 'longrope', 'rope_theta': 1e4, 'factor': 4.0},
                **{'short_factor': [1.0, 2.5], 'long_factor': [2.0, 5.0]},
                'partial_rotary_factor': 0.5,
            },
        },
    ),
    'mistral, window unused': ('mistral', SIZES | {'num_key_value_heads': 2, 'sliding_window': 32}),
    'qwen2, more heads': (
        'qwen2',
        SIZES
        | {
            'num_attention_heads': 8,
            'num_key_value_heads': 4,
            'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6},
        },
    ),
    'qwen3, tied, wide heads': (
        'qwen3',
        SIZES | {'num_key_value_heads': 4, 'head_dim': 12, 'tie_word_embeddings': True},
    ),
}


def logits_of_folder(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """As a user of transformers gets them, computed in fp32."""
    return logits_of(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        tokens,
    )


def logits_of_run(run: Path, tokens: np.ndarray, data: int, model: int) -> np.ndarray:
    opened = open_model(run, [f'mesh.data={data}', f'mesh.model={model}', 'train.dtype=float32'])
    with jax.set_mesh(opened.mesh):
        return logits(opened.config, opened.params, tokens)


@pytest.mark.parametrize(
    ('setting', 'dtype'),
    [
        *((setting, 'float32') for setting in SETTINGS),
        ('llama, YaRN', 'bfloat16'),
        *(slow(setting, 'bfloat16') for setting in SETTINGS if setting != 'llama, YaRN'),
    ],
)
def test_logits_and_tensors_go_there_and_back(setting: str, dtype: str, tmp_path: Path) -> None:
    model_type, keys = SETTINGS[setting]
    model = random_model(model_type, keys, dtype=getattr(torch, dtype))
    tokens = np.random.default_rng(1).integers(0, keys['vocab_size'], (2, 20))
    expected = logits_of(model, tokens)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / 'in')
    import_huggingface(tmp_path / 'in', tmp_path / 'run')
    meshes = [(1, 1), (1, 2), (2, 2), (1, 4)]
    for data, size in meshes if dtype == 'float32' else meshes[-1:]:
        assert np.abs(logits_of_run(tmp_path / 'run', tokens, data, size) - expected).max() < LIMIT
    assert export_huggingface(tmp_path / 'run', tmp_path / 'out', shard_bytes=10_000) == (
        model_type,
        dtype,
    )
    assert_same_tensors(tmp_path / 'out', tmp_path / 'in')
    assert np.abs(logits_of_folder(tmp_path / 'out', tokens) - expected).max() < 1e-6


@pytest.mark.parametrize('name', NAMES)
def test_what_is_stored_is_what_transformers_makes(name: str) -> None:
    stored = np.load(DATA / f'{name}.npz')
    assert (
        np.abs(
            logits_of_folder(DATA / name, stored['tokens'].astype(np.int64)) - stored['logits']
        ).max()
        < 1e-5
    )


SIZES_HERE = {
    'num_layers': 2,
    'hidden_size': 32,
    'num_heads': 4,
    'vocab_size': 300,
    'max_seq_len': 32,
}
MODELS = {
    'gpt2': {},
    'llama': {
        'norm': 'rmsnorm',
        'activation': 'swiglu',
        'position': 'rope',
        'bias': False,
        'num_kv_heads': 2,
    },
    'qwen2': {
        'norm': 'rmsnorm',
        'activation': 'swiglu',
        'position': 'rope',
        'bias': False,
        'qkv_bias': True,
        'head_dim': 12,
    },
    'qwen3': {
        'norm': 'rmsnorm',
        'activation': 'swiglu',
        'position': 'rope',
        'bias': False,
        'qk_norm': True,
        'tie_embeddings': False,
    },
    'olmo2': {
        'norm': 'rmsnorm',
        'norm_position': 'after',
        'activation': 'swiglu',
        'position': 'rope',
        'bias': False,
        'qk_norm': 'all',
        'num_kv_heads': 2,
    },
}


@pytest.mark.parametrize('family', MODELS)
def test_a_model_trained_here_is_the_same_there(family: str, tmp_path: Path) -> None:
    """Also the rows of the vocabulary's padding, which training changes, must not matter."""
    config = Config(
        model=SIZES_HERE | {'tie_embeddings': True} | MODELS[family],
        mesh={'data': 2, 'model': 2},
        train={'seq_len': 16, 'dtype': 'float32'},
    )
    with (
        on_mesh(config),
        Checkpoints(
            tmp_path / 'run' / 'checkpoints', config, tokenizer=byte_tokenizer()
        ) as checkpoints,
    ):
        checkpoints.save({'params': random_params(config, 0.5)}, 7)
    assert export_huggingface(tmp_path / 'run', tmp_path / 'out') == (family, 'float32')
    text = 'def f(x):\n    return x'
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
    tokens = np.array([tokenizer(text)['input_ids'][:20], tokenizer(text[::-1])['input_ids'][:20]])
    np.testing.assert_array_equal(tokens[0], byte_tokenizer().encode_batch([text])[0][:20])
    assert tokenizer.eos_token_id == byte_tokenizer().eod
    expected = logits_of_run(tmp_path / 'run', tokens, 1, 2)
    assert np.abs(logits_of_folder(tmp_path / 'out', tokens) - expected).max() < LIMIT
    assert np.abs(expected).max() > 1


def test_a_prompt_starts_as_there(tmp_path: Path) -> None:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=start_token(tmp_path / 'tokenizer.json')
    )
    config = Config(model=SIZES_HERE, train={'seq_len': 16})
    assert encode_prompts(config, load_tokenizer(str(tmp_path / 'tokenizer.json')), ['def f']) == [
        theirs('def f')['input_ids']
    ]


def test_transformers_generates_the_same_from_an_export_and_ends_at_every_end(
    tmp_path: Path,
) -> None:
    byte_tokenizer(TURNS).save(tmp_path / 'tokenizer.json')
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / 'tokenizer.json'),
        eos_token=TURNS[1],
        bos_token='<|endoftext|>',
    )
    theirs.chat_template = CHATML
    theirs.save_pretrained(tmp_path / 'in')
    model = random_model('llama', SIZES | {'vocab_size': 259, 'max_position_embeddings': 128})
    ends = {'eos_token_id': [256, END, *range(100, 120)], 'bos_token_id': 256}
    model.generation_config = transformers.GenerationConfig(
        **ends, do_sample=True, temperature=0.7, top_p=0.9
    )
    model.save_pretrained(tmp_path / 'in')
    import_huggingface(tmp_path / 'in', tmp_path / 'run')
    export_huggingface(tmp_path / 'run', tmp_path / 'out')

    def texts(folder: Path) -> list[list[int]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer.apply_chat_template(
            [{'role': 'user', 'content': 'Hi'}],
            add_generation_prompt=True,
            return_tensors='pt',
            return_dict=True,
        )
        made = []
        for seed in range(8):
            torch.manual_seed(seed)
            (ids,) = model.generate(**prompt, max_new_tokens=40, pad_token_id=0).tolist()
            made.append(ids)
        return made

    expected = texts(tmp_path / 'in')
    assert texts(tmp_path / 'out') == expected
    assert len({ids[-1] for ids in expected} & set(ends['eos_token_id'])) > 1


def test_zero_centered_norms_and_scaled_embeddings_are_those_of_gemma_3() -> None:
    from transformers.models.gemma3 import modeling_gemma3 as there

    config = make_config('both_norms', model={'norm_eps': 1e-6})
    random, size = np.random.default_rng(0), config.model.hidden_size
    x, w = random.normal(size=(2, 4, size)), random.normal(0, 0.05, size)
    norm = there.Gemma3RMSNorm(size)
    norm.weight.data = torch.tensor(w, dtype=torch.float32)
    scale, tokens = config.model.embedding_scale, random.integers(1037, size=(2, 8))
    embedding = there.Gemma3TextScaledWordEmbedding(1037, size, 0, scale)
    with on_mesh(config), torch.no_grad():
        parameters = Parameters.of(config.model, Layout.of(config))
        here = make_norm(config.model, parameters['norm'])
        here.weight[...] = jnp.asarray(w, jnp.float32)
        for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 0)):
            theirs = norm(torch.tensor(x).to(dtype)).float().numpy()
            ours = here(jnp.asarray(x, jnp.float32).astype(str(dtype).removeprefix('torch.')))
            assert relative_error(ours, theirs) <= limit
        module = VocabParallelEmbedding(parameters['embedding'], key=jax.random.key(0), scale=scale)
        embedding.weight.data = torch.tensor(np.asarray(module.table[...])[:1037])
        theirs = embedding(torch.tensor(tokens)).numpy()
        np.testing.assert_array_equal(module(jnp.asarray(tokens), jnp.float32), theirs)
