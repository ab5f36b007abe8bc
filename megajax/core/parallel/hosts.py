"""The hosts of a mesh's devices: which groups of devices may span them."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from megajax.core.config import ConfigError
from megajax.core.config.divisors import divisors
from megajax.core.hardware.records import hardware_of


class Hosts:
    """The host of each device of a mesh, in the order of the mesh.

    NVLink joins `domain` devices even of several hosts (`devices_per_domain`); groups of at most so
    many devices count as within a host.
    """

    def __init__(self, names: Sequence[str], domain: int = 0) -> None:
        self.names, self.domain = names, domain

    def __len__(self) -> int:
        """Return the number of devices."""
        return len(self.names)

    @cached_property
    def largest_inside(self) -> int:
        """Return the size of the largest equal groups of neighbors that each stay in one host.

        Groups stay in their hosts if their size divides it.
        """
        return math.gcd(len(self), *self._starts())

    @property
    def is_one(self) -> bool:
        """Whether all devices are in one host."""
        return self.largest_inside == len(self)

    def span(self, size: int) -> bool:
        """Return whether any group of `size` neighbors is on several hosts not joined by NVLink."""
        return size > self.domain and self.largest_inside % size > 0

    def crossed(self, size: int) -> str:
        """Return the names of the first two hosts of the first group that spans several."""
        second = next(start for start in self._starts() if start % size)
        last = self.names[second // size * size + size - 1]
        both = self.names[second - 1], self.names[second]
        return ', '.join([*both, *(['...'] if last not in both else [])])

    def _starts(self) -> Iterator[int]:
        """Yield the position of each device in another host than the device before it."""
        pairs = enumerate(itertools.pairwise(self.names), start=1)
        return (place for place, (before, here) in pairs if before != here)


def check_hosts(hosts: Hosts, sizes: Mapping[str, int], *, cross_hosts: bool) -> None:
    """Raise ConfigError if groups of devices span hosts unnecessarily.

    A tensor-parallel group that NVLink does not join may span hosts only if `cross_hosts` is set,
    and the data shards of a replica only if no number of replicas avoids it that leaves each
    replica several shards.
    """
    if not cross_hosts:
        _check_tensor_groups(hosts, sizes)
    replicas, stages, data = sizes.get('replica', 1), sizes.get('stage', 1), data_shards(sizes)
    if replicas == 1 or hosts.is_one:
        return
    if 'row' in sizes:
        raise ConfigError(
            f'mesh.replicas={replicas} with mesh.model_rows={sizes["row"]} on several hosts: '
            'a grid whose gradients are also summed between hosts is not supported yet; '
            'set mesh.replicas=1, or mesh.model_rows=1'
        )
    devices = len(hosts) // stages  # number of devices of each stage, in groups of neighbors
    size = devices // replicas
    if not hosts.span(size):
        return
    # A replica has all of its experts, so it has a multiple of their data shards.
    inside = (count for count in divisors(data // sizes.get('expert', 1)) if count < data)
    if count := next((n for n in inside if not hosts.span(devices // n)), None):
        within = devices // count
        near = 'NVLink joins' if hosts.largest_inside % within else 'stay in one host'
        raise ConfigError(
            f'mesh.replicas={replicas} makes groups of {size} devices, which '
            f'reach across hosts ({hosts.crossed(size)}), and each layer would wait for their '
            f'network: set mesh.replicas={count}, whose groups of {within} devices {near}'
        )


def _check_tensor_groups(hosts: Hosts, sizes: Mapping[str, int]) -> None:
    rows, model = sizes.get('row', 1), sizes['model']
    if not hosts.span(rows * model):
        return
    joined = (size for size in divisors(len(hosts)) if size <= hosts.domain)
    largest = max([hosts.largest_inside, *joined])
    crossed = hosts.crossed(rows * model)
    allow = 'or mesh.allow_model_across_hosts=true'
    if rows > 1:
        raise ConfigError(
            f'mesh.model_rows={rows} x mesh.model={model} reaches across hosts '
            f'({crossed}), and each layer would wait for their network: '
            f'set their product to {largest} or a divisor of it, {allow}'
        )
    shards, remainder = divmod(data_shards(sizes) * model, largest)
    groups = sizes.get('replica', 1) * sizes.get('expert', 1)
    fits = remainder == 0 and shards % groups == 0
    example = f'for example mesh.data={shards} mesh.model={largest}, ' if fits else ''
    raise ConfigError(
        f'mesh.model={model} reaches across hosts ({crossed}), '
        'and each layer would wait for their network: '
        f'set mesh.model to {largest} or a divisor of it, {example}{allow}'
    )


def nvlink_domain(device_kind: str) -> int:
    """Return how many GPUs of a kind NVLink joins even in several hosts; 0 if it joins none."""
    known = hardware_of(device_kind)
    return (known.devices_per_domain or 0) if known else 0


def data_shards(sizes: Mapping[str, int]) -> int:
    """Return `mesh.data`: the data shards of all replicas, including those along `expert`."""
    return sizes.get('replica', 1) * sizes['data'] * sizes.get('expert', 1)
