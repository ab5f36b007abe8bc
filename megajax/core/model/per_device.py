"""Functions of each device's part of arrays, in a computation that is mapped over data shards.

A kernel supports neither Explicit axes nor the dims that a training step maps, and collectives of a
`shard_map` need to know the device. A mapped dim is sharded over its mesh axes, so each device has
one element of it, and a `shard_map` over all axes reaches that directly.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import P

Specs = Sequence[P]


def per_device(
    function: Callable[..., tuple[jax.Array, ...]],
    out: Callable[[Specs], Specs],
    unmapped: Callable[..., tuple[jax.Array, ...]] | None = None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return `function`, applied to each device's part of its arguments, however they are mapped.

    `out` returns the shardings of the results, given the shardings of the arguments; both begin
    with the mapped dims. If nothing is mapped, `unmapped` replaces a function that communicates
    along a mapped dim.
    """

    @functools.cache
    def with_mapped(count: int) -> Callable[..., tuple[jax.Array, ...]]:
        """Return the function for arrays with this number of leading mapped dims."""

        @jax.custom_batching.custom_vmap
        def on_devices(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            specs = tuple(jax.typeof(x).sharding.spec for x in arrays)

            def on_device(*arrays: jax.Array) -> tuple[jax.Array, ...]:
                apply = unmapped if unmapped and count == 0 else function
                results = apply(*(x.reshape(x.shape[count:]) for x in arrays))
                return tuple(y.reshape(*(1,) * count, *y.shape) for y in results)

            of_devices = jax.shard_map(
                on_device, in_specs=specs, out_specs=tuple(out(specs)), check_vma=False
            )
            return of_devices(*arrays)

        @on_devices.def_vmap
        def rule(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
            assert all(batched)
            results = with_mapped(count + 1)(*arrays)
            return results, (True,) * len(results)

        return on_devices

    return with_mapped(0)
