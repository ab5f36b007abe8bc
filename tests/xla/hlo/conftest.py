"""Programs whose collectives are known, compiled and read back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.dump import without_cache
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.text import program_text


@pytest.fixture
def read() -> Callable[..., list[Collective]]:
    """What a function of shards sends, of a device's own array of `shape`, on a mesh of data x
    model.
    """

    def read(
        function: Callable[..., Any],
        *,
        mesh: tuple[int, int] = (2, 4),
        shape: tuple[int, ...] = (8, 16),
        dtype: Any = jnp.float32,
        trip_count: int | None = None,
        skipped: str = '',
    ) -> list[Collective]:
        devices = jax.make_mesh(
            mesh, ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2
        )
        whole = (shape[0] * mesh[0], shape[1] * mesh[1], *shape[2:])
        mapped = jax.shard_map(
            function,
            mesh=devices,
            in_specs=jax.P('data', 'model'),
            out_specs=jax.P(('data', 'model')),
            check_vma=False,
        )
        lowered = jax.jit(mapped).lower(jax.ShapeDtypeStruct(whole, dtype))
        with without_cache():  # whose programs have the source lines of the day they were compiled
            text = program_text(lowered.compile())
        return collectives(
            Program(text, trip_count=trip_count, skipped=skipped), dict(devices.shape)
        )

    return read
