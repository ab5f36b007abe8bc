"""Functions of each device's part of arrays, in a computation that is mapped over data shards.

A kernel supports neither Explicit axes nor the dims that a training step maps, and the collectives
of a `shard_map` depend on the device. A mapped dim is sharded over its mesh axes, so each device
has one element of it, and a `shard_map` over all axes gives each device this element.
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

    Arguments that are not mapped, such as weights, are the same for all devices along the mapped
    dims. Arguments may be None. Given the shardings of the arguments that are arrays, `out` returns
    the shardings of the results, which begin with all mapped dims. If nothing is mapped, `unmapped`
    is applied instead of a function that communicates along a mapped dim.
    """

    @functools.cache
    def with_mapped(
        counts: tuple[int, ...], is_given: tuple[bool, ...]
    ) -> Callable[..., tuple[jax.Array, ...]]:
        """Return the function for arrays with these numbers of leading mapped dims."""
        most = max(counts)

        @jax.custom_batching.custom_vmap
        def on_devices(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            specs = tuple(jax.typeof(x).sharding.spec for x in arrays)

            def on_device(*arrays: jax.Array) -> tuple[jax.Array, ...]:
                apply = unmapped if unmapped and most == 0 else function
                parts = (x.reshape(x.shape[n:]) for x, n in zip(arrays, counts, strict=True))
                args = (next(parts) if is_array else None for is_array in is_given)
                return tuple(y.reshape(*(1,) * most, *y.shape) for y in apply(*args))

            of_devices = jax.shard_map(
                on_device, in_specs=specs, out_specs=tuple(out(specs)), check_vma=False
            )
            return of_devices(*arrays)

        @on_devices.def_vmap
        def rule(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
            now = tuple(count + is_mapped for count, is_mapped in zip(counts, batched, strict=True))
            results = with_mapped(now, is_given)(*arrays)
            return results, (True,) * len(results)

        return on_devices

    def of_arrays(*args: jax.Array | None) -> tuple[jax.Array, ...]:
        arrays = [x for x in args if x is not None]
        is_given = tuple(x is not None for x in args)
        return with_mapped((0,) * len(arrays), is_given)(*arrays)

    return of_arrays
