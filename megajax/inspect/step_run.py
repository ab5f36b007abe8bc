"""Execute the compiled step of a config, in a process of its own with simulated devices, and judge it.

Where a result is wrong, the pass of the compiler that made it so and the smallest config that shows
it can be looked for; each try compiles and runs a program.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from megajax.config import Config, dump
from megajax.inspect.child import call_in_child, telling_parent
from megajax.inspect.limits import Say, judged
from megajax.inspect.result import StepRun
from megajax.inspect.shrink import shrink


def run_in_child(
    config: Config, target: str, *, bisect: bool, reduce: bool, say: Say
) -> list[StepRun]:
    """Execute the step of `config`, or of a smaller one, as compiled for `target`; `say` hears of its progress.

    A program of 16 bits runs twice: as it is, and with everything of 16 bits in fp32.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder, 'task'), Path(folder, 'result')
        task.write_text(
            json.dumps(
                {
                    'config': config.model_dump_json(),
                    'target': target,
                    'bisect': bisect,
                    'reduce': reduce,
                }
            )
        )
        call_in_child(__name__, task, result, target=target, say=say)
        return [StepRun.model_validate(one) for one in json.loads(result.read_text())]


def run(config: Config, target: str, *, bisect: bool, reduce: bool, say: Say) -> list[StepRun]:
    """The same in this process, which must have a CPU device for each of the mesh."""
    from megajax.inspect.emulated_step import EmulatedStep

    small, changes = shrink(config)
    start = time.perf_counter()
    say(f'compiling {"a smaller step" if changes else "the step"} for {target} ...')
    step = EmulatedStep(small, target)
    runs = []
    for exact in (False,) if small.train.dtype == 'float32' else (False, True):
        say(
            'executing it on simulated CPU devices'
            + (', everything of 16 bits in fp32 ...' if exact else ' ...')
        )
        results = judged(step.differences(exact=exact), small, exact=exact)
        seconds, start = time.perf_counter() - start, time.perf_counter()
        runs.append(
            StepRun(
                config=dump(small), shrunk=changes, exact=exact, seconds=seconds, results=results
            )
        )
    return [_explained(one, small, target, bisect=bisect, reduce=reduce, say=say) for one in runs]


def _explained(
    found: StepRun, config: Config, target: str, *, bisect: bool, reduce: bool, say: Say
) -> StepRun:
    if found.ok:
        return found
    from megajax.inspect.culprit import culprit
    from megajax.inspect.emulated_step import EmulatedStep
    from megajax.inspect.reduce import smallest

    def is_wrong(simpler: Config) -> bool:
        exact = found.exact and simpler.train.dtype != 'float32'
        results = judged(
            EmulatedStep(simpler, target).differences(exact=exact), simpler, exact=exact
        )
        worst = max(results, key=lambda one: one.error / one.limit)
        say(f'{"wrong" if not worst.ok else "right"}: {worst.name} differs by {worst.error:.1e}')
        return not worst.ok

    updates = {}
    if bisect:
        updates['culprit'] = culprit(config, target, exact=found.exact, say=say)
    if reduce:
        updates['smallest'] = dump(smallest(config, is_wrong))
    return found.model_copy(update=updates)


def _main(task: str, result: str) -> None:
    told = json.loads(Path(task).read_text())
    config = Config.model_validate_json(told['config'])
    import jax

    jax.config.update('jax_num_cpu_devices', shrink(config)[0].mesh.data * config.mesh.model)
    say = lambda line: print(line, flush=True)  # noqa: E731
    runs = run(config, told['target'], bisect=told['bisect'], reduce=told['reduce'], say=say)
    Path(result).write_text(json.dumps([one.model_dump() for one in runs]))


if __name__ == '__main__':
    with telling_parent():
        _main(*sys.argv[1:])
