"""Check the sizes of the vision encoder, and multi-dimensional rotary positions."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from megajax.base.errors import Problem
from megajax.core.config.divisors import divides, multiples
from megajax.core.config.vision import Part

if TYPE_CHECKING:
    from megajax.core.config.schema import Config


def of_positions(config: 'Config') -> Iterator[Problem]:
    """Check multi-dimensional rotary positions (mrope, rope_2d)."""
    model = config.model
    if model.position == 'rope_2d':
        message = 'rope_2d is for the vision encoder only; use mrope'
        yield Problem('model.position', message)
    if model.position != 'mrope':
        return
    pairs, sections = model.head_dim // 2, model.mrope_section
    others = 'model.head_dim', 'model.position'
    if sum(sections) != pairs:
        message = (
            f'{list(sections)} has {sum(sections)} pairs, but model.head_dim={model.head_dim} has '
            f'{pairs}; use sections that add up to {pairs}'
        )
        yield Problem('model.mrope_section', message, others=others)
    elif 3 * max(sections[1:]) > pairs:
        message = (
            f'{list(sections)}: row and column can have at most a third of the {pairs} pairs; '
            f'use at most {pairs // 3} for each of them, and the rest for time'
        )
        yield Problem('model.mrope_section', message, others=others)


def of_encoder(config: 'Config') -> Iterator[Problem]:
    """Check the sizes of the vision encoder."""
    vision, model = config.vision, config.model
    if vision is None:
        return
    heads = ('vision.num_heads', vision.num_heads)
    yield from divides('vision.hidden_size', vision.hidden_size, *heads)
    head_dim = vision.hidden_size // vision.num_heads
    if vision.hidden_size % vision.num_heads == 0 and head_dim % 4:
        message = (
            f'{vision.hidden_size} gives each of {vision.num_heads} heads {head_dim} elements, '
            'not a multiple of 4, which rotary positions by row and column need; '
            f'use {multiples(vision.hidden_size, 4 * vision.num_heads)}'
        )
        yield Problem('vision.hidden_size', message, others=('vision.num_heads',))
    if vision.max_patches % vision.unit:
        message = (
            f'{vision.max_patches} is not a multiple of the {vision.unit} patches of a unit '
            f'(vision.merge_size={vision.merge_size}); '
            f'use {multiples(vision.max_patches, vision.unit)}'
        )
        yield Problem('vision.max_patches', message, others=('vision.merge_size',))
    if vision.min_patches > vision.max_patches:
        message = (
            f'{vision.min_patches} is above vision.max_patches={vision.max_patches}; '
            f'use at most {vision.max_patches}, or raise vision.max_patches'
        )
        yield Problem('vision.min_patches', message, others=('vision.max_patches',))
    of_units = not vision.is_crossed and config.relevance is None
    if of_units and vision.vectors > config.train.seq_len:
        message = (
            f'{vision.max_patches} patches give an image {vision.vectors} tokens, more than '
            f'train.seq_len={config.train.seq_len}; use at most '
            f'{config.train.seq_len * vision.unit}, longer sequences, or '
            'vision.fusion=cross_attention'
        )
        yield Problem(
            'vision.max_patches',
            message,
            others=('train.seq_len', 'vision.merge_size', 'vision.fusion'),
        )
    if vision.image_token >= model.vocab_size:
        message = (
            f'{vision.image_token} is not a token id below model.vocab_size={model.vocab_size}; '
            f'use at most {model.vocab_size - 1}'
        )
        yield Problem('vision.image_token', message, others=('model.vocab_size',))
    has_others = config.relevance is not None or vision.is_crossed
    if not has_others and set(vision.freeze) == set(get_args(Part)):
        message = f'{list(vision.freeze)} leaves nothing to train; remove one of them'
        yield Problem('vision.freeze', message)
    yield from _taps(config)
    if vision.is_crossed:  # a cross-attention layer follows each group of layers
        every = ('vision.cross_every', vision.cross_every)
        yield from divides('model.num_layers', model.num_layers, *every, under='vision.fusion')


def _taps(config: 'Config') -> Iterator[Problem]:
    """Check the encoder layers of DeepStack; the model needs at least as many layers."""
    vision, layers = config.vision, config.model.num_layers
    assert vision is not None
    taps = vision.deepstack
    if list(taps) != sorted(set(taps)) or (taps and taps[-1] >= vision.num_layers):
        message = (
            f'{list(taps)} must be ascending layers of vision.num_layers={vision.num_layers}; '
            f'use 0 to {vision.num_layers - 1}'
        )
        yield Problem('vision.deepstack', message, others=('vision.num_layers',))
    if len(taps) > layers:
        message = (
            f'{list(taps)} has {len(taps)} layers, more than model.num_layers={layers}, each of '
            f'which adds one; use at most {layers}'
        )
        yield Problem('vision.deepstack', message, others=('model.num_layers',))
