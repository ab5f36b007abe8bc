"""Tokens a second that batches are read at, from files and from the same files by their URL.

The server is on this machine, so a request takes no time on a network. The run's own threads read
ahead. With --text, what a run needs until it has its first batch of JSON lines, when it first
starts and when it starts again, and how fast it then reads, by `data.order`. Prints tables.
python benchmarks/data_remote.py [--tokens 20] [--text 10]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path

from data_read import write

import megajax
from megajax.runtime.data import Data, load_data, read_documents

sys.path.append(str(Path(__file__).parents[1] / 'tests'))
STEPS = 40
SHAPE = 'train.seq_len=1024', 'model.max_seq_len=1024', 'train.batch_size=8'
PROGRAM = """
import resource, sys, time
import megajax
from megajax.runtime.data import load_data
def memory(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
load_data(megajax.load('tiny', ['data.tokenizer=bytes', 'data.order=streamed'])).train[0]
first = time.perf_counter(), time.process_time(), memory()
batches = load_data(megajax.load('tiny', sys.argv[1:])).train
size = batches[0]['tokens'].size
wall, cpu = time.perf_counter() - first[0], time.process_time() - first[1]
start = time.perf_counter()
for _ in batches.read_ahead(1, 201, slice(0, batches.batch_size)):
    pass
rate = 200 * size / (time.perf_counter() - start) / 1e6
print(wall, cpu, memory() - first[2], rate)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--tokens', type=int, default=20, help='millions in the file')
    parser.add_argument('--text', type=int, default=0, help='MB of JSON lines, in place of tokens')
    arguments = parser.parse_args()
    if arguments.text:
        time_text(arguments.text)
        return
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


def time_text(megabytes: int) -> None:
    """Print what the first batch costs in a process of its own, for a file and for its URL."""
    from runtime.data import stores

    texts = [document.text for document in read_documents('stdlib')]
    parts = [text[i : i + 3000] for text in texts for i in range(0, len(text), 3000)]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, 'files')
        files.mkdir()
        with (files / 'a.jsonl').open('w') as file:
            for number, part in enumerate(cycle(parts)):
                file.write(json.dumps({'text': f'{number} {part}'}) + '\n')
                if file.tell() > megabytes * 10**6:
                    break
            print(
                f'{file.tell() / 1e6:.1f} MB of JSON lines, batches of 8 sequences of 1,024 tokens'
            )
        columns = 'seconds', 'CPU s', 'memory MB', 'M tokens/s', 'requests'
        print(f'{"data.order":>10}{"tokenizer":>11}{"read":>11}', *map('{:>11}'.format, columns))
        for order, tokenizer in product(('stateless', 'streamed'), ('bytes', 'bpe')):
            os.environ['XDG_CACHE_HOME'] = f'{folder}/cache_{order}_{tokenizer}'
            with stores.web(files) as server:
                url = f'{server.url}/a.jsonl'
                for name, corpus in ('file', files / 'a.jsonl'), ('URL', url), ('URL again', url):
                    asked = len(server.asked)
                    keys = f'data.corpus={corpus}', f'data.order={order}'
                    command = [*keys, f'data.tokenizer={tokenizer}', *SHAPE]
                    wall, cpu, memory, speed = first_batch(command)
                    numbers = f'{wall:12.2f}{cpu:12.2f}{memory:12.0f}{speed:12.2f}'
                    numbers += f'{len(server.asked) - asked:12}'
                    print(f'{order:>10}{tokenizer:>11}{name:>11}{numbers}', flush=True)


def first_batch(keys: Sequence[str]) -> tuple[float, ...]:
    """Seconds of time and of CPU until the first batch, MB of memory, and the speed afterwards."""
    said = subprocess.run(
        [sys.executable, '-c', PROGRAM, *keys], check=True, capture_output=True, text=True
    )
    return tuple(map(float, said.stdout.split()))


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
