"""Stages and long sequences, compiled for H100s: `python benchmarks/stages.py OUT.csv`.

For every line of STEPS: bytes that a GPU holds and sends in a training step in bf16, temporaries of
the step and of its loss and gradients alone, the share of bytes that matrix products overlap, and
the seconds of compiling. No GPU is needed (`pip install 'megajax[gpu-compile]'`). Lines that
OUT.csv has already are not compiled again, so that the run, about twenty minutes on one core, can
be interrupted.
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
from megajax.core.config import Config
from megajax.core.counts.schedule import schedule_of
from megajax.core.hardware.targets import WITHOUT_GPU, gpu_devices, num_hosts
from megajax.core.parallel.mesh import concrete, mesh_of
from megajax.core.train.compiler_options import step_options
from megajax.core.train.feed import abstract_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.overlap import SLOTS
from megajax.core.train.step import init_state
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program

# One row of a microbatch for each data shard; the second word is the number of microbatches.
STEPS = """
8B p4 full             | llama3_8b 16 P4 train.recompute=full
8B p4                  | llama3_8b 16 P4
8B p4 m64 full         | llama3_8b 64 P4 train.recompute=full
8B p4 m64              | llama3_8b 64 P4
8B p4 v2 full          | llama3_8b 16 P4 mesh.virtual_stages=2 train.recompute=full
8B p4 v2               | llama3_8b 16 P4 mesh.virtual_stages=2
8B p4 gpipe full       | llama3_8b 16 P4 train.schedule=gpipe train.recompute=full
8B p4 gpipe            | llama3_8b 16 P4 train.schedule=gpipe
8B p4 m64 gpipe full   | llama3_8b 64 P4 train.schedule=gpipe train.recompute=full
8B p4 m64 gpipe        | llama3_8b 64 P4 train.schedule=gpipe
8B p4 one slot         | llama3_8b 16 P4 ONE_SLOT
8B 32k c4 gather       | llama3_8b 1 C4
8B 32k c4 ring         | llama3_8b 1 C4 mesh.context_exchange=ring
8B 32k p4 c2           | llama3_8b 16 P4 mesh.context=2 mesh.data=1 train.seq_len=32768
8B 128k                | llama3_8b_128k 32 C8
8B 128k ring           | llama3_8b_128k 32 C8 mesh.context_exchange=ring
8B 128k full           | llama3_8b_128k 32 C8 train.recompute=full
70B p4                 | llama3_70b 16 mesh.stages=4 mesh.data=4 train.recompute=full
175B p8                | gpt3_175b 32 mesh.stages=8 mesh.data=2 train.recompute=full
1008B p64 A100         | gpt3_175b 512 P64
"""
GROUPS = {
    'P4': 'mesh.stages=4 mesh.data=2 train.seq_len=4096 optim.shard=none',
    'C4': 'mesh.context=4 mesh.data=1 mesh.model=2 train.seq_len=32768 optim.shard=none',
    'C8': 'mesh.context=8 mesh.data=1 mesh.context_exchange=gather',
    'P64': 'mesh.stages=64 mesh.data=6 mesh.sequence_parallel=false train.recompute=full '
    'model.num_layers=128 model.hidden_size=25600 model.num_heads=160 model.head_dim=160 '
    'model.ffn_size=102400 model.vocab_size=51200',
    'ONE_SLOT': '',
}
COLUMNS = ['name', 'layout', 'bubble', 'state', 'temporaries', 'of_gradients', 'permutes']
COLUMNS += ['beside_products', 'sent', 'overlapped', 'findings', 'jax', 'seconds']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('out', type=Path)
    parser.add_argument('--only', default='', help='lines whose name contains this')
    arguments = parser.parse_args()
    wanted = missing(arguments.out, steps_of(STEPS, arguments.only))
    extend(arguments.out, COLUMNS, (measure(*step) for step in wanted))
    print(table(read(arguments.out)))


def load(words: list[str]) -> Config:
    preset, microbatches, *overrides = words
    overrides = ' '.join(GROUPS.get(word, word) for word in overrides).split()
    keys = {
        'mesh.data': '1',
        'mesh.model': '8',
        'mesh.sequence_parallel': 'true',
        'train.microbatches': microbatches,
        'train.dtype': 'bfloat16',
        'train.recompute': 'none',
        'optim.shard': 'optimizer',
        'model.dropout': '0.0',
        **dict(override.split('=') for override in overrides),
    }
    length = int(keys.get('train.seq_len', 0)) or megajax.load(preset).train.seq_len
    keys['train.seq_len'] = str(length)
    keys['model.max_seq_len'] = str(max(length, megajax.load(preset).model.max_seq_len))
    keys['train.batch_size'] = str(int(keys['mesh.data']) * int(microbatches))
    return megajax.load(preset, [f'{key}={value}' for key, value in keys.items()])


def measure(name: str, words: list[str]) -> dict[str, object]:
    config, target = load(words), 'a100' if 'A100' in name else 'h100'
    options = dict.fromkeys(SLOTS, '1') if 'ONE_SLOT' in words else {}
    step = compile_for(config, target, num_hosts(config.mesh.num_devices), options)
    told = audit(config, step, target)
    permutes = [
        collective
        for collective in collectives(Program(step.text), step.mesh)
        if collective.kind == 'collective-permute' and collective.times
    ]
    beside = sum(each.times for each in permutes if each.overlapped_flops)
    schedule = schedule_of(config)
    return {
        'name': name,
        'layout': ' '.join(f'{axis}={size}' for axis, size in config.mesh.sizes.items()),
        'bubble': f'{schedule.bubble:.4f}' if config.mesh.stages > 1 else '',
        'state': step.arguments,
        'temporaries': step.temporaries,
        'of_gradients': temporaries_of_gradients(config, target, options),
        'permutes': sum(each.times for each in permutes),
        'beside_products': beside,
        'sent': ' '.join(f'{axis}={size:.0f}' for axis, size in sent_by_axis(told).items()),
        'overlapped': ' '.join(
            f'{axis}={share:.3f}' for axis, share in sorted(told.overlapped_share.items())
        ),
        'findings': num_findings(told),
        'jax': step.jax_version,
        'seconds': f'{step.seconds:.0f}',
    }


def temporaries_of_gradients(config: Config, target: str, options: dict[str, str]) -> int:
    """Compile loss and gradients alone, and return the bytes of their temporaries."""
    hosts = num_hosts(config.mesh.num_devices)
    per_host = config.mesh.num_devices // hosts
    mesh = mesh_of(gpu_devices(target, hosts=hosts, per_host=per_host), config.mesh.sizes)
    with jax.set_mesh(mesh):
        params = concrete(jax.eval_shape(lambda: init_state(config).params))
        function = jax.jit(
            make_loss_and_gradients(config), compiler_options=step_options(config) | options
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        compiled = function.lower(params, abstract_batch(config), key).compile(WITHOUT_GPU)
    return compiled.memory_analysis().temp_size_in_bytes


def table(rows: list[dict[str, str]]) -> str:
    """The rows as Markdown, in GiB, GB and percent."""
    heads = 'step', 'jax', 'bubble', 'state', 'temporaries', 'of gradients', 'permutes'
    lines = [f'| {" | ".join((*heads, "sent, overlapped", "findings", "seconds"))} |']
    lines.append('|---' * 10 + '|')
    for row in rows:
        shares = dict(part.split('=') for part in row['overlapped'].split())
        sent = (part.split('=') for part in row['sent'].split())
        words = [
            f'{axis} {float(size) / 1e9:.2f} GB'
            + (f', {float(shares[axis]):.0%}' if axis in shares else '')
            for axis, size in sent
        ]
        cells = [
            row['name'],
            row['jax'],
            f'{float(row["bubble"]):.1%}' if row['bubble'] else '',
            *(f'{int(row[column]) / 2**30:.2f}' for column in COLUMNS[3:6]),
            f'{row["beside_products"]} of {row["permutes"]}' if int(row['permutes']) else '',
            '; '.join(words),
            row['findings'],
            row['seconds'],
        ]
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
