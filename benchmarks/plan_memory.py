"""Compare what `megajax.plan` counts of a training step with the program that XLA compiles:
`python benchmarks/plan_memory.py OUT.csv`, or with `--experts` for mixtures of experts.

For every step of plan_memory.txt or plan_memory_experts.txt, it compares the bytes of memory, the
FLOPs of matmuls, the number of kernels, and the bytes that each H100 sends by mesh axis. It also
stores the share of these bytes that overlaps matmuls. No GPU is needed
(`pip install 'megajax[gpu-compile]'`). Steps that OUT.csv already has are not compiled again; all
of them take about 90 minutes on one core. Predictions are always computed again, in seconds.
"""

import argparse
import csv
import os
import statistics
from collections.abc import Mapping
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

from compiled_rows import read, sent_by_axis

import megajax
from megajax.analysis.plan.communication import wire_bytes
from megajax.analysis.plan.launches import num_launches
from megajax.analysis.plan.memory import memory
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.expert_rows import LATER_ROUNDS
from megajax.core.counts.flash import uses_flash
from megajax.core.counts.muon import newton_schulz
from megajax.core.counts.products import products
from megajax.core.hardware.records import hardware
from megajax.core.hardware.targets import num_hosts

# Each line of these files: preset, data x model, sequence parallelism, recompute, sequences of a
# microbatch, microbatches, other overrides.
STEPS, EXPERTS = (Path(__file__).with_name(f'plan_memory{name}.txt') for name in ('', '_experts'))
IN_ORDER = 'IN_ORDER'  # layers as GPUs have them by default; else in a loop, in XLA's order
KEYS = ['preset', 'mesh', 'parallel', 'recompute', 'rows', 'microbatches', 'overrides']
PREDICTED = ['predicted_bytes', 'predicted_gflops', 'predicted_launches', 'predicted_wire']
COMPILED = [
    'compiled_bytes',
    'arguments',
    'compiled_gflops',
    'compiled_launches',
    'compiled_wire',
    'overlapped',
    'jax',
]
Line = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    parser.add_argument('--experts', action='store_true')
    arguments = parser.parse_args()
    found = {key(line): line for line in read(arguments.out)}
    lines = []
    for step in steps(EXPERTS if arguments.experts else STEPS):
        compiled = found.get(key(step)) or measure(load(step))
        line = step | predict(load(step)) | {name: compiled[name] for name in COMPILED}
        lines.append(
            line | {'ratio': f'{int(line["predicted_bytes"]) / int(line["compiled_bytes"]):.4f}'}
        )
        print(*lines[-1].values(), flush=True)
        write(
            arguments.out,
            lines + [one for name, one in found.items() if name not in map(key, lines)],
        )
    table(lines)


def steps(file: Path = STEPS) -> list[Line]:
    return [
        dict(zip(KEYS, [*(words := line.split())[:6], ' '.join(words[6:])], strict=True))
        for line in file.read_text().replace('\\\n', '').splitlines()
    ]


def key(line: Line) -> tuple[str, ...]:
    return tuple(line[name] for name in KEYS)


def write(path: Path, lines: list[Line]) -> None:
    new = path.with_suffix('.new')
    with new.open('w', newline='') as file:
        writer = csv.DictWriter(file, [*KEYS, *PREDICTED, *COMPILED, 'ratio'])
        writer.writeheader()
        writer.writerows(lines)
    os.replace(new, path)


def load(line: Line) -> megajax.Config:
    data, model = map(int, line['mesh'].split('x'))
    batch = data * int(line['rows']) * int(line['microbatches'])
    parallel = 'true' if line['parallel'] == 'sp' else 'false'
    overrides = [
        f'mesh.data={data}',
        f'mesh.model={model}',
        f'mesh.sequence_parallel={parallel}',
        f'train.recompute={line["recompute"]}',
        'optim.shard=none',
    ]
    overrides += [
        f'train.batch_size={batch}',
        f'train.microbatches={line["microbatches"]}',
        'train.dtype=bfloat16',
        'model.dropout=0.0',
    ]
    others = line['overrides'].split()
    config = megajax.load(
        line['preset'], [*overrides, *(each for each in others if each != IN_ORDER)]
    )
    return resolved(config, on_gpu=IN_ORDER in others)


def predict(config: megajax.Config) -> Line:
    work = [*products(config, flash=uses_flash(config)), *newton_schulz(config)]
    flops = sum(product.times * product.flops for product in work)
    total = memory(config, capacity_bytes=hardware('h100').memory).total
    sent = by_axis(wire_bytes(config))
    figures = total, f'{flops / 1e9:.3f}', num_launches(config), sent
    return dict(zip(PREDICTED, map(str, figures), strict=True))


def by_axis(figures: Mapping[str, float]) -> str:
    return ' '.join(f'{axis}={figure}' for axis, figure in sorted(figures.items()) if figure)


def measure(config: megajax.Config) -> Line:
    from megajax.analysis.inspect.audit import audit
    from megajax.analysis.inspect.compile import compile_for
    from megajax.xla.hlo.launches import is_launched, launching
    from megajax.xla.hlo.program import Program
    from megajax.xla.hlo.schedule import flops

    compiled = compile_for(config, 'h100', num_hosts(config.mesh.num_devices))
    program = Program(compiled.text, skipped=LATER_ROUNDS)
    gflops = sum(flops(program, program.entry, one) for one in program.entry.instructions) / 1e9
    found = audit(config, compiled, 'h100')
    total = compiled.arguments + compiled.temporaries + compiled.outputs
    figures = (
        total,
        compiled.arguments,
        f'{gflops:.3f}',
        # A library call counts as one kernel, although cuDNN's backward pass launches several.
        sum(
            program.times[computation.name] * sum(map(is_launched, computation.instructions))
            for computation in launching(program)
        ),
        by_axis(sent_by_axis(found)),
        by_axis({axis: round(share, 3) for axis, share in found.overlapped_share.items()}),
        compiled.jax_version,
    )
    return dict(zip(COMPILED, map(str, figures), strict=True))


def table(lines: list[Line]) -> None:
    print(
        '\n| preset | data x model | layout | recompute | rows | microbatches | | predicted | '
        'compiled | ratio |'
    )
    print(f'|{"---|" * 10}')
    for line in lines:
        predicted, compiled = (int(line[name]) for name in ('predicted_bytes', 'compiled_bytes'))
        fits = '' if compiled <= hardware('h100').memory else ', does not fit'
        print(
            f'| {" | ".join(key(line))} | {predicted / 1e9:.2f} GB | '
            f'{compiled / 1e9:.2f} GB{fits} | {predicted / compiled:.3f} |'
        )
    errors = [abs(float(line['ratio']) - 1) for line in lines]
    print(
        f'\n{len(lines)} steps: median error {statistics.median(errors):.1%}, '
        f'largest {max(errors):.1%}'
    )


if __name__ == '__main__':
    main()
