"""XLA starts a collective late, whatever could run beside it: `python benchmarks/late_start.py`.

Reduce-scatters whose operands are there from the start, then four products in a fixed order, and
only then what needs the results. Compiled for 8 H100s (`pip install 'megajax[gpu-compile]'`), the
transfer stands beside the last product and a half as long as one of two options is missing: to
start early, and a limit of more than one collective in flight. With both it stands beside all of
them. jax 0.10.2 and 0.12.0.1 agree. `core/train/overlap.py` sets both.
"""

import itertools
import os
from functools import partial

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.hardware.targets import compile_without_gpu, gpu_devices
from megajax.core.train.overlap import EARLY, SLOTS
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.text import program_text


def products_in_order(count: int, y: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    """Send `count` arrays, multiply four times, the last time by a narrow matrix, and add all."""
    sent = [lax.psum_scatter(y + i, 'model', scatter_dimension=0, tiled=True) for i in range(count)]
    for _ in range(3):
        x = lax.optimization_barrier(x @ w)
    short = lax.optimization_barrier(x[:, :512] @ w[:512, :512])
    return sum(one.sum() for one in sent) + short.astype(jnp.float32).sum()


def main() -> None:
    devices = gpu_devices('h100', hosts=1, per_host=8)
    mesh = Mesh(devices, ('model',), axis_types=(AxisType.Explicit,))
    arguments = [
        jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
        for _ in range(2)
    ]
    arguments.append(
        jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    )
    print('| transfers | options | GFLOP of products beside each |\n|---|---|---|')
    for count, options in itertools.product((1, 2), ({}, EARLY, SLOTS, EARLY | SLOTS)):
        mapped = jax.shard_map(
            partial(products_in_order, count),
            mesh=mesh,
            in_specs=(P(), P(), P()),
            out_specs=P(),
            check_vma=False,
        )
        with jax.set_mesh(mesh):
            lowered = jax.jit(mapped).lower(*arguments)
            compiled = compile_without_gpu(lowered.compile, dict(options))
        found = collectives(Program(program_text(compiled)), dict(mesh.shape))
        beside = sorted(one.overlapped_flops / 1e9 for one in found)
        names = ', '.join(name.removeprefix('xla_gpu_experimental_') for name in options) or 'none'
        print(f'| {count} | {names} | {", ".join(f"{gflops:.1f}" for gflops in beside)} |')


if __name__ == '__main__':
    main()
