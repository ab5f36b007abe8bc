"""Random training steps, compiled for H100s and executed on simulated CPU devices:
`python benchmarks/random_steps.py OUT.csv`.

Each program has a number, from which its config follows: family, mesh, sequence parallelism,
ZeRO-1, microbatches, recompute, batch-split overlap, dropout, norms of queries and keys, biases,
key/value heads, loss and its chunks, dtype, Triton's products or cuBLAS's. Its loss, gradients and
updated parameters are compared with those of one device, programs of 16 bits also with everything
of 16 bits in fp32. Runs until it is told to stop (Ctrl-C, SIGTERM) or `--count` programs are done;
numbers that OUT.csv has for this jax are left out. Exits with 1 where a program was wrong. No GPU
is needed (`pip install 'megajax[gpu-compile]'`).
"""

import argparse
import csv
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

os.environ |= {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}

import jax
import numpy as np

import megajax
from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.core.counts import chunks

TARGET = 'h100'
MESHES = (1, 1), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2), (8, 1)
SIZES = {
    'num_layers': 2,
    'hidden_size': 64,
    'num_heads': 8,
    'head_dim': 64,
    'ffn_size': 128,
    'vocab_size': 1000,
    'max_seq_len': 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    'gpt': {},
    'llama': {
        'norm': 'rmsnorm',
        'activation': 'swiglu',
        'position': 'rope',
        'bias': False,
        'tie_embeddings': False,
    },
    'bert': {'objective': 'masked_lm', 'activation': 'gelu'},
}
COLUMNS = [
    'number',
    'jax',
    'config',
    'triton',
    'chunks',
    'error',
    'worst',
    'exact_error',
    'exact_worst',
    'verdict',
    'seconds',
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    parser.add_argument('--count', type=int, help='end after so many programs')
    parser.add_argument('--first', type=int, default=0, help='the number to begin with')
    arguments = parser.parse_args()
    jax.config.update('jax_num_cpu_devices', 8)
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stop.append(number))
    rows = list(csv.DictReader(arguments.out.open(newline=''))) if arguments.out.exists() else []
    done = {int(row['number']) for row in rows if row['jax'] == jax.__version__}
    numbers = (number for number in itertools.count(arguments.first) if number not in done)
    wrong = 0
    with arguments.out.open('a', newline='') as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not rows:
            writer.writeheader()
        for number in itertools.islice(numbers, arguments.count):
            row = measure(number)
            writer.writerow(row)
            file.flush()
            print(*row.values(), flush=True)
            wrong += row['verdict'] != 'right'
            if stop:
                break
    raise SystemExit(wrong > 0)


def draw(number: int) -> tuple[megajax.Config, bool, bool]:
    """The config of a program, whether Triton may make its products, and whether its loss has more
    than one chunk.
    """
    random = np.random.default_rng(number)

    def choose(*values: Any) -> Any:
        return values[random.integers(len(values))]

    family, (data, model) = choose(*FAMILIES), choose(*MESHES)
    dropout, dtype = choose(0.0, 0.0, 0.1), choose('float32', 'float32', 'bfloat16', 'float16')
    microbatches, overlap = choose(1, 2), choose('none', 'batch_split')
    config = {
        'model': {
            **SIZES,
            **FAMILIES[family],
            'dropout': dropout,
            'qk_norm': choose(False, False, True),
        },
        'mesh': {'data': data, 'model': model, 'sequence_parallel': choose(False, True)},
        'train': {
            'seq_len': 32,
            'batch_size': 2 * data * microbatches,
            'microbatches': microbatches,
            'dtype': dtype,
        },
        'optim': {'shard': choose(False, True)},
        'loss': choose({}, {'label_smoothing': 0.1, 'z_loss': 1e-3}),
    }
    config['train'] |= {'recompute': choose('none', 'selective', 'full'), 'overlap': overlap}
    if family == 'llama':
        config['model'] |= {'num_kv_heads': choose(8, 2, 1), 'qkv_bias': choose(False, True)}
    if family != 'bert':
        config['data'] = {'document_mask': choose(False, False, True)}
    return megajax.Config(**config), bool(choose(True, False)), bool(choose(False, True))


def measure(number: int) -> dict[str, Any]:
    start = time.perf_counter()
    config, triton, cut = draw(number)
    chunks.GPU_CHUNK_BYTES = 2**17 if cut else 2**30
    row = dict.fromkeys(COLUMNS, '') | {
        'number': number,
        'jax': jax.__version__,
        'triton': triton,
        'chunks': cut,
    }
    row['config'] = described(config)
    step = EmulatedStep(config, TARGET, {'xla_gpu_enable_triton_gemm': triton})
    right = True
    for exact in (False,) if config.train.dtype == 'float32' else (False, True):
        results = step.results(exact=exact)
        prefix = 'exact_' if exact else ''
        row |= {f'{prefix}error': f'{results[0].error:.1e}', f'{prefix}worst': results[0].name}
        right &= all(one.ok for one in results)
    return row | {
        'verdict': 'right' if right else 'WRONG',
        'seconds': f'{time.perf_counter() - start:.0f}',
    }


def described(config: megajax.Config) -> str:
    """The keys of a config that differ from the sizes that all have in common."""
    written = config.model_dump(mode='json', exclude_unset=True)
    plain = {'model': SIZES, 'train': {'seq_len': 32}}
    pairs = (
        f'{section}.{key}={value}'
        for section, values in written.items()
        for key, value in values.items()
        if plain.get(section, {}).get(key) != value and value not in (False, 0.0)
    )
    return ' '.join(pairs)


if __name__ == '__main__':
    main()
