"""The hosts of a mesh's devices: which groups of devices may span them."""

import collections
import math
from collections.abc import Mapping, Sequence

from megajax.core.config import ConfigError
from megajax.core.config.divisors import divisors
from megajax.core.hardware.records import hardware_of


def check_hosts(
    hosts: Sequence[str], sizes: Mapping[str, int], *, cross_hosts: bool, domain: int = 0
) -> None:
    """Raise ConfigError if groups of devices span hosts unnecessarily.

    `hosts` has the host of each device of the mesh, and NVLink joins `domain` devices even of
    several hosts (`devices_per_domain`). Groups of at most so many may span hosts. A larger
    tensor-parallel group may do so only if `cross_hosts` is set, and the data shards of a replica
    only if no number of replicas avoids it that leaves each replica several shards.
    """
    if not cross_hosts:
        _check_tensor_groups(hosts, sizes, domain)
    replicas, stages, data = sizes.get('replica', 1), sizes.get('stage', 1), data_shards(sizes)
    if replicas == 1 or len(set(hosts)) == 1:
        return
    if 'row' in sizes:
        raise ConfigError(
            f'mesh.replicas={replicas} with mesh.model_rows={sizes["row"]} on several hosts: '
            'a grid whose gradients are also summed between hosts is not supported yet; '
            'set mesh.replicas=1, or mesh.model_rows=1'
        )
    devices = len(hosts) // stages  # number of devices of each stage, in groups of neighbors
    if crossing := crossing_hosts(hosts, replicas * stages, domain):
        inside = [
            count
            for count in range(1, data)
            if data % count == 0 and not crossing_hosts(hosts, count * stages, domain)
        ]
        if inside:
            is_in_hosts = not crossing_hosts(hosts, inside[0] * stages)
            near = 'stay in one host' if is_in_hosts else 'NVLink joins'
            raise ConfigError(
                f'mesh.replicas={replicas} makes groups of {devices // replicas} devices, which '
                f'reach across hosts ({", ".join(crossing)}), and each layer would wait for their '
                f'network: set mesh.replicas={inside[0]}, whose groups of '
                f'{devices // inside[0]} devices {near}'
            )


def _check_tensor_groups(hosts: Sequence[str], sizes: Mapping[str, int], domain: int) -> None:
    rows, model = sizes.get('row', 1), sizes['model']
    crossing = crossing_hosts(hosts, len(hosts) // (rows * model), domain)
    if not crossing:
        return
    # Groups that divide a host stay in it, and NVLink joins groups of up to `domain` devices.
    joined = (size for size in divisors(len(hosts)) if size <= domain)
    largest = max([math.gcd(*collections.Counter(hosts).values()), *joined])
    allow = 'or mesh.allow_model_across_hosts=true'
    if rows > 1:
        raise ConfigError(
            f'mesh.model_rows={rows} x mesh.model={model} reaches across hosts '
            f'({", ".join(crossing)}), and each layer would wait for their network: '
            f'set their product to {largest} or a divisor of it, {allow}'
        )
    shards, remainder = divmod(data_shards(sizes) * model, largest)
    example = '' if remainder else f'for example mesh.data={shards} mesh.model={largest}, '
    raise ConfigError(
        f'mesh.model={model} reaches across hosts ({", ".join(crossing)}), '
        'and each layer would wait for their network: '
        f'set mesh.model to {largest} or a divisor of it, {example}{allow}'
    )


def crossing_hosts(hosts: Sequence[str], num_groups: int, domain: int = 0) -> list[str]:
    """Return the hosts of the first group of neighbors that spans several hosts, if any.

    Groups of at most `domain` devices count as within a host.
    """
    size = len(hosts) // num_groups
    if size <= domain:
        return []
    groups = (set(hosts[i * size : (i + 1) * size]) for i in range(num_groups))
    return next((sorted(group) for group in groups if len(group) > 1), [])


def nvlink_domain(device_kind: str) -> int:
    """Return how many GPUs of a kind NVLink joins even in several hosts; 0 if it joins none."""
    known = hardware_of(device_kind)
    return (known.devices_per_domain or 0) if known else 0


def data_shards(sizes: Mapping[str, int]) -> int:
    """Return `mesh.data`: the data shards of all replicas, including those along `expert`."""
    return sizes.get('replica', 1) * sizes['data'] * sizes.get('expert', 1)
