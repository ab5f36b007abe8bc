"""The work of experts on the device that gets the most tokens."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from megajax.core.config import Config
from megajax.core.config.load import CONFIG
from megajax.core.counts.collective import EXCHANGE, Expected
from megajax.core.counts.expert_rows import LATER, ROOM
from megajax.core.counts.experts import of_megatron, over_experts
from megajax.core.counts.product import Product
from megajax.core.counts.runs import Runs

LAST_STEPS = 100  # of a run, whose load a plan assumes


def imbalance_of_run(config: Path) -> float:
    """Return the load of the busiest expert in the last steps of the run with this config file.

    It is at least the load of the busiest device. Without a run it is 1, a balanced load.
    """
    metrics = config.with_name('metrics.jsonl')
    if config.name != CONFIG or not metrics.exists():
        return 1.0
    steps = map(json.loads, metrics.read_text().splitlines())
    loads = [step['expert_load'] for step in steps if 'expert_load' in step]
    return fmean(loads[-LAST_STEPS:]) if loads else 1.0


def of_busiest(product: Product, config: Config, imbalance: float) -> Product:
    """Return a matmul of experts as the busiest device computes it, one by one for its experts.

    That device has `imbalance` times the mean rows. Other matmuls are returned unchanged.
    """
    experts = config.model.experts
    if not product.of_experts or experts is None:
        return product
    m, n, k = product.sizes
    is_sum = product.name.endswith(' weight')  # over the rows
    rows, own = k if is_sum else m, experts.count // config.mesh.experts
    each = max(1, round(product.batch * rows * _excess(config, imbalance) / own))
    sizes = (m, n, each) if is_sum else (each, n, k)
    return dataclasses.replace(product, sizes=sizes, batch=own)


def exchanges_of_tokens(config: Config, imbalance: float) -> Iterator[Expected]:
    """Yield what the busiest device sends to others' experts, if it sends tokens alone."""
    for sent in of_megatron(config, Runs.of_stages(config).layers):
        if sent.site.phase != 'step':
            yield _with_rows(sent, _excess(config, imbalance)) if sent.kind == EXCHANGE else sent


def later_exchanges(config: Config, imbalance: float) -> Iterator[Expected]:
    """Yield the all-to-alls of the rounds after the first, if the load does not fit in one.

    Each has buffers of half the size (`core/counts/expert_rows.py`).
    """
    left = _excess(config, imbalance) - ROOM if config.model.experts else 0.0
    if left <= 0:
        return
    rounds = math.ceil(left / (LATER * ROOM))
    for sent in over_experts(config, Runs.of_stages(config).layers):
        if sent.kind == EXCHANGE:
            yield dataclasses.replace(_with_rows(sent, LATER), times=rounds * sent.times)


def _with_rows(sent: Expected, factor: float) -> Expected:
    """Return a collective of a multiple of its rows."""
    rows, size = sent.array.shape
    array = sent.array._replace(shape=(round(factor * rows), size))
    return dataclasses.replace(sent, array=array)


def _excess(config: Config, imbalance: float) -> float:
    """Return the rows of the busiest device over the mean.

    They are equal if each device has all experts, or if each expert has the same capacity.
    """
    experts = config.model.experts
    assert experts is not None
    is_even = config.mesh.experts == 1 or experts.capacity is not None
    return 1.0 if is_even else min(imbalance, config.mesh.experts)
