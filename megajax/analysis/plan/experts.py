"""The work of the experts on the device that gets the most tokens."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from megajax.base.files.json_file import parse_json
from megajax.core.config import Config
from megajax.core.config.load import CONFIG
from megajax.core.counts.collective import EXCHANGE, Expected
from megajax.core.counts.expert_rows import LATER, ROOM
from megajax.core.counts.experts import of_megatron, over_experts
from megajax.core.counts.product import Product
from megajax.core.counts.runs import Runs

LAST_STEPS = 100  # steps of a run whose mean load a plan assumes


def imbalance_of_run(config: Path) -> float:
    """Return the busiest expert's load over the mean, from the last steps of a run.

    `config` is the run's config file. The busiest device's load is at most the returned load. If
    there is no run, it is 1, a balanced load.
    """
    metrics = config.with_name('metrics.jsonl')
    if config.name != CONFIG or not metrics.exists():
        return 1.0
    loads = [*_loads(metrics)]
    return fmean(loads[-LAST_STEPS:]) if loads else 1.0


def _loads(metrics: Path) -> Iterator[float]:
    for line in metrics.read_bytes().splitlines():
        with suppress(ValueError):  # the run was killed while it wrote the line
            step = parse_json(line)
            # JSON has no infinite numbers, so the run writes null for them.
            if isinstance(step, dict) and isinstance(load := step.get('expert_load'), float | int):
                yield load


def of_busiest(product: Product, config: Config, imbalance: float) -> Product:
    """Return a matmul of experts as the busiest device computes it, one expert at a time.

    That device has `imbalance` times the mean rows. With fewer rows than experts, it reads only as
    many experts as it has rows. Other matmuls are returned unchanged.
    """
    experts = config.model.experts
    if not product.of_experts or experts is None:
        return product
    m, n, k = product.sizes
    is_sum = product.name.endswith(' weight')  # sums over the rows
    own = experts.count // config.mesh.experts
    rows = product.batch * (k if is_sum else m) * _excess(config, imbalance)
    used = own if is_sum else min(own, math.ceil(rows))
    each = max(1, round(rows / used))
    sizes = (m, n, each) if is_sum else (each, n, k)
    return dataclasses.replace(product, sizes=sizes, batch=used)


def exchanges_of_tokens(config: Config, imbalance: float) -> Iterator[Expected]:
    """Yield what the busiest device sends to experts on other devices, if it sends only tokens."""
    for sent in of_megatron(config, Runs.of_stages(config).layers):
        if sent.site.phase != 'step':
            yield _with_rows(sent, _excess(config, imbalance)) if sent.kind == EXCHANGE else sent


def later_exchanges(config: Config, imbalance: float) -> Iterator[Expected]:
    """Yield the all-to-alls of the rounds after the first, if the load does not fit in one.

    Each has buffers of half the size of the first round's (`core/counts/expert_rows.py`).
    """
    left = _excess(config, imbalance) - ROOM if config.model.experts else 0.0
    if left <= 0:
        return
    rounds = math.ceil(left / (LATER * ROOM))
    for sent in over_experts(config, Runs.of_stages(config).layers):
        if sent.kind == EXCHANGE:
            yield dataclasses.replace(_with_rows(sent, LATER), times=rounds * sent.times)


def _with_rows(sent: Expected, factor: float) -> Expected:
    """Return the collective with `factor` times as many rows."""
    rows, size = sent.array.shape
    array = sent.array._replace(shape=(round(factor * rows), size))
    return dataclasses.replace(sent, array=array)


def _excess(config: Config, imbalance: float) -> float:
    """Return the ratio of the busiest device's rows to the mean.

    The ratio is 1 if each device has all experts, or if the experts have a capacity.
    """
    experts = config.model.experts
    assert experts is not None
    is_even = config.mesh.experts == 1 or experts.capacity is not None
    return 1.0 if is_even else min(imbalance, config.mesh.experts)
