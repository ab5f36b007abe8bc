"""A small model with a vision encoder, on any mesh."""

from typing import Any

from support import make_config

from megajax.core.config import Config

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
# Two layers of cross-attention, after the second and the fourth of the others.
CROSS_VISION = VISION | {'fusion': 'cross_attention', 'cross_every': 2, 'deepstack': ()}
CROSS_MODEL = MODEL | {'num_layers': 4}


def vlm(
    data: int = 1,
    model: int = 1,
    /,
    *,
    sequence_parallel: bool = False,
    crossed: bool = False,
    **sections: Any,
) -> Config:
    """A small model with an encoder on a mesh of data x model; `crossed`: with cross-attention."""
    vision = CROSS_VISION if crossed else VISION
    train = {'batch_size': 16, 'seq_len': 24} | sections.pop('train', {})
    return make_config(
        'llama',
        data,
        model,
        sequence_parallel=sequence_parallel,
        model=(CROSS_MODEL if crossed else MODEL) | sections.pop('model', {}),
        vision=vision | sections.pop('vision', {}),
        train=train,
        **sections,
    )


RELEVANCE = {'regions': (2, 1), 'total_tokens': 400, 'scorer_size': 16}
SMALL = {
    'vision': {
        'num_layers': 1,
        'hidden_size': 16,
        'num_heads': 2,
        'ffn_size': 32,
        'patch_size': 2,
        'merge_size': 1,
        'max_patches': 800,
        'images': 1,
        'deepstack': (),
    },
    'model': {'num_layers': 2, 'max_seq_len': 416},
}


def relevant(data: int = 1, model: int = 1, /, **sections: Any) -> Config:
    """A small model that gives the two regions of an image 400 tokens."""
    relevance = RELEVANCE | sections.pop('relevance', {})
    vision = SMALL['vision'] | sections.pop('vision', {})
    sizes = SMALL['model'] | sections.pop('model', {})
    train = {'batch_size': 8, 'seq_len': 416} | sections.pop('train', {})
    return vlm(
        data, model, relevance=relevance, vision=vision, model=sizes, train=train, **sections
    )
