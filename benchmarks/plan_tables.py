"""Print published throughputs and the predictions of `megajax plan` as Markdown."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from megajax.analysis.plan.band import band
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.published.comparison import markdown, summary_rows
from megajax.analysis.plan.published.predictions import Prediction, predict
from megajax.analysis.plan.published.tables import OF_2026, TABLES
from megajax.analysis.plan.search import memory_on
from megajax.core.hardware.records import hardware

HEAD = """# Published throughputs, and what `megajax plan` predicts for them

`python benchmarks/plan_tables.py` writes this file, and `megajax plan --table NAME` shows \
a table. TFLOP/s
are those of one GPU, as the source counts them. At most three efficiencies of a GPU are fitted
(`benchmarks/fit_gpus.py`), on the rows marked so; which rows are held out follows from a hash \
of their
text (`benchmarks/held_out.py`). The last columns are the predicted shares of the step.

| table | GPU | rows | held out: mean error | max error | fitted: mean error | max error |
|---|---|---|---|---|---|---|"""
GROUPS_HEAD = """
## Held-out rows published before 2026, by group

A row is in the first group that it matches. A positive error means that the predicted rate is too
high. The points are the group's part of the mean error of all these rows.

| group | GPU | rows | mean error | mean signed error | points | worst row |
|---|---|---|---|---|---|---|"""
FAR = 0.2  # an error beyond which a row is listed by itself
FEW_TOKENS = 16384  # tokens of a GPU in a step


class Row(NamedTuple):
    """A published throughput, with the table that has it."""

    table: str
    prediction: Prediction

    @property
    def error(self) -> float:
        return self.prediction.error

    def __str__(self) -> str:
        row = self.prediction.row
        return f'{self.table} {row.name}, {row.num_gpus} {row.gpu}, {self.error:+.1%}'


def held_out(*excluded: str) -> list[Row]:
    """The held-out rows of all tables but the excluded ones."""
    names = [name for name in TABLES if name not in excluded]
    return [Row(name, one) for name in names for one in predict(name) if one.row.held_out]


def needs_too_much(row: Row) -> bool:
    """Whether FSDP of this run is predicted to need more memory than the GPU has."""
    run = row.prediction.row
    if not row.table.startswith('foundry'):
        return False
    gpu = hardware(run.gpu)
    sharded = changed(run.config, optim__shard='weights')
    return memory_on(sharded, Cluster.of(gpu, run.num_gpus)).total > gpu.memory


def is_short(row: Row) -> bool:
    """Whether a GPU computes few tokens in a step without tensor parallelism."""
    run = row.prediction.row
    tokens = run.config.train.batch_size * run.config.train.seq_len / run.num_gpus
    return run.config.mesh.tensor_parallel == 1 and tokens <= FEW_TOKENS


GROUPS: dict[str, Callable[[Row], bool]] = {
    'FSDP, predicted not to fit in memory': needs_too_much,
    'one small model on more GPUs, 2019 (strong)': lambda row: row.table == 'strong',
    'tensor parallelism without FSDP, fp16 (narayanan, korthikanti)': lambda row: (
        row.table in ('narayanan', 'korthikanti')
    ),
    'pipelines of unpublished microbatches (narayanan-pipeline, core)': lambda row: (
        row.table in ('narayanan-pipeline', 'core') and row.prediction.row.config.mesh.stages > 1
    ),
    f'at most {FEW_TOKENS:,} tokens per GPU and step, no tensor parallelism': is_short,
    'other rows': lambda _: True,
}


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each group."""
    found: dict[str, list[Row]] = {name: [] for name in GROUPS}
    for row in rows:
        found[next(name for name, matches in GROUPS.items() if matches(row))].append(row)
    return found


def groups() -> Iterator[str]:
    """The lines of the table of groups."""
    rows = held_out(*OF_2026)
    groups = grouped(rows) | {'all': rows}
    for name, members in groups.items():
        errors = [row.error for row in members]
        gpus = ', '.join(dict.fromkeys(row.prediction.row.gpu for row in members))
        points = 100 * sum(map(abs, errors)) / len(rows)
        worst = max(members, key=lambda row: abs(row.error))
        yield (
            f'| {name} | {gpus} | {len(members)} | {fmean(map(abs, errors)):.1%} | '
            f'{fmean(errors):+.1%} | {points:.1f} | {worst} |'
        )


def of_memory() -> Iterator[str]:
    """The lines of the table that tells whether rows that are predicted not to fit are slower."""
    rows = [Row(name, one) for name in TABLES if 'foundry' in name for one in predict(name)]
    for fits in (False, True):
        errors = [row.error for row in rows if needs_too_much(row) != fits]
        yield (
            f'| {"yes" if fits else "no"} | {len(errors)} | {fmean(map(abs, errors)):.1%} | '
            f'{fmean(errors):+.1%} |'
        )


def far() -> Iterator[str]:
    """The lines of the table of rows that are far off."""
    for row in sorted(held_out(), key=lambda row: -abs(row.error)):
        if abs(row.error) > FAR:
            name = next(name for name, matches in GROUPS.items() if matches(row))
            yield f'| {row} | {"-" if row.table in OF_2026 else name} |'


def is_in_band(row: Row) -> bool:
    """Whether the published time is within the band of the predicted time."""
    one = row.prediction
    cluster = Cluster.of(hardware(one.row.gpu), one.row.num_gpus)
    found = band(one.row.config, one.time, cluster, one.row.program)
    return found is not None and abs(row.error) <= found.error


def main() -> None:
    print(HEAD)
    for cells in summary_rows():
        print('| ' + ' | '.join(cells) + ' |')
    rows = held_out()
    count = sum(map(is_in_band, rows))
    print(f'\n{count} of {len(rows)} held-out rows ({count / len(rows):.0%}) are in their bands.')
    print(GROUPS_HEAD, *groups(), sep='\n')
    print("\nAll rows of llm-foundry, fitted or held out, by FSDP's predicted memory:\n")
    print('| fits | rows | mean error | mean signed error |', f'|{"---|" * 4}', sep='\n')
    print(*of_memory(), sep='\n')
    print(f'\nHeld-out rows of all tables that are off by more than {FAR:.0%}:\n')
    print('| row | group |', '|---|---|', *far(), sep='\n')
    for table in TABLES:
        print(f'\n## {table}\n\n{markdown(table)}')


if __name__ == '__main__':
    main()
