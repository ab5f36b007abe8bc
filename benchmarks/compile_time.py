"""The seconds until the step of megatron_8.3b is compiled: `python benchmarks/compile_time.py`.

For eight simulated devices, as a user has it, with XLA's optimizations; nothing is allocated. Each
turn is a process of its own. Prints Markdown: the seconds to import, trace, lower and compile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

CONFIG = ['megatron_8.3b', 'mesh.data=1', 'mesh.model=8', 'train.batch_size=8']
PHASES = 'import', 'trace', 'lower', 'compile'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('overrides', nargs='*', help='for example train.dtype=float32')
    parser.add_argument('--turns', type=int, default=3)
    parser.add_argument(
        '--again', action='store_true', help='time starts that read what an earlier one compiled'
    )
    parser.add_argument('--one', action='store_true', help='print the seconds of one turn as JSON')
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one_turn(arguments.overrides)))
        return
    with tempfile.TemporaryDirectory() as folder:
        cache = {'JAX_COMPILATION_CACHE_DIR': folder} if arguments.again else {}
        if arguments.again:
            in_a_process(arguments.overrides, cache)
        turns = [in_a_process(arguments.overrides, cache) for _ in range(arguments.turns)]
    print(f'| {" | ".join([*PHASES, "all"])} |\n|{"---|" * (len(PHASES) + 1)}')
    for turn in [*turns, {phase: median(turn[phase] for turn in turns) for phase in PHASES}]:
        seconds = [*turn.values(), sum(turn.values())]
        print(f'| {" | ".join(f"{value:.1f}" for value in seconds)} |')
    print('\nThe last line has the medians.')


def in_a_process(overrides: list[str], cache: dict[str, str]) -> dict[str, float]:
    own = {'PYTHONPATH': str(Path(__file__).parents[1]), 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, __file__, *overrides, '--one']
    done = subprocess.run(
        command, env=os.environ | own | cache, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def one_turn(overrides: list[str]) -> dict[str, float]:
    """The seconds of each phase."""
    start = time.perf_counter()
    ends = []

    import jax

    import megajax
    from megajax.core.parallel.mesh import concrete, mesh_for
    from megajax.core.train.feed import abstract_batch

    config = megajax.load(CONFIG[0], [*CONFIG[1:], *overrides])
    with jax.set_mesh(mesh_for(config)):
        state = concrete(jax.eval_shape(lambda: megajax.init_state(config)))
        step = megajax.make_train_step(config)
        ends.append(time.perf_counter())
        traced = step.trace(state, abstract_batch(config))
        ends.append(time.perf_counter())
        lowered = traced.lower()
        ends.append(time.perf_counter())
        lowered.compile()
        ends.append(time.perf_counter())
    starts = [start, *ends[:-1]]
    return {phase: end - begin for phase, begin, end in zip(PHASES, starts, ends, strict=True)}


if __name__ == '__main__':
    main()
