"""Saving with digests beside Orbax alone, in one run:
`python benchmarks/checkpoint.py [--megabytes N]`.

A state of random float32 numbers on four simulated devices is saved by an Orbax CheckpointManager
with its own defaults and by megajax's Checkpoints, in turns, because others may use the machine.
`blocking` is the time in which the training loop waits; `total` ends when the step can be trusted.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

WIDTH = 2048


class State(NamedTuple):
    step: Any
    params: Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--rounds',
        type=int,
        default=7,
        help='turns of each contender, after one that does not count',
    )
    parser.add_argument('--megabytes', type=int, default=512, help='MiB of state')
    parser.add_argument(
        '--folder', type=Path, help='where to write, a temporary folder if left out'
    )
    arguments = parser.parse_args()
    import jax

    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', 4)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        compare(Path(folder), arguments.megabytes, arguments.rounds)


def compare(folder: Path, megabytes: int, rounds: int) -> None:
    state = make_state(megabytes)
    seconds: dict[str, list[tuple[float, float]]] = {'orbax': [], 'megajax': []}
    save = {'orbax': orbax_saver(folder / 'orbax'), 'megajax': megajax_saver(folder / 'megajax')}
    for turn in range(1, rounds + 2):
        for name, times in seconds.items():
            times.append(timed(save[name], state, turn))
            print(
                f'round {turn}: {name:8s} blocking {times[-1][0]:.2f} s, '
                f'total {times[-1][1]:.2f} s',
                flush=True,
            )
    report(
        {name: times[1:] for name, times in seconds.items()}, folder / 'megajax' / str(rounds + 1)
    )


def timed(
    save: Callable[[Any, int], Callable[[], object]], state: State, step: int
) -> tuple[float, float]:
    start = time.perf_counter()
    wait = save(state, step)
    blocking = time.perf_counter() - start
    wait()
    return blocking, time.perf_counter() - start


def make_state(megabytes: int) -> State:
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from megajax.core.parallel.mesh import make_mesh

    mesh = make_mesh(2, 2)
    random = np.random.default_rng(0)
    place = NamedSharding(mesh, PartitionSpec(None, 'model'))
    arrays = range(megabytes * 2**20 // (4 * WIDTH * WIDTH))
    params = {
        f'{i}': jax.device_put(random.normal(size=(WIDTH, WIDTH)).astype(np.float32), place)
        for i in arrays
    }
    return State(jax.device_put(np.int32(0), NamedSharding(mesh, PartitionSpec())), params)


def orbax_saver(folder: Path) -> Callable[[Any, int], Callable[[], object]]:
    import orbax.checkpoint as ocp

    policy = ocp.checkpoint_managers.LatestN(2)
    manager = ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(preservation_policy=policy)
    )

    def save(state: State, step: int) -> Callable[[], object]:
        manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)), force=True)
        return manager.wait_until_finished

    return save


def megajax_saver(folder: Path) -> Callable[[Any, int], Callable[[], object]]:
    from megajax.core.config import load
    from megajax.runtime.checkpoint.checkpoints import Checkpoints

    checkpoints = Checkpoints(folder, load('tiny'))

    def save(state: Any, step: int) -> Callable[[], object]:
        checkpoints.save(state, step)
        return checkpoints.wait

    return save


def report(seconds: dict[str, list[tuple[float, float]]], step: Path) -> None:
    from megajax.runtime.checkpoint.digests import problems

    size = sum(path.stat().st_size for path in step.rglob('*') if path.is_file())
    start = time.perf_counter()
    assert problems(step) == []
    hashing = time.perf_counter() - start
    medians = {
        name: [statistics.median(column) for column in zip(*times, strict=True)]
        for name, times in seconds.items()
    }
    print(f'\nmedians of {len(seconds["orbax"])}    blocking    total')
    for name, (blocking, total) in medians.items():
        print(f'{name:14s} {blocking:8.2f} s {total:6.2f} s')
    ratios = [
        ours / theirs for ours, theirs in zip(medians['megajax'], medians['orbax'], strict=True)
    ]
    print(f'{"ratio":14s} {ratios[0]:8.2f}   {ratios[1]:6.2f}')
    print(f'verifying {size / 1e6:.0f} MB takes {hashing:.2f} s, {size / hashing / 1e6:.0f} MB/s')
    shutil.rmtree(step.parent)


if __name__ == '__main__':
    main()
