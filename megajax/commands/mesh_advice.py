"""The line in which a run on GPUs reports the prediction of `megajax plan` for its mesh."""

import logging
import threading
from collections import Counter

import jax
from jax.sharding import Mesh

from megajax.core.config import Config
from megajax.core.hardware.records import hardware_of
from megajax.core.parallel.mesh import host_names

PATIENCE = 2.0  # seconds that a run waits for the layout search

logger = logging.getLogger(__name__)


def mesh_advice(config: Config, mesh: Mesh) -> str:
    """Return the line for the GPUs of a mesh; empty for unknown GPUs, and in all processes but 0.

    All processes must call it. It is also empty for hosts with different numbers of GPUs. It never
    fails and takes at most PATIENCE seconds; if the search takes longer, its part is omitted.
    """
    hosts, device = host_names(), mesh.devices.flat[0]
    if jax.process_index() != 0 or hardware_of(device.device_kind) is None:
        return ''
    lines = list[str]()
    counts = {*Counter(hosts[each.process_index] for each in mesh.devices.flat).values()}
    if len(counts) > 1:
        return ''
    arguments = config, device.device_kind, counts.pop(), lines
    # The search runs in a thread, because a search of many layouts cannot be stopped.
    search = threading.Thread(target=_search, args=arguments, name='mesh advice', daemon=True)
    search.start()
    search.join(PATIENCE)
    return f'plan       {lines[-1]}' if lines else ''


def _search(config: Config, kind: str, gpus_per_host: int, lines: list[str]) -> None:
    try:
        from megajax.analysis.plan.advice import advice

        gpu = hardware_of(kind)
        assert gpu is not None
        for line in advice(config, gpu, gpus_per_host):
            lines.append(line)
    except Exception:  # a bug in the plan must not end a run that would work
        logger.debug('no advice on the mesh', exc_info=True)
