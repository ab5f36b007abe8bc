"""TPUs as compile targets: abstract chips of a slice, from libtpu, without a TPU.

libtpu has XLA's compiler for TPUs. megajax has never run a program on a TPU.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from megajax.core.config import Config, ConfigError, Problem
from megajax.core.config.extras import install

CHIPS_PER_HOST = 4
DTYPES = 'bfloat16', 'float32'
# libtpu looks for a TPU's host, asks a server on the network for its name, and locks a file, so
# that a second process fails; none of it is needed to compile.
ENVIRONMENT = {
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_ACCELERATOR_TYPE': 'v5p-8',
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
}
_NO_MEMORY = 'RESOURCE_EXHAUSTED'


class Tpu(NamedTuple):
    """A type of TPU."""

    device_kind: str  # in jax
    memory: int  # bytes of HBM on a chip that the compiler can use
    num_dims: int  # dims of the torus that the chips of a slice form


TPUS = {
    # Memory: the limit that libtpu 0.0.42 names if a program does not fit.
    'v5p': Tpu('TPU v5', int(95.74 * 2**30), 3),
    'v6e': Tpu('TPU v6 lite', int(31.25 * 2**30), 2),
}


def has_tpu_compiler() -> bool:
    """Whether XLA's TPU compiler is installed; it needs no TPU."""
    return importlib.util.find_spec('libtpu') is not None


def check_tpu(target: str) -> None:
    """Raise ConfigError unless a step can be compiled for a TPU here."""
    if not has_tpu_compiler():
        raise ConfigError(
            f"target {target} needs libtpu, XLA's TPU compiler, but no TPU: "
            + install('tpu-compile')
        )


def check_config_for_tpu(config: Config, target: str) -> None:
    """Raise ConfigError for settings that need a GPU, and for a mesh that is not a slice."""
    train = config.train
    shape_of_slice(target, config.mesh.num_devices)
    problems = []
    if train.dtype not in DTYPES:
        message = f'{target} computes in {", ".join(DTYPES)}; use one of them'
        problems.append(Problem('train.dtype', f'{train.dtype}: {message}'))
    if train.overlap not in ('auto', 'none'):
        message = (
            f'{train.overlap}: the overlap schedule needs options of the GPU compiler, and {target}'
            " has XLA's schedule; use auto or none"
        )
        problems.append(Problem('train.overlap', message))
    if problems:
        raise ConfigError(*problems)


def shape_of_slice(target: str, chips: int) -> tuple[int, ...]:
    """Return the shape of a slice with this number of chips, as near to a cube as possible.

    Raises ConfigError if there is no such slice.
    """
    if chips not in (1, 2) and chips % CHIPS_PER_HOST:
        raise ConfigError(
            f'target {target}: the mesh has {chips} devices, and a slice has 1, 2 or a multiple of '
            f'{CHIPS_PER_HOST} chips; change the sizes of the mesh'
        )
    shape = [min(chips, 2), 2 if chips >= CHIPS_PER_HOST else 1, 1][: TPUS[target].num_dims]
    for factor in sorted(_primes(chips // prod(shape)), reverse=True):
        smallest = max(range(len(shape)), key=lambda dim: (-shape[dim], dim))
        shape[smallest] *= factor
    return tuple(shape)


def _primes(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            yield factor


def num_tpu_hosts(target: str, chips: int, wanted: int | None = None) -> int:
    """Return the number of hosts of a slice. Raises ConfigError if `wanted` is a different one."""
    hosts = max(1, chips // CHIPS_PER_HOST)
    if wanted not in (None, hosts):
        raise ConfigError(
            f'{wanted} hosts: a {target} host has {CHIPS_PER_HOST} chips, so {chips} chips have '
            f'{hosts}; leave --hosts out'
        )
    return hosts


def tpu_devices(target: str, chips: int) -> list[Any]:
    """Return the abstract chips of a slice, in the order of their ids; needs libtpu but no TPU."""
    from jax.experimental import topologies

    shape = shape_of_slice(target, chips)
    bounds = {} if chips >= CHIPS_PER_HOST else {'chips_per_host_bounds': [*shape, 1][:3]}
    topology = topologies.get_topology_desc(
        platform='tpu', topology_name=f'{target}:{"x".join(map(str, shape))}', **bounds
    )
    return list(topology.devices)


def compile_without_tpu(
    compile_with: Callable[[dict[str, Any]], Any], options: Mapping[str, Any]
) -> Any:
    """Call `compile_with` with options. Raises ConfigError if the program does not fit in HBM."""
    import jax

    try:
        return compile_with(dict(options))
    except jax.errors.JaxRuntimeError as error:
        if _NO_MEMORY not in str(error):
            raise
        reason = str(error).strip().splitlines()[0].partition(f'{_NO_MEMORY}: ')[2]
        raise ConfigError(
            f'the step does not fit: {reason} Use train.recompute=selective or full (XLA attention '
            'stores its scores), more devices or train.microbatches, or optim.shard=weights'
        ) from error
