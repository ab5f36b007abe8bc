"""Published throughputs of mixtures of experts on H100s beside those that `megajax.plan` predicts:
`python benchmarks/plan_experts.py > OUT.md`.

No number is fitted on these rows. Every second one is held out by the rule of `held_out.py`.
"""

import csv
import dataclasses
import statistics
from pathlib import Path
from typing import NamedTuple

from held_out import held_out

from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.overlap import NOTHING, HiddenBy, hidden_by_ticks
from megajax.analysis.plan.programs import FSDP, MEGATRON
from megajax.analysis.plan.time import StepTime, step_time
from megajax.core.config import Config, load
from megajax.core.counts.collective import EXCHANGE, PERMUTE, Expected
from megajax.core.hardware.records import hardware

TABLE = Path(__file__).with_suffix('.csv')
# The embedding and the head count as a layer each, so that 94 layers fill 32 chunks of three.
LAYERS = {'qwen3_30b_a3b': 48, 'qwen3_235b_a22b': 96}


def hidden_by_other_pass(collective: Expected, config: Config) -> HiddenBy:
    """Return the overlap of Megatron with --overlap-moe-expert-parallel-comm.

    The all-to-alls of a microbatch overlap the matmuls of another one's other pass.
    """
    if collective.site.axis == 'model':
        return NOTHING
    if collective.kind != EXCHANGE:
        return MEGATRON.hidden_by(collective, config)
    return hidden_by_ticks(dataclasses.replace(collective, kind=PERMUTE), config)


# Bridge's recipes for H100s overlap the all-to-alls of the larger model, but not its tensor
# parallelism (scripts/performance/configs/qwen: moe_a2a_overlap, tp_comm_overlap).
BRIDGE = dataclasses.replace(MEGATRON, has_whole_experts=True)
PROGRAMS = {
    ('automodel', 'qwen3_30b_a3b'): FSDP,
    ('bridge', 'qwen3_30b_a3b'): BRIDGE,
    ('bridge', 'qwen3_235b_a22b'): dataclasses.replace(BRIDGE, hidden_by=hidden_by_other_pass),
}


class Row(NamedTuple):
    """A published throughput and its prediction, in tokens/s per GPU."""

    values: dict[str, str]
    time: StepTime
    held_out: bool

    @property
    def published(self) -> float:
        return float(self.values['tokens_per_s_per_gpu'])

    @property
    def predicted(self) -> float:
        return self.time.tokens_per_second / self.time.devices

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def config_of(values: dict[str, str]) -> Config:
    """Return the config of a row; ranks that share the experts are at most its data shards."""
    gpus, tp, pp, ep, batch, rows = (
        int(values[name]) for name in ('gpus', 'tp', 'pp', 'ep', 'gbs', 'mbs')
    )
    data = gpus // (tp * pp)
    return changed(
        load(values['preset']),
        model__num_layers=LAYERS[values['preset']],
        mesh__data=data,
        mesh__model=tp,
        mesh__sequence_parallel=tp > 1,
        mesh__stages=pp,
        mesh__virtual_stages=int(values['vp']),
        mesh__experts=min(ep, data),
        train__batch_size=batch,
        train__seq_len=4096,
        train__microbatches=batch // data // rows,
        train__dtype=values['dtype'],
        train__fp8_scaling='current' if values['dtype'] == 'fp8' else 'delayed',
        train__recompute='none',
        train__overlap='none',
        train__unroll=False,
        optim__shard='weights' if pp == 1 else 'optimizer',
    )


def rows() -> list[Row]:
    """Return every row with its prediction."""
    _, *lines = TABLE.read_text(encoding='utf-8').splitlines()
    table = [*csv.DictReader(lines)]
    found = []
    for values, is_held_out in zip(table, held_out(TABLE.stem, table), strict=True):
        cluster = Cluster.of(hardware('h100'), int(values['gpus']))
        time = step_time(config_of(values), cluster, PROGRAMS[values['software'], values['preset']])
        found.append(Row(values, time, is_held_out))
    return found


def seconds_of_all_to_alls(time: StepTime) -> float:
    """Return the seconds in which a step sends tokens to experts and back, exposed or not."""
    return sum(one.seconds for one in time.transfers if one.kind == EXCHANGE)


def table(found: list[Row]) -> str:
    """Return the rows and their errors as Markdown."""
    lines = [
        '| model | software | dtype | GPUs | tp x pp x vp, ep | published tokens/s per GPU | '
        'predicted | error | matmul | memory-bound | exposed | all-to-alls in the published step |',
        '|---|---|---|---|---|---|---|---|---|---|---|---|',
    ]
    for row in found:
        values, time = row.values, row.time
        shares = time.products, time.memory_bound, time.waits()
        cells = [
            values['preset'],
            f'{values["software"]} {values["release"]}'.strip(),
            values['dtype'],
            values['gpus'],
            f'{values["tp"]} x {values["pp"]} x {values["vp"]}, {values["ep"]}',
            f'{row.published:,.0f}',
            f'{row.predicted:,.0f}',
            f'{row.error:+.1%}{" (held out)" if row.held_out else ""}',
            *(f'{share / time.total:.1%}' for share in shares),
            f'{seconds_of_all_to_alls(time) * row.published / row.predicted / time.total:.1%}',
        ]
        lines.append(f'| {" | ".join(cells)} |')
    for name, errors in (
        ('held out', [abs(row.error) for row in found if row.held_out]),
        ('all', [abs(row.error) for row in found]),
    ):
        lines.append(
            f'\n{len(errors)} rows {name}: mean error {statistics.mean(errors):.1%}, '
            f'maximum {max(errors):.1%}'
        )
    return '\n'.join(lines)


def degrees() -> str:
    """Return the predicted times of a step by expert-parallel degree, on GPUs with small and large
    NVLink domains, as Markdown.
    """
    lines = ['| 64 GPUs | mesh.experts | step ms | all-to-alls ms |', '|---|---|---|---|']
    settings = 'mesh.data=64 mesh.model=1 train.batch_size=64 train.microbatches=1'
    settings += ' train.recompute=full optim.shard=weights'
    for gpu in ('h100', 'gb200'):
        for count in (8, 16, 64):
            config = load('qwen3_30b_a3b', [*settings.split(), f'mesh.experts={count}'])
            time = step_time(config, Cluster.of(hardware(gpu), 64))
            sent = 1e3 * seconds_of_all_to_alls(time)
            lines.append(f'| {gpu} | {count} | {1e3 * time.total:,.0f} | {sent:,.1f} |')
    return '\n'.join(lines)


if __name__ == '__main__':
    print(table(rows()), degrees(), sep='\n\n')
