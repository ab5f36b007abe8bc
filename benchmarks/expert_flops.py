"""Count the matmul FLOPs of steps with dropless experts, in the program and as executed:
`python benchmarks/expert_flops.py OUT.md`.

A program has blocks of rows for every distribution of the tokens, and skips those that are not
used. The preset's experts and mesh decide which: tokens are assigned, exactly equally or at random,
and `core/model/grouped.py` groups what the busiest device receives. No step is compiled; that
compiled steps have these FLOPs is a test (`tests/analysis/inspect/test_experts.py`).
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import megajax
from megajax.analysis.inspect.products import of_unused_blocks
from megajax.core.config import Config
from megajax.core.counts import products
from megajax.core.counts.expert_rows import block_rows, rows_to_each
from megajax.core.model.grouped import group

PRESETS = 'qwen3_30b_a3b', 'qwen3_235b_a22b', 'mixtral_8x7b', 'gpt_oss_20b'
HEAD = (
    '| preset | experts | tokens | program | executed, equal load | executed, random load '
    '| fullest buffer |\n|---|---|---|---|---|---|---|\n'
)


class Executed(NamedTuple):
    """Rows of used blocks over a balanced load's, and the fullest buffer over its size."""

    rows: float
    fullest: float


def main() -> None:
    """Write a row for each preset."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    out = parser.parse_args().out
    out.write_text(HEAD + ''.join(_row(name) for name in PRESETS))


def _row(name: str) -> str:
    config = megajax.load(name)
    all_products = [*products.products(config, flash=True)]
    required = sum(each.times * each.flops for each in all_products)
    of_experts = sum(each.times * each.flops for each in all_products if each.of_experts)
    experts, tokens = config.model.experts, config.microbatch_rows * config.train.seq_len
    assert experts is not None
    equal, at_random = executed(config, tokens, random=False), executed(config, tokens, random=True)
    ratios = [
        1 + of_unused_blocks(config) / required,
        *(1 + of_experts / required * (each.rows - 1) for each in (equal, at_random)),
    ]
    numbers = ' | '.join(f'{ratio:.3f}x' for ratio in ratios)
    sizes = f'{experts.active} of {experts.count} on {config.mesh.experts} devices | {tokens:,}'
    return f'| {name} | {sizes} | {numbers} | {at_random.fullest:.2f} |\n'


def executed(config: Config, tokens: int, *, random: bool) -> Executed:
    """Return what the busiest device of an expert-parallel group executes."""
    experts, devices = config.model.experts, config.mesh.experts
    assert experts is not None
    own, each = experts.count // devices, rows_to_each(tokens * experts.active, devices)[0]
    sent = [
        _assigned(experts.count, experts.active, tokens, source if random else None)
        for source in range(devices)
    ]
    loads = np.stack([np.bincount(expert_n // own, minlength=devices) for expert_n in sent])
    busiest, received = int(loads.sum(0).argmax()), []
    for expert_n in sent:
        mine = np.sort(expert_n[expert_n // own == busiest])[:each] % own
        received.append(np.pad(mine, (0, each - len(mine)), constant_values=own))
    block = block_rows(devices * each, own)
    groups = jax.jit(lambda x: group(x, own, block=block))(
        jnp.asarray(np.concatenate(received), jnp.int32)
    )
    rows = int((groups.expert_b < own).sum()) * groups.block
    return Executed(rows / (tokens * experts.active), loads.max() / each)


def _assigned(count: int, active: int, tokens: int, seed: int | None) -> np.ndarray:
    """Return the expert of each assignment: in turn, or `active` different ones at random."""
    if seed is None:
        return np.arange(tokens * active) % count
    scores = np.random.default_rng(seed).random((tokens, count), np.float32)
    return np.argpartition(scores, active, axis=1)[:, :active].reshape(-1)


if __name__ == '__main__':
    main()
