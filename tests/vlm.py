"""A small model with a vision encoder, on any mesh."""

from typing import Any

from support import make_config

from megajax.config import Config

VISION = {
    'num_layers': 2,
    'hidden_size': 32,
    'num_heads': 4,
    'ffn_size': 64,
    'patch_size': 4,
    'merge_size': 2,
    'positions': 6,
    'deepstack': (0,),
    'images': 2,
    'max_patches': 16,
}
MODEL = {
    'num_layers': 3,
    'head_dim': 8,
    'position': 'mrope',
    'mrope_section': (2, 1, 1),
    'dropout': 0.0,
}
SP = {'sequence_parallel': True}


def vlm(
    data: int = 1, model: int = 1, /, *, sequence_parallel: bool = False, **sections: Any
) -> Config:
    """A small model with an encoder on a mesh of data x model."""
    train = {'batch_size': 16, 'seq_len': 24} | sections.pop('train', {})
    return make_config(
        'llama',
        data,
        model,
        sequence_parallel=sequence_parallel,
        model=MODEL | sections.pop('model', {}),
        vision=VISION | sections.pop('vision', {}),
        train=train,
        **sections,
    )
