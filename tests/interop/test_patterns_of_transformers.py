"""Models whose layers differ, attend in ways of their own, or have experts, are those of
transformers: logits, gradients, and every bit of an export; where transformers is installed.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason="torch is in the extra 'test-hf'")
transformers = pytest.importorskip('transformers', reason="transformers is in the extra 'test-hf'")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from interop.make_data import SIZES, logits_of, random_model  # noqa: E402
from interop.stored import LIMIT, assert_same_tensors  # noqa: E402
from support import by_name, graph_of, on_mesh, slow  # noqa: E402

from megajax.core.config import Config  # noqa: E402
from megajax.core.model.computation import Computation  # noqa: E402
from megajax.interop.huggingface.directories import export_huggingface, import_huggingface  # noqa: E402
from megajax.interop.huggingface.families import read_family  # noqa: E402
from megajax.interop.huggingface.layers import FULL, SLIDING  # noqa: E402
from megajax.interop.huggingface.tensors import read_tensors  # noqa: E402
from megajax.interop.huggingface.weights import from_huggingface  # noqa: E402
from megajax.runtime.generate import Generator, Request, Sampling  # noqa: E402

SIZES |= {'num_key_value_heads': 2, 'pad_token_id': None}
FIVE = SIZES | {'num_hidden_layers': 5}
QWEN = FIVE | {'use_sliding_window': True, 'sliding_window': 6}
THETA = {'rope_type': 'default', 'rope_theta': 1e4}
YARN = {'rope_type': 'yarn', 'rope_theta': 5e5, 'factor': 4.0}
YARN |= {'original_max_position_embeddings': 8, 'beta_fast': 4.0}
OLMO = FIVE | {'sliding_window': 6}
EXPERTS = SIZES | {'num_experts_per_tok': 2}
OSS = EXPERTS | {'head_dim': 8, 'sliding_window': 6, 'num_local_experts': 6}
GLM = FIVE | {'num_experts_per_tok': 2, 'head_dim': 8, 'moe_intermediate_size': 12}
GLM |= {'routed_scaling_factor': 2.5}
LINEAR = {'rope_type': 'linear', 'rope_theta': 1e6, 'factor': 8.0}
GEMMA = OLMO | {'head_dim': 8, 'query_pre_attn_scalar': 8, 'sliding_window_pattern': 3}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    'mistral, a window': ('mistral', SIZES | {'sliding_window': 8}),
    'mistral, no window': ('mistral', SIZES | {'sliding_window': None}),
    'phi3, a window': ('phi3', SIZES | {'sliding_window': 5}),
    'ministral, two types and a rest': (
        'ministral',
        FIVE | {'head_dim': 4, 'sliding_window': 7, 'layer_types': [FULL, SLIDING] * 2 + [FULL]},
    ),
    'ministral, windows alone': ('ministral', SIZES | {'head_dim': 4, 'sliding_window': 7}),
    'qwen2, windows in the last layers': ('qwen2', QWEN | {'max_window_layers': 2}),
    'smollm3, a third without rope': ('smollm3', FIVE | {'no_rope_layer_interval': 3}),
    'smollm3, windows and biases': (
        'smollm3',
        QWEN
        | {'no_rope_layers': [1, 0, 1, 1, 0], 'layer_types': [FULL, SLIDING] * 2 + [SLIDING]}
        | {'attention_bias': True, 'mlp_bias': True, 'tie_word_embeddings': False},
    ),
    'olmo3, YaRN in full layers': ('olmo3', OLMO | {'rope_parameters': {FULL: YARN}}),
    'olmo3, two thetas': (
        'olmo3',
        OLMO | {'rope_parameters': {FULL: THETA, SLIDING: THETA | {'rope_theta': 100.0}}},
    ),
    'olmo3, windows alone': ('olmo3', OLMO | {'layer_types': [SLIDING] * 5}),
    'olmo3, full attention alone': ('olmo3', OLMO | {'layer_types': [FULL] * 5}),
    'gemma3, as released': ('gemma3_text', GEMMA | {'rope_parameters': {FULL: LINEAR}}),
    'gemma3, untied, heads of a scale': (
        'gemma3_text',
        GEMMA | {'tie_word_embeddings': False, 'query_pre_attn_scalar': 6},
    ),
    'gemma3, full attention alone': ('gemma3_text', GEMMA | {'layer_types': [FULL] * 5}),
    'glm4, half a head': ('glm4', SIZES | {'head_dim': 8}),
    'glm4, a quarter, no biases': (
        'glm4',
        SIZES | {'head_dim': 16, 'attention_bias': False, 'partial_rotary_factor': 0.25},
    ),
    'glm, a whole head': ('glm', SIZES | {'head_dim': 8, 'partial_rotary_factor': 1.0}),
    'exaone4, full layers without rope': ('exaone4', OLMO | {'sliding_window_pattern': 3}),
    'exaone4, no windows': (
        'exaone4',
        SIZES | {'head_dim': 8, 'sliding_window': None, 'layer_types': [FULL] * 2},
    ),
    'mixtral, as released': ('mixtral', EXPERTS | {'num_local_experts': 8}),
    'mixtral, a window and 3 experts of a token': (
        'mixtral',
        EXPERTS | {'num_local_experts': 5, 'sliding_window': 6, 'num_experts_per_tok': 3},
    ),
    'qwen3_moe, as released': (
        'qwen3_moe',
        EXPERTS
        | {'head_dim': 8, 'num_experts': 8, 'moe_intermediate_size': 12, 'norm_topk_prob': True},
    ),
    'qwen3_moe, windows, not normalized': (
        'qwen3_moe',
        EXPERTS | QWEN | {'num_experts': 4, 'moe_intermediate_size': 8},
    ),
    'qwen3_moe, layers with an MLP': (
        'qwen3_moe',
        EXPERTS
        | {'num_hidden_layers': 5, 'head_dim': 8, 'num_experts': 4, 'moe_intermediate_size': 12}
        | {'mlp_only_layers': [1], 'decoder_sparse_step': 2},
    ),
    'glm4_moe, as released': ('glm4_moe', GLM | {'n_routed_experts': 8, 'use_qk_norm': True}),
    'glm4_moe, groups, biases and two shared experts': (
        'glm4_moe',
        GLM
        | {'n_routed_experts': 8, 'n_group': 4, 'topk_group': 2, 'n_shared_experts': 2}
        | {'attention_bias': True, 'first_k_dense_replace': 2, 'norm_topk_prob': False},
    ),
    'olmoe, as released': ('olmoe', EXPERTS | {'num_experts': 8, 'num_experts_per_tok': 3}),
    'olmoe, normalized': ('olmoe', EXPERTS | {'num_experts': 4, 'norm_topk_prob': True}),
    'gpt_oss, as released, gates clamped': (
        'gpt_oss',
        OSS | {'hidden_size': 256, 'rope_parameters': YARN | {'truncate': False}},
    ),
    'gpt_oss, windows alone, no YaRN': (
        'gpt_oss',
        OSS | {'rope_parameters': THETA, 'layer_types': [SLIDING] * 2, 'num_experts_per_tok': 1},
    ),
    'qwen3, two types': ('qwen3', QWEN | {'head_dim': 8, 'layer_types': [SLIDING] * 4 + [FULL]}),
}


GREEDY = (  # one of each family
    'mistral, a window',
    'ministral, two types and a rest',
    'qwen2, windows in the last layers',
    'smollm3, windows and biases',
    'olmo3, YaRN in full layers',
    'gemma3, as released',
    'glm4, half a head',
    'exaone4, full layers without rope',
    'mixtral, as released',
    'qwen3_moe, as released',
    'glm4_moe, as released',
    'olmoe, as released',
    'gpt_oss, as released, gates clamped',
)


def config_of(folder: Path) -> Config:
    keys = json.loads((folder / 'config.json').read_text())
    model = read_family(keys, str(folder))[1]
    return Config(model=model, train={'seq_len': 24, 'dtype': 'float32'})


def theirs(
    model: Any, tokens: np.ndarray, folder: Path
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, and the gradients of the mean loss of the next tokens by the names of saved tensors.

    transformers renames tensors, and takes experts apart, when it saves them: here in `folder`.
    """
    logits = model(torch.from_numpy(tokens)).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), torch.from_numpy(tokens)[:, 1:].flatten()
    )
    loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    for name, buffer in model.named_buffers():
        if name.endswith('e_score_correction_bias'):  # which selects, and has no gradient
            buffer.zero_()
    model.save_pretrained(folder)
    return logits.detach().numpy(), read_tensors(folder)


def ours(config: Config, params: nnx.State, tokens: np.ndarray) -> tuple[jax.Array, nnx.State]:
    @jax.jit
    def step(params: nnx.State) -> tuple[nnx.State, jax.Array]:
        def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(graph_of(config), params)
            logit = model(jnp.asarray(tokens, jnp.int32), Computation.of(config))
            logit = logit[..., : config.model.vocab_size]
            hit = jax.nn.one_hot(tokens[:, 1:], config.model.vocab_size)
            return -(jax.nn.log_softmax(logit[:, :-1]) * hit).sum(-1).mean(), logit

        return jax.grad(loss, has_aux=True)(params)

    gradients, logits = step(params)
    return logits, gradients


@pytest.mark.parametrize(
    'setting', [setting if setting in GREEDY else slow(setting) for setting in SETTINGS]
)
def test_logits_gradients_and_every_bit_are_those_of_transformers(
    setting: str, tmp_path: Path
) -> None:
    family, keys = SETTINGS[setting]
    model = random_model(family, keys)
    model.save_pretrained(tmp_path / 'in')
    tokens = np.random.default_rng(1).integers(0, SIZES['vocab_size'], (2, 24))
    expected, theirs_by_name = theirs(model, tokens, tmp_path / 'gradients')
    config = config_of(tmp_path / 'in')
    with on_mesh(config):
        params, gradients = (
            from_huggingface(config, tensors, source=setting, family=family)
            for tensors in (read_tensors(tmp_path / 'in'), theirs_by_name)
        )
        logits, found = ours(config, params, tokens)
    assert np.abs(logits - expected).max() < LIMIT
    assert np.abs(expected).max() > 1
    found_by_name = by_name(found)
    for name, x in by_name(gradients).items():
        assert np.abs(found_by_name[name] - x).max() < 1e-4 * max(1, np.abs(x).max()), name
    import_huggingface(tmp_path / 'in', tmp_path / 'run')
    assert export_huggingface(tmp_path / 'run', tmp_path / 'out') == (family, 'float32')
    assert_same_tensors(tmp_path / 'out', tmp_path / 'in')
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out').eval()
    assert np.abs(logits_of(there, tokens) - expected).max() < 1e-6


@pytest.mark.parametrize('setting', [GREEDY[0], *map(slow, GREEDY[1:])])
def test_80_greedy_texts_longer_than_a_window_are_those_of_transformers(
    setting: str, tmp_path: Path
) -> None:
    family, keys = SETTINGS[setting]
    model = random_model(family, keys)
    model.save_pretrained(tmp_path)
    draw = np.random.default_rng(2)
    by_length = [draw.integers(0, SIZES['vocab_size'], (10, length)) for length in range(1, 17, 2)]
    greedy = {'max_new_tokens': 14, 'do_sample': False, 'pad_token_id': 0}
    texts = [
        model.generate(torch.from_numpy(x), attention_mask=torch.ones(x.shape), **greedy).tolist()
        for x in by_length
    ]
    # Prompts of all lengths in each batch.
    prompts = [x[row].tolist() for row in range(10) for x in by_length]
    expected = [text[row] for row in range(10) for text in texts]
    config, request = config_of(tmp_path), Request(max_tokens=14, sampling=Sampling(temperature=0))
    with on_mesh(config):
        params = from_huggingface(config, read_tensors(tmp_path), source=setting, family=family)
        *_, rows = Generator(config, params).stream(prompts, request)
    found = [[*prompt, *row.ids] for prompt, row in zip(prompts, rows, strict=True) if row]
    assert found == expected
