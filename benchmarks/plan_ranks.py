"""Where the mesh that was published ranks among those that the plan would try:
`python benchmarks/plan_ranks.py`.

For each row of the tables of tensor parallelism, by how much a step on its mesh is slower than on
the plan's fastest. A run of before ZeRO-1 or sequence parallelism is ranked among layouts without
them. SimuMax measured each model with several tensor-parallel degrees: there the plan chooses one
of those that were measured, and the share of the best published rate that the choice had is given.
Tables of FSDP are left out: they are of programs that gather everything in 16 bits.
"""

from collections import defaultdict
from collections.abc import Iterator

from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.published.predictions import predicted
from megajax.analysis.plan.published.programs import FSDP_IN_JAX_2024
from megajax.analysis.plan.published.rates import PublishedRate
from megajax.analysis.plan.published.tables import rows
from megajax.analysis.plan.search import Choice, search
from megajax.core.config import Config
from megajax.core.hardware.records import hardware

TABLES = 'scaling', 'megatron', 'narayanan', 'narayanan-pipeline', 'korthikanti', 'nvidia', 'core'
NEAR = 0.03


def main() -> None:
    print('| run | GPUs | published | fastest | slower by | held out |')
    print(f'|{"---|" * 6}')
    shares = []
    for table in TABLES:
        for row in filter(is_ranked, rows(table)):
            fastest, slower = ranked(row)
            shares.append(slower)
            run = f'{table} {row.name} | {row.num_gpus} | {mesh_of(row.config)}'
            print(f'| {run} | {fastest} | {slower:.2%} | {"yes" if row.held_out else ""} |')
    count = sum(one <= NEAR for one in shares)
    print(f'\n{count} of {len(shares)} rank first or within {NEAR:.0%} of the first.\n')
    print('| run of SimuMax | measured | chosen | share of the best rate |')
    print(f'|{"---|" * 4}')
    for name, measured, chosen, share in swept():
        print(f'| {name} | {", ".join(map(str, measured))} | {chosen} | {share:.1%} |')


def is_ranked(row: PublishedRate) -> bool:
    """Whether its program is one whose layouts are tried."""
    return row.program is not FSDP_IN_JAX_2024


def ranked(row: PublishedRate) -> tuple[str, float]:
    """The fastest mesh, and by what share of its step the published one is slower.

    What was published runs, whether or not it fits by the memory of megajax.
    """
    cluster, own = Cluster.of(hardware(row.gpu), row.num_gpus), mesh_of(row.config)
    best = {own: predicted(row, cluster.hardware).time.total}
    for choice in search(row.config, cluster, row.program, prune=False).fitting:
        if could_have(row, choice):
            name, total = mesh_of(choice.config), choice.timed.total
            best[name] = min(total, best.get(name, total))
    fastest = min(best, key=lambda name: best[name])
    return fastest, best[own] / best[fastest] - 1


def mesh_of(config: Config) -> str:
    """The tensor-parallel degree, and the stages of a pipeline."""
    mesh = config.mesh
    return f'{mesh.model} x {mesh.stages} stages' if mesh.stages > 1 else str(mesh.model)


def could_have(row: PublishedRate, choice: Choice) -> bool:
    """Whether the run's software had what the layout uses."""
    mesh, theirs = choice.config.mesh, row.config.optim.shard
    scatters = row.config.mesh.sequence_parallel or theirs != 'none'
    return (
        choice.config.optim.shard in ('none', theirs)
        and mesh.replicas == mesh.context == 1
        and mesh.sequence_parallel <= scatters
        # Megatron-LM had no pipeline in 2019 and 2020, when it ran on V100s.
        and (mesh.stages == 1 or row.gpu != 'v100')
    )


def swept() -> Iterator[tuple[str, list[int], int, float]]:
    """Each run of SimuMax: degrees that were measured, the plan's, its share of the best rate."""
    runs = defaultdict[str, list[PublishedRate]](list)
    for row in rows('simumax'):
        runs[row.name].append(row)
    for name, measured in runs.items():
        chosen = max(measured, key=lambda row: predicted(row, hardware(row.gpu)).tflops)
        best = max(row.published for row in measured)
        degrees = sorted(row.config.mesh.model for row in measured)
        yield name, degrees, chosen.config.mesh.model, chosen.published / best


if __name__ == '__main__':
    main()
