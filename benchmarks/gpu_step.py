"""A training step on one GPU, ready to be timed, and what nvidia-smi says meanwhile."""

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

SMALL = bool(os.environ.get('MEGAJAX_SMALL'))
WARM_UP, STEPS = 3, 3 if SMALL else 20
STEP = (
    'mesh.data=1',
    'mesh.model=1',
    'train.dtype=bfloat16',
    'train.recompute=none',
    'optim.shard=none',
    'model.dropout=0',
    'train.profile={start: 0, steps: 2}',
)
TINY = 'model.num_layers=2', 'model.hidden_size=64', 'model.num_heads=4', 'model.vocab_size=512'
# By the name of a step: the preset, rows, microbatches, and what else differs from it.
SIZES: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    '1.2b-8': ('megatron_1.2b', 8, 1, ()),
    '1.2b-8-fp8': ('megatron_1.2b', 8, 1, ('train.dtype=fp8',)),
    '1.2b-4x8': ('megatron_1.2b', 32, 4, ()),
    '1.2b-32': ('megatron_1.2b', 32, 1, ()),
    '345m': ('gpt2_345m', 32, 1, ()),
    '124m': ('gpt2_124m', 32, 1, ()),
    '4.2b': ('megatron_4.2b', 8, 1, ()),
    'llama': ('llama3_8b', 2, 1, ('model.num_layers=16',)),
    '8b-lora': ('llama3_8b', 32, 16, ('lora.rank=16', 'lora.alpha=32', 'train.seq_len=4096')),
}
# A machine that is lent may give few files back.
UNTRACED = '1.2b-4x8', '345m'


def config_of(size: str) -> Any:
    import megajax

    preset, rows, microbatches, more = SIZES[size]
    if SMALL:
        rope = ('model.position=rope',) if preset.startswith('llama') else ()
        kept = (one for one in more if 'dtype' in one or 'lora' in one)
        preset, rows, more = 'tiny', microbatches, (*TINY, *rope, *kept)
    batch = f'train.batch_size={rows}', f'train.microbatches={microbatches}'
    return megajax.load(preset, [*STEP, *more, *batch])


def prepared(config: Any, mesh: Any = None) -> tuple[Any, Any, Any, float]:
    """Return the compiled step, its first state and a batch, and the seconds of compiling.

    The mesh is one device unless it is given.
    """
    import jax
    import numpy as np

    import megajax
    from megajax.core.train.first_step import with_scales

    jax.set_mesh(mesh or megajax.make_mesh(1, 1))
    train = config.train
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (train.batch_size, train.seq_len + 1), np.int32
    )
    mask = np.ones((train.batch_size, train.seq_len), np.float32)
    batch = megajax.place_batch(
        {'tokens': tokens[:, :-1], 'labels': tokens[:, 1:], 'loss_mask': mask}
    )
    start = time.perf_counter()
    abstract = jax.eval_shape(lambda: megajax.init_state(config))
    compiled = megajax.make_train_step(config).lower(abstract, batch).compile()
    seconds = time.perf_counter() - start
    return compiled, with_scales(config, megajax.init_state(config), batch), batch, seconds


def query(what: str) -> str | None:
    """What nvidia-smi says of the GPU that jax uses first; None without one."""
    # nvidia-smi itself ignores the variable. An entry is an index or a UUID.
    first = os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',')[0].strip() or '0'
    command = [
        'nvidia-smi',
        f'--id={first}',
        f'--query-gpu={what}',
        '--format=csv,noheader,nounits',
    ]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Sensors:
    """Clock and power of the GPU while it works, by nvidia-smi, four times a second."""

    def __enter__(self) -> 'Sensors':
        self.seen: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set() and (answer := query('clocks.sm,power.draw')):
            clock, power = (float(value) for value in answer.split(','))
            self.seen.append((clock, power))
            self._stop.wait(0.25)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def result(self) -> dict[str, float | None]:
        """Their medians."""
        clocks, powers = zip(*self.seen, strict=True) if self.seen else ((), ())
        return {
            'clock_mhz': statistics.median(clocks) if clocks else None,
            'power_w': statistics.median(powers) if powers else None,
        }


def timed(run: Callable[[], object], steps: int = STEPS) -> dict[str, float]:
    """Milliseconds of some runs after those that warm up."""
    for _ in range(WARM_UP):
        run()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    tenths = statistics.quantiles(seconds, n=10, method='inclusive')
    return {
        'median_ms': 1e3 * statistics.median(seconds),
        'min_ms': 1e3 * min(seconds),
        'p90_ms': 1e3 * tenths[-1],
    }
