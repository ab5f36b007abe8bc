"""What `megajax.plan` counts of a training step beside what XLA's compiler made of it:
`python benchmarks/plan_memory.py OUT.csv`, or with `--experts` for every line of EXPERTS.

Bytes of memory, FLOPs of the matrix products, kernels and bytes on the wire of each H100 by mesh
axis, with the share of these that matrix products overlap, for every line of STEPS. No GPU is
needed (`pip install 'megajax[gpu-compile]'`). What OUT.csv has of compiled steps is not compiled
again, so that the run, some five quarters of an hour on one core, can be interrupted, and what is
predicted can be computed anew in seconds.
"""

import argparse
import csv
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import megajax
from megajax.analysis.plan.communication import wire_bytes
from megajax.analysis.plan.launches import num_launches
from megajax.analysis.plan.memory import memory
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.expert_rows import LATER_ROUNDS
from megajax.core.counts.flash import uses_flash
from megajax.core.counts.products import products
from megajax.core.hardware.records import hardware
from megajax.core.hardware.targets import num_hosts

# preset, data x model, sequence parallelism, recompute, rows of a microbatch, microbatches, other
# overrides
STEPS = """
gpt2_124m      1x1 tp none      1 1
gpt2_124m      1x1 tp none      8 1
gpt2_124m      1x1 tp selective 8 1
gpt2_124m      1x1 tp full      8 1
gpt2_124m      1x1 tp none      4 1 train.dtype=float32
gpt2_124m      1x1 tp selective 4 1 train.dtype=float32
gpt2_124m      2x4 tp none      8 4
gpt2_124m      8x1 tp none      4 1 model.dropout=0.1
gpt2_345m      1x1 tp none      4 1
gpt2_345m      1x1 tp full      4 1
gpt2_345m      2x2 tp none      4 1
gpt2_345m      2x2 sp none      4 1
gpt2_345m      1x8 sp selective 8 1
gpt2_345m      8x1 tp none      4 2
gpt2_345m      1x4 tp none      2 1 model.dropout=0.1
gpt2_345m      1x4 sp selective 2 1 model.dropout=0.1
gpt2_345m      1x4 sp full      2 1 model.dropout=0.1
megatron_1.2b  1x1 tp full      8 1
megatron_1.2b  8x1 tp full      4 4
megatron_1.2b  1x2 tp none      4 1
megatron_1.2b  8x8 sp none      8 1
megatron_2.5b  1x2 tp selective 2 1
megatron_2.5b  2x2 sp none      2 1
megatron_2.5b  1x4 tp full      8 1
megatron_4.2b  1x4 sp none      1 1
megatron_4.2b  1x8 tp full      4 1 train.dtype=float32
megatron_8.3b  1x8 tp none      2 1
megatron_8.3b  2x8 tp full      8 1
megatron_8.3b  8x8 sp none      4 1
megatron_8.3b  1x8 sp full      8 1
megatron_8.3b  64x8 tp full     8 4
megatron_8.3b  2x4 sp selective 1 1
llama3_8b      1x8 sp none      1 1
llama3_8b      2x8 sp full      4 1
llama3_8b      1x8 tp full      1 2
llama3_8b      2x4 tp none      1 1 train.seq_len=4096
llama3_8b      1x16 sp full     2 1
qwen3_8b       1x4 tp full      2 1
qwen3_8b       1x8 sp none      1 1 train.seq_len=4096
llama3_70b     1x8 sp full      1 1 train.seq_len=4096
llama3_70b     1x64 sp full     4 1
megatron_8.3b  1x8 sp none      32 1
gpt3_175b      1x8 sp full      1 1
gpt3_175b      64x8 tp full     8 1
gpt3_175b      1x32 sp selective 4 1
gpt2_345m      2x4 sp none      4 2 train.dtype=float16
gpt2_345m      8x1 tp none      4 1 optim.shard=true
megatron_1.2b  8x1 tp full      4 4 optim.shard=true
megatron_8.3b  8x8 sp selective 4 1 optim.shard=true
llama3_8b      8x4 tp full      1 2 optim.shard=true
gpt3_175b      8x32 sp full     4 1 optim.shard=true
qwen3_8b       4x2 sp selective 2 2
megatron_4.2b  2x8 sp full      2 4 model.dropout=0.1
llama3_8b      2x8 tp none      2 1 train.seq_len=2048
megatron_1.2b  4x2 sp selective 4 1 train.dtype=float16
llama3_8b      1x2 tp none      4 1 train.seq_len=2048 model.num_layers=6
llama3_8b      1x2 tp none      4 1 train.seq_len=2048 model.num_layers=6 model.ffn_size=28672
tiny           2x4 sp none      4 1
tiny           1x1 tp none      8 1 train.dtype=float32
bert_336m      2x4 sp selective 8 2
gpt2_345m      4x4 tp none      8 1 model.num_kv_heads=1
qwen3_8b       8x4 tp full      2 1 optim.shard=true model.num_layers=40 \
    model.hidden_size=5120 model.num_heads=40 model.ffn_size=17408
qwen3_8b       8x4 sp none      1 2 optim.shard=true model.num_layers=40 \
    model.hidden_size=5120 model.num_heads=40 model.ffn_size=17408
gpt2_124m      1x1 tp none      8 1 data.document_mask=true
llama3_8b      1x8 sp full      1 1 data.document_mask=true
llama3_8b      1x8 sp full      1 1 data.document_mask=true train.seq_len=16384 \
    model.max_seq_len=16384
qwen3_8b       1x8 tp none      2 1 data.document_mask=true train.seq_len=4096
bert_336m      1x1 tp none      8 1 model.dropout=0.0
llama3_8b      1x16 sp full     2 1 model.num_layers=3 model.hidden_size=8192 \
    model.num_heads=64 model.vocab_size=256000
llama3_8b      1x16 sp none     1 1 model.num_layers=3 model.hidden_size=8192 \
    model.num_heads=64 model.vocab_size=256000
llama3_8b      8x1 tp full      1 1
llama3_8b      8x1 tp full      1 1 optim.shard=optimizer
llama3_8b      8x1 tp full      1 1 optim.shard=gradients
llama3_8b      8x1 tp full      1 1 optim.shard=weights
llama3_8b      8x1 tp full      1 1 optim.shard=weights optim.reduce_dtype=bfloat16
llama3_8b      8x1 tp full      1 4 optim.shard=optimizer
llama3_8b      8x1 tp full      1 4 optim.shard=gradients
llama3_8b      8x1 tp full      1 4 optim.shard=weights
llama3_8b      8x1 tp none      1 1 optim.shard=weights train.seq_len=2048
llama3_8b      4x2 sp full      2 1 optim.shard=optimizer
llama3_8b      4x2 sp full      2 1 optim.shard=weights
llama3_8b      4x2 sp full      2 4 optim.shard=gradients
llama3_8b      8x8 sp full      8 1 optim.shard=optimizer
llama3_8b      8x8 sp full      8 1 optim.shard=weights
llama3_70b     8x8 sp full      8 1 optim.shard=weights
llama3_70b     64x1 tp full     1 1 optim.shard=weights
gpt3_175b      8x8 sp full      8 1 optim.shard=weights
llama3_8b      1x1 tp full      1 1 optim.moments_dtype=bfloat16
gpt2_345m      48x1 tp none     4 1 optim.shard=weights model.hidden_size=1280 model.num_heads=20
gpt2_345m      8x1 tp none      4 2 optim.shard=weights train.dtype=float32
gpt2_345m      3x2 tp full      4 1 optim.shard=gradients
qwen3_8b       6x2 sp full      2 1 optim.shard=weights
qwen3_8b       8x2 sp selective 1 1 optim.shard=weights train.seq_len=4096
bert_336m      8x1 tp none      8 2 optim.shard=weights
megatron_8.3b  8x8 sp none      4 1 optim.shard=weights
llama3_8b      16x4 sp full     2 1 optim.shard=weights mesh.replicas=2
llama3_8b      16x1 tp full     1 2 optim.shard=gradients mesh.replicas=2
llama3_8b      32x1 tp none     1 1 optim.shard=gradients mesh.replicas=4 train.seq_len=2048
llama3_70b     16x8 sp none     1 2 optim.shard=weights mesh.replicas=2
gpt2_345m      2x2 sp none      4 1 mesh.model_rows=2
llama3_8b      1x2 sp none      4 1 mesh.model_rows=2 train.seq_len=2048 model.num_layers=6
llama3_8b      2x4 sp full      4 1 mesh.model_rows=2 optim.shard=weights
llama3_8b      2x8 sp none      4 1 mesh.model_rows=2 train.seq_len=4096
llama3_8b      8x2 sp full      4 1 mesh.model_rows=2 optim.shard=weights mesh.replicas=2
llama3_8b      2x4 sp full      8 1 mesh.model_rows=4 model.num_kv_heads=32
llama3_70b     4x8 sp full      8 1 mesh.model_rows=4 optim.shard=weights
megatron_8.3b  1x8 sp full      8 2 mesh.model_rows=2
gpt3_175b      1x32 sp full     16 1 mesh.model_rows=4
gpt3_175b      4x16 sp full     8 1 mesh.model_rows=4 optim.shard=gradients
gpt3_175b      2x16 sp none     8 1 mesh.model_rows=4 train.seq_len=1024 optim.shard=weights
llama3_8b      2x8 sp full      1 16 mesh.stages=4 train.seq_len=4096
llama3_8b      2x8 sp none      1 16 mesh.stages=4 train.seq_len=4096
llama3_8b      1x8 sp full      1 1 mesh.context=4 train.seq_len=8192
llama3_8b      1x8 sp none      1 1 mesh.context=4 train.seq_len=8192
llama3_8b      2x8 sp none      1 16 mesh.stages=4 mesh.virtual_stages=2 train.seq_len=4096
llama3_8b      2x8 sp full      1 16 mesh.stages=4 mesh.virtual_stages=2 train.seq_len=4096
llama3_8b      2x8 sp full      1 16 mesh.stages=4 train.seq_len=4096 train.schedule=gpipe
llama3_8b      2x8 sp none      1 8 mesh.stages=4 train.seq_len=4096 train.schedule=gpipe
llama3_8b      2x8 sp full      1 16 mesh.stages=4 train.seq_len=4096 optim.shard=optimizer
llama3_70b     4x8 sp full      1 16 mesh.stages=4 train.seq_len=4096
llama3_8b      1x2 sp full      1 1 mesh.context=4 mesh.context_exchange=ring train.seq_len=8192
gpt3_175b      2x8 sp full      1 16 mesh.stages=8
llama3_8b      2x8 tp none      1 16 mesh.stages=4 train.seq_len=4096
megatron_8.3b  2x4 sp selective 1 8 mesh.stages=4 model.dropout=0.1
llama3_8b      2x2 sp full      1 4 mesh.stages=2 mesh.context=2 train.seq_len=8192
llama3_8b      2x8 sp full      2 8 mesh.stages=4 train.seq_len=4096
megatron_1.2b  2x1 tp none      1 8 mesh.stages=4
llama3_8b      2x4 sp full      1 2 mesh.context=2 train.seq_len=8192 optim.shard=weights
gpt2_345m      2x2 sp none      4 4 mesh.stages=2
bert_336m      2x2 sp none      4 4 mesh.stages=2
llama3_8b      1x2 sp none      1 4 mesh.stages=2 mesh.context=2 mesh.context_exchange=ring \
    train.seq_len=8192
llama3_8b      2x1 tp full      1 1 mesh.context=4 train.seq_len=8192 optim.shard=optimizer
llama3_8b      2x8 sp none      1 16 mesh.stages=4 train.seq_len=4096 optim.shard=optimizer
llama3_8b      2x8 sp none      1 16 mesh.stages=2 train.seq_len=4096
llama3_8b      2x8 sp none      1 16 mesh.stages=8 train.seq_len=4096
llama3_8b      1x8 sp none      1 8 mesh.stages=4 train.seq_len=4096
llama3_8b      2x8 sp none      1 16 mesh.stages=4 mesh.virtual_stages=4 train.seq_len=4096
llama3_70b     4x8 sp none      1 16 mesh.stages=4 train.seq_len=4096
llama3_70b     4x8 sp full      1 16 mesh.stages=4 mesh.virtual_stages=4 train.seq_len=4096 \
    optim.shard=optimizer
gpt3_175b      2x8 sp none      1 16 mesh.stages=8 optim.shard=optimizer
gpt3_175b      2x8 tp full      2 16 mesh.stages=8 mesh.virtual_stages=2
megatron_8.3b  2x4 sp none      4 8 mesh.stages=4
megatron_8.3b  2x4 tp full      4 8 mesh.stages=2 train.dtype=float32
gpt2_345m      1x2 sp selective 4 4 mesh.stages=2 model.dropout=0.1
llama3_8b      2x1 tp full      1 2 mesh.context=8 train.seq_len=8192 optim.shard=weights
llama3_8b      1x8 sp none      1 4 mesh.context=4 train.seq_len=8192 mesh.context_exchange=ring
gpt2_345m      2x1 tp none      2 1 mesh.context=4
llama3_8b      2x8 sp full      1 16 mesh.stages=2 train.seq_len=4096
llama3_8b      2x2 sp full      1 4 mesh.stages=2 train.seq_len=4096
llama3_8b      2x2 sp full      1 8 mesh.stages=4 mesh.context=2 train.seq_len=8192
qwen3_vl_2b    8x8 sp full      8 1
qwen3_vl_2b    2x2 sp none      4 2 train.seq_len=2048
qwen3_vl_2b    8x1 tp full      2 1 optim.shard=weights
qwen3_vl_2b    2x4 sp full      8 1 vision.fusion=cross_attention vision.deepstack=[]
qwen3_vl_2b    2x4 sp none      4 1 vision.fusion=cross_attention vision.deepstack=[] \
    train.seq_len=2048
qwen3_vl_4b    2x4 sp selective 4 1 optim.shard=gradients train.seq_len=2048
qwen3_vl_8b    8x8 sp full      8 1
qwen3_vl_8b    8x8 tp none      8 1 train.seq_len=2048
qwen3_vl_8b    2x8 sp full      8 2 vision.freeze=[encoder,merger]
qwen3_vl_32b   8x8 sp full      8 1 optim.shard=weights
arr_coc_32b    1x8 sp full      8 1
gpt2_345m      1x1 tp none      4 1 IN_ORDER
gpt2_345m      1x1 tp full      4 2 IN_ORDER
megatron_1.2b  1x1 tp none      8 1 IN_ORDER
megatron_1.2b  1x1 tp full      8 1 IN_ORDER
gpt2_345m      8x1 tp none      4 2 optim.shard=optimizer IN_ORDER
megatron_1.2b  8x1 tp none      4 1 optim.shard=optimizer IN_ORDER
megatron_1.2b  8x1 tp full      4 4 optim.shard=weights IN_ORDER
llama3_8b      8x1 tp none      1 1 optim.shard=weights IN_ORDER
llama3_8b      8x1 tp full      1 1 optim.shard=weights IN_ORDER
llama3_8b      8x1 tp full      1 1 optim.shard=gradients IN_ORDER
llama3_8b      8x1 tp full      1 1 optim.shard=optimizer IN_ORDER
llama3_8b      8x1 tp full      1 4 optim.shard=gradients IN_ORDER
llama3_8b      4x2 sp none      2 1 optim.shard=weights IN_ORDER
llama3_8b      4x2 sp full      2 1 optim.shard=weights IN_ORDER
llama3_8b      4x2 sp full      2 1 optim.shard=optimizer IN_ORDER
llama3_8b      4x2 tp full      2 2 optim.shard=weights IN_ORDER
llama3_8b      1x8 sp none      2 1 IN_ORDER
llama3_8b      1x8 sp none      1 1 IN_ORDER
"""
EXPERTS = """
qwen3_30b_a3b 8x1 tp full 2 1 model.num_layers=12 mesh.experts=8 optim.shard=weights
qwen3_30b_a3b 8x1 tp none 1 1 model.num_layers=12 mesh.experts=8 optim.shard=weights
qwen3_30b_a3b 8x1 tp full 2 1 model.num_layers=12 mesh.experts=1 optim.shard=weights
qwen3_30b_a3b 8x1 tp full 2 1 model.num_layers=12 mesh.experts=8 optim.shard=optimizer \
    model.experts.capacity=1.25
mixtral_8x7b  2x4 sp full 1 1 model.num_layers=8 mesh.experts=2 optim.shard=optimizer
mixtral_8x7b  1x8 sp none 1 1 model.num_layers=8 mesh.experts=1 optim.shard=none
mixtral_8x7b  8x1 tp full 1 2 model.num_layers=4 mesh.experts=4 optim.shard=gradients
mixtral_8x7b  2x4 tp none 1 1 model.num_layers=8 mesh.experts=2 optim.shard=optimizer \
    model.experts.capacity=1.0
qwen3_30b_a3b 8x1 tp full 2 1 model.num_layers=12 mesh.experts=8 optim.shard=weights \
    model.ffn_size=6144 model.experts.first_dense=1
qwen3_30b_a3b 8x1 tp none 1 1 model.num_layers=12 mesh.experts=8 optim.shard=weights \
    model.ffn_size=6144 model.experts.first_dense=1
mixtral_8x7b  2x4 sp full 1 1 model.num_layers=8 mesh.experts=2 optim.shard=optimizer \
    model.experts.first_dense=1
mixtral_8x7b  1x8 sp none 1 1 model.num_layers=8 mesh.experts=1 optim.shard=none \
    model.experts.first_dense=1
mixtral_8x7b  1x8 sp none 1 1 model.num_layers=8 mesh.experts=1 optim.shard=none \
    model.layers=[{},{"experts":null}]
mixtral_8x7b  8x1 tp full 1 2 model.num_layers=4 mesh.experts=4 optim.shard=gradients \
    model.layers=[{},{"experts":null}]
mixtral_8x7b  2x4 sp full 1 1 model.num_layers=8 mesh.experts=2 optim.shard=optimizer \
    model.layers=[{},{"experts":null}]
qwen3_30b_a3b 8x1 tp full 1 1 model.num_layers=7 mesh.experts=8 optim.shard=weights \
    model.hidden_size=4096 model.num_heads=96 model.num_kv_heads=8 model.ffn_size=10944 \
    model.qk_norm=false model.qkv_bias=true model.experts.ffn_size=1408 \
    model.experts.shared_ffn_size=1408 model.experts.scores=sigmoid \
    model.experts.selection_bias=true model.experts.first_dense=1
"""
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
    found = {key(line): line for line in read(arguments.out)} if arguments.out.exists() else {}
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


def steps(text: str = STEPS) -> list[Line]:
    return [
        dict(zip(KEYS, [*(words := line.split())[:6], ' '.join(words[6:])], strict=True))
        for line in text.strip().splitlines()
    ]


def key(line: Line) -> tuple[str, ...]:
    return tuple(line[name] for name in KEYS)


def read(path: Path) -> list[Line]:
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


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
    work = products(config, flash=uses_flash(config))
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
    from megajax.xla.hlo import launches
    from megajax.xla.hlo.program import Program
    from megajax.xla.hlo.schedule import flops

    compiled = compile_for(config, 'h100', num_hosts(config.mesh.num_devices))
    program = Program(compiled.text, skipped=LATER_ROUNDS)
    gflops = sum(flops(program, program.entry, one) for one in program.entry.instructions) / 1e9
    found = audit(config, compiled, 'h100')
    sent = defaultdict[str, float](float)
    for row in found.rows:
        if row.site != 'metrics':  # single numbers
            sent[row.axis] += row.wire_bytes
    total = compiled.arguments + compiled.temporaries + compiled.outputs
    figures = (
        total,
        compiled.arguments,
        f'{gflops:.3f}',
        launches.num_launches(program),
        by_axis(sent),
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
