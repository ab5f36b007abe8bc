"""Execute a config's compiled step on simulated devices, in a child process, and judge its results.

If a result is wrong, one search can find the compiler pass after which it is wrong, and another the
smallest config that shows it. Each attempt compiles and executes a program.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from megajax.analysis.inspect.child import call_in_child, telling_parent
from megajax.analysis.inspect.result import StepRun
from megajax.analysis.inspect.shrink import shrink
from megajax.analysis.inspect.tolerances import Say, has_16_bits
from megajax.core.config import Config, dump
from megajax.xla.emulate.result import NOT_FOUND


def run_in_child(
    config: Config, target: str, *, bisect: bool, minimize: bool, say: Say
) -> list[StepRun]:
    """Execute the step of `config`, or of a smaller config, as compiled for `target`.

    A program with 16-bit types runs twice: as compiled, and with fp32 in their place. `say` gets
    lines about the progress.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder, 'task'), Path(folder, 'result')
        task.write_text(
            json.dumps(
                {
                    'config': config.model_dump_json(),
                    'target': target,
                    'bisect': bisect,
                    'minimize': minimize,
                }
            )
        )
        call_in_child(__name__, task, result, target=target, say=say)
        return [StepRun.model_validate(step_run) for step_run in json.loads(result.read_text())]


def run(config: Config, target: str, *, bisect: bool, minimize: bool, say: Say) -> list[StepRun]:
    """Do the same in this process, which needs one CPU device for each device of the mesh."""
    from megajax.analysis.inspect.emulated_step import EmulatedStep

    small, changes = shrink(config)
    start = time.perf_counter()
    say(f'compiling {"a smaller step" if changes else "the step"} for {target} ...')
    step = EmulatedStep(small, target)
    runs = []
    for exact in (False, True) if has_16_bits(small) else (False,):
        say(
            'executing it on simulated CPU devices'
            + (', with fp32 instead of 16-bit types ...' if exact else ' ...')
        )
        results = step.results(exact=exact)
        seconds, start = time.perf_counter() - start, time.perf_counter()
        runs.append(
            StepRun(
                config=dump(small), shrunk=changes, exact=exact, seconds=seconds, results=results
            )
        )
    options = {'bisect': bisect, 'minimize': minimize}
    return [_explained(step_run, small, target, **options, say=say) for step_run in runs]


def _explained(
    step_run: StepRun, config: Config, target: str, *, bisect: bool, minimize: bool, say: Say
) -> StepRun:
    if step_run.ok:
        return step_run
    from megajax.analysis.inspect.emulated_step import EmulatedStep
    from megajax.analysis.inspect.minimize import smallest

    def is_wrong(simpler: Config) -> bool:
        exact = step_run.exact and has_16_bits(simpler)
        try:
            worst = EmulatedStep(simpler, target).results(exact=exact)[0]
        except Exception as error:  # another fault: only the config is known to be valid
            say(f'not executed: {error}')
            return False
        say(f'{"wrong" if not worst.ok else "right"}: {worst.name} differs by {worst.error:.1e}')
        return not worst.ok

    updates = {}
    if bisect:
        try:
            updates['culprit'] = culprit(config, target, exact=step_run.exact, say=say)
        except (ValueError, RuntimeError) as error:
            updates['culprit'] = f'{NOT_FOUND}{error}'
    if minimize:
        updates['smallest'] = dump(smallest(config, is_wrong))
    return step_run.model_copy(update=updates)


def culprit(config: Config, target: str, *, exact: bool, say: Say) -> str:
    """Compile again with a dump after every pass, and bisect for the first wrong dump."""
    from megajax.analysis.inspect.emulated_step import EmulatedStep
    from megajax.xla.emulate.bisect import dump_options, first_wrong, modules

    with tempfile.TemporaryDirectory() as folder:
        say('compiling with a dump of every pass ...')
        step = EmulatedStep(config, target, dump_options(Path(folder)))

        def is_right(text: str) -> bool:
            return step.results(exact=exact, text=text)[0].ok

        return str(first_wrong(modules(Path(folder)), is_right, say))


def _main(task: str, result: str) -> None:
    request = json.loads(Path(task).read_text())
    config = Config.model_validate_json(request['config'])
    import jax

    jax.config.update('jax_num_cpu_devices', shrink(config)[0].mesh.num_devices)
    say = lambda line: print(line, flush=True)  # noqa: E731
    bisect, minimize = request['bisect'], request['minimize']
    runs = run(config, request['target'], bisect=bisect, minimize=minimize, say=say)
    Path(result).write_text(json.dumps([step_run.model_dump() for step_run in runs]))


if __name__ == '__main__':
    with telling_parent():
        _main(*sys.argv[1:])
