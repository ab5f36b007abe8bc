"""Memory and FLOPs of steps with sliding windows, as XLA compiles them:
`python benchmarks/windows.py OUT.csv`.

The first steps have one layer and a growing sequence, with a window and without. The others have
layers in a pattern, whose loop over periods needs more memory than a loop over layers. No GPU is
needed (`pip install 'megajax[gpu-compile]'`). Steps that OUT.csv has are not compiled again.
"""

import argparse
import csv
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import jax
from compiled_rows import read

import megajax
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.inspect.products import count_products
from megajax.xla.hlo.program import Program

LENGTHS = {'h100': (8192, 32768, 131072), 'cpu': (512, 2048, 8192)}
LAYER = 'num_layers=1 norm=rmsnorm position=rope vocab_size=1000'
ONE_LAYER = {
    'h100': f'{LAYER} hidden_size=1024 num_heads=8 head_dim=128 ffn_size=4096 train.dtype=bfloat16',
    'cpu': f'{LAYER} hidden_size=64 num_heads=2 head_dim=32 ffn_size=128',
}
WINDOWS = {'h100': ('window=1024', ''), 'cpu': ('window=64', '')}
PATTERN = (
    'num_layers=8 hidden_size=1024 num_heads=8 head_dim=128 ffn_size=4096 vocab_size=8192 '
    'max_seq_len=1024 train.seq_len=1024 train.batch_size=4 train.dtype=bfloat16 '
    'train.unroll=false train.overlap=none'
)
PATTERNS = (
    'layers=[{"window":256},{}]',
    'layers=[{"repeat":2,"window":256},{}]',
    'layers=[{"repeat":3,"window":256},{}]',
)
STAGES = 'mesh.stages=2 train.microbatches=4 train.batch_size=16'
SHARDED = 'mesh.data=2 train.batch_size=8 optim.shard'
LAYOUTS = {  # and the patterns that are compiled with each
    '': (2, 1),
    'train.recompute=full': (2, 1),
    f'{SHARDED}=optimizer': (2,),
    f'{SHARDED}=weights train.recompute=full': (2, 1),
    STAGES: (0,),
    f'{STAGES} train.recompute=full': (0,),
}
KEYS = ['target', 'overrides']
COMPILED = ['temporaries', 'compiled_bytes', 'compiled_gflops', 'jax']
DEEPER = {  # numbers of layers, and the pattern of each
    '': {11: 1},
    'train.recompute=full': {11: 1},
    f'{SHARDED}=weights train.recompute=full': {12: 0},
    STAGES: {16: 0},
    f'{STAGES} train.recompute=full': {16: 0, 12: 1},
}
Line = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    out = parser.parse_args().out
    found = read(out)
    lines = []
    for step in steps():
        stored = (line for line in found if [line[key] for key in KEYS] == [*step])
        lines.append(next(stored, None) or measure(*step))
        print(*lines[-1].values(), flush=True)
        with out.open('w', newline='') as file:
            writer = csv.DictWriter(file, [*KEYS, *COMPILED], lineterminator='\n')
            writer.writeheader()
            writer.writerows(lines)


def steps() -> Iterator[tuple[str, str]]:
    """Yield each target with the overrides of a step."""
    for target, lengths in LENGTHS.items():
        for window, length in itertools.product(WINDOWS[target], lengths):
            sizes = f'max_seq_len={length} train.seq_len={length} train.batch_size=1'
            yield target, ' '.join(filter(None, (ONE_LAYER[target], window, sizes)))
    for layout, patterns in LAYOUTS.items():
        for index in patterns:
            yield 'h100', f'{PATTERN} {PATTERNS[index]} {layout}'.strip()
    for layout, patterns in DEEPER.items():
        for layers, index in patterns.items():
            sizes = PATTERN.replace('num_layers=8', f'num_layers={layers}')
            yield 'h100', f'{sizes} {PATTERNS[index]} {layout}'.strip()


def load(overrides: str) -> megajax.Config:
    keys = [key if '.' in key.split('=')[0] else f'model.{key}' for key in overrides.split()]
    return megajax.load('tiny', ['mesh.data=1', 'mesh.model=1', *keys])


def measure(target: str, overrides: str) -> Line:
    config = load(overrides)
    compiled = compile_for(config, target, 1)
    total = compiled.arguments + compiled.temporaries + compiled.outputs
    flops = count_products(config, Program(compiled.text), target).compiled
    figures = compiled.temporaries, total, f'{flops / 1e9:.6f}', jax.__version__
    return {
        'target': target,
        'overrides': overrides,
        **dict(zip(COMPILED, map(str, figures), strict=True)),
    }


if __name__ == '__main__':
    main()
