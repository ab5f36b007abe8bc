"""Compare an H100 and an H200 as `megajax plan` predicts each preset's own layout:
`python benchmarks/plan_dies.py > OUT.md`.

Both have the same die and power limit, so only memory bandwidth can make a step faster. Without
regard to memory size: some presets do not fit on these GPUs.
"""

from typing import NamedTuple

from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX
from megajax.analysis.plan.time import StepTime, step_time
from megajax.core.config import Config, load, presets
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.records import Hardware, hardware

HEAD = """# H100 and H200 as predicted, 2026-11-30

`python benchmarks/plan_dies.py`: each preset's own layout in bf16. Nothing was executed. Memory
explains at most the ratio in the last column: memory-bound operations are faster by the ratio of
the memory bandwidths, matmuls take no longer than their FLOPs do, and the rest is as fast.

| preset | GPUs | H100 ms | H200 ms | H100 / H200 | memory explains at most |
|---|---|---|---|---|---|"""


class Compared(NamedTuple):
    """A preset's step on both GPUs, in seconds."""

    preset: str
    gpus: int
    slower: float
    faster: float
    explained: float  # the largest ratio that memory bandwidth explains

    @property
    def ratio(self) -> float:
        return self.slower / self.faster

    @property
    def is_explained(self) -> bool:
        """Whether memory explains the ratio, apart from rounding."""
        return self.ratio <= self.explained + 1e-9

    def __str__(self) -> str:
        return (
            f'| {self.preset} | {self.gpus} | {1000 * self.slower:,.1f} | '
            f'{1000 * self.faster:,.1f} | {self.ratio:.3f} | {self.explained:.3f} |'
        )


def compared(preset: str) -> Compared:
    """The step of a preset on H100s and H200s."""
    config = resolved(load(preset, ('train.dtype=bfloat16',)), on_gpu=True)
    small, large = hardware('h100'), hardware('h200')
    one, other = (timed(config, gpu) for gpu in (small, large))
    gained = 1 - small.memory_bandwidth / large.memory_bandwidth
    unlimited = timed(config, small.model_copy(update={'memory_bandwidth': 1e30}))
    saved = gained * one.memory_bound + one.products - unlimited.products
    return Compared(
        preset=preset,
        gpus=config.mesh.num_devices,
        slower=one.total,
        faster=other.total,
        explained=one.total / (one.total - saved),
    )


def timed(config: Config, gpu: Hardware) -> StepTime:
    return step_time(config, Cluster.of(gpu, config.mesh.num_devices), MEGAJAX)


if __name__ == '__main__':
    print(HEAD)
    rows = [compared(preset) for preset in presets()]
    print(*rows, sep='\n')
    within = sum(row.is_explained for row in rows)
    most, least = (choose(rows, key=lambda row: row.ratio) for choose in (max, min))
    print(
        f'\n{within} of {len(rows)} presets are within what memory explains; the ratios are '
        f'{least.ratio:.3f} ({least.preset}) to {most.ratio:.3f} ({most.preset}).'
    )
