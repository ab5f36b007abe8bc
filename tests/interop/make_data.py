"""Write tests/interop/data: tiny random models as transformers saves them and what it makes of some
tokens, and a file of torch.save.

    python tests/interop/make_data.py

needs `pip install 'megajax[test-hf]'`. The tests read what it wrote where that is not installed.
"""

import argparse
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

DATA = Path(__file__).parent / 'data'
VOCAB, LENGTH = 50, 24
SIZES = {
    'vocab_size': VOCAB,
    'hidden_size': 16,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'intermediate_size': 24,
}
SIZES |= {'max_position_embeddings': 32, 'bos_token_id': None, 'eos_token_id': None}
LLAMA3 = {
    'rope_type': 'llama3',
    'rope_theta': 500.0,
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
}
LLAMA3 |= {'original_max_position_embeddings': 16}
YARN = {'rope_type': 'yarn', 'rope_theta': 500000.0, 'factor': 4.0}
YARN |= {'original_max_position_embeddings': 8, 'attention_factor': 1.2, 'beta_fast': 4.0}
YARN |= {'beta_slow': 1.0, 'truncate': True}
FIVE = SIZES | {'num_hidden_layers': 5, 'num_key_value_heads': 2, 'pad_token_id': None}
FIVE |= {'sliding_window': 8}
EXPERTS = SIZES | {'num_key_value_heads': 2, 'pad_token_id': None, 'num_experts_per_tok': 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    'gpt2': (
        'gpt2',
        {
            'vocab_size': VOCAB,
            'n_embd': 16,
            'n_layer': 2,
            'n_head': 4,
            'n_positions': 32,
            'n_inner': 24,
        },
    ),
    'llama2': ('llama', SIZES | {'num_key_value_heads': 4}),
    'llama3': (
        'llama',
        SIZES | {'num_key_value_heads': 2, 'tie_word_embeddings': True, 'rope_parameters': LLAMA3},
    ),
    'llama_bias': (
        'llama',
        SIZES
        | {
            'attention_bias': True,
            'mlp_bias': True,
            'rope_parameters': {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 2.0},
        },
    ),
    'mistral': (
        'mistral',
        SIZES
        | {'num_key_value_heads': 1, 'head_dim': 8, 'sliding_window': None, 'rms_norm_eps': 1e-5},
    ),
    'qwen2': ('qwen2', SIZES | {'num_key_value_heads': 2, 'tie_word_embeddings': True}),
    'phi3': ('phi3', SIZES | {'num_key_value_heads': 2, 'pad_token_id': None}),
    'qwen3': ('qwen3', SIZES | {'num_key_value_heads': 2, 'head_dim': 8}),
    'olmo2': ('olmo2', SIZES | {'num_key_value_heads': 2, 'pad_token_id': None}),
    'ministral': (
        'ministral',
        FIVE
        | {'head_dim': 4}
        | {
            'layer_types': [
                *['sliding_attention'] * 2,
                'full_attention',
                *['sliding_attention'] * 2,
            ]
        },
    ),
    'smollm3': ('smollm3', FIVE | {'no_rope_layer_interval': 2}),
    'olmo3': ('olmo3', FIVE | {'rope_parameters': {'full_attention': YARN}}),
    'gemma3': (
        'gemma3_text',
        FIVE | {'head_dim': 8, 'query_pre_attn_scalar': 12, 'sliding_window_pattern': 3},
    ),
    'glm4': ('glm4', SIZES | {'num_key_value_heads': 2, 'head_dim': 8, 'pad_token_id': None}),
    'mixtral': ('mixtral', EXPERTS | {'num_local_experts': 4}),
    'qwen3_moe': (
        'qwen3_moe',
        EXPERTS | {'num_experts': 6, 'moe_intermediate_size': 8, 'norm_topk_prob': True},
    ),
    'olmoe': ('olmoe', EXPERTS | {'num_experts': 4}),
    'gpt_oss': (
        'gpt_oss',
        EXPERTS
        | {'hidden_size': 32, 'intermediate_size': 32, 'head_dim': 8, 'sliding_window': 8}
        | {
            'num_local_experts': 4,
            'rope_parameters': YARN | {'rope_theta': 1e4, 'truncate': False},
        },
    ),
}


def random_model(
    model_type: str, keys: dict[str, Any], *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """A model of which no parameter is zero or one; every number of it fits into `dtype`, in which
    it is saved.
    """
    torch.manual_seed(seed)
    centre = 0 if model_type == 'gemma3_text' else 1  # of the gains of norms
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **keys)
    ).eval()
    for parameter in model.parameters():
        parameter.data = (
            torch.randn_like(parameter)
            .mul_(0.2)
            .add_(centre * (parameter.ndim == 1))
            .to(dtype)
            .float()
        )
    for name, buffer in model.named_buffers():
        if name.endswith('e_score_correction_bias'):
            buffer.normal_(0, 0.1)
    return model


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """[B, S, V] in fp32."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def write_families() -> None:
    """A directory for each family, two of them in pieces or in bf16."""
    for number, (name, (model_type, keys)) in enumerate(FAMILIES.items()):
        dtype = torch.bfloat16 if name == 'qwen2' else torch.float32
        model = random_model(model_type, keys, dtype=dtype, seed=number)
        tokens = np.random.default_rng(number).integers(0, VOCAB, (2, LENGTH))
        np.savez_compressed(
            DATA / f'{name}.npz', tokens=tokens.astype(np.int16), logits=logits_of(model, tokens)
        )
        model.to(dtype).save_pretrained(
            DATA / name, max_shard_size='8KB' if name == 'qwen3' else '1GB'
        )
        (DATA / name / 'generation_config.json').unlink(missing_ok=True)


def write_tokenizer() -> None:
    """A byte-level BPE of VOCAB entries beside gpt2."""
    letters = [
        *'abcdefghijklmnopqrstuvwxyz0123456789_():.,=+-',
        '\u0120',
        '\u010a',
        'th',
        'he',
        '<|endoftext|>',
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={letter: i for i, letter in enumerate(letters)}, merges=[('t', 'h'), ('h', 'e')]
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(['<|endoftext|>'])
    tokenizer.save(str(DATA / 'gpt2' / 'tokenizer.json'))


def write_torch() -> None:
    """What a checkpoint of Megatron-LM has beside tensors: arguments, random states, ordered and
    shared things.
    """
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    contents = {
        'args': argparse.Namespace(
            num_layers=2, params_dtype=torch.bfloat16, seed=None, names=['a', 'b']
        ),
        'checkpoint_version': 3.0,
        'model': OrderedDict(
            whole=base,
            transposed=base.T[1:],
            half=base.bfloat16(),
            parameter=torch.nn.Parameter(base[0]),
        ),
        'rng_state': [
            {
                'numpy': np.random.RandomState(0).get_state(),
                'torch': torch.tensor([1, 2], dtype=torch.uint8),
            }
        ],
        'iteration': 7,
    }
    torch.save(contents, DATA / 'torch.pt')


if __name__ == '__main__':
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    write_families()
    write_tokenizer()
    write_torch()
