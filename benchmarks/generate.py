"""Tokens a second of megajax and of transformers' generate, in one run:
`python benchmarks/generate.py [--rounds N]`.

Both continue prompts of 32 tokens by 64, greedily, with a GPT-2 of 124M parameters drawn at random,
on this machine's CPU. The contenders take turns, each in a process of its own that stays and waits,
so that a slow minute hits all of them. A turn is the whole call: reading the prompts, and the
tokens. PyTorch and transformers are optional (`pip install 'megajax[bench]'`).
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PROMPT, TOKENS, VOCAB = 32, 64, 50257
Run = Callable[[int], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--rounds', type=int, default=5, help='turns of each contender')
    parser.add_argument('--dtype', choices=['float32', 'bfloat16'], help='both unless given')
    parser.add_argument('--worker', help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker))
        return
    for dtype in [arguments.dtype] if arguments.dtype else ['float32', 'bfloat16']:
        with started(dtype) as workers:
            for batch in (1, 8):
                compare(workers, dtype, batch, arguments.rounds)


def contenders(dtype: str) -> dict[str, dict[str, Any]]:
    """Each worker's settings, by the name in the table."""
    workers = {
        f'megajax 1x{model}': {'kind': 'megajax', 'dtype': dtype, 'model': model}
        for model in (1, 2)
    }
    if importlib.util.find_spec('torch') and importlib.util.find_spec('transformers'):
        workers['transformers'] = {'kind': 'transformers', 'dtype': dtype}
    return workers


@contextmanager
def started(dtype: str) -> Iterator[dict[str, subprocess.Popen[str]]]:
    command = [sys.executable, __file__, '--worker']
    pipes = {
        'stdin': subprocess.PIPE,
        'stdout': subprocess.PIPE,
        'stderr': subprocess.DEVNULL,
        'text': True,
    }
    workers = {
        name: subprocess.Popen([*command, json.dumps(settings)], **pipes)
        for name, settings in contenders(dtype).items()
    }
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.communicate()


def ask(worker: subprocess.Popen[str], batch: int) -> float:
    """Tokens a second of one turn."""
    assert worker.stdin
    assert worker.stdout
    print(batch, file=worker.stdin, flush=True)
    return batch * TOKENS / float(worker.stdout.readline())


def compare(workers: dict[str, subprocess.Popen[str]], dtype: str, batch: int, rounds: int) -> None:
    for worker in workers.values():
        ask(worker, batch)  # compiles
    turns = [{name: ask(worker, batch) for name, worker in workers.items()} for _ in range(rounds)]
    for name in workers:
        speed = statistics.median(turn[name] for turn in turns)
        print(f'{dtype}  batch {batch}  {name:14s} {speed:7.1f} tokens/s', end='')
        if 'transformers' in workers:  # of a round, so that its minute counts for both
            ratio = statistics.median(turn[name] / turn['transformers'] for turn in turns)
            print(f'  {ratio:5.2f} of transformers', end='')
        print(flush=True)


def work(settings: dict[str, Any]) -> None:
    run = {'megajax': megajax_run, 'transformers': transformers_run}[settings.pop('kind')](
        **settings
    )
    for line in sys.stdin:
        start = time.perf_counter()
        run(int(line))
        print(time.perf_counter() - start, flush=True)


def megajax_run(*, dtype: str, model: int) -> Run:
    import jax
    import numpy as np

    import megajax
    from megajax.runtime.generate import Generator, Request, Sampling

    overrides = [
        'mesh.data=1',
        f'mesh.model={model}',
        'train.batch_size=8',
        'train.microbatches=1',
        f'train.dtype={dtype}',
    ]
    config = megajax.load('gpt2_124m', overrides)
    jax.set_mesh(megajax.make_mesh(1, model))
    generator = Generator(config, megajax.init_state(config).params)
    request = Request(max_tokens=TOKENS, sampling=Sampling(temperature=0))
    random = np.random.default_rng(0)

    def run(batch: int) -> None:
        *_, rows = generator.stream(random.integers(0, VOCAB, (batch, PROMPT)).tolist(), request)
        assert all(row and len(row.ids) == TOKENS for row in rows)

    return run


def transformers_run(*, dtype: str) -> Run:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB)).to(getattr(torch, dtype)).eval()

    def run(batch: int) -> None:
        ids = torch.randint(0, VOCAB, (batch, PROMPT))
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        assert made.shape == (batch, PROMPT + TOKENS)

    return run


if __name__ == '__main__':
    main()
