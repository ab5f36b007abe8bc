"""`megajax inspect`: parse, call, render."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megajax.base.files.outputs import check_outputs, writing
from megajax.base.render.console import plain_console
from megajax.commands.inspect_fuzz import fuzz
from megajax.commands.options import DefaultGroup
from megajax.core.config import Config, ConfigError, load
from megajax.core.config.records import read_record
from megajax.core.hardware.records import record_name
from megajax.core.hardware.tpus import TPUS

if TYPE_CHECKING:
    from megajax.analysis.inspect.budget import Budget
    from megajax.analysis.inspect.result import Inspection, StepRun


class _Group(DefaultGroup):
    """The commands of inspect; `--diff` and `--fuzz` mean the commands `diff` and `fuzz`."""

    default = 'step'

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args[:1] in (['--diff'], ['--fuzz']):
            args = [args[0].removeprefix('--'), *args[1:]]
        return super().parse_args(ctx, args)


inspect_app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List each collective that XLA inserted, next to Megatron's.\n\n"
    'megajax inspect CONFIG [KEY=VALUE ...] [--target h100]. See megajax inspect step --help.',
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar='KEY=VALUE', help='For example mesh.model=4.'),
]
NEEDS_GPU = 'needs a program compiled for a GPU: add --target h100, or a100, h200, b200'
ConfigSource = Annotated[str, typer.Argument(metavar='CONFIG', help='A preset or a YAML file.')]
Target = Annotated[
    str,
    typer.Option(
        callback=record_name,
        help='cpu, a GPU (a100, b200, h100, h200) or a TPU (v5p, v6e); no GPU or TPU is needed.',
    ),
]
NumHosts = Annotated[
    int | None,
    typer.Option(help='Number of hosts; the default is as few as hold 8 devices each.'),
]
JsonFile = Annotated[Path | None, typer.Option(help='Write everything to this file.')]
HloFile = Annotated[Path | None, typer.Option(help='Write the compiled program to this file.')]
RunOption = Annotated[
    bool,
    typer.Option(
        '--run',
        help='Execute the GPU program on simulated CPU devices and compare with one device.',
    ),
]
BisectOption = Annotated[
    bool,
    typer.Option(
        '--bisect',
        help='With --run: name the compiler pass after which the result is wrong.',
    ),
]
ScanOption = Annotated[
    bool,
    typer.Option(
        '--scan',
        help='Compile a loop over the layers even if a run compiles them separately: quicker, but '
        'with less overlap.',
    ),
]
MinimizeOption = Annotated[
    bool,
    typer.Option('--minimize', help='With --run: print the smallest config with a wrong result.'),
]
OldMinimizeOption = Annotated[bool, typer.Option('--reduce', hidden=True)]
KernelsOption = Annotated[
    bool, typer.Option('--kernels', help='With a GPU target: list kernels, bytes and FLOPs.')
]
MemoryOption = Annotated[
    bool, typer.Option('--memory', help='List the arrays in device memory at its peak.')
]
BudgetFile = Annotated[
    Path | None,
    typer.Option(help='A YAML file of limits; exits with 1 if the step exceeds one.'),
]


@inspect_app.command()
def step(
    source: ConfigSource,
    overrides: Overrides = None,
    target: Target = 'cpu',
    hosts: NumHosts = None,
    json: JsonFile = None,
    hlo: HloFile = None,
    run: RunOption = False,
    bisect: BisectOption = False,
    minimize: MinimizeOption = False,
    reduce: OldMinimizeOption = False,
    scan: ScanOption = False,
    kernels: KernelsOption = False,
    memory: MemoryOption = False,
    budget: BudgetFile = None,
) -> None:
    """List each collective that XLA inserted, next to Megatron's.

    Exits with code 1 if XLA sends more. With --run, the compiled step is also executed, without a
    GPU, and every gradient is compared with a step on one device.
    """
    config = load(source, overrides or ())
    minimize = minimize or reduce
    _check_run(target, run, explained=bisect or minimize)
    _check_gpu(target, kernels=kernels, budget=budget, memory=memory)
    check_outputs(json, hlo)
    limits = _read_budget(budget) if budget else None
    from megajax.analysis.inspect import inspect_with_text

    inspection, text = inspect_with_text(config, target=target, hosts=hosts, scan=scan)
    inspection = _with_remedy(inspection, config)
    if run:
        runs = _run_with_progress(config, target, bisect=bisect, minimize=minimize)
        inspection = inspection.model_copy(update={'runs': runs})
    if limits:
        from megajax.analysis.inspect.budget import over_budget

        findings = [*inspection.findings, *over_budget(inspection, limits)]
        inspection = inspection.model_copy(update={'findings': findings})
    with writing((json, inspection.model_dump_json(indent=2)), (hlo, text)):
        _print(inspection, kernels=kernels, memory=memory)
    raise typer.Exit(0 if inspection.ok else 1)


def _read_budget(file: Path) -> 'Budget':
    from megajax.analysis.inspect.budget import Budget  # here, because it imports jax

    return read_record(file, Budget)


inspect_app.command()(fuzz)

Compared = Annotated[
    str,
    typer.Argument(help='A file written by inspect --json, a preset or a YAML file.'),
]


@inspect_app.command()
def diff(
    before: Compared,
    after: Compared,
    target: Target = 'cpu',
    markdown: Annotated[
        bool, typer.Option('--markdown', help='Print Markdown, for a pull request.')
    ] = False,
) -> None:
    """Compare two compiled steps.

    The steps can be from two commits, configs or versions of jax. A config is compiled now, for the
    target. Exits with code 1 if there is a new error. megajax inspect --diff does the same.
    """
    sources = _read_inspection(before), _read_inspection(after)
    from megajax.analysis.inspect import inspect
    from megajax.analysis.inspect.diff import difference
    from megajax.analysis.inspect.diff_markdown import to_markdown
    from megajax.analysis.inspect.diff_report import to_tables
    from megajax.base.render.console import as_text

    old, new = (
        inspect(source, target=target) if isinstance(source, Config) else source
        for source in sources
    )
    found = difference(old, new)
    width = Console().width if sys.stdout.isatty() else 120
    print(to_markdown(found) if markdown else as_text(to_tables(found), width=width), end='')
    raise typer.Exit(any(finding.level == 'error' for finding in found.new))


def _read_inspection(source: str) -> 'Inspection | Config':
    path = Path(source)
    if path.suffix != '.json':
        return load(source, ())
    from megajax.analysis.inspect.result import Inspection

    try:
        return Inspection.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f'{path} cannot be read: {error.strerror}') from error
    except ValueError as error:
        raise ConfigError(
            f'{path} was not written by megajax inspect --json of this version: '
            f'{str(error).splitlines()[0]}; write it again'
        ) from error


def _with_remedy(inspection: 'Inspection', config: Config) -> 'Inspection':
    """Add the key that makes the step fit, if it does not fit in the GPU's memory."""
    from megajax.analysis.plan.memory_fix import remedy

    if inspection.rates is None:  # not a GPU
        return inspection
    memory, per_host = inspection.memory, inspection.devices_per_host
    text = remedy(config, memory.needed, gpu=inspection.target, gpus_per_host=per_host)
    return inspection.model_copy(update={'memory': memory.model_copy(update={'remedy': text})})


def _print(inspection: 'Inspection', *, kernels: bool, memory: bool) -> None:
    from megajax.analysis.inspect.report import tables, to_text

    console = plain_console()
    console.print(
        tables(inspection, kernels=kernels, memory=memory)
        if console.is_terminal
        else to_text(inspection, kernels=kernels, memory=memory),
        soft_wrap=not console.is_terminal,
    )


def _check_gpu(target: str, *, kernels: bool, budget: Path | None, memory: bool) -> None:
    wanted = '--kernels' if kernels else '--budget' if budget else None
    if wanted and target in ('cpu', *TPUS):
        raise ConfigError(f'{wanted} {NEEDS_GPU}')
    if memory and target in TPUS:
        raise ConfigError(
            f'--memory: the compiler for {target} does not list the arrays in memory; use '
            '--target cpu or h100, or leave --memory out'
        )


def _check_run(target: str, run: bool, *, explained: bool) -> None:
    if explained and not run:
        raise ConfigError('--bisect and --minimize explain a wrong result of --run: add --run')
    if run and target in ('cpu', *TPUS):
        raise ConfigError(f'--run {NEEDS_GPU}')


def _run_with_progress(
    config: Config, target: str, *, bisect: bool, minimize: bool
) -> 'list[StepRun]':
    """Execute the step in a child process, and report its progress on standard error."""
    from megajax.analysis.inspect.step_run import run_in_child

    progress = plain_console(stderr=True)
    return run_in_child(
        config,
        target,
        bisect=bisect,
        minimize=minimize,
        say=lambda line: progress.print(line, style='dim'),
    )
