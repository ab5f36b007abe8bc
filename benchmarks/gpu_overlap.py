"""What a compiler without GPUs cannot say of overlap, for `benchmarks/gpu.py` on several GPUs.

Milliseconds of a step of eight layers of Llama 3 8B with tensor and sequence parallelism: plain,
and with halves or quarters of the tokens or halves of the rows that take turns, for each limit of
collectives in flight. Quarters hide more seconds in the compiled program, with messages half as
long.
"""

import itertools
import os
import statistics
import time
from typing import Any

SMALL = bool(os.environ.get('MEGAJAX_SMALL'))
WARM_UP, STEPS = 2, 2 if SMALL else 10
LAYERS = 'model.num_layers=2' if SMALL else 'model.num_layers=8'
LENGTH = 128 if SMALL else 8192
TINY = (
    *('model.hidden_size=64', 'model.num_heads=4', 'model.num_kv_heads=4', 'model.head_dim=16'),
    *('model.ffn_size=128', 'model.vocab_size=512'),
)
SLOTS = 'xla_gpu_experimental_parallel_collective_overlap_limit'


def overlap() -> dict[str, Any]:
    """Milliseconds of each form of the step; 'skipped' with one GPU."""
    import jax

    if SMALL:
        jax.config.update('jax_num_cpu_devices', 2)
    count = jax.device_count()
    if count < 2:
        return {'skipped': 'one GPU sends nothing'}
    found = {'gpus': count, 'jax': jax.__version__, 'plain_ms': measure('none', 1, 1, None)}
    forms = ('batch_split', 2, 2), ('sequence_split', 1, 2), ('sequence_split', 1, 4)
    for (how, rows, parts), slots in itertools.product(forms, (None,) if SMALL else (1, 4)):
        name = f'{how}, {rows} rows in {parts} parts, {slots} slots'
        found[f'{name}, ms a row'] = measure(how, rows, parts, slots) / rows
    return found


def measure(how: str, rows: int, parts: int, slots: int | None) -> float:
    """Milliseconds of a step, the median."""
    import jax
    import numpy as np

    import megajax
    from megajax.core.config import overlap_rules

    overlap_rules.PARTS = parts
    config = megajax.load(
        'llama3_8b',
        [
            *(LAYERS, 'mesh.data=1', f'mesh.model={jax.device_count()}'),
            *('mesh.sequence_parallel=true', 'model.dropout=0', 'train.dtype=bfloat16'),
            *('train.recompute=full', 'optim.shard=none'),
            *(f'train.batch_size={rows}', 'train.microbatches=1', f'train.seq_len={LENGTH}'),
            *(f'train.overlap={how}', f'train.unroll={str(how != "none").lower()}'),
            *(TINY if SMALL else ()),
        ],
    )
    jax.set_mesh(megajax.make_mesh(1, jax.device_count()))
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (rows, LENGTH + 1), np.int32
    )
    mask = np.ones((rows, LENGTH), np.float32)
    batch = megajax.place_batch(
        {'tokens': tokens[:, :-1], 'labels': tokens[:, 1:], 'loss_mask': mask}
    )
    state = megajax.init_state(config)
    lowered = megajax.make_train_step(config).lower(state, batch)
    step = lowered.compile({SLOTS: str(slots)} if slots else None)
    times = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[WARM_UP:])


if __name__ == '__main__':
    print(overlap())
