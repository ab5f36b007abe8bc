"""Tokens a second that batches are read at, from a warm file, by one thread; prints a table.

python benchmarks/data_read.py [--tokens 100]
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import megajax
from megajax.runtime.data import load_data
from megajax.runtime.data.tokens.indexed import write_index

SETTINGS = [
    (length, order, mask)
    for length in (256, 1024, 4096)
    for order in ('stateless', 'megatron')
    for mask in ('false', 'true')
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--tokens', type=int, default=100, help='millions in the file')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, 'corpus')
        write(prefix, arguments.tokens * 10**6)
        print(f'{"sequence":>8}  {"order":10}{"documents":>10}{"M tokens/s":>12}')
        for length, order, mask in SETTINGS:
            documents = 'apart' if mask == 'true' else 'joined'
            rate = max(rates(prefix, length, order, mask))
            print(f'{length:8}  {order:10}{documents:>10}{rate:12.1f}')


def write(prefix: Path, tokens: int) -> None:
    """Documents of 100 to 2000 tokens."""
    random = np.random.default_rng(0)
    lengths = random.integers(100, 2000, tokens // 1050).astype(np.int32)
    Path(f'{prefix}.bin').write_bytes(
        random.integers(0, 50000, int(lengths.sum()), np.uint16).tobytes()
    )
    with Path(f'{prefix}.idx').open('wb') as file:
        write_index(file, np.dtype(np.uint16), lengths, np.arange(len(lengths) + 1))


def rates(prefix: Path, length: int, order: str, mask: str) -> Iterator[float]:
    """Millions of tokens a second, of three rounds of a second or so."""
    batch_size = 2**18 // length
    overrides = [
        f'data.corpus={prefix}', 'data.tokenizer=none', 'train.sample_prompts=[]',
        f'data.order={order}', f'data.document_mask={mask}', f'train.seq_len={length}',
        f'model.max_seq_len={length}', f'train.batch_size={batch_size}',
        'model.vocab_size=50257', 'mesh.data=1',
    ]  # fmt: skip
    train = load_data(megajax.load('tiny', overrides)).train
    for round in range(3):
        start = time.perf_counter()
        steps = 60
        for step in range(round * steps, (round + 1) * steps):
            train[step]
        yield steps * batch_size * length / (time.perf_counter() - start) / 1e6


if __name__ == '__main__':
    main()
