"""The batch of a step, cut into the microbatches of each data shard."""

import logging

import jax
import jax.numpy as jnp

from megajax.core.config import Config, ConfigError, Problem, mistake
from megajax.core.config.rules import of_batch
from megajax.core.model.arr_coc.relevance import question
from megajax.core.model.documents import first_tokens, of_all_shards
from megajax.core.model.dropout import sequence_keys
from megajax.core.model.images import Images
from megajax.core.model.rows import Rows
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.zigzag import position_at
from megajax.core.train.feed import Batch

# Arrays of a batch with one element per sequence. Each process traces them in this order: the order
# of a set differs between processes, and so would their programs.
OF_ROWS = 'rows', 'swapped', 'row_weights'
OF_IMAGES = 'pixels', 'image_grid', 'image_index'

logger = logging.getLogger(__name__)


def with_weights(batch: Batch, config: Config, layout: Layout) -> Batch:
    """Return a batch with the weight of each token in the loss, and the row indices for dropout.

    Without a counted token, all weights are zero. With experts, the batch gets `real`: 0 for the
    padding at the end of sequences, on which no counted token depends, and 1 for all other tokens.
    On context shards the tokens are not in order, so the batch also gets their places. Raises
    ConfigError if the config would not accept these numbers of rows and tokens.
    """
    _check_shape(batch, config)
    # Weights that add up to one over the global batch make the mean exact, however the mask is
    # distributed over the shards. Their sum may exceed the range of a mask in 16 bits.
    mask_BS = batch['loss_mask'].astype(jnp.float32)
    total = mask_BS.sum()
    added = {'weights': mask_BS / jnp.where(total > 0, total, 1)}
    if config.model.is_bert:
        real_B1 = real_rows(batch)
        added['row_weights'] = real_B1 / jnp.maximum(real_B1.sum(), 1)
        if config.model.experts is not None:
            added['real'] = _outside_padding(batch, real_B1, layout)
    elif config.model.experts is not None:
        added['real'] = _up_to_last_label(batch, layout)
    if config.model.has_dropout or config.relevance is not None:
        added['rows'] = jnp.arange(mask_BS.shape[0], out_sharding=layout('B'))
    rest = {name: x for name, x in batch.items() if name != 'loss_mask'}
    batch = {**rest, **added}
    return for_shards(batch, config, layout) if layout.mesh_axes('S') else batch


def check_arrays(batch: Batch, config: Config) -> None:
    """Raise ConfigError for a batch from which the loss cannot be computed."""
    needed = _needed(batch, config)
    shown = {name: f'{name} [{", ".join(map(str, shape))}]' for name, shape in needed.items()}
    if missing := [name for name in needed if name not in batch]:
        given = ', '.join(shown[name] for name in missing)
        message = (
            f'has no {" and no ".join(missing)}; give the array{"s" * (len(missing) > 1)} {given}'
        )
        raise mistake('batch', message)
    for name, shape in needed.items():
        if batch[name].shape[2:] != shape[2:]:
            message = f'has the shape {batch[name].shape}; give {shown[name]}'
            raise mistake(f'batch[{name!r}]', message)


def _needed(batch: Batch, config: Config) -> dict[str, tuple[str | int, ...]]:
    """Return the shape of each array that the loss needs; sequences may have no images."""
    of_tokens, vision = ('rows', 'tokens'), config.vision
    needed: dict[str, tuple[str | int, ...]] = dict.fromkeys(
        ('tokens', 'labels', 'loss_mask'), of_tokens
    )
    if config.model.is_bert:
        needed |= {'token_types': of_tokens, 'swapped': ('rows', 1)}
    if vision is not None and not batch.keys().isdisjoint(OF_IMAGES):
        needed['pixels'] = 'rows', 'images', vision.max_patches, vision.pixels
        needed |= {'image_grid': ('rows', 'images', 2), 'image_index': of_tokens}
        if config.model.position == 'mrope':
            needed['positions'] = *of_tokens, 3
    return needed


def _check_shape(batch: Batch, config: Config) -> None:
    """Raise ConfigError if the batch has a shape that the config would not accept."""
    rows, length = batch['tokens'].shape
    if (rows, length) == (config.train.batch_size, config.train.seq_len):
        return
    _warn_of_parts(rows, config)
    if problems := of_batch(config, rows, length):
        of = f'{rows:,} rows of {length:,} tokens do not fit the config'
        raise ConfigError(
            *(Problem('batch', f'{of}: {problem}', problem.others) for problem in problems)
        )


def _warn_of_parts(rows: int, config: Config) -> None:
    """Log a warning if each process may have passed its own rows to `place_batch` as the batch."""
    count, whole = jax.process_count(), config.train.batch_size
    if count > 1 and rows * count == whole:
        logger.warning(
            'batch: %d rows in %d processes, and train.batch_size=%d: place_batch takes the same '
            'whole batch in each process. If these are the rows local_rows(%d) of this process, '
            'give it batch_size=%d: now most of them are not used',
            *(rows, count, whole, whole, whole),
        )


def for_shards(batch: Batch, config: Config, layout: Layout) -> Batch:
    """Return a batch with the arrays that context shards need.

    They get the position of each token, unless the batch has positions. With documents, they get
    the position of the first token of each token's document, which identifies the document, or the
    documents of all tokens if attention is bidirectional or by heads. Arrays with one element per
    sequence get one for each shard. The first shard has the first token, so the weights of
    sequences are zero on all others.
    """
    rows, shards = len(batch['tokens']), layout.num_shards('S')
    added = {}
    if 'segment_ids' in batch:
        ids, by_heads = batch['segment_ids'], config.mesh.exchanges_heads
        added['segment_ids'] = (
            first_tokens(ids, layout)
            if config.model.causal and not by_heads
            else of_all_shards(ids, layout, ordered=by_heads)
        )
    if 'positions' not in batch:
        added['positions'] = places(batch, layout)
    for name in filter(batch.__contains__, OF_ROWS):
        x_B1 = batch[name].reshape(rows, 1, out_sharding=layout('B-'))
        added[name] = jax.reshard(jnp.broadcast_to(x_B1, (rows, shards)), layout('BS'))
    if 'row_weights' in added:
        is_first = jnp.arange(shards, out_sharding=layout('S'))[None] == 0
        added['row_weights'] = jnp.where(is_first, added['row_weights'], 0)
    return batch | added


def places(batch: Batch, layout: Layout) -> jax.Array:
    """Return the place [B, S] of each token in its sequence."""
    shape, shards = batch['tokens'].shape, layout.num_shards('S')
    place_BS = jax.lax.broadcasted_iota(jnp.int32, shape, 1, out_sharding=layout('BS'))
    return place_BS if shards == 1 else position_at(place_BS, shape[1], shards)


def _up_to_last_label(batch: Batch, layout: Layout) -> jax.Array:
    """Return [B, S]: 1 for tokens up to the last counted one, and 0 for those after it."""
    place_BS = places(batch, layout)
    counted_BS = jnp.where(batch['loss_mask'] > 0, place_BS, -1)
    last_B1 = counted_BS.max(-1, keepdims=True)  # all-reduce over context
    return (place_BS <= last_B1).astype(jnp.float32)


def _outside_padding(batch: Batch, real_B1: jax.Array, layout: Layout) -> jax.Array:
    """Return [B, S]: 1 for tokens of BERT, which are the first segment, and 0 for padding."""
    if (segment_BS := batch.get('segment_ids')) is None:
        return jax.reshard(jnp.broadcast_to(real_B1, batch['tokens'].shape), layout('BS'))
    first_B1 = segment_BS.astype(jnp.int32).min(-1, keepdims=True)  # all-reduce over context
    return real_B1 * (segment_BS == first_B1)


def real_rows(batch: Batch) -> jax.Array:
    """Return [B, 1]: 1 for sequences with a counted token, 0 for sequences that pad the batch."""
    return (batch['loss_mask'].max(-1, keepdims=True) > 0).astype(jnp.float32)


def rows_of(shard: Batch, key: jax.Array | None = None) -> Rows:
    """Return the arrays next to a shard's tokens; `key` is for dropout."""
    keys = None if key is None or 'rows' not in shard else sequence_keys(key, shard['rows'].ravel())
    return Rows(
        shard.get('positions'),
        shard.get('segment_ids'),
        shard.get('token_types'),
        keys,
        real_BS=shard.get('real'),
    )


def images_of(shard: Batch, key: jax.Array | None = None) -> Images:
    """Return the images of a shard's sequences.

    `key` is for dropout; the noise of relevance is derived from it, too.
    """
    index_BS, keys = shard['image_index'], rows_of(shard, key).key_B
    is_question_BS = question(shard['weights'], index_BS)
    return Images(shard['pixels'], shard['image_grid'], index_BS, is_question_BS, keys)


def split(x: jax.Array, num_microbatches: int, layout: Layout) -> jax.Array:
    """Reshape [B, ...] to [microbatch, *shards, sequence, ...], with shards as in `Layout.mapped`.

    Each data shard splits its own sequences into microbatches, and each context shard keeps its own
    tokens, so nothing moves between devices.
    """
    batch, context = layout.mesh_axes('B'), layout.mesh_axes('S')
    rows = x.shape[0] // (num_microbatches * layout.num_shards('B'))
    if not context:
        shape = *layout.sizes_of(layout.mapped), num_microbatches, rows, *x.shape[1:]
        parts = x.reshape(shape, out_sharding=layout.stacked('-' * (x.ndim + 1), layout.mapped))
        return jnp.moveaxis(parts, len(layout.mapped), 0)
    shards = layout.num_shards('S')
    tokens = x.shape[1] // shards
    one_by_one = [(axis,) for axis in batch]
    shape = *layout.sizes_of(one_by_one), num_microbatches, rows, shards, tokens
    parts = x.reshape(shape, out_sharding=layout.stacked('--S-', one_by_one))
    parts = jnp.moveaxis(parts, -2, len(batch))
    shape = *layout.sizes_of(layout.mapped), num_microbatches, rows, tokens
    parts = parts.reshape(shape, out_sharding=layout.stacked('---', layout.mapped))
    return jnp.moveaxis(parts, len(layout.mapped), 0)
