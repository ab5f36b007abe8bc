"""Predict what Muon adds to a training step: time, communication and memory, on H100s.

    python benchmarks/muon_cost.py > benchmarks/results/DATE_muon_cost.md

No GPU is needed. Each layout is predicted with AdamW and with Muon (`megajax plan`).
"""

import jax

import megajax
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.time import step_time
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.muon import exchanges, newton_schulz, pools_of
from megajax.core.hardware.records import hardware

LAYOUTS = {
    'megatron_1.2b': 'mesh.data=8 mesh.model=1 train.batch_size=512 optim.shard=optimizer',
    'llama3_8b': 'mesh.data=64 mesh.model=1 train.batch_size=512 train.microbatches=8 '
    'train.recompute=full optim.shard=weights',
    'llama3_70b': 'mesh.data=8 mesh.stages=4 mesh.model=8 train.microbatches=64 '
    'train.batch_size=512 train.recompute=full optim.shard=optimizer',
}


def line(name: str, overrides: str) -> str:
    """Return the row of a layout."""
    adamw, muon = (
        resolved(megajax.load(name, [*overrides.split(), f'optim.kind={kind}']), on_gpu=True)
        for kind in ('adamw', 'muon')
    )
    cluster = Cluster.of(hardware('h100'), adamw.mesh.num_devices)
    before, after = (step_time(config, cluster) for config in (adamw, muon))
    sent = sum(one.times * one.wire_bytes for one in exchanges(muon))
    flops = sum(x.times * x.flops for x in newton_schulz(muon))
    held = [memory(config).total / 1e9 for config in (adamw, muon)]
    waits = after.waits() - before.waits()
    parts = after.products - before.products, after.memory_bound - before.memory_bound, waits
    cells = [
        f'{name} on {adamw.mesh.num_devices}',
        len(pools_of(muon)),
        f'{1000 * before.total:,.0f}',
        *(f'{1000 * seconds:.1f}' for seconds in parts),
        f'{100 * (after.total / before.total - 1):.1f}%',
        f'{sent / 1e6:,.0f}',
        f'{flops / 1e12:.1f}',
        *(f'{gb:.1f}' for gb in held),
    ]
    return f'| {" | ".join(map(str, cells))} |'


def main() -> None:
    """Print the table."""
    print('# What Muon adds to a step on H100s\n')
    print(f'Predicted by `megajax plan`, not measured; jax {jax.__version__}.\n')
    for name, overrides in LAYOUTS.items():
        print(f'- `{name} {overrides}`')
    print()
    columns = (
        'model and GPUs | pools | AdamW step ms | + matmul ms | + memory-bound ms | + exposed ms '
        '| longer | exchanged MB | TFLOP per GPU | AdamW GB | Muon GB'
    )
    print(f'| {columns} |')
    print('|---' * len(columns.split('|')) + '|')
    for name, overrides in LAYOUTS.items():
        print(line(name, overrides))


if __name__ == '__main__':
    main()
