"""What of the communication runs beside products: `python benchmarks/overlap.py OUT.csv`.

For every line of STEPS, compiled for H100s in bf16 without dropout: the share of the bytes that are
on the wire while matrix products run, the share of the seconds on the wire that these products
hide, milliseconds of a step by a timeline of the schedule, bytes on the wire beside Megatron's, and
bytes that kernels without products move. Nothing is timed. No GPU is needed
(`pip install 'megajax[gpu-compile]'`). Lines that OUT.csv has already are not compiled again, so
that the run, some 40 minutes on one core, can be interrupted. `--only WORD` takes the lines whose
name has a word.
"""

import argparse
import os
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

from compiled_rows import Step, extend, missing, num_findings, read, steps_of

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.published.tables import rows as published
from megajax.core.config import Config
from megajax.core.hardware.targets import num_hosts
from megajax.core.train.overlap import EARLY, OPTIONS, SLOTS
from megajax.xla.hlo.kernels import kernels
from megajax.xla.hlo.program import Program

# name | preset, data x model, parallelism, rows of a data shard, further overrides; PLAIN is a loop
# over layers in XLA's order, and a word that begins with NO takes away some of XLA's options. Rows
# of pipeline stages are of eight microbatches.
STEPS = """
8 layers, one row, plain       | llama3_8b 1x8 sp 1 LAYERS PLAIN
8 layers, one row              | llama3_8b 1x8 sp 1 LAYERS
8 layers, one row, full        | llama3_8b 1x8 sp 1 LAYERS train.recompute=full
8 layers, one row, TP          | llama3_8b 1x8 tp 1 LAYERS
8 layers, one row, TP, full    | llama3_8b 1x8 tp 1 LAYERS train.recompute=full
8 layers, two rows, plain      | llama3_8b 1x8 sp 2 LAYERS PLAIN
8 layers, two rows             | llama3_8b 1x8 sp 2 LAYERS
8 layers, two rows, full       | llama3_8b 1x8 sp 2 LAYERS train.recompute=full
8 layers, two rows, TP         | llama3_8b 1x8 tp 2 LAYERS
8 layers, two rows, TP, full   | llama3_8b 1x8 tp 2 LAYERS train.recompute=full
32 layers, one row             | llama3_8b 1x8 sp 1
32 layers, one row, full       | llama3_8b 1x8 sp 1 train.recompute=full
32 layers, two rows            | llama3_8b 1x8 sp 2
32 layers, two rows, full      | llama3_8b 1x8 sp 2 train.recompute=full
32 layers, two rows, TP        | llama3_8b 1x8 tp 2
32 layers, two microbatches    | llama3_8b 1x8 sp 2 train.microbatches=2
8x1, weights, plain            | llama3_8b 8x1 tp 1 optim.shard=weights PLAIN
8x1, weights                   | llama3_8b 8x1 tp 1 optim.shard=weights
8x1, weights, full             | llama3_8b 8x1 tp 1 optim.shard=weights train.recompute=full
8x1, gradients                 | llama3_8b 8x1 tp 1 optim.shard=gradients
8x1, gradients, full           | llama3_8b 8x1 tp 1 optim.shard=gradients train.recompute=full
8x1, optimizer, plain          | llama3_8b 8x1 tp 1 optim.shard=optimizer PLAIN
8x1, optimizer                 | llama3_8b 8x1 tp 1 optim.shard=optimizer
4x2, weights, plain, full      | llama3_8b 4x2 sp 2 optim.shard=weights train.recompute=full PLAIN
4x2, weights                   | llama3_8b 4x2 sp 2 optim.shard=weights
4x2, weights, full             | llama3_8b 4x2 sp 2 optim.shard=weights train.recompute=full
4x2, gradients                 | llama3_8b 4x2 sp 2 optim.shard=gradients
4x2, optimizer                 | llama3_8b 4x2 sp 2 optim.shard=optimizer
gpt2_345m 2x4, plain           | gpt2_345m 2x4 sp 4 PLAIN
gpt2_345m 2x4                  | gpt2_345m 2x4 sp 4
megatron_1.2b 1x1, plain       | megatron_1.2b 1x1 tp 8 PLAIN
megatron_1.2b 1x1              | megatron_1.2b 1x1 tp 8
core 1.7B                      | core 48x1 0
core 7.1B                      | core 48x2 1
core 16B                       | core 48x4 2
core 32B                       | core 48x8 3
options: two rows, no slots    | llama3_8b 1x8 sp 2 LAYERS NO_SLOTS
options: two rows, not early   | llama3_8b 1x8 sp 2 LAYERS NOT_EARLY
options: two rows, combining   | llama3_8b 1x8 sp 2 LAYERS NO_THRESHOLDS
options: two rows, merging     | llama3_8b 1x8 sp 2 LAYERS NO_DOT_MERGER
options: 8x1, no slots         | llama3_8b 8x1 tp 1 optim.shard=weights NO_SLOTS
options: 8x1, not early        | llama3_8b 8x1 tp 1 optim.shard=weights NOT_EARLY
stages: one row, plain         | llama3_8b 1x4 sp 8 STAGES PLAIN
stages: one row                | llama3_8b 1x4 sp 8 STAGES SEPARATE
stages: one row, early         | llama3_8b 1x4 sp 8 STAGES SEPARATE EARLY
stages: two rows, plain        | llama3_8b 1x4 sp 16 STAGES PLAIN
stages: two rows               | llama3_8b 1x4 sp 16 STAGES SEPARATE
stages: two rows, loop, halves | llama3_8b 1x4 sp 16 STAGES LOOP_IN_HALVES
stages: two rows, halves       | llama3_8b 1x4 sp 16 STAGES IN_HALVES
stages: two rows, halves early | llama3_8b 1x4 sp 16 STAGES IN_HALVES EARLY
loop: gpt2_345m                | gpt2_345m 2x4 tp 4 PLAIN
loop: gpt2_345m, full          | gpt2_345m 2x4 tp 4 PLAIN train.recompute=full
loop: gpt2_345m, SP            | gpt2_345m 2x4 sp 4 PLAIN
loop: gpt2_345m, SP, full      | gpt2_345m 2x4 sp 4 PLAIN train.recompute=full
loop: megatron_8.3b            | megatron_8.3b 2x4 tp 4 PLAIN
loop: megatron_8.3b, full      | megatron_8.3b 2x4 tp 4 PLAIN train.recompute=full
loop: megatron_8.3b, SP        | megatron_8.3b 2x4 sp 4 PLAIN
loop: megatron_8.3b, SP, full  | megatron_8.3b 2x4 sp 4 PLAIN train.recompute=full
loop: llama3_8b                | llama3_8b 2x4 tp 4 PLAIN
loop: llama3_8b, full          | llama3_8b 2x4 tp 4 PLAIN train.recompute=full
loop: llama3_8b, SP            | llama3_8b 2x4 sp 4 PLAIN
loop: llama3_8b, SP, full      | llama3_8b 2x4 sp 4 PLAIN train.recompute=full
"""
WORDS = {
    'LAYERS': 'model.num_layers=8',
    'PLAIN': 'train.overlap=none train.unroll=false',
    'SEPARATE': 'train.overlap=none train.unroll=true',
    'LOOP_IN_HALVES': 'train.overlap=batch_split train.unroll=false',
    'IN_HALVES': 'train.overlap=batch_split train.unroll=true',
    'STAGES': 'model.num_layers=4 mesh.stages=2 train.microbatches=8',
}
DEFAULTS: dict[str, dict[str, str | bool]] = {  # XLA's, in the place of ours, and one of ours
    'EARLY': EARLY,
    'NO_SLOTS': dict.fromkeys(SLOTS, '1'),
    'NOT_EARLY': dict.fromkeys(EARLY, False),
    'NO_THRESHOLDS': {name: '31457280' for name in OPTIONS if 'threshold_bytes' in name},
    'NO_DOT_MERGER': {name: '32' for name in OPTIONS if 'dot_merger' in name},
}
AXES = 'data', 'model'
BY_AXIS = 'share', 'hidden', 'wire_ms', 'of_megatron'
COLUMNS = ['name', 'overlap', 'unrolled', *(f'{key}_{axis}' for axis in AXES for key in BY_AXIS)]
COLUMNS += ['compute_ms', 'exposed_ms', 'moved', 'state', 'temporaries', 'findings', 'jax']
COLUMNS += ['seconds']


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    parser.add_argument('--only', default='', metavar='WORD')
    arguments = parser.parse_args()
    wanted = missing(arguments.out, steps(arguments.only))
    extend(arguments.out, COLUMNS, (measure(*step) for step in wanted))
    print(table(read(arguments.out)))


def steps(only: str = '') -> list[Step]:
    return steps_of(STEPS, only)


def load(words: list[str]) -> Config:
    preset, mesh, *others = words
    if preset == 'core':
        # The fastest layout by `plan` of the step on the row's mesh.
        row = [row for row in published('core') if row.config.mesh.stages == 1][int(others[0])]
        return changed(row.config, train__microbatches=1)
    parallel, rows, *overrides = others
    data, model = mesh.split('x')
    keys = {
        'mesh.data': data,
        'mesh.model': model,
        'mesh.sequence_parallel': str(parallel == 'sp').lower(),
        'train.batch_size': str(int(data) * int(rows)),
        'train.microbatches': '1',
        'train.recompute': 'none',
        'train.dtype': 'bfloat16',
        'model.dropout': '0.0',
        'optim.shard': 'none',
    }
    if preset == 'llama3_8b':
        keys['train.seq_len'] = '8192'
    given = ' '.join(WORDS.get(word, word) for word in overrides if word not in DEFAULTS).split()
    return megajax.load(preset, [*(f'{key}={value}' for key, value in keys.items()), *given])


def measure(name: str, words: list[str]) -> dict[str, object]:
    config = load(words)
    step = compile_for(config, 'h100', num_hosts(config.mesh.num_devices), DEFAULTS.get(words[-1]))
    told = audit(config, step, 'h100')
    line: dict[str, object] = {'name': name, 'overlap': told.overlap, 'unrolled': told.unrolled}
    for axis in AXES:
        if on_wire := told.wire_seconds.get(axis):
            line[f'share_{axis}'] = f'{told.overlapped_share[axis]:.4f}'
            line[f'hidden_{axis}'] = f'{told.hidden_seconds[axis] / on_wire:.4f}'
            line[f'wire_ms_{axis}'] = f'{1e3 * on_wire:.3f}'
            line[f'of_megatron_{axis}'] = f'{told.ratios[axis]:.4f}'
    assert told.compute_seconds is not None
    assert told.exposed_seconds is not None
    return line | {
        'compute_ms': f'{1e3 * told.compute_seconds:.3f}',
        'exposed_ms': f'{1e3 * told.exposed_seconds:.3f}',
        'moved': sum(
            kernel.times * kernel.bytes
            for kernel in kernels(Program(step.text))
            if not kernel.products
        ),
        'state': step.arguments,
        'temporaries': step.temporaries,
        'findings': num_findings(told),
        'jax': step.jax_version,
        'seconds': f'{step.seconds:.0f}',
    }


def table(lines: list[dict[str, str]]) -> str:
    """The lines as Markdown, in ms, GB and percent."""
    rows = ['| step | jax | bytes, seconds beside products | ms | moved | temporaries |']
    rows.append('|---|---|---|---|---|---|')
    for line in lines:
        parts = [
            f'{axis} {float(line[f"share_{axis}"]):.0%}, {float(line[f"hidden_{axis}"]):.1%}'
            for axis in AXES
            if line[f'share_{axis}']
        ]
        compute, exposed = float(line['compute_ms']), float(line['exposed_ms'])
        cells = (
            *(line['name'], line['jax'], '; '.join(parts)),
            f'{compute:.1f} + {exposed:.1f} = {compute + exposed:.1f}',
            *(f'{int(line[key]) / 1e9:.1f} GB' for key in ('moved', 'temporaries')),
        )
        rows.append(f'| {" | ".join(cells)} |')
    return '\n'.join(rows)


if __name__ == '__main__':
    main()
