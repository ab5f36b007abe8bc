"""Predict the time of a collective on a cluster, as rings over links in and between hosts."""

import dataclasses
from functools import cached_property
from math import prod
from typing import Self

from megajax.core.config import Config, ConfigError
from megajax.core.hardware.records import Hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one type, in hosts with the same number of GPUs each."""

    hardware: Hardware
    num_devices: int
    devices_per_host: int

    @classmethod
    def of(cls, hardware: Hardware, num_devices: int, devices_per_host: int | None = None) -> Self:
        """Return a cluster; by default its hosts have as many GPUs as the type is sold with.

        Raises ConfigError for hosts of unequal size.
        """
        per_host = min(num_devices, devices_per_host or hardware.devices_per_host)
        if num_devices % per_host:
            below = num_devices // per_host * per_host
            raise ConfigError(
                f'{num_devices} GPUs do not fill hosts of {per_host}: '
                f'use {below} or {below + per_host}, or set the number of GPUs per host'
            )
        return cls(hardware=hardware, num_devices=num_devices, devices_per_host=per_host)

    @cached_property
    def devices_per_domain(self) -> int:
        """Return the number of GPUs that the fast links join, in one host or in several.

        Domains consist of whole hosts and have equally many GPUs, as in clusters of NVL72 racks
        that use 64 GPUs of each.
        """
        most = self.hardware.devices_per_domain or 0
        if self.devices_per_host != min(self.num_devices, self.hardware.devices_per_host):
            # the hosts differ from the hosts that the GPUs are sold in
            return self.devices_per_host
        sizes = range(self.devices_per_host, most + 1, self.devices_per_host)
        return max((n for n in sizes if self.num_devices % n == 0), default=self.devices_per_host)

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts; all hosts are full."""
        return self.num_devices // self.devices_per_host

    def _group(self, config: Config, axis: str) -> tuple[int, int]:
        """Return the size of a group, and how many of its GPUs share a domain."""
        sizes, axes = config.mesh.sizes, axis.split('+')
        names = [*sizes]
        inner = names[1 + max(names.index(name) for name in axes if name in sizes) :]
        size = prod(sizes.get(name, 1) for name in axes)
        # Distance between two neighbors; `mesh.sizes` is outermost first.
        apart = prod(sizes[name] for name in inner)
        return size, min(size, max(1, self.devices_per_domain // apart))

    def ring(self, config: Config, axis: str) -> 'Ring':
        """Return the ring of the GPUs of one group over mesh axes."""
        inside, across = self.hardware.inside_host, self.hardware.across_hosts
        size, members = self._group(config, axis)
        hosts = -(-size // members)
        bandwidth = self.hardware.ring_bandwidth(members=members, hosts=hosts)
        return Ring(
            size=size,
            hosts=hosts,
            bandwidth=bandwidth,
            bandwidth_inside=inside.bandwidth,
            bandwidth_across=across.bandwidth,
            latency_inside=inside.latency,
            latency_across=across.latency,
        )


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
