"""The receiving side of a ragged all-to-all as a jax function.

G: devices of a group, P: slices that a device sends, R: rows of a device, O: rows of its output.
"""

import jax
import jax.numpy as jnp
from jax import lax


def received(
    out_O: jax.Array,
    x_GR: jax.Array,
    start_GP: jax.Array,
    size_GP: jax.Array,
    place_GP: jax.Array,
    rank_1: jax.Array,
) -> tuple[jax.Array]:
    """Return the output of the device with this rank, with the rows that the group sends to it.

    Each device sends P/G slices to each rank, in the order of the ranks. A slice has `size_GP` rows
    of the sender, from `start_GP`, and begins at row `place_GP` of the receiver's output. Other
    rows of the output do not change. See `jax.lax.ragged_all_to_all`.
    """
    slices = start_GP.shape[1] // len(x_GR)
    row_O = jnp.arange(len(out_O))

    def receive(
        out_O: jax.Array, sender: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        x_R, *sent = sender
        for each in range(slices):
            start, size, place = (numbers_P[rank_1[0] * slices + each] for numbers_P in sent)
            is_sent_O = (place <= row_O) & (row_O < place + size)
            rows_O = jnp.take(x_R, row_O - place + start, axis=0, mode='clip')
            out_O = jnp.where(is_sent_O.reshape(-1, *[1] * (x_R.ndim - 1)), rows_O, out_O)
        return out_O, None

    return (lax.scan(receive, out_O, (x_GR, start_GP, size_GP, place_GP))[0],)
