"""The rows that the experts of a device multiply. Imports no jax."""

import math
from collections.abc import Mapping

from megajax.core.config.schema import Config


def rows_of_experts(config: Config, tokens: int, shards: Mapping[str, int]) -> tuple[int, int]:
    """Return a device's experts, and the rows of each, given the tokens of a data shard.

    Without a capacity the load is balanced, and the rows that fill blocks do not count. If the
    rows are not a multiple of the experts, they count as one matmul.
    """
    experts = config.model.experts
    assert experts is not None
    devices = shards.get('X', 1)
    own, rows = experts.count // devices, devices * tokens * experts.active
    if experts.capacity is not None:
        group = experts.capacity_group or config.train.seq_len
        slots = math.ceil(experts.capacity * group * experts.active / experts.count)
        return own, devices * tokens // group * slots
    return (own, rows // experts.count) if rows % experts.count == 0 else (1, rows // devices)
