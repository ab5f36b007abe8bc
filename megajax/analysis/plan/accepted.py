"""Choose layouts that training accepts on the hosts of a cluster."""

import functools
import math

from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.core.config import Config, ConfigError
from megajax.core.parallel.hosts import Hosts, check_hosts


def accepted(config: Config, cluster: Cluster) -> Config | None:
    """Return a layout as training accepts it on the hosts of a cluster, None if it does not.

    A layout whose tensor-parallel groups span hosts, and more than NVLink joins, has
    `mesh.allow_model_across_hosts` set.
    """
    if not rejection(config, cluster):
        return config
    permitted = changed(config, mesh__allow_model_across_hosts=True)
    return None if rejection(permitted, cluster) else permitted


def rejection(config: Config, cluster: Cluster) -> str:
    """Return the error of training with a layout on the hosts of a cluster; empty if it trains."""
    mesh = config.mesh
    per_host, most = cluster.devices_per_host, cluster.most_joined
    # Training knows how many GPUs NVLink joins, but not how many of them each domain has.
    domain = most if most > per_host else 0
    return _rejection(per_host, domain, mesh.allow_model_across_hosts, tuple(mesh.sizes.items()))


@functools.lru_cache(maxsize=4096)
def _rejection(
    per_host: int, domain: int, cross_hosts: bool, axes: tuple[tuple[str, int], ...]
) -> str:
    sizes = dict(axes)
    hosts = _hosts(math.prod(sizes.values()), per_host, domain)
    try:
        check_hosts(hosts, sizes, cross_hosts=cross_hosts)
    except ConfigError as error:
        return str(error)
    return ''


@functools.lru_cache(maxsize=8)
def _hosts(num_devices: int, per_host: int, domain: int) -> Hosts:
    names = (str(host) for host in range(num_devices // per_host))
    return Hosts([name for name in names for _ in range(per_host)], domain)
