"""What the plan says overlaps, and what the compiled steps have:
`python benchmarks/plan_overlap.py`, as Markdown.

The steps of the table are those of `benchmarks/collectives.py`, compiled for H100s. The plan's
shares are means of these steps, so the table has the error of the fit. The last line has the error
in held-out steps of `benchmarks/plan_memory.py`. A step that does not fit is left out, because
XLA's scheduler then saves memory instead, and nothing overlaps.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Self

import plan_memory

from megajax.analysis.plan.communication import communication
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.overlap import hidden_by
from megajax.analysis.plan.search import usable_memory
from megajax.core.config import Config, load
from megajax.core.hardware.records import hardware

RESULTS = Path(__file__).parent / 'results'


class Step(NamedTuple):
    """A compiled step: the share of the bytes over `model` that overlaps matmuls, there and in
    the plan.
    """

    kind: str
    compiled: float
    planned: float

    @classmethod
    def of(cls, config: Config, compiled: float) -> Self:
        """Compare the plan of a config with its compiled step."""
        parallel = 'SP' if config.mesh.sequence_parallel else 'TP'
        return cls(f'{parallel}, recompute={config.train.recompute}', compiled, planned(config))

    @property
    def error(self) -> float:
        """In shares of all bytes."""
        return abs(self.planned - self.compiled)


def steps() -> Iterator[Step]:
    """Of the newest table."""
    file = max(RESULTS.glob('*_collectives.csv'))
    with file.open(newline='') as lines:
        for line in csv.DictReader(lines):
            config = config_of(line)
            available = usable_memory(Cluster.of(hardware('h100'), 1))
            if (
                line['model_overlap']
                and memory(config, capacity_bytes=available).total <= available
            ):
                yield Step.of(config, float(line['model_overlap']))


def memory_steps(*, are_dense: bool) -> Iterator[Step]:
    """Of the newest table of `plan_memory.py`, in XLA's order: the steps with only data and tensor
    parallelism and without images, or the others.
    """
    file = max(RESULTS.glob('*_plan_memory.csv'))
    for line in plan_memory.read(file):
        config = plan_memory.load(line)
        mesh = config.mesh
        is_dense = mesh.is_one_dimensional and config.vision is None
        fits = int(line['compiled_bytes']) < 80e9
        if (
            plan_memory.IN_ORDER not in line['overrides']
            and fits
            and mesh.model > 1
            and not mesh.is_grid
            and is_dense == are_dense
        ):
            shares = dict(pair.split('=') for pair in line['overlapped'].split())
            yield Step.of(config, float(shares.get('model', 0)))


def config_of(line: dict[str, str]) -> Config:
    overrides = [
        f'mesh.{name}={line[name].lower()}' for name in ('data', 'model', 'sequence_parallel')
    ]
    overrides += [f'train.{name}={line[name]}' for name in ('recompute', 'microbatches')]
    overrides += [
        f'train.batch_size={4 * int(line["data"])}',
        'train.dtype=bfloat16',
        'model.dropout=0.0',
        'optim.shard=none',
    ]
    return load(line['preset'], overrides)


def planned(config: Config) -> float:
    """The share of the bytes over `model` that can overlap matmuls."""
    found = [
        (one.times * one.wire_bytes, hidden_by(one, config).share)
        for one in communication(config)
        if one.site.axis == 'model'
    ]
    return sum(size * share for size, share in found) / sum(size for size, _ in found)


def main() -> None:
    by_kind = defaultdict[str, list[Step]](list)
    for one in steps():
        by_kind[one.kind].append(one)
        by_kind['all'].append(one)
    print(
        '| steps | how many | in the program | in the plan | mean error | within 10 points |\n'
        '|---|---|---|---|---|---|'
    )
    for kind, found in sorted(by_kind.items(), key=lambda item: (item[0] == 'all', item[0])):
        shares = ' | '.join(
            f'{fmean(values):.0%}'
            for values in ([one.compiled for one in found], [one.planned for one in found])
        )
        near = sum(one.error <= 0.1 for one in found) / len(found)
        print(
            f'| {kind} | {len(found)} | {shares} | '
            f'{100 * fmean(one.error for one in found):.1f} points | {near:.0%} |'
        )
    errors = [one.error for one in memory_steps(are_dense=False)]
    print(
        f'\n{len(errors)} held-out steps with pipeline stages, context parallelism or images: '
        f'off by {100 * fmean(errors):.1f} points on average'
    )


if __name__ == '__main__':
    main()
