"""A training step with its guards beside the same step without, in one run:
`python benchmarks/guards.py [--steps N]`.

With: losses and gradients that are not finite and spikes leave everything as it is, decided inside
the step. Without: every step is taken, and XLA takes the guards out. The model is that of `cpu.py`.
The two take turns, because others may use the machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from cpu import BATCH, HEADS, LAYERS, LENGTH, VOCAB, WIDTH


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--steps', type=int, default=40, help='of each, after two that do not count'
    )
    arguments = parser.parse_args()
    import jax

    import megajax

    jax.config.update('jax_platforms', 'cpu')
    with jax.set_mesh(megajax.make_mesh(1, 1)):
        compare(
            {'with': make_step(guarded=True), 'without': make_step(guarded=False)}, arguments.steps
        )


def make_step(*, guarded: bool) -> Callable[[], None]:
    import jax
    import numpy as np

    import megajax

    config = make_config()
    token = np.random.default_rng(0).integers(VOCAB, size=(BATCH, LENGTH + 1), dtype=np.int32)
    batch = megajax.place_batch(
        {
            'tokens': token[:, :-1],
            'labels': token[:, 1:],
            'loss_mask': np.ones((BATCH, LENGTH), np.float32),
        }
    )
    state = megajax.init_state(config)
    if guarded:
        compiled = megajax.make_train_step(config).lower(state, batch).compile()
    else:
        with patch('megajax.core.train.step.judge', take_every_step):
            compiled = megajax.make_train_step(config).lower(state, batch).compile()
    memory = compiled.memory_analysis()
    print(
        f'{"with" if guarded else "without"} guards: '
        f'{memory.temp_size_in_bytes / 1e6:.0f} MB of temporaries'
    )

    def step() -> None:
        nonlocal state
        state, _ = compiled(state, batch)
        jax.block_until_ready(state)

    return step


def make_config() -> Any:
    from megajax import load

    model = {
        'num_layers': LAYERS,
        'hidden_size': WIDTH,
        'num_heads': HEADS,
        'ffn_size': 4 * WIDTH,
        'vocab_size': VOCAB,
        'max_seq_len': LENGTH,
    }
    keys = [f'model.{key}={value}' for key, value in model.items()]
    return load(
        'tiny',
        [
            *keys,
            'mesh.data=1',
            'mesh.model=1',
            f'train.batch_size={BATCH}',
            f'train.seq_len={LENGTH}',
            'train.spike=skip',
        ],
    )


def take_every_step(guard: Any, *_: Any, **__: Any) -> Any:
    import jax.numpy as jnp

    from megajax.core.train.guard import Verdict

    no = jnp.array(False)
    return Verdict(
        taken=~no, finite=~no, spike=no, overflow=no, skipped_in_a_row=jnp.array(0)
    ), guard


def compare(steps: dict[str, Callable[[], None]], count: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(count + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[2:]) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f'{name:8s} {1e3 * median:.1f} ms, {1e3 * min(seconds[name][2:]):.1f} at best')
    ratios = [a / b for a, b in zip(seconds['with'][2:], seconds['without'][2:], strict=True)]
    print(
        f'ratio of medians {medians["with"] / medians["without"]:.3f}, '
        f'median of ratios {statistics.median(ratios):.3f}'
    )


if __name__ == '__main__':
    main()
