"""Store the arrays of a checkpoint without padding.

The sharded storage pads a matrix that cannot be divided evenly among its shards
(`core/parallel/layout.py`). The padding depends on the mesh, so a checkpoint stores parameters and
moments in their unpadded shapes, and can be restored on any mesh. Each process writes its padded
shards. The recorded shapes are then reduced, which moves no data, because a reader does not see
elements beyond the end of an array. When a checkpoint is restored, it is padded with zeros again,
shard by shard.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import tensorstore
from flax import nnx

from megajax.core.parallel.layout import Layout

Shape = tuple[int, ...]


def unpadded(tree: Any, layout: Layout) -> Any:
    """Return the shapes and dtypes of a state, or a part of one, as a checkpoint stores them.

    The state of an optimizer that is not shaped like its parameter (factored moments, for example)
    keeps its shape.
    """

    def own(x: Any) -> Any:
        if not isinstance(x, nnx.Variable):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        is_matrix, dims = x.declared.is_matrix, x.declared.dims

        def of_array(value: Any) -> jax.ShapeDtypeStruct:
            shape = _without_padding(value.shape, dims, layout) if is_matrix else value.shape
            return jax.ShapeDtypeStruct(shape, value.dtype)

        return x.replace(jax.tree.map(of_array, x.get_value()))

    return jax.tree.map(own, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _without_padding(shape: Shape, dims: str, layout: Layout) -> Shape:
    sizes, padding = layout.unpadded(dims), layout.padding(dims)
    if len(shape) != len(dims) or any(
        size is not None and own != size + more
        for own, size, more in zip(shape, sizes, padding, strict=True)
    ):
        return shape
    return tuple(size or own for size, own in zip(sizes, shape, strict=True))


def strip_padding(folder: Path, shapes: Mapping[str, Shape]) -> None:
    """Reduce the arrays with these names, in a folder that Orbax wrote, to these shapes.

    All arrays change in one transaction, which requires that they share a context.
    """
    context, transaction = tensorstore.Context(), tensorstore.Transaction(atomic=True)
    for name, shape in shapes.items():
        array = tensorstore.open(
            _spec(folder, name), open=True, context=context, transaction=transaction
        ).result()
        array.resize(exclusive_max=shape, shrink_only=True).result()
    transaction.commit_sync()


def _spec(folder: Path, name: str) -> dict[str, Any]:
    base = {'driver': 'file', 'path': f'{folder.absolute()}/'}
    path = f'{name.replace("/", ".")}/'
    return {'driver': 'zarr', 'kvstore': {'driver': 'ocdbt', 'base': base, 'path': path}}
