"""Batches from the host onto the mesh; each process reads and places its own rows."""

import logging
from collections.abc import Callable, Mapping
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from megajax.config import Config, ConfigError, Problem, RunError
from megajax.data import Batch as HostBatch
from megajax.data import Batches
from megajax.parallel.layout import CONTEXT, batch_layout
from megajax.parallel.zigzag import position_at
from megajax.processes.agree import from_all

logger = logging.getLogger(__name__)

Batch = dict[str, jax.Array]


class PlacedBatches:
    """The batches of steps `first` up to `last` on the current mesh, read ahead.

    Each process reads its own rows. In a run of one process, a read error is raised at once. In a
    run of several, a process that cannot read its rows must still take part in the step that all
    of them compute, or the others would wait forever: it feeds rows whose loss is not a number.
    All processes call `check` when they see such a loss, and it raises in every one.
    """

    def __init__(
        self,
        batches: Batches,
        first: int,
        last: int,
        *,
        prepare: Callable[[HostBatch], HostBatch] = lambda batch: batch,
    ):
        self._batches, self._prepare, self._rows = batches, prepare, local_rows(batches.batch_size)
        self._read = batches.read_ahead(first, last, self._rows)
        self._error: Exception | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        try:
            # After an error the rows of every later batch are unreadable too: the next step may be
            # dispatched before the failure is known, and it must not change anything either.
            batch = next(self._read) if self._error is None else self._unreadable()
        except StopIteration:
            raise
        except Exception as error:
            if jax.process_count() == 1:
                raise
            # Logged now, because the others may end this process before it reports the error.
            if not isinstance(error, RunError):
                logger.exception('this process could not read its rows of a batch')
            self._error = self._error or error
            batch = self._unreadable()
        return place_batch(self._prepare(batch), batch_size=self._batches.batch_size)

    def _unreadable(self) -> HostBatch:
        return self._batches.unreadable(self._rows.stop - self._rows.start)

    def check(self) -> None:
        """Raise in all processes if one of them could not read its rows; all must call this."""
        if jax.process_count() == 1:
            return
        failed = from_all(self._error is not None)[:, 0]
        if self._error is not None:
            raise self._error
        if failed.any():
            raise ConfigError(
                f'process {int(failed.argmax())} could not read its rows of a batch: '
                'see what it printed'
            )


def place_batch(batch: Mapping[str, np.ndarray], *, batch_size: int | None = None) -> Batch:
    """Place host arrays [B, S] on the current mesh, the rows of each data shard on its devices.

    Context shards have the tokens in the order of `zigzag.py`. With `batch_size`, the arrays hold
    only this process's rows of a batch of that size. Raises ConfigError for what is not such an
    array.
    """
    _check_arrays(batch)
    sharding = _sharding()
    shards = sharding.mesh.shape.get(CONTEXT, 1)

    def place(x: np.ndarray) -> jax.Array:
        shape = batch_size or len(x), *x.shape[1:]
        offset = local_rows(batch_size).start if batch_size else 0
        order = shard_order(x.shape[1], shards)

        def rows(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(shape[0])
            mine = x[start - offset : stop - offset]
            return mine if order is None else mine[:, order[index[1]]]

        return jax.make_array_from_callback(shape, sharding, rows)

    return {name: place(x) for name, x in batch.items()}


def _check_arrays(batch: Mapping[str, np.ndarray]) -> None:
    """Raise ConfigError for what is no array with rows; those of other libraries have `ndim`."""
    if not isinstance(batch, Mapping):
        message = f'a {type(batch).__name__} is not a dict of arrays by name; see docs/python.md'
        raise ConfigError(Problem(path='batch', message=message))
    problems = []
    for name, x in batch.items():
        if getattr(x, 'ndim', 0) < 2:
            shape = f' of shape {x.shape}' if hasattr(x, 'shape') else ''
            message = (
                f'a {type(x).__name__}{shape} is not an array [rows, tokens]; give np.asarray of '
                'rows of equal length'
            )
            problems.append(Problem(path=f'batch[{name!r}]', message=message))
    if problems:
        raise ConfigError(*problems)


def shard_order(length: int, shards: int) -> np.ndarray | None:
    """Return the position of the token at each place of a sequence; None where all are in order."""
    return position_at(np.arange(length), length, shards) if shards > 1 else None


def local_rows(batch_size: int) -> slice:
    """The smallest range of rows of a batch that contains all rows on this process's devices.

    Rows in between that belong to other processes are included.
    """
    mesh = jax.sharding.get_mesh()
    sharding = NamedSharding(mesh, batch_layout(mesh.axis_names)('B'))
    rows = [
        index[0].indices(batch_size)
        for index in sharding.addressable_devices_indices_map((batch_size,)).values()
        if index
    ]
    return slice(min(start for start, _, _ in rows), max(stop for _, stop, _ in rows))


def _sharding() -> NamedSharding:
    mesh = jax.sharding.get_mesh()
    return NamedSharding(mesh, batch_layout(mesh.axis_names)('BS'))


def abstract_batch(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes, dtypes and placements of a batch on the current mesh."""
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
    if config.model.position == 'mrope':
        shapes['positions'] = (length, 3), jnp.int32
    sharding = _sharding()
    return {
        name: jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding)
        for name, (shape, dtype) in shapes.items()
    }
