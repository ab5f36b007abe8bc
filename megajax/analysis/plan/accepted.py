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
    mesh = config.mesh
    per_host, most = cluster.devices_per_host, cluster.most_joined
    # Training knows how many GPUs NVLink joins, but not how many of them each domain has.
    domain = most if most > per_host else 0

    def is_accepted(cross_hosts: bool) -> bool:
        return _is_accepted(per_host, domain, cross_hosts, tuple(mesh.sizes.items()))

    if is_accepted(mesh.allow_model_across_hosts):
        return config
    return changed(config, mesh__allow_model_across_hosts=True) if is_accepted(True) else None


@functools.lru_cache(maxsize=4096)
def _is_accepted(
    per_host: int, domain: int, cross_hosts: bool, axes: tuple[tuple[str, int], ...]
) -> bool:
    sizes = dict(axes)
    hosts = _hosts(math.prod(sizes.values()), per_host, domain)
    try:
        check_hosts(hosts, sizes, cross_hosts=cross_hosts)
    except ConfigError:
        return False
    return True


@functools.lru_cache(maxsize=8)
def _hosts(num_devices: int, per_host: int, domain: int) -> Hosts:
    names = (str(host) for host in range(num_devices // per_host))
    return Hosts([name for name in names for _ in range(per_host)], domain)
