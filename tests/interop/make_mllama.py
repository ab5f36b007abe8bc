"""Write tests/interop/mllama.npz: two random layers of transformers' Mllama that attend to images,
and what they make of rows of which some tokens see no image.

    python tests/interop/make_mllama.py

needs `pip install 'megajax[test-hf]'`. The test reads what it wrote where that is not installed.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import MllamaTextConfig
from transformers.models.mllama.modeling_mllama import MllamaCrossAttentionDecoderLayer

FILE = Path(__file__).parent / 'mllama.npz'
LAYERS, ROWS, TOKENS, VECTORS = 2, 2, 8, 6


def main() -> None:
    """Write weights, inputs and outputs."""
    torch.manual_seed(0)
    config = MllamaTextConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=LAYERS,
        cross_attention_layers=list(range(LAYERS)),
        vocab_size=64,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation='eager',
    )
    layers = [MllamaCrossAttentionDecoderLayer(config, index).eval() for index in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.normal_(0.3 if parameter.ndim == 1 else 0, 0.4)
    x, vectors = torch.randn(ROWS, TOKENS, 16), torch.randn(ROWS, VECTORS, 16)
    seen = torch.rand(ROWS, TOKENS, VECTORS) < 0.6
    seen[0, 2], seen[1, :3] = False, False
    row = seen.any(-1)[:, None, :, None].float()
    mask = torch.where(seen[:, None], 0.0, torch.finfo(torch.float32).min) * row
    y = x
    with torch.no_grad():
        for layer in layers:
            y = layer(
                y,
                cross_attention_states=vectors,
                cross_attention_mask=mask,
                full_text_row_masked_out_mask=row,
                attention_mask=None,
            )
    names = layers[0].state_dict()
    weights = {
        name: np.stack([layer.state_dict()[name].numpy() for layer in layers]) for name in names
    }
    np.savez_compressed(
        FILE, x=x.numpy(), vectors=vectors.numpy(), seen=seen.numpy(), y=y.numpy(), **weights
    )


if __name__ == '__main__':
    main()
