"""What the kernels of one GPU's step move, with a roofline of them: `python benchmarks/kernels.py
OUT.csv`.

Each line of STEPS is compiled for an H200 without recomputation, products by cuBLAS. Nothing is
timed: a product takes its FLOPs at 0.80 of 989.4 TFLOP/s, in fp8 1.54 times as many a second,
attention half of its own at 0.55 forward and 0.45 backward, or their bytes if those take longer,
and every other kernel its bytes, at 4.3 TB/s. MFU is of the peak in bf16. No GPU is needed
(`pip install 'megajax[gpu-compile]'`). Lines that OUT.csv has already for this version of jax are
not compiled again; a run takes some ten minutes.
"""

import argparse
import os
import re
import time
from collections import Counter
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import jax
from compiled_rows import extend, missing, read, steps_of

import megajax
from megajax.analysis.inspect.compile import compile_for
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.flops import step_flops
from megajax.core.counts.parameters import num_parameters
from megajax.core.hardware.records import FP8_SHARE
from megajax.xla.hlo.kernels import Kernel, kernels
from megajax.xla.hlo.program import Program

STEPS = """
megatron_1.2b, 8 rows                 | megatron_1.2b 8
megatron_1.2b, 32 rows                | megatron_1.2b 32
megatron_1.2b, 4 microbatches of 8    | megatron_1.2b 32 train.microbatches=4
megatron_4.2b, 8 rows                 | megatron_4.2b 8
llama3_8b, 16 layers, 2 rows of 8192  | llama3_8b 2 model.num_layers=16
gpt2_124m, 32 rows                    | gpt2_124m 32
megatron_1.2b, 8 rows, hidden dropout | megatron_1.2b 8 model.dropout=0.1 model.attention_dropout=0
megatron_1.2b, 8 rows, fp8            | megatron_1.2b 8 train.dtype=fp8
megatron_1.2b, 32 rows, fp8           | megatron_1.2b 32 train.dtype=fp8
llama3_8b, 16 layers, 2 rows, fp8     | llama3_8b 2 model.num_layers=16 train.dtype=fp8
"""
PEAK, PRODUCTS, BANDWIDTH = 989.4e12, 0.80, 4.3e12
ATTENTION = {'attention': 0.55, 'attention gradient': 0.45}
COLUMNS = 'name', 'jax', 'gigabytes', 'ms', 'mfu', 'temporaries', 'cast_per_parameter', 'filled'
COLUMNS = *COLUMNS, 'head_share', 'attention_runs', 'gradient_runs', 'compile_seconds'
Line = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    out = parser.parse_args().out
    wanted = missing(out, steps_of(STEPS))
    extend(out, COLUMNS, (measure(*step) for step in wanted))
    table(read(out))


def measure(name: str, words: list[str]) -> Line:
    preset, rows, *overrides = words
    one_device = 'mesh.data=1', 'mesh.model=1', 'model.dropout=0.0', 'train.microbatches=1'
    plain = 'train.dtype=bfloat16', 'train.recompute=none', f'train.batch_size={rows}'
    plain = *plain, 'optim.shard=none'
    config = resolved(megajax.load(preset, [*one_device, *plain, *overrides]), on_gpu=True)
    start = time.perf_counter()
    compiled = compile_for(config, 'h200', 1, {'xla_gpu_enable_triton_gemm': False})
    seconds = time.perf_counter() - start
    moved, took, runs = Counter[str](), Counter[str](), Counter[str]()
    for kernel in kernels(Program(compiled.text)):
        moved[kernel.kind] += kernel.times * kernel.bytes
        runs[kernel.kind] += kernel.times
        is_of_head = {'loss', 'head'} & {*re.findall(r'\w+', kernel.instruction.op_name)}
        took['head' if is_of_head else 'rest'] += kernel.times * roofline(kernel)
    total = sum(took.values())
    figures = (
        name,
        jax.__version__,
        f'{sum(moved.values()) / 1e9:.1f}',
        f'{1e3 * total:.1f}',
        f'{step_flops(config).model / (total * PEAK):.4f}',
        f'{compiled.temporaries / 1e9:.1f}',
        f'{moved["cast"] / num_parameters(config.model):.2f}',
        f'{moved["fill"] / 1e9:.2f}',
        f'{took["head"] / total:.3f}',
        runs['attention'],
        runs['attention gradient'],
        f'{seconds:.0f}',
    )
    return dict(zip(COLUMNS, map(str, figures), strict=True))


def roofline(kernel: Kernel) -> float:
    """Seconds of one run of a kernel."""
    rate = PEAK * ATTENTION.get(kernel.kind, PRODUCTS)
    if any(one.dtype.startswith('f8') for one in kernel.products):
        rate *= 2 * FP8_SHARE
    flops = sum(one.flops / 2 if one.is_causal else one.flops for one in kernel.products)
    return max(flops / rate, kernel.bytes / BANDWIDTH)


def table(lines: list[Line]) -> None:
    print('| one H200 | jax | moved | roofline | MFU | temporaries | head and loss |')
    print(f'|{"---|" * 7}')
    for line in lines:
        print(
            f'| {line["name"]} | {line["jax"]} | {line["gigabytes"]} GB | {line["ms"]} ms | '
            f'{float(line["mfu"]):.1%} | {line["temporaries"]} GB | '
            f'{float(line["head_share"]):.1%} |'
        )


if __name__ == '__main__':
    main()
