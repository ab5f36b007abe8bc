"""A model whose next token follows from the last one alone, so that a test knows what it says."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
from support import make_config, on_mesh, random_params

from megajax.core.config import Config
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.data.text.tokenizer import byte_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    '<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
TURNS = ['<|im_start|>', '<|im_end|>']
START, END = 257, 258  # their ids


def chain(text: bytes, *, then: int) -> dict[int, int]:
    """The token after each, where a text of different bytes follows a line break."""
    return dict(pairwise([ord('\n'), *text, then]))


def chain_config(max_seq_len: int = 64, **data: object) -> Config:
    sizes = {'num_layers': 1, 'vocab_size': 259, 'max_seq_len': max_seq_len, 'qk_norm': False}
    train = {'seq_len': max_seq_len}
    return make_config('llama', model=sizes, train=train, data={'tokenizer': 'bytes', **data})


def write_chain(run: Path, follows: Mapping[int, int], config: Config) -> None:
    """Make a run whose layers add nothing: the output is the embedding, and the head its next."""
    with on_mesh(config):
        params = random_params(config, std=0.05)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
        table_VD = np.random.default_rng(0).standard_normal(zeros['embedding']['table'].shape)
        head_VD = np.zeros_like(table_VD)
        for token, following in follows.items():
            head_VD[following] += table_VD[token]
        for array, values in (
            (params['embedding']['table'], table_VD),
            (params['head'], head_VD),
            (params['norm']['weight'], np.ones(config.model.hidden_size)),
        ):
            array[...] = jax.device_put(values.astype(np.float32), array[...].sharding)
        layers = jax.tree.map(lambda x: jax.device_put(x * 0, x.sharding), params['layers'])
        params['layers'] = layers
        tokenizer = byte_tokenizer(TURNS)
        with Checkpoints(run / 'checkpoints', config, tokenizer=tokenizer) as checkpoints:
            checkpoints.save({'params': params}, 1)
