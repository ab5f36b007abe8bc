"""The rows that the experts of a device multiply. Imports no jax."""

import math
from collections.abc import Mapping

from megajax.core.config.schema import Config

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 128
# with a balanced load; half a block of padding per expert is then 12.5% of the rows
BLOCKS_PER_EXPERT = 4
ROOM = 1.25  # size of the first round's buffers, relative to a balanced load
LATER = 0.5  # size of later rounds' buffers, relative to the first round's
LATER_ROUNDS = 'later_rounds'  # the named scope of the loop over them


def rows_of_experts(config: Config, tokens: int, shards: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of a device's experts, and the rows of each.

    `tokens` are the tokens of a data shard. Without a capacity, the load is assumed to be balanced,
    and padding rows do not count. If the rows are not a multiple of the experts, they count as one
    matmul.
    """
    experts = config.model.experts
    assert experts is not None
    devices = shards.get('X', 1)
    own, rows = experts.count // devices, devices * tokens * experts.active
    if experts.capacity is not None:
        group = experts.capacity_group or config.train.seq_len
        return own, devices * tokens // group * experts.slots(group)
    return (own, rows // experts.count) if rows % experts.count == 0 else (1, rows // devices)


def block_rows(assignments: int, num_experts: int) -> int:
    """Return the number of rows of a block, given the number of assignments to these experts."""
    share = max(assignments // (num_experts * BLOCKS_PER_EXPERT), 1)
    return min(max(1 << (share.bit_length() - 1), SMALLEST_BLOCK), LARGEST_BLOCK)


def num_blocks(assignments: int, num_experts: int, block: int) -> int:
    """Return the number of blocks that the assignments need in the worst distribution."""
    return -(-assignments // block) + num_experts


def rows_to_each(assignments: int, devices: int) -> tuple[int, int]:
    """Return the rows that a device may send to each device in a round, without a capacity.

    The first number is for the first round, the second for later rounds. With a balanced load,
    there are no later rounds.
    """
    first = min(math.ceil(ROOM * assignments / devices), assignments)
    return first, math.ceil(LATER * first)


def rows_sent(config: Config, tokens: int, devices: int) -> int:
    """Return the number of rows that a device sends to its experts' devices, and receives.

    Without a capacity, this is the buffer of the first round.
    """
    experts = config.model.experts
    assert experts is not None
    if experts.capacity is None:
        return devices * rows_to_each(tokens * experts.active, devices)[0]
    own, of_each = rows_of_experts(config, tokens, {'X': devices})
    return own * of_each


def rows_with_unused(
    config: Config, tokens: int, shards: Mapping[str, int], smallest: int = SMALLEST_BLOCK
) -> int:
    """Return the number of rows in all blocks of a device, used or not, without a capacity.

    With several devices, this is the first round. A block has at least `smallest` rows.
    """
    experts, devices = config.model.experts, shards.get('X', 1)
    assert experts is not None
    own, assignments = experts.count // devices, tokens * experts.active
    block = max(block_rows(assignments, own), smallest)
    return num_blocks(rows_sent(config, tokens, devices), own, block) * block
