"""A training step with pictures beside one of text with as many FLOPs:
`python benchmarks/picture_steps.py [--steps N]`.

The steps of `tiny_vlm` and of its decoder alone, on more rows, take turns on 1x1 and 2x2 simulated
devices, and the data pipeline makes rows in one thread. The aims are at most 1.15 of the time, and
at least three times the rows that the step needs. The rows of a step are the preset's, and four
times as many.
"""

import argparse
import itertools
import statistics
import time

import jax

import megajax
from megajax.core.config import Config
from megajax.core.counts.flops import step_flops
from megajax.core.parallel.mesh import make_mesh
from megajax.core.train.feed import place_batch
from megajax.core.train.step import init_state, make_train_step
from megajax.runtime.data import Batches, load_data

MESHES = (1, 1), (2, 2)
ROWS = 32, 128
SECONDS = 1.0  # in which one thread makes rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--steps', type=int, default=40, help='timed steps of each')
    steps = parser.parse_args().steps
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', 4)
    print('| data x model | rows | step | text | time by FLOPs | rows needed | made by a thread |')
    print('|---|---|---|---|---|---|---|')
    for rows, (data, model) in itertools.product(ROWS, MESHES):
        mesh = f'mesh.data={data}', f'mesh.model={model}'
        pictures = megajax.load('tiny_vlm', [*mesh, f'train.batch_size={rows}'])
        text = of_text(pictures)
        batches = load_data(pictures).train
        with jax.set_mesh(make_mesh(data, model)):
            seconds = in_turn([(pictures, batches), (text, load_data(text).train)], steps)
        rates = [median / flops(one) for median, one in zip(seconds, (pictures, text), strict=True)]
        needed, made = pictures.train.batch_size / seconds[0], rows_a_second(batches)
        print(
            f'| {data}x{model} | {rows} | {1e3 * seconds[0]:.0f} ms | {1e3 * seconds[1]:.0f} ms | '
            f'{rates[0] / rates[1]:.2f} | {needed:.0f} | {made:.0f}, {made / needed:.1f} |'
        )


def of_text(config: Config) -> Config:
    """The decoder alone, on as many rows as make the FLOPs those of a step with pictures."""
    parts = {
        'vision': None,
        'model': config.model.model_copy(update={'vision': None}),
        'data': config.data.model_copy(update={'corpus': 'stdlib'}),
    }
    text = config.model_copy(update=parts)
    rows = 4 * round(config.train.batch_size * flops(config) / flops(text) / 4)
    train = text.train.model_copy(update={'batch_size': rows})
    return text.model_copy(update={'train': train})


def flops(config: Config) -> int:
    """FLOPs of a step."""
    return step_flops(config, flash=False).model


def rows_a_second(batches: Batches) -> float:
    """Rows in a second of this thread's processor time, from the first batch on."""
    start, steps = time.thread_time(), 0
    while (spent := time.thread_time() - start) < SECONDS:
        batches[steps]
        steps += 1
    return steps * batches.batch_size / spent


def in_turn(runs: list[tuple[Config, Batches]], steps: int) -> list[float]:
    """The median seconds of the steps of each, which take turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    states = [init_state(config) for config, _ in runs]
    placed = [place_batch(batches[0]) for _, batches in runs]
    compiled = [
        make_train_step(config).lower(state, batch).compile()
        for (config, _), state, batch in zip(runs, states, placed, strict=True)
    ]
    for turn in range(steps + 3):
        for one, step in enumerate(compiled):
            start = time.perf_counter()
            states[one], metrics = step(states[one], placed[one])
            jax.block_until_ready(metrics)
            seconds[one] += [time.perf_counter() - start] * (turn >= 3)  # the first ones warm up
    return [statistics.median(times) for times in seconds]


if __name__ == '__main__':
    main()
