"""Time real training steps, from which calibration gets the rate of matmuls in training."""

import os
import time
from collections.abc import Callable

import jax
import numpy as np

from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX
from megajax.analysis.plan.time import step_time
from megajax.core.config import Config, MeshConfig, ModelConfig, TrainConfig
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.dies import Efficiency, Fit, Seen
from megajax.core.hardware.records import Dtype, Hardware
from megajax.core.parallel.mesh import make_mesh
from megajax.core.train.feed import place_batch
from megajax.core.train.step import init_state, make_train_step

STEPS = 5
# The band of a GPU without published rates: the widest band of the dies with at least ten rows.
NO_RATES = 0.21
BUSY = 0.25  # share of the cores that counts as busy, by the load of the last minute


def busy() -> str | None:
    """Return a warning if other processes are using this machine; None if it is idle."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < BUSY * cores:
        return None
    return (
        f'the machine is busy (load {load:.1f} on {cores} cores), so the rates measured are too '
        'low: measure again when it is idle'
    )


def config_for(devices: int, *, is_gpu: bool, narrow: Dtype = 'bfloat16') -> Config:
    """Return a GPT whose step takes a few tenths of a second on a CPU or on a GPU.

    It computes in `narrow` on a GPU. The batch has at least one sequence for every device. Overlap
    and unrolling are resolved, so that the planned step is the one that runs.
    """
    width, length, rows = (2048, 2048, 4) if is_gpu else (512, 256, 2)
    config = Config(
        model=ModelConfig(
            num_layers=4,
            hidden_size=width,
            num_heads=width // 64,
            vocab_size=8192,
            max_seq_len=length,
            dropout=0.0,
        ),
        mesh=MeshConfig(data=devices, model=1),
        train=TrainConfig(
            batch_size=rows * devices,
            seq_len=length,
            dtype=narrow if is_gpu else 'float32',
            recompute='none',
        ),
    )
    return resolved(config, on_gpu=is_gpu)


def real_seconds(config: Config) -> list[float]:
    """Return the seconds of STEPS steps, after two warm-up steps."""
    train = config.train
    with jax.set_mesh(make_mesh(config.mesh.data, 1)):
        tokens = np.random.default_rng(0).integers(
            0, config.model.vocab_size, (train.batch_size, train.seq_len + 1), np.int32
        )
        mask = np.ones((train.batch_size, train.seq_len), np.float32)
        batch = place_batch({'tokens': tokens[:, :-1], 'labels': tokens[:, 1:], 'loss_mask': mask})
        state, step, seconds = init_state(config), make_train_step(config), list[float]()
        for _ in range(2 + STEPS):
            start = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - start)
    return seconds[2:]


def fitted_to_step(record: Hardware, config: Config, seconds: list[float]) -> Hardware:
    """Return the record with the matmul rate at which a step takes the median of `seconds`.

    If no rate gives the median, the record has the nearest possible rate. Its band is at least as
    wide as before, because one step does not show how well other steps are predicted.
    """
    median = float(np.median(seconds))

    def planned(matmul: float) -> float:
        return step_time(config, Cluster.of(_with(record, matmul=matmul), config.mesh.data)).total

    matmul = _where(planned, median, 1e-3, 1.0)
    error = abs(planned(matmul) / median - 1)
    spread = max(abs(measured / median - 1) for measured in seconds)
    least = record.fit.band if record.fit else NO_RATES
    mean = min(1.0, max(1e-3, error))
    band = min(1.0, max(1e-3, error, spread, least))
    step = Seen(rows=1, band=band, gpus=config.mesh.num_devices, dtypes=(config.train.dtype,))
    fit = Fit(rows=1, mean=mean, band=band, programs={MEGAJAX.name: step})
    return _with(record, matmul=round(matmul, 4)).model_copy(update={'fit': fit})


def _where(falls: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Find by bisection where a decreasing function reaches a value between two bounds."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if falls(middle) > value else (low, middle)
    return high


def _with(record: Hardware, *, matmul: float) -> Hardware:
    efficiency: Efficiency = record.efficiency.model_copy(update={'matmul': matmul})
    return record.model_copy(update={'efficiency': efficiency})
