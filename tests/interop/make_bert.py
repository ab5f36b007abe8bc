"""Write tests/interop/bert: a tiny random MegatronBert as transformers saves it, and what both its
heads make of some tokens.

    python tests/interop/make_bert.py

needs `pip install 'megajax[test-hf]'`. The tests read what it wrote where that is not installed.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent / 'bert'
KEYS: dict[str, Any] = {
    'vocab_size': 50,
    'hidden_size': 16,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'intermediate_size': 24,
}
KEYS |= {'max_position_embeddings': 32, 'type_vocab_size': 2}


def random_bert(**keys: Any) -> Any:
    """A model of which no parameter is zero or one."""
    torch.manual_seed(0)
    model = transformers.MegatronBertForPreTraining(
        transformers.MegatronBertConfig(**KEYS | keys)
    ).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter).mul_(0.2).add_(parameter.ndim == 1)
    return model


def random_inputs(length: int = 24) -> dict[str, np.ndarray]:
    """Two rows of two segments, the second with padding."""
    random = np.random.default_rng(0)
    types, mask = (np.zeros((2, length), np.int64) for _ in range(2))
    types[:, 10:], mask[0], mask[1, : length - 7] = 1, 1, 1
    return {
        'input_ids': random.integers(0, KEYS['vocab_size'], (2, length)),
        'token_type_ids': types,
        'attention_mask': mask,
    }


def heads_of(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`logits` [B, S, V] of the tokens, and `order` [B, 2] of the segments, in fp32."""
    with torch.no_grad():
        made = model(**{name: torch.from_numpy(x) for name, x in inputs.items()})
    return {'logits': made.prediction_logits.numpy(), 'order': made.seq_relationship_logits.numpy()}


if __name__ == '__main__':
    shutil.rmtree(FOLDER, ignore_errors=True)
    model, inputs = random_bert(), random_inputs()
    model.save_pretrained(FOLDER)
    np.savez_compressed(FOLDER / 'heads.npz', **inputs, **heads_of(model, inputs))
