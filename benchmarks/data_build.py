"""`megajax data build` beside the encoder that it uses, in one run:
`python benchmarks/data_build.py [--megabytes N]`.

The corpus is the interpreter's standard library as JSON lines, repeated; the tokenizer a byte-level
BPE of 8192 entries, trained on a part of it. The raw encoder is tokenizers' own encode_batch_fast
with its own threads, on texts that are in memory already; the build reads a file and writes a
complete pair, in as many workers as there are cores, and its start counts. They take turns, and the
ratio is the median of the rounds', because others may use the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

VOCAB = 8192
DOCUMENTS_AT_ONCE = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--rounds', type=int, default=5, help='turns of each contender')
    parser.add_argument('--megabytes', type=int, default=60, help='of text')
    parser.add_argument('--raw', nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.raw:
        raw(*arguments.raw)
        return
    with tempfile.TemporaryDirectory() as folder:
        size = make_corpus(Path(folder), arguments.megabytes * 10**6)
        compare(Path(folder), size, arguments.rounds)


def make_corpus(folder: Path, size: int) -> int:
    from megajax.runtime.data.text.corpus import read_documents
    from megajax.runtime.data.text.tokenizer import train_bpe

    texts = [document.text for document in read_documents('stdlib')]
    train_bpe(texts[::4], VOCAB).save(folder / 'tokenizer.json')
    written = 0
    with (folder / 'corpus.jsonl').open('w') as file:
        while written < size:
            for text in texts:
                file.write(json.dumps({'text': text}) + '\n')
                written += len(text.encode())
    return written


def compare(folder: Path, size: int, rounds: int) -> None:
    corpus, tokenizer = folder / 'corpus.jsonl', folder / 'tokenizer.json'
    seconds: dict[str, list[float]] = {'raw encoder': [], 'megajax data build': []}
    tokens = 0
    for turn in range(rounds):
        command = [sys.executable, __file__, '--raw', str(corpus), str(tokenizer)]
        took, tokens = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        )
        seconds['raw encoder'].append(took)
        command = [
            sys.executable,
            '-m',
            'megajax',
            'data',
            'build',
            f'{folder}/{turn}',
            '--input',
            str(corpus),
            '--tokenizer',
            str(tokenizer),
        ]
        seconds['megajax data build'].append(
            timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))  # noqa: B023
        )
        assert json.loads(Path(f'{folder}/{turn}.json').read_text())['tokens'] == tokens
        print(
            f'round {turn + 1}: '
            + ', '.join(f'{name} {times[-1]:.2f} s' for name, times in seconds.items()),
            flush=True,
        )
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f'\n{size / 1e6:.1f} MB, {len(os.sched_getaffinity(0))} cores    MB/s   Mtokens/s')
    for name, median in medians.items():
        print(f'{name:20s} {size / median / 1e6:8.2f} {tokens / median / 1e6:11.2f}')
    ratios = [raw / built for raw, built in zip(*seconds.values(), strict=True)]
    print(f'ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})')


def raw(corpus: str, tokenizer: str) -> None:
    """Print seconds and tokens of encode_batch_fast alone."""
    import tokenizers

    os.environ['TOKENIZERS_PARALLELISM'] = 'true'
    with open(corpus) as file:
        texts = [json.loads(line)['text'] for line in file]
    backend = tokenizers.Tokenizer.from_file(tokenizer)
    count = 0

    def encode() -> None:
        nonlocal count
        for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
            encodings = backend.encode_batch_fast(
                texts[start : start + DOCUMENTS_AT_ONCE], add_special_tokens=False
            )
            count += sum(len(encoding) for encoding in encodings)

    print(json.dumps([timed(encode), count]))


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == '__main__':
    main()
