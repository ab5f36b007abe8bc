"""The memory of a device while a trained model is loaded. Imports no jax."""

from megajax.core.config.schema import Config
from megajax.core.counts.parameters import (
    BYTES,
    dim_sizes,
    dtype_at_rest,
    elements,
    num_at_rest,
    parameters,
)
from megajax.core.parallel.layout import Layout


def loading_bytes(config: Config, *, cast: bool) -> int:
    """Return the peak bytes of weights per device while `config`'s model is loaded.

    With `cast`, the matrices are read in the compute dtype, as for a `Generator`. It separates the
    layers, so that all weights are in memory twice: as stored, and as generation uses them.
    """
    model, layout = config.model, Layout.of(config)
    sizes, total = dim_sizes(model), 0
    for _, x in parameters(model):
        is_cast = cast and x.is_matrix
        itemsize = BYTES[config.train.compute_dtype if is_cast else dtype_at_rest(x, config)]
        used = elements(x.dims, sizes, layout.shards) if cast else 0
        total += itemsize * (num_at_rest(x, model, layout) + used)
    return total
