"""Place batches from the host on the mesh; each process places its own sequences."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from megajax.core.config import Config, ConfigError, Problem, mistake
from megajax.core.parallel.layout import CONTEXT, batch_layout
from megajax.core.parallel.zigzag import position_at

Batch = dict[str, jax.Array]


def place_batch(batch: Mapping[str, np.ndarray], *, batch_size: int | None = None) -> Batch:
    """Place host arrays [B, S] on the current mesh, each data shard's sequences on its devices.

    Context shards have the tokens in the order of `zigzag.py`; an array [B, 1] is on all of them.
    Several processes must all pass the same whole batch, of which each places its own sequences.
    With `batch_size`, the arrays contain only the sequences `local_rows(batch_size)` of a batch of
    that size, which are this process's. Raises ConfigError for anything that is not such an array,
    and if context shards get a document that is not one range of tokens.
    """
    _check_arrays(batch)
    sharding, of_rows = _sharding('BS'), _sharding('B-')
    shards = sharding.mesh.shape.get(CONTEXT, 1)
    if shards > 1 and 'segment_ids' in batch:
        _check_documents(batch['segment_ids'])

    def place(x: np.ndarray) -> jax.Array:
        shape, is_of_rows = (batch_size or len(x), *x.shape[1:]), x.shape[1] == 1
        offset = local_rows(batch_size).start if batch_size else 0
        order = None if is_of_rows else shard_order(x.shape[1], shards)

        def rows(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(shape[0])
            mine = x[start - offset : stop - offset]
            return mine if order is None else mine[:, order[index[1]]]

        return jax.make_array_from_callback(shape, of_rows if is_of_rows else sharding, rows)

    return {name: place(x) for name, x in batch.items()}


def _check_arrays(batch: Mapping[str, np.ndarray]) -> None:
    """Raise ConfigError unless these are arrays with rows; other libraries' arrays have `ndim`."""
    if not isinstance(batch, Mapping):
        message = f'a {type(batch).__name__} is not a dict of arrays by name; see docs/api.md'
        raise mistake('batch', message)
    problems = []
    for name, x in batch.items():
        if getattr(x, 'ndim', 0) < 2:
            shape = f' of shape {x.shape}' if hasattr(x, 'shape') else ''
            message = (
                f'a {type(x).__name__}{shape} is not an array [rows, tokens]; give np.asarray of '
                'rows of equal length'
            )
            problems.append(Problem(f'batch[{name!r}]', message))
    if problems:
        raise ConfigError(*problems)


def _check_documents(document_BS: np.ndarray) -> None:
    """Raise ConfigError if a document continues after another one has begun."""
    signed_BS = np.asarray(document_BS).astype(np.int64)  # unsigned differences are never negative
    steps_BS = np.diff(signed_BS, axis=1)
    for row in np.flatnonzero((steps_BS < 0).any(axis=1)):
        if len(np.unique(document_BS[row])) <= np.count_nonzero(steps_BS[row]):
            message = (
                f'row {row} has a document in several parts, which context parallelism does not '
                'support; give each part its own id, or use mesh.context=1'
            )
            raise mistake("batch['segment_ids']", message)


def shard_order(length: int, shards: int) -> np.ndarray | None:
    """Return the position of the token at each index of a sequence, or None if all are in order."""
    return position_at(np.arange(length), length, shards) if shards > 1 else None


def local_rows(batch_size: int) -> slice:
    """Return the range of a batch's sequences that this process places on the current mesh.

    It is the smallest range that contains them all, and may contain sequences of other processes.
    """
    rows = [
        index[0].indices(batch_size)
        for index in _sharding('B').addressable_devices_indices_map((batch_size,)).values()
        if index
    ]
    return slice(min(start for start, _, _ in rows), max(stop for _, stop, _ in rows))


def _sharding(dims: str) -> NamedSharding:
    mesh = jax.sharding.get_mesh()
    return NamedSharding(mesh, batch_layout(mesh.axis_names)(dims))


def abstract_batch(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, dtypes and shardings of a batch on the current mesh."""
    rows, length = config.train.batch_size, config.train.seq_len
    shapes: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
        'tokens': ((length,), jnp.int32),
        'labels': ((length,), jnp.int32),
        'loss_mask': ((length,), jnp.float32),
    }
    if config.data.document_mask:
        shapes |= dict.fromkeys(('segment_ids', 'positions'), ((length,), jnp.int32))
    if config.model.is_bert:
        shapes |= dict.fromkeys(('segment_ids', 'token_types'), ((length,), jnp.int32))
        shapes['swapped'] = (1,), jnp.int32
    if config.vision is not None:
        vision = config.vision
        shapes |= {
            'pixels': ((vision.images, vision.max_patches, vision.pixels), jnp.uint8),
            'image_grid': ((vision.images, 2), jnp.int32),
            'image_index': ((length,), jnp.int32),
        }
        if config.model.position == 'mrope':  # text without images has one number per position
            shapes['positions'] = (length, 3), jnp.int32
    return {
        name: jax.ShapeDtypeStruct(
            (rows, *shape), dtype, sharding=_sharding('B-' if shape == (1,) else 'BS')
        )
        for name, (shape, dtype) in shapes.items()
    }
