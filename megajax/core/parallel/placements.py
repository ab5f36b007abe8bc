"""The sharding of every parameter, and its bytes per device."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The name, global shape, mesh axes per dim and bytes per device of an array."""

    name: str
    shape: tuple[int, ...]
    spec: tuple[str | tuple[str, ...] | None, ...]
    bytes_per_device: int

    def __str__(self) -> str:
        dims = ', '.join(
            f'{size}@{"+".join(axes)}' if axes else f'{size}'
            for size, axes in zip(self.shape, self.axes, strict=True)
        )
        return f'{self.name} [{dims}] {self.bytes_per_device:,} bytes per device'

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of each dim, outermost first; () if it is not sharded."""
        entries = *self.spec, *(None,) * (len(self.shape) - len(self.spec))
        return tuple(
            () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            for entry in entries
        )

    @property
    def mesh_axes(self) -> frozenset[str]:
        """The mesh axes that shard the array."""
        return frozenset(axis for axes in self.axes for axis in axes)


def placements(tree: Any) -> list[Placement]:
    """Return the sharding of every array of a model, a parameter tree or a state.

    The arrays may be allocated or abstract.
    """
    return list(_placements(tree))


def parameter_name(path: tuple[Any, ...]) -> str:
    """Return the dotted name of a leaf's path, such as `layers.attention.qkv.weight`."""
    keys = (
        str(getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key)))) for key in path
    )
    return '.'.join(key for key in keys if key != 'value')


def _placements(tree: Any) -> Iterator[Placement]:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        assert isinstance(x.sharding, NamedSharding)
        shard = x.sharding.shard_shape(x.shape)
        size = x.dtype.itemsize
        for dim in shard:
            size *= dim
        yield Placement(
            name=parameter_name(path),
            shape=x.shape,
            spec=tuple(x.sharding.spec),
            bytes_per_device=size,
        )
