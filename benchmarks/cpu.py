"""The training step on this CPU beside Hugging Face's GPT-2, in one run:
`python benchmarks/cpu.py [--steps N]`.

Both train a GPT-2 of 6 layers, width 384, 6 heads, vocabulary 50304, on 8 sequences of 256 tokens,
without dropout, with AdamW and clipping at 1.0. The contenders take turns, each in a process of its
own, so that a slow minute of the machine hits all of them. PyTorch and transformers are optional
(`pip install 'megajax[bench]'`); without them only megajax is timed.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BATCH, LENGTH, VOCAB, LAYERS, WIDTH, HEADS = 8, 256, 50304, 6, 384, 6
TOKENS = BATCH * LENGTH


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--rounds', type=int, default=3, help='turns of each contender')
    parser.add_argument('--steps', type=int, default=5, help='timed steps in a turn')
    parser.add_argument('--worker', help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(make_worker(json.loads(arguments.worker)), arguments.steps)))
        return
    speeds: dict[str, list[float]] = {name: [] for name in contenders()}  # one a round
    for turn in range(arguments.rounds):
        for name, worker in contenders().items():
            seconds = run_worker(worker, arguments.steps)
            speeds[name].append(TOKENS / statistics.median(seconds))
            print(f'round {turn + 1}: {name:32s} {speeds[name][-1]:6.0f} tokens/s', flush=True)
    report(speeds)


def contenders() -> dict[str, dict[str, Any]]:
    """Each worker's settings, by the name in the table."""
    workers: dict[str, dict[str, Any]] = {}
    for dtype in ('float32', 'bfloat16'):
        for data, model in ((1, 1), (1, 2), (2, 1)):
            workers[f'megajax {data}x{model} {dtype}'] = {
                'kind': 'megajax',
                'dtype': dtype,
                'data': data,
                'model': model,
            }
        workers[f'the products of a step {dtype}'] = {'kind': 'products', 'dtype': dtype}
        if importlib.util.find_spec('torch') and importlib.util.find_spec('transformers'):
            for compiled in (False, True):
                name = f'transformers {"compile" if compiled else "eager"} {dtype}'
                workers[name] = {'kind': 'transformers', 'dtype': dtype, 'compiled': compiled}
    return workers


def run_worker(worker: dict[str, Any], steps: int) -> list[float]:
    command = [sys.executable, __file__, '--worker', json.dumps(worker), '--steps', str(steps)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds: list[float] = json.loads(output.strip().splitlines()[-1])
    return seconds


def measure(step: Callable[[], None], steps: int) -> list[float]:
    for _ in range(2):
        step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def make_worker(worker: dict[str, Any]) -> Callable[[], None]:
    make = {
        'megajax': megajax_step,
        'transformers': transformers_step,
        'products': products_of_a_step,
    }[worker.pop('kind')]
    return make(**worker)


def megajax_step(*, dtype: str, data: int, model: int) -> Callable[[], None]:
    import jax
    import numpy as np

    import megajax

    config = megajax.Config(
        model=dict(
            num_layers=LAYERS,
            hidden_size=WIDTH,
            num_heads=HEADS,
            vocab_size=VOCAB,
            max_seq_len=LENGTH,
        ),
        mesh=dict(data=data, model=model),
        train=dict(batch_size=BATCH, seq_len=LENGTH, dtype=dtype),
        optim=dict(weight_decay=0.1),
    )
    jax.set_mesh(megajax.make_mesh(data, model))
    state = megajax.init_state(config)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    batch = megajax.place_batch(
        {
            'tokens': tokens[:, :-1],
            'labels': tokens[:, 1:],
            'loss_mask': np.ones((BATCH, LENGTH), np.float32),
        }
    )
    train_step = megajax.make_train_step(config)

    def step() -> None:
        nonlocal state
        state, metrics = train_step(state, batch)
        jax.block_until_ready((state, metrics))

    return step


def products_of_a_step(*, dtype: str) -> Callable[[], None]:
    """The matrix products of a step and nothing else, each in its fastest form: what no step on
    XLA's CPU backend can beat.
    """
    import jax
    import jax.numpy as jnp

    padded = -(-VOCAB // 1024) * 1024
    shapes = [
        (TOKENS, WIDTH, 3 * WIDTH),
        (TOKENS, WIDTH, WIDTH),
        (TOKENS, WIDTH, 4 * WIDTH),
        (TOKENS, 4 * WIDTH, WIDTH),
    ] * LAYERS
    shapes += [(TOKENS // 4, padded, WIDTH)] * 4  # the head, in chunks and with the small result
    heads = BATCH * HEADS, LENGTH, WIDTH // HEADS

    @jax.jit
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    pairs = [(jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)) for m, k, n in shapes]
    pairs += [(jnp.ones(heads, dtype), jnp.ones((heads[0], heads[2], LENGTH), dtype))] * 2 * LAYERS

    def step() -> None:
        for x, w in pairs * 3:  # forward, and the gradients of both operands
            jax.block_until_ready(product(x, w))

    return step


def transformers_step(*, dtype: str, compiled: bool) -> Callable[[], None]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH))
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast('cpu', torch.bfloat16, enabled=dtype == 'bfloat16'):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def report(speeds: dict[str, list[float]]) -> None:
    """Print tokens/s and their ratios: the median of the rounds, and the range."""
    print(f'\n{"tokens/s":32s} {"median":>8s}  range')
    for name, rounds in speeds.items():
        print(f'{name:32s} {spread(rounds, ".0f")}')
    print(f'\n{"ratio within a round":66s} {"median":>8s}  range')
    for dtype in ('float32', 'bfloat16'):
        one = f'megajax 1x1 {dtype}'
        print_ratio(speeds, f'megajax 1x2 {dtype}', one)
        for name in (one, f'the products of a step {dtype}'):
            for kind in ('eager', 'compile'):
                print_ratio(speeds, name, f'transformers {kind} {dtype}')


def print_ratio(speeds: dict[str, list[float]], name: str, other: str) -> None:
    if other in speeds:
        rounds = [x / y for x, y in zip(speeds[name], speeds[other], strict=True)]
        print(f'{f"{name} to {other}":66s} {spread(rounds, ".2f")}')


def spread(rounds: list[float], form: str) -> str:
    return f'{statistics.median(rounds):8{form}}  {min(rounds):{form}} to {max(rounds):{form}}'


if __name__ == '__main__':
    main()
