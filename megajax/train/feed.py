"""Batches from the host onto the mesh; each process reads and places its own rows. B batch, S sequence."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from megajax.config import Config
from megajax.data import Batches
from megajax.parallel import layout

Batch = dict[str, jax.Array]


def placed_batches(batches: Batches, first: int, last: int) -> Iterator[Batch]:
    """The batches of steps `first` up to `last` on the current mesh, read ahead."""
    for batch in batches.read_ahead(first, last, local_rows(batches.batch_size)):
        yield place_batch(batch, batch_size=batches.batch_size)


def place_batch(batch: Mapping[str, np.ndarray], *, batch_size: int | None = None) -> Batch:
    """Host arrays [B, S], the rows of each data shard on its devices; with `batch_size`, the arrays hold this process's rows alone."""
    sharding = NamedSharding(jax.sharding.get_mesh(), layout.BATCH)

    def place(x: np.ndarray) -> jax.Array:
        shape = batch_size or len(x), *x.shape[1:]
        offset = local_rows(batch_size).start if batch_size else 0

        def rows(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(shape[0])
            return x[start - offset : stop - offset]

        return jax.make_array_from_callback(shape, sharding, rows)

    return {name: place(x) for name, x in batch.items()}


def local_rows(batch_size: int) -> slice:
    """The rows of a batch that this process's devices hold, and perhaps others between them."""
    sharding = NamedSharding(jax.sharding.get_mesh(), layout.BATCH)
    rows = [index[0].indices(batch_size) for index in sharding.addressable_devices_indices_map((batch_size, 1)).values() if index]
    return slice(min(start for start, _, _ in rows), max(stop for _, stop, _ in rows))


def abstract_batch(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch in shapes and places on the current mesh."""
    sharding = NamedSharding(jax.sharding.get_mesh(), layout.BATCH)
    shape = config.train.batch_size, config.train.seq_len
    dtypes = {'tokens': jnp.int32, 'labels': jnp.int32, 'loss_mask': jnp.float32}
    if config.data.document_mask:
        dtypes |= {'segment_ids': jnp.int32, 'positions': jnp.int32}
    if not config.model.causal:
        dtypes |= {'segment_ids': jnp.int32, 'token_types': jnp.int32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
    return batch if config.model.causal else batch | {'swapped': jax.ShapeDtypeStruct((shape[0], 1), jnp.int32, sharding=sharding)}
