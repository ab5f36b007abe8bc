"""The exchanges of matrices, and the Newton-Schulz iterations, of a training step with Muon.

`core/train/whole_matrices.py` and `core/train/muon.py` compute them. Megatron's layer-wise
optimizer (`optimizer/layer_wise_optimizer.py` of Megatron-Core) shards whole matrices over `data`,
so its Muon sends nothing over `data`, but each tensor-parallel group all-gathers the momentum of
each matrix in fp32. Imports no jax.
"""

import dataclasses
import functools
from collections.abc import Iterator
from math import prod

from megajax.core.config import Config
from megajax.core.counts.collective import EXCHANGE, GATHER, Expected, Site, axes_text
from megajax.core.counts.parameters import dim_sizes, elements, parameters
from megajax.core.counts.product import Product
from megajax.core.counts.whole_matrices import Form, pools
from megajax.core.parallel.layout import Layout
from megajax.xla.hlo.program import Array

SOURCE = 'emerging_optimizers newton_schulz_tp, tp_mode=duplicated'


@dataclasses.dataclass(frozen=True)
class Pool:
    """The matrices of one form on a device."""

    form: Form
    matrices: int  # number of matrices of a group
    count: int  # the same with padding
    copies: int  # number of devices that hold the same pieces
    by_elements: bool  # see `Form.by_elements`

    @property
    def whole(self) -> int:
        """The number of matrices that a device orthogonalizes."""
        return self.count // self.num_devices

    @property
    def num_devices(self) -> int:
        """The number of devices that a group of matrices is spread over."""
        return self.copies * self.form.num_pieces

    @property
    def piece(self) -> int:
        """The elements of a piece."""
        return prod(self.form.padded_shape) // self.form.num_pieces

    @property
    def gathered(self) -> tuple[int, int]:
        """The number of matrices whose updates a device gets, and the elements of each."""
        if self.by_elements:
            return self.matrices, self.piece + -self.piece % self.copies
        return self.count, self.piece


@functools.cache
def pools_of(config: Config) -> tuple[Pool, ...]:
    """Return the pools of Muon's matrices, or () for a different optimizer."""
    if config.optim.kind != 'muon':
        return ()
    layout, found = Layout.of(config), []
    for form, parts in pools(config).items():
        (copies,) = layout.sizes_of([form.copies(layout)])
        count = sum(part.count for part in parts)
        padded, by_elements = form.padded(count, layout), form.by_elements(count, layout)
        found.append(Pool(form, count, padded, copies, by_elements))
    return tuple(found)


def exchanges(config: Config) -> Iterator[Expected]:
    """Yield the exchanges of each pool, and the gathers by devices with the same pieces."""
    layout, dtype = Layout.of(config), 'f32' if config.train.dtype == 'float32' else 'bf16'
    for pool in pools_of(config):
        copies, part = pool.form.copies(layout), (pool.count // pool.copies, pool.piece)
        in_parts = pool.count // pool.copies, pool.gathered[1]
        for kind, axes, times, shape in (
            (EXCHANGE, pool.form.pieces, 2, part),
            (EXCHANGE, copies if pool.by_elements else (), 1, in_parts),
            (GATHER, copies, 1, pool.gathered),
        ):
            if axis := axes_text(config, *axes):
                site = Site('optimizer', 'step', axis)
                yield Expected.over(config, site, kind, Array(dtype, shape), times)


def over_tensor_parallel(config: Config) -> Iterator[Expected]:
    """Yield the gathers of Megatron's Muon, for the matrices that a data shard updates."""
    mesh, sizes = config.mesh, dim_sizes(config.model)
    if config.optim.kind != 'muon' or mesh.model == 1:
        return
    count = sum(
        elements(x.dims, sizes)
        for _, x in parameters(config.model)
        if x.is_layer_matrix and not x.is_frozen
    )
    own = count // (mesh.stages * mesh.data_shards * mesh.context)
    site = Site('optimizer', 'step', 'model')
    yield Expected.over(config, site, GATHER, Array('f32', (own,)), 1, SOURCE)


def newton_schulz(config: Config) -> list[Product]:
    """Return the matmuls of the iterations on one device: X X^T, its square, and B X."""
    found = []
    for pool in pools_of(config):
        m, n = pool.form.shape
        for name, sizes in (('gram', (m, m, n)), ('square', (m, m, m)), ('polynomial', (m, n, m))):
            found.append(
                Product(
                    name=f'muon {name}',
                    where='optimizer',
                    phase='step',
                    sizes=sizes,
                    batch=pool.whole,
                    times=config.optim.ns_steps,
                )
            )
    return found
