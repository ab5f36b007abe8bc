"""Predict the time of a collective on a cluster, as rings over links in and between hosts."""

import dataclasses
import functools
import itertools
from functools import cached_property
from math import gcd, prod
from typing import Self

import numpy as np

from megajax.core.config import Config, ConfigError
from megajax.core.hardware.records import Hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one type, in hosts with the same number of GPUs each."""

    hardware: Hardware
    num_devices: int
    devices_per_host: int
    # GPUs in a full host if they were given; otherwise, as many as the type is sold with.
    full_host: int | None = None

    @classmethod
    def of(cls, hardware: Hardware, num_devices: int, devices_per_host: int | None = None) -> Self:
        """Return a cluster; by default its hosts have as many GPUs as the type is sold with.

        All simulated devices of a CPU are on one host and share it. Raises ConfigError for hosts of
        unequal size.
        """
        per_host = min(num_devices, devices_per_host or _sold(hardware, num_devices))
        if num_devices % per_host:
            below = num_devices // per_host * per_host
            raise ConfigError(
                f'{num_devices} GPUs do not fill hosts of {per_host}: '
                f'use {below} or {below + per_host}, or set the number of GPUs per host'
            )
        each = hardware.shared(per_host)
        return cls(
            hardware=each,
            num_devices=num_devices,
            devices_per_host=per_host,
            full_host=devices_per_host if hardware.is_gpu else None,
        )

    def resized(self, num_devices: int) -> Self:
        """Return a cluster of another number of these GPUs.

        A part of a host grows to full hosts if the GPUs fill hosts; other hosts keep their size.
        """
        per_host = self.devices_per_host
        full = self.full_host or _sold(self.hardware, num_devices)
        if self.num_hosts == 1 and (num_devices <= full or num_devices % full == 0):
            per_host = max(per_host, full)
        return self.of(self.hardware, num_devices, per_host)

    @cached_property
    def domain_unit(self) -> int:
        """Return the number of GPUs of which the domains of fast links consist.

        A domain has whole hosts. All have this size if equal domains can have more than half of the
        GPUs that the links join, as in clusters of NVL72 racks that use 64 GPUs of each; otherwise
        a domain has one or several times as many (`domains`).
        """
        sizes = range(self.devices_per_host, self.most_joined + 1, self.devices_per_host)
        return max((n for n in sizes if self.num_devices % n == 0), default=self.devices_per_host)

    @cached_property
    def domains(self) -> tuple[int, ...]:
        """Return the number of GPUs in each domain that fast links join, in one or several hosts.

        They are as few and as equal as possible: 76 GPUs of NVL72 racks are 40 and 36.
        """
        return _domains(self.num_devices, self.domain_unit, self.most_joined)

    @cached_property
    def smallest_domain(self) -> int:
        """Return the number of GPUs in the smallest domain: larger groups span domains."""
        return min(self.domains)

    @property
    def most_joined(self) -> int:
        """Return the most GPUs that fast links join, however many a domain here has.

        Hosts other than those that the GPUs are sold in have no links between them.
        """
        is_sold = self.devices_per_host == min(self.num_devices, self.hardware.devices_per_host)
        return max(self.devices_per_host, (self.hardware.devices_per_domain or 0) * is_sold)

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts; all hosts are full."""
        return self.num_devices // self.devices_per_host

    def counts(self, most: int) -> list[int]:
        """Return powers of two, of GPUs in a host and of full hosts, up to `most` GPUs."""
        per_host = self.devices_per_host
        inside = itertools.takewhile(
            lambda count: count < per_host, (1 << power for power in itertools.count())
        )
        hosts = (per_host << power for power in itertools.count())
        return [*itertools.takewhile(lambda count: count <= most, itertools.chain(inside, hosts))]

    def _group(self, config: Config, axis: str) -> tuple[int, int, int]:
        """Return the size of a group, how many of its GPUs share a domain, and its domains."""
        sizes, axes = config.mesh.sizes, axis.split('+')
        names = [*sizes]
        inner = names[1 + max(names.index(name) for name in axes if name in sizes) :]
        size = prod(sizes.get(name, 1) for name in axes)
        # Distance between two neighbors; `mesh.sizes` is outermost first.
        apart = prod(sizes[name] for name in inner)
        groups = prod(sizes.values()) // (size * apart)
        cluster = self.num_devices, self.domain_unit, self.most_joined
        return size, *_parts(groups, size, apart, *cluster)

    def ring(self, config: Config, axis: str) -> 'Ring':
        """Return the ring of the GPUs of one group over mesh axes."""
        size, members, hosts = self._group(config, axis)
        bandwidth = self.hardware.ring_bandwidth(members=members, hosts=hosts)
        across = self.hardware.link('across_hosts' if hosts > 1 else 'inside_host')
        inside = self.hardware.inside_host or across
        return Ring(
            size=size,
            hosts=hosts,
            bandwidth=bandwidth,
            bandwidth_inside=inside.bandwidth,
            bandwidth_across=across.bandwidth,
            latency_inside=inside.latency,
            latency_across=across.latency,
        )


def _sold(hardware: Hardware, num_devices: int) -> int:
    return hardware.devices_per_host if hardware.is_gpu else num_devices


@functools.cache
def _domains(num_devices: int, unit: int, most: int) -> tuple[int, ...]:
    """Return the sizes of the fewest domains of at most `most` devices, in multiples of `unit`."""
    units = num_devices // unit
    count = -(-units // (most // unit))
    each, larger = divmod(units, count)
    return (unit * (each + 1),) * larger + (unit * each,) * (count - larger)


@functools.lru_cache(maxsize=4096)
def _parts(
    groups: int, size: int, apart: int, num_devices: int, unit: int, most: int
) -> tuple[int, int]:
    """Return the fewest devices that a group has in a domain, and the most domains of a group.

    Each of `groups` blocks of `apart` groups has `size` devices of each group, `apart` devices from
    each other.
    """
    domains, repeated = _domains(num_devices, unit, most), 0
    if len(set(domains)) == 1:
        each = domains[0]
        if apart >= each:
            return 1, size
        # What a group has in equal domains repeats along it, and blocks repeat too: two rounds of a
        # group, and the blocks that differ, show all.
        period = each // gcd(apart, each)
        rounds = max(0, size // period - 2)
        size, repeated = size - rounds * period, rounds * period * apart // each
        groups = min(groups, each // gcd(size * apart, each))
    # A mesh of more devices than the cluster has continues with the same domains.
    again, position = np.divmod(np.arange(groups * size * apart), num_devices)
    domain = again * len(domains) + np.searchsorted(np.cumsum(domains), position, side='right')
    count = int(domain[-1]) + 1
    group = np.arange(groups * apart).reshape(groups, 1, apart)
    place = group * count + domain.reshape(groups, size, apart)
    places, members = np.unique(place, return_counts=True)
    _, parts = np.unique(places // count, return_counts=True)
    return int(members.min()), int(parts.max()) + repeated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """GPUs that pass data around in a ring."""

    size: int  # number of GPUs
    hosts: int
    bandwidth: float  # bytes per second of the slowest link between them
    bandwidth_inside: float  # bytes per second of a GPU's links within a host
    bandwidth_across: float  # bytes per second of a GPU's own network card
    latency_inside: float  # seconds per step within a host
    latency_across: float  # seconds per step between hosts

    def seconds(self, kind: str, wire_bytes: float) -> float:
        """Return the seconds of one collective in which each GPU sends `wire_bytes`.

        An all-reduce of P bytes takes 2(t-1)/t P/bandwidth + 2(t-1) latency. All-gathers and
        reduce-scatters take half of that in both terms (Thakur et al., 2005, section 4). The
        latency between hosts counts in as many steps as there are other hosts, as in NCCL's model.
        A permute is one step. In an all-to-all, each GPU sends most bytes to other hosts, over its
        own network card, while it sends the rest within its host.
        """
        if kind == 'collective-permute':
            latency = self.latency_across if self.hosts > 1 else self.latency_inside
            return wire_bytes / self.bandwidth + latency
        rounds = 2 if kind == 'all-reduce' else 1
        latency = (self.size - self.hosts) * self.latency_inside + (
            self.hosts - 1
        ) * self.latency_across
        if kind == 'all-to-all':
            return self._to_all(wire_bytes) + latency
        return wire_bytes / self.bandwidth + rounds * latency

    def _to_all(self, wire_bytes: float) -> float:
        """Return the seconds in which each GPU sends an equal part to each other GPU."""
        if self.hosts == 1:
            return wire_bytes / self.bandwidth
        across = wire_bytes * (self.size - self.size / self.hosts) / (self.size - 1)
        inside = wire_bytes - across
        return max(across / self.bandwidth_across, inside / self.bandwidth_inside)
