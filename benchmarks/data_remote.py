"""Tokens a second that batches are read at, from files and from the same files by their URL.

The server is on this machine, so a request takes no time on a network. The run's own threads read
ahead. With --text, the seconds until a run has its first batch of JSON lines, when it first starts
and when it starts again. Prints tables. python benchmarks/data_remote.py [--tokens 20] [--text 10]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from data_read import write

import megajax
from megajax.runtime.data import Data, load_data, read_documents

sys.path.append(str(Path(__file__).parents[1] / 'tests'))
STEPS = 40


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
    """Print the seconds until the first batch, for a file and for its URL."""
    from runtime.data import stores

    texts = [document.text for document in read_documents('stdlib')]
    parts = [text[i : i + 3000] for text in texts for i in range(0, len(text), 3000)]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, 'files')
        files.mkdir()
        with (files / 'a.jsonl').open('w') as file:
            for part in parts:
                file.write(json.dumps({'text': part}) + '\n')
                if file.tell() > megabytes * 10**6:
                    break
            print(f'{file.tell() / 1e6:.1f} MB of JSON lines')
        columns = ('file', 'URL', 'URL again', 'cpu: file', 'URL', 'URL again')
        print(f'{"tokenizer":>9}' + ''.join(f'{name:>11}' for name in columns) + '  seconds')
        for tokenizer in ('bytes', 'bpe'):
            os.environ['XDG_CACHE_HOME'] = f'{folder}/cache_{tokenizer}'
            with stores.web(files) as server:
                corpora = (files / 'a.jsonl', *[f'{server.url}/a.jsonl'] * 2)
                times = [first_batch(corpus, tokenizer) for corpus in corpora]
            row = [wall for wall, _ in times] + [cpu for _, cpu in times]
            print(f'{tokenizer:>9}' + ''.join(f'{seconds:11.2f}' for seconds in row))


def first_batch(corpus: str | Path, tokenizer: str) -> tuple[float, float]:
    """Seconds of time and of CPU until the first batch."""
    before = time.perf_counter(), time.process_time()
    data = load_data(megajax.load('tiny', [f'data.corpus={corpus}', f'data.tokenizer={tokenizer}']))
    data.train[0]
    return time.perf_counter() - before[0], time.process_time() - before[1]


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
