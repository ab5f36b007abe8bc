"""Tokens a second that batches are read at, from files and from the same files by their URL.

The server is on this machine, so a request takes no time on a network. The run's own threads read
ahead. Prints a table. python benchmarks/data_remote.py [--tokens 20]
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from data_read import write

import megajax
from megajax.runtime.data import Data, load_data

sys.path.append(str(Path(__file__).parents[1] / 'tests'))
STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--tokens', type=int, default=20, help='millions in the file')
    arguments = parser.parse_args()
    from runtime.data import stores

    with tempfile.TemporaryDirectory() as folder:
        os.environ['XDG_CACHE_HOME'] = f'{folder}/cache'
        files = Path(folder, 'files')
        files.mkdir()
        write(files / 'corpus', arguments.tokens * 10**6)
        print(f'{"sequence":>8}{"files":>10}{"URL":>10}{"URL, cached":>13}  M tokens/s')
        for length in (1024, 4096):
            with stores.web(files) as server:
                local = rate(files / 'corpus', length)
                remote = [rate(f'{server.url}/corpus', length) for _ in range(2)]
            print(f'{length:8}{local:10.2f}{remote[0]:10.2f}{remote[1]:13.2f}')


def rate(corpus: str | Path, length: int) -> float:
    """Millions of tokens a second,."""
    data = load(corpus, length)
    size = data.train.batch_size
    start = time.perf_counter()
    for _ in data.train.read_ahead(0, STEPS, slice(0, size)):
        pass
    return STEPS * size * length / (time.perf_counter() - start) / 1e6


def load(corpus: str | Path, length: int) -> Data:
    """The data of a config on a corpus."""
    keys = [
        f'data.corpus={corpus}', 'data.tokenizer=none', 'train.sample_prompts=[]',
        f'train.seq_len={length}', f'model.max_seq_len={length}',
        f'train.batch_size={2**16 // length}', 'model.vocab_size=50257', 'mesh.data=1',
    ]  # fmt: skip
    return load_data(megajax.load('tiny', keys))


if __name__ == '__main__':
    main()
