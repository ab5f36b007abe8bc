"""`megajax inspect fuzz`: parse, call, render."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megajax.base.errors import ResourceError, StopRequested
from megajax.base.files.outputs import check_outputs
from megajax.base.render.console import plain_console
from megajax.core.config import ConfigError
from megajax.core.hardware.records import record_name
from megajax.core.hardware.tpus import TPUS

if TYPE_CHECKING:
    from megajax.analysis.fuzz.case import Case
    from megajax.core.config import Config

MODELS = 3  # models to draw before fixed settings count as a mistake
Count = Annotated[int, typer.Argument(metavar='COUNT', min=1, help='Number of random steps.')]
Fixed = Annotated[
    list[str] | None,
    typer.Argument(
        metavar='KEY=VALUE', help='Settings that are not drawn, for example mesh.stages=2.'
    ),
]
Seed = Annotated[int, typer.Option(help='The same seed gives the same configs.')]
Target = Annotated[
    str, typer.Option(callback=record_name, help='A GPU (none is needed): a100, b200, h100, h200.')
]
OutFile = Annotated[
    Path,
    typer.Option(
        help='JSON lines, one per step. A step in the file is run again only if megajax or the '
        'compiler has changed.'
    ),
]
Jobs = Annotated[int, typer.Option(min=1, help='Number of processes.')]
MinimizeOption = Annotated[
    bool,
    typer.Option(
        '--minimize',
        help='Find the smallest config and the compiler pass of each finding, and write a folder.',
    ),
]
ListOption = Annotated[bool, typer.Option('--list', help='Print the configs; compile nothing.')]


def fuzz(
    count: Count,
    fixed: Fixed = None,
    seed: Seed = 0,
    target: Target = 'h100',
    out: OutFile = Path('fuzz.jsonl'),
    jobs: Jobs = 1,
    minimize: MinimizeOption = False,
    list_only: ListOption = False,
) -> None:
    """Verify random training steps as compiled for a GPU.

    Models, meshes, dtypes and features are drawn from all valid configs. Each step is executed
    without a GPU and compared with one device. The same command continues a stopped run. Exits with
    code 1 if a step is wrong, or fails to compile or run. megajax inspect --fuzz does the same.
    """
    if target in ('cpu', *TPUS):
        raise ConfigError(f'--target {target}: fuzz executes programs for GPUs; use --target h100')
    first = _some_config(seed, fixed or ())
    if list_only:
        return _print_configs(seed, count, fixed or ())
    check_outputs(out)
    reports = _folder(out) if minimize else None
    from megajax.analysis.fuzz import run
    from megajax.analysis.fuzz.report import line, tables
    from megajax.core.config.overrides import read_overrides
    from megajax.core.hardware.targets import check_target

    is_fixed = 'train.dtype' in read_overrides(fixed or (), [])
    check_target(target, first.train.dtype if is_fixed else None)
    progress = plain_console(stderr=True)
    executed: list[Case] = []

    def say(case: 'Case') -> None:
        executed.append(case)
        progress.print(line(case), style='dim', soft_wrap=True)

    try:
        with _stopping():
            cases = run.fuzz(
                out,
                seed=seed,
                count=count,
                target=target,
                fixed=fixed or (),
                jobs=jobs,
                reports=reports,
                say=say,
            )
    except KeyboardInterrupt:
        print('interrupted: the same command continues', file=sys.stderr)
        raise typer.Exit(130) from None
    if cases:
        plain_console().print(tables(cases, len(executed), out), soft_wrap=True)
    raise typer.Exit(_code(cases, count, jobs))


def _some_config(seed: int, fixed: Sequence[str]) -> 'Config':
    """Return a config with the fixed settings; raise ConfigError if the first models have none."""
    from megajax.analysis.fuzz.draw import LAYOUTS, draw

    for model in range(MODELS - 1):  # a model may have none by chance
        with suppress(ConfigError):
            return draw(seed, model * LAYOUTS, fixed)
    return draw(seed, (MODELS - 1) * LAYOUTS, fixed)


@contextmanager
def _stopping() -> Iterator[None]:
    """Raise StopRequested in the block if a signal other than Ctrl-C asks this process to end."""
    from megajax.runtime.processes.signals import STOPS, take_stops

    numbers = [number for number in STOPS if number != signal.SIGINT]

    def stop(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # schedulers may repeat it
        raise StopRequested(f'{signal.Signals(number).name}: the same command continues')

    before = take_stops(stop, numbers)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _print_configs(seed: int, count: int, fixed: Sequence[str]) -> None:
    from megajax.analysis.fuzz.draw import described, draw

    for number in range(count):
        try:
            print(f'{number}  {described(draw(seed, number, fixed))}')
        except ConfigError as error:
            print(f'{number}  rejected  {" ".join(str(error).splitlines())}')


def _folder(out: Path) -> Path:
    """Return the folder for the findings in the file `out`."""
    reports = out.with_suffix('')
    if reports == out or reports.is_file():
        raise ConfigError(
            f'--out {out}: with --minimize, the folder {reports} gets the findings, but a file has '
            f'this name; use a different name, such as --out {out.with_suffix("")}-found.jsonl'
        )
    return reports


def _code(cases: Sequence['Case'], count: int, jobs: int) -> int:
    """Return the exit code, and print the number of steps that have no case."""
    if missing := count - len(cases):
        smaller = 'on a machine with more memory, or fix smaller sizes, such as train.seq_len=32'
        print(
            f'error: {missing:,} of {count:,} steps were not executed: SIGKILL or SIGABRT ended '
            'their process, which happens if memory runs out; run the same command '
            f'{"with fewer --jobs" if jobs > 1 else smaller}',
            file=sys.stderr,
        )
    if any(case.is_finding for case in cases):
        return 1
    return ResourceError.exit_code if missing else 0
