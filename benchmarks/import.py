"""Importing a Hugging Face directory beside reading its bytes, in turns, in one run:
`python benchmarks/import.py [--gigabytes N]`.

Random weights of a Llama are brought to a mesh, transposed, fused and in fp32. `cold` drops the
files from the page cache before each turn, `warm` has read them before. `read` is a plain read of
the files into memory; a ratio is to the `read` of its own turn.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HIDDEN, FFN, VOCAB = 2048, 5632, 32000  # as TinyLlama 1.1B


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--gigabytes', type=float, default=1.0)
    parser.add_argument(
        '--dtype', choices=('float32', 'bfloat16'), default='float32', help='of the files'
    )
    parser.add_argument('--model', type=int, default=2, help='devices on the axis model, simulated')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument(
        '--folder', type=Path, help='where to write, a temporary folder if left out'
    )
    arguments = parser.parse_args()
    import jax

    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', arguments.model)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        size = write(folder, arguments.gigabytes * 1e9, arguments.dtype)
        print(
            f'{size / 1e9:.2f} GB of {arguments.dtype} in {len(files(folder))} files, '
            f'to {arguments.model} devices'
        )
        compare(folder, arguments.model, arguments.rounds)


def write(folder: Path, size: float, dtype: str) -> int:
    """A directory of about `size` bytes; its bytes."""
    import numpy as np

    from megajax.interop.huggingface.directories import EXPORT_DTYPES
    from megajax.interop.huggingface.tensors import Tensor, write_tensors
    from megajax.interop.huggingface.weights import huggingface_pieces
    from megajax.interop.pieces import shapes_of

    config = config_of(
        folder,
        layers := max(
            1,
            round(
                (size / EXPORT_DTYPES[dtype].itemsize - 2 * VOCAB * HIDDEN)
                / (12.6 * HIDDEN**2 * 0.8)
            ),
        ),
    )
    pieces = huggingface_pieces(config.model, shapes_of(config.model))
    plan = [
        Tensor(piece.name, piece.shape, EXPORT_DTYPES[dtype])
        for group in pieces.values()
        for piece in group
    ]
    random = np.random.default_rng(layers)
    write_tensors(
        folder,
        plan,
        (random.random(tensor.shape, np.float32).astype(tensor.dtype) for tensor in plan),
        shard_bytes=10**9 // 2,
    )
    for file in files(folder):
        with file.open('rb') as opened:
            os.fsync(opened.fileno())
    return sum(tensor.size for tensor in plan)


def config_of(folder: Path, layers: int) -> Any:
    from megajax.core.config import Config

    model = {
        'num_layers': layers,
        'hidden_size': HIDDEN,
        'num_heads': 32,
        'num_kv_heads': 4,
        'ffn_size': FFN,
        'vocab_size': VOCAB,
    }
    model |= {
        'max_seq_len': 2048,
        'norm': 'rmsnorm',
        'activation': 'swiglu',
        'position': 'rope',
        'bias': False,
        'tie_embeddings': False,
    }
    (folder / 'layers.json').write_text(json.dumps(layers))
    return Config(model=model)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob('*.safetensors'))


def compare(folder: Path, model: int, rounds: int) -> None:
    import jax

    from megajax.core.parallel.mesh import make_mesh
    from megajax.interop.huggingface.tensors import read_tensors
    from megajax.interop.huggingface.weights import from_huggingface

    config = config_of(folder, json.loads((folder / 'layers.json').read_text()))
    config = config.model_copy(update={'mesh': config.mesh.model_copy(update={'model': model})})

    def read() -> Any:
        return [file.read_bytes() for file in files(folder)]

    def load() -> Any:
        with jax.set_mesh(make_mesh(1, model)):
            return jax.block_until_ready(
                from_huggingface(config, read_tensors(folder), source=str(folder))
            )

    for state, prepare in (('cold', lambda: drop(folder)), ('warm', lambda: None)):
        load()
        ratios = []
        for turn in range(1, rounds + 1):
            seconds = {}
            for name, work in (('read', read), ('import', load)):
                prepare()
                seconds[name] = timed(work)
            ratios.append(seconds['import'] / seconds['read'])
            print(
                f'{state} turn {turn}: read {seconds["read"]:.2f} s, '
                f'import {seconds["import"]:.2f} s, ratio {ratios[-1]:.2f}',
                flush=True,
            )
        print(
            f'{state}: median ratio {statistics.median(ratios):.2f}, '
            f'{min(ratios):.2f} to {max(ratios):.2f}'
        )


def drop(folder: Path) -> None:
    for file in files(folder):
        with file.open('rb') as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == '__main__':
    main()
