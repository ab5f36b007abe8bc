"""Corpora of synthetic images of words, which are drawn on the fly, without files or downloads."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from megajax.core.config import Config, mistake
from megajax.core.config.overlap_rules import length_multiple
from megajax.core.config.vision import DRAWN, FINEST
from megajax.runtime.data.corpus_tokenizer import check_image_token
from megajax.runtime.data.image_rows import RowShape
from megajax.runtime.data.patches import PatchSize
from megajax.runtime.data.synthetic_batches import PictureBatches
from megajax.runtime.data.synthetic_images import (
    IMAGE,
    LINES,
    NUM_HELD_OUT,
    Picture,
    lines_picture,
    word_picture,
    words,
)
from megajax.runtime.data.text.tokenizer import Tokenizer, load_tokenizer, make_tokenizer

# Values of `data.corpus`: images of one word, or of four words, one of which is asked for.
PICTURES: dict[str, Callable[..., Picture]] = dict(
    zip(DRAWN, (word_picture, lines_picture), strict=True)
)
NO_TOKEN = -1


class Drawn(NamedTuple):
    """The images of a run, and the tokenizer of their questions and answers."""

    tokenizer: Tokenizer
    train: PictureBatches  # endless batches
    validation: PictureBatches  # one image of each held-out word
    summary: str
    fingerprint: str  # hash of the words


def draw_pictures(config: Config) -> Drawn:
    """Return the images that `data.corpus` names.

    Raises ConfigError for a model without a vision encoder, for a different tokenizer, and if a
    sequence is too short.
    """
    draw, seed, shape = _drawing(config), config.train.seed, row_shape(config)
    tokenizer = drawn_tokenizer(config)
    _check_tokenizer(config, tokenizer)
    make = partial(
        PictureBatches, shape=shape, tokenizer=tokenizer, batch_size=config.train.batch_size
    )
    train = make(partial(draw, 'train', seed))
    validation = make(partial(draw, 'held_out', seed), count=NUM_HELD_OUT)
    if config.data.corpus == 'words':
        scalable = partial(draw, 'held_out', seed, font='scalable')
        validation.unlike = make(scalable, count=NUM_HELD_OUT)
    _check(config, tokenizer, validation)
    known = words()['train']
    return Drawn(
        tokenizer,
        train,
        validation,
        f'images of {len(known):,} words to train on, of {NUM_HELD_OUT} others to validate',
        hashlib.sha256('\n'.join(known).encode()).hexdigest(),
    )


def drawn_tokenizer(config: Config) -> Tokenizer:
    """Return the tokenizer of the questions and answers about images that are drawn."""
    return make_tokenizer('bytes', config.model.vocab_size, special=(IMAGE,))


def _check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if `data.tokenizer` is not the tokenizer of images that are drawn."""
    spec = config.data.tokenizer
    if spec in ('auto', 'bytes'):
        return
    if spec in ('bpe', 'none') or load_tokenizer(spec).fingerprint != tokenizer.fingerprint:
        message = f'{spec} is not the tokenizer of data.corpus={config.data.corpus}; use bytes'
        raise mistake('data.tokenizer', message, 'data.corpus')


def _drawing(config: Config) -> Callable[..., Picture]:
    """Return the function that draws images; with relevance, a region contains one line."""
    draw, relevance, vision = PICTURES[config.data.corpus], config.relevance, config.vision
    if relevance is None or vision is None or config.data.corpus != 'lines':
        return draw
    if relevance.regions != (LINES, 1):
        message = (
            f'{list(relevance.regions)} divides lines; use [{LINES}, 1], a region for each line'
        )
        raise mistake('relevance.regions', message)
    side = FINEST * vision.patch_size * vision.merge_size
    return partial(draw, line_size=(side, side))


def _of_relevance(config: Config) -> dict[str, Any]:
    """Return the fixed patch grid of every image, and its number of embeddings."""
    relevance, vision = config.relevance, config.vision
    if relevance is None or vision is None:
        return {}
    rows, columns = (units * vision.merge_size for units in relevance.units)
    return {'budget': relevance.total_tokens, 'grid': (rows, columns)}


def _check(config: Config, tokenizer: Tokenizer, batches: PictureBatches) -> None:
    """Raise ConfigError for a wrong image token, or if an image and its answer are too long."""
    check_image_token(config, tokenizer)
    longest = max(len(batches.document(picture).tokens) for picture in batches.pictures)
    if longest > config.train.seq_len + 1:
        message = (
            f'{config.train.seq_len} is too short for images of {config.data.corpus}, '
            f'which have up to {longest} tokens with question and answer; use {longest} or more'
        )
        raise mistake('train.seq_len', message, 'data.corpus')


def row_shape(config: Config) -> RowShape:
    """Return the shape of the sequences that the encoder of a config reads.

    Raises ConfigError without an encoder.
    """
    vision = config.vision
    if vision is None:
        message = f'{config.data.corpus} are images; add the section vision, or name a text corpus'
        raise mistake('data.corpus', message)
    patches = PatchSize(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        max_patches=vision.max_patches,
        min_patches=vision.min_patches,
        marked=vision.is_crossed,
        **_of_relevance(config),
    )
    return RowShape(
        images=vision.images,
        patches=patches,
        image_token=vision.image_token,
        **_of_text(config),
    )


def document_row_shape(config: Config) -> RowShape:
    """Return the shape of sequences of whole documents; without an encoder they have no image
    slots.
    """
    if config.vision is not None:
        return row_shape(config)
    return RowShape(
        images=0,
        patches=PatchSize(patch_size=1, merge_size=1, max_patches=1),
        image_token=NO_TOKEN,
        **_of_text(config),
    )


def _of_text(config: Config) -> dict[str, Any]:
    return {
        'seq_len': config.train.seq_len,
        'max_seq_len': config.model.max_seq_len,
        'multiple': length_multiple(config),
        # A text model has one number per position.
        'mrope': config.vision is not None and config.model.position == 'mrope',
        'document_mask': config.data.document_mask,
    }
