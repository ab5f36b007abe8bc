"""An encoder beside the decoder, compiled: `python benchmarks/encoders.py OUT.csv`.

For every line of STEPS: bytes that a GPU holds and sends over `model` in a training step, beside
those that Megatron sends, in all and for the encoder; and the FLOPs of the encoder on a GPU over
its share of those of one device. No GPU is needed (`pip install 'megajax[gpu-compile]'`). Lines
that OUT.csv has already are not compiled again, so that the run, about an hour on one core, can be
interrupted.
"""

import argparse
import os
import re
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import jax
from compiled_rows import extend, num_findings, read

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_for
from megajax.core.config import Config
from megajax.core.counts import products as counts
from megajax.core.counts.flash import uses_flash
from megajax.core.hardware.targets import num_hosts
from megajax.xla.hlo.products import products
from megajax.xla.hlo.program import Program

PRESETS = 'qwen3_vl_2b', 'qwen3_vl_4b', 'qwen3_vl_8b', 'qwen3_vl_32b'
# preset, target, data x model, sequence parallelism, and further overrides
STEPS = [
    (preset, target, '8x8', parallel, '')
    for target in ('h100', 'cpu')
    for parallel in ('sp', 'tp')
    for preset in PRESETS
]
STEPS += [
    ('qwen3_vl_8b', 'h100', '8x8', 'tp', 'train.seq_len=2048 train.recompute=none'),
    ('arr_coc_32b', 'a100', '1x8', 'sp', ''),
    ('arr_coc_32b', 'a100', '4x8', 'sp', ''),
]
COLUMNS = ['preset', 'target', 'mesh', 'parallel', 'overrides', 'memory', 'vision']
COLUMNS += ['megatron_vision', 'model', 'megatron_model', 'share', 'findings', 'jax', 'seconds']
KEYS = COLUMNS[:5]
OF_ENCODER = re.compile(r'\bvision\b')  # in the source of an instruction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('out', type=Path)
    parser.add_argument('--only', default='', help='lines with this word')
    arguments = parser.parse_args()
    jax.config.update('jax_num_cpu_devices', 64)  # of the largest mesh
    done = {(*(row[key] for key in KEYS), row['jax']) for row in read(arguments.out)}
    wanted = [
        step
        for step in STEPS
        if (*step, jax.__version__) not in done and arguments.only in ' '.join(step)
    ]
    rows = (dict(zip(KEYS, step, strict=True)) | measure(*step) for step in wanted)
    extend(arguments.out, COLUMNS, rows)
    print(table(read(arguments.out)))


def measure(
    preset: str, target: str, mesh: str, parallel: str, overrides: str
) -> dict[str, object]:
    """Compile a step of eight rows for each data shard, and read its bytes and FLOPs."""
    data, model = map(int, mesh.split('x'))
    keys = [
        f'mesh.data={data}',
        f'mesh.model={model}',
        f'mesh.sequence_parallel={str(parallel == "sp").lower()}',
        f'train.batch_size={8 * data}',
        'train.microbatches=1',
        'train.recompute=full',
        'train.dtype=bfloat16',
        'optim.shard=none',
    ]
    config = megajax.load(preset, [*keys, *overrides.split()])
    step = compile_for(config, target, num_hosts(config.mesh.num_devices))
    told = audit(config, step, target)
    # The names of products do not survive XLA's compiler for CPUs.
    share = '' if target == 'cpu' else f'{share_of_encoder(config, Program(step.text)):.4f}'
    of_model = [row for row in told.rows if row.axis == 'model' and row.site != 'metrics']
    of_vision = [row for row in of_model if row.site == 'vision']
    return {
        'memory': step.arguments + step.temporaries + step.outputs,
        'vision': sum(row.wire_bytes for row in of_vision),
        'megatron_vision': sum(row.megatron_wire_bytes for row in of_vision),
        'model': sum(row.wire_bytes for row in of_model),
        'megatron_model': sum(row.megatron_wire_bytes for row in of_model),
        'share': share,
        'findings': num_findings(told),
        'jax': step.jax_version,
        'seconds': f'{step.seconds:.0f}',
    }


def share_of_encoder(config: Config, program: Program) -> float:
    """The encoder's FLOPs on a device, over those of one device divided by `mesh.model`."""
    alone = config.mesh.model_copy(update={'model': 1, 'sequence_parallel': False})
    on_its_own = config.model_copy(update={'mesh': alone})
    required = counts.products(on_its_own, flash=uses_flash(config))
    on_one = sum(x.times * x.flops for x in required if x.name.startswith('vision '))
    compiled = sum(
        times * product.flops
        for product, _, instruction, times in products(program)
        if OF_ENCODER.search(instruction.op_name) and 'budget' not in instruction.op_name
    )
    return compiled * config.mesh.model / on_one


def table(rows: list[dict[str, str]]) -> str:
    """The rows as Markdown, in GB."""
    lines = [
        '| preset | compiled for | data x model | holds | encoder sends | everything over `model` '
        '| FLOPs of the encoder | findings | jax |',
        f'|{"---|" * 9}',
    ]
    for row in rows:
        parallel = 'sequence parallel' if row['parallel'] == 'sp' else ''
        what = ', '.join(filter(None, (row['mesh'], parallel, row['overrides'])))
        sent = (
            f'{float(row[own]) / 1e9:.2f} of {float(row[megatron]) / 1e9:.2f} GB, '
            f'{float(row[own]) / float(row[megatron]):.2f}'
            for own, megatron in (('vision', 'megatron_vision'), ('model', 'megatron_model'))
        )
        memory = f'{int(row["memory"]) / 1e9:.1f} GB'
        cells = row['preset'], row['target'], what, memory, *sent, row['share']
        lines.append(f'| {" | ".join((*cells, row["findings"], row["jax"]))} |')
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
