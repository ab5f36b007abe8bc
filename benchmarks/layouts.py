"""Where weights live, compiled for H100s: `python benchmarks/layouts.py OUT.csv`.

For every line of STEPS: bytes that a GPU holds and sends in a training step of one row of 8192
tokens a data shard and `model`, in bf16 with full recomputation, and the share of the bytes that
matrix products overlap, in a loop over layers in XLA's order (`benchmarks/overlap.py` has ours). No
GPU is needed (`pip install 'megajax[gpu-compile]'`). Lines that OUT.csv
has already are not compiled again, so that the run, about half an hour on one core, can be
interrupted.
"""

import argparse
import os
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import jax
from compiled_rows import extend, missing, num_findings, read, sent_by_axis, steps_of

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.plan.communication import wire_bytes
from megajax.core.config import Config
from megajax.core.hardware.targets import num_hosts
from megajax.core.train.overlap import SLOTS

# name, preset, data, rows of the batch, further overrides, and options of XLA's in capitals
STEPS = """
DP, 8x1                    | llama3_8b 8 8 optim.shard=none
ZeRO-1, 8x1                | llama3_8b 8 8 optim.shard=optimizer
ZeRO-2, 8x1                | llama3_8b 8 8 optim.shard=gradients
ZeRO-3, 8x1                | llama3_8b 8 8 optim.shard=weights
ZeRO-3 in bf16, 8x1        | llama3_8b 8 8 optim.shard=weights optim.reduce_dtype=bfloat16
ZeRO-3 4 microbatches, 8x1 | llama3_8b 8 32 optim.shard=weights train.microbatches=4
ZeRO-3, 4x2                | llama3_8b 4 8 optim.shard=weights mesh.model=2
ZeRO-3 four slots, 8x1     | llama3_8b 8 8 optim.shard=weights SLOTS
ZeRO-3 four slots, 4x2     | llama3_8b 4 8 optim.shard=weights mesh.model=2 SLOTS
ZeRO-3 pipelined, 8x1      | llama3_8b 8 8 optim.shard=weights PIPELINED
ZeRO-3 pipelined, 4x2      | llama3_8b 4 8 optim.shard=weights mesh.model=2 PIPELINED
HSDP 2 replicas, 8x8       | llama3_8b 8 64 optim.shard=weights mesh.model=8 mesh.replicas=2
grid 2x2                   | llama3_8b 1 4 mesh.model=2 mesh.model_rows=2
grid 2x8                   | llama3_8b 1 16 mesh.model=8 mesh.model_rows=2
grid 4x16                  | gpt3_175b 1 4 mesh.model=16 mesh.model_rows=4 train.seq_len=2048
70B, 8x8                   | llama3_70b 8 64 optim.shard=weights mesh.model=8
70B, 64x1                  | llama3_70b 64 64 optim.shard=weights
175B, 8x8 H200             | gpt3_175b 8 64 optim.shard=weights mesh.model=8 train.seq_len=2048
"""
PIPELINED = (
    {f'xla_gpu_enable_pipelined_{kind}': True for kind in ('all_gather', 'reduce_scatter')}
    if jax.__version__.startswith('0.10.')
    else {
        f'xla_gpu_pipeline_{kind}': 'COLLECTIVE_PIPELINING_MODE_ON'
        for kind in ('all_gather', 'reduce_scatter')
    }
)
OPTIONS: dict[str, dict[str, str | bool]] = {'SLOTS': {**SLOTS}, 'PIPELINED': {**PIPELINED}}
COLUMNS = ['name', 'state', 'temporaries', 'wire', 'counted', 'overlapped', 'findings', 'jax']
COLUMNS += ['seconds', 'layout']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('out', type=Path)
    parser.add_argument('--only', default='', help='lines whose name contains this')
    arguments = parser.parse_args()
    wanted = missing(arguments.out, steps_of(STEPS, arguments.only))
    extend(arguments.out, COLUMNS, (measure(*step) for step in wanted))
    print(table(read(arguments.out)))


def load(words: list[str]) -> Config:
    preset, data, rows, *overrides = words
    keys = dict(override.split('=') for override in overrides if override not in OPTIONS)
    length = min(8192, int(keys.get('train.seq_len', 8192)))
    keys = {
        'mesh.data': data,
        'mesh.model': '1',
        'train.batch_size': rows,
        'train.microbatches': '1',
        'train.seq_len': str(length),
        'train.recompute': 'full',
        'train.dtype': 'bfloat16',
        'mesh.sequence_parallel': str('mesh.model' in keys).lower(),
        'model.dropout': '0.0',
        'train.overlap': 'none',
        'train.unroll': 'false',
        'optim.shard': 'none',
        **keys,
    }
    return megajax.load(preset, [f'{key}={value}' for key, value in keys.items()])


def measure(name: str, words: list[str]) -> dict[str, object]:
    """Compile a step and read its bytes; a step of many hosts has eight GPUs on each."""
    config, target = load(words), 'h200' if 'H200' in name else 'h100'
    options = OPTIONS.get(words[-1])
    step = compile_for(config, target, num_hosts(config.mesh.num_devices), options)
    told = audit(config, step, target)
    return {
        'name': name,
        'layout': ' '.join(f'{axis}={size}' for axis, size in config.mesh.sizes.items()),
        'state': step.arguments,
        'temporaries': step.temporaries,
        'wire': ' '.join(f'{axis}={size:.0f}' for axis, size in sent_by_axis(told).items()),
        'counted': ' '.join(
            f'{axis}={size:.0f}' for axis, size in sorted(wire_bytes(config).items()) if size
        ),
        'overlapped': ' '.join(
            f'{axis}={share:.3f}' for axis, share in sorted(told.overlapped_share.items())
        ),
        'findings': num_findings(told),
        'jax': step.jax_version,
        'seconds': f'{step.seconds:.0f}',
    }


def table(rows: list[dict[str, str]]) -> str:
    """The rows as Markdown, in GB and percent."""
    lines = ['| step | jax | state | temporaries | sent, overlapped | findings |']
    lines.append('|---|---|---|---|---|---|')
    for row in rows:
        shares = dict(part.split('=') for part in row['overlapped'].split())
        sent = (part.split('=') for part in row['wire'].split())
        words = [
            f'{axis} {float(size) / 1e9:.2f} GB'
            + (f', {float(shares[axis]):.0%}' if axis in shares else '')
            for axis, size in sent
            if float(size) > 5e6
        ]
        sizes = (f'{int(row[key]) / 1e9:.2f} GB' for key in ('state', 'temporaries'))
        cells = row['name'], row['jax'], *sizes, '; '.join(words), row['findings']
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
