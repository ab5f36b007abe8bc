"""The subcommands of `megajax plan`: parse, call, render."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from megajax.base.files.outputs import check_outputs, with_folder
from megajax.base.render.folded import Folded
from megajax.commands.default_command import DefaultGroup
from megajax.commands.options import with_old_names
from megajax.commands.plan_options import (
    BatchSize,
    CompareOption,
    ConfigSource,
    GenerateOption,
    Gpu,
    GpuHoursToFailure,
    GpusPerHost,
    Imbalance,
    JsonFile,
    LayoutFile,
    LinkOption,
    NumGpus,
    NumPrompts,
    NumTokens,
    Overrides,
    Price,
    Program,
    PromptTokens,
    RooflinePlot,
    ScalingPlot,
    SchedulePlot,
    StorageRate,
    TableName,
    VerifyOption,
    WhatIfOption,
)
from megajax.core.config import Config, ConfigError, load
from megajax.core.hardware.records import record_name

if TYPE_CHECKING:
    from megajax.analysis.plan import Plan
    from megajax.analysis.plan.programs import ProgramName
    from megajax.core.hardware.records import LinkName

OLD_NAMES = {
    '--failures': '--mtbf-gpu-hours',
    '--price': '--gpu-hour-price',
    '--storage': '--storage-bandwidth',
    '--target-batch': '--global-batch-size',
}


class _Group(DefaultGroup):
    default = 'for'


plan_app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help='Predict memory, speed and the best layout of a config.\n\n'
    'megajax plan CONFIG [KEY=VALUE ...] --gpu h100 --gpus 64; options: megajax plan for --help.',
)


@plan_app.command('for', cls=with_old_names(OLD_NAMES))
def for_config(
    source: ConfigSource = None,
    overrides: Overrides = None,
    gpu: Gpu = 'h100',
    gpus: NumGpus = None,
    gpus_per_host: GpusPerHost = None,
    link: LinkOption = None,
    tokens: NumTokens = None,
    global_batch_size: BatchSize = None,
    program: Program = 'megajax',
    gpu_hour_price: Price = None,
    storage_bandwidth: StorageRate = None,
    mtbf_gpu_hours: GpuHoursToFailure = None,
    imbalance: Imbalance = None,
    verify: VerifyOption = False,
    json: JsonFile = None,
    write: LayoutFile = None,
    roofline: RooflinePlot = None,
    scaling: ScalingPlot = None,
    schedule: SchedulePlot = None,
    table: TableName = None,
    compare: CompareOption = None,
    what_if: WhatIfOption = False,
    generate: GenerateOption = False,
    prompt: PromptTokens = None,
    batch: NumPrompts = None,
) -> None:
    """Predict memory, time and the best layout of a config.

    This does not need the GPUs. Exits with code 1 if the layout of the config does not fit.
    """
    console = Console(highlight=False)
    if table:
        return _show_table(table, console)
    config = _config(source, overrides, json, write, own=program == 'megajax')
    plots = _checked_plots(roofline=roofline, scaling=scaling, schedule=schedule)
    _check_options(write or verify or what_if or plots, generate, prompt or batch, compare)
    if generate:
        return _show_generation(config, console, json, gpu, gpus, link, prompt, tokens, batch)
    if compare:
        return _show_comparison(config, compare, console, json, gpus, tokens, program)
    result = _planned(
        config,
        gpu,
        verify,
        mtbf_gpu_hours,
        gpus=gpus,
        gpus_per_host=gpus_per_host,
        link=link,
        tokens=tokens,
        target_batch=global_batch_size,
        program=program,
        price=gpu_hour_price,
        storage=storage_bandwidth,
        imbalance=_imbalance(config, source) if imbalance is None else imbalance,
        savings=what_if,
    )
    _draw(plots, result, gpu, link)
    _show(result, console, json=json, layout=write)


@plan_app.command()
def calibrate(
    out: Annotated[
        Path,
        typer.Argument(metavar='FILE.yaml', help='Output file, for --gpu FILE.yaml.'),
    ],
    seconds: Annotated[
        float,
        typer.Option(min=1, help='Seconds per measurement: matmuls, memory, collectives.'),
    ] = 20,
) -> None:
    """Measure this machine's devices and write a file for --gpu.

    It measures matmuls by size, memory bandwidth and, with several devices, collectives.
    """
    if out.suffix != '.yaml':
        raise ConfigError(f'{out}: give a file name that ends in .yaml')
    check_outputs(out)
    from megajax.analysis.plan.calibrate import calibrate as measure  # here, because it imports jax

    for line in measure(out, seconds=seconds):
        print(line, flush=True)


def _config(
    source: str | None, overrides: list[str] | None, *outputs: Path | None, own: bool
) -> Config:
    if source is None:
        raise ConfigError(
            'plan needs a config: megajax plan CONFIG --gpu h100 --gpus 64, or --table scaling'
        )
    config = load(source, overrides or (), own=own)
    check_outputs(*outputs)
    return config


def _imbalance(config: Config, source: str | None) -> float:
    if source is None or config.model.experts is None:
        return 1.0
    from megajax.analysis.plan.experts import imbalance_of_run

    return imbalance_of_run(Path(source))


def _show_table(name: str, console: Console) -> None:
    from megajax.analysis.plan.published.comparison import summary, table_of
    from megajax.analysis.plan.published.tables import TABLES

    if name not in (*TABLES, 'all'):
        raise ConfigError(f'--table {name}: choose among {", ".join(TABLES)}, all')
    shown = summary() if name == 'all' else table_of(name)
    if console.is_terminal:
        console.print(Folded(shown))
    else:
        Console(width=150, highlight=False).print(shown)


def _planned(
    config: Config, gpu: str, verify: bool, failures: float | None, **asked: Any
) -> 'Plan':
    from megajax.analysis.plan.goodput import GPU_HOURS_TO_FAILURE
    from megajax.analysis.plan.planning import plan
    from megajax.analysis.plan.verify import check_verify, verified

    if verify:
        check_verify(gpu)
    hours = failures or GPU_HOURS_TO_FAILURE
    result = plan(config, gpu=gpu, gpu_hours_to_failure=hours, **asked)
    return verified(result, gpu) if verify else result


def _check_options(
    of_plan: object, generate: bool, of_generation: object, compare: str | None
) -> None:
    """Raise ConfigError for options of a step's plan, or of generation, that would be ignored."""
    if of_generation and not generate:
        raise ConfigError('--prompt and --batch apply to generation only: add --generate')
    for option, is_given in (('--generate', generate), ('--compare', compare)):
        if is_given and of_plan:
            raise ConfigError(
                '--write, --verify, --what-if and plots apply to the plan of a training step: '
                f'remove them, or remove {option}'
            )


def _show_generation(
    config: Config,
    console: Console,
    json: Path | None,
    gpu: str,
    gpus: int | None,
    link: 'LinkName | None',
    prompt: int | None,
    tokens: float | None,
    batch: int | None,
) -> None:
    from megajax.analysis.plan.generation import plan_generation
    from megajax.analysis.plan.generation_report import generation_table

    size = {'prompt': prompt or 1024, 'tokens': int(tokens or 256), 'batch': batch or 1}
    result = plan_generation(config, gpu=gpu, gpus=gpus, link=link, **size)
    if json:
        with_folder(json).write_text(result.model_dump_json(indent=2))
    console.print(generation_table(result))


def _show_comparison(
    config: Config,
    machines: str,
    console: Console,
    json: Path | None,
    gpus: int | None,
    tokens: float | None,
    program: 'ProgramName',
) -> None:
    from megajax.analysis.plan.compare import compare, with_price

    known = {record_name(name): price for name, price in map(with_price, machines.split(','))}
    result = compare(config, known, gpus=gpus, tokens=tokens or 1e9, program=program)
    if json:
        with_folder(json).write_text(result.model_dump_json(indent=2))
    console.print(str(result), soft_wrap=True, markup=False)


def _show(result: 'Plan', console: Console, *, json: Path | None, layout: Path | None) -> NoReturn:
    from megajax.analysis.plan.report import tables

    if json:
        with_folder(json).write_text(result.model_dump_json(indent=2))
    if layout:
        with_folder(layout).write_text(result.best_config)
    console.print(
        tables(result) if console.is_terminal else str(result),
        soft_wrap=not console.is_terminal,
        markup=False,
    )
    raise typer.Exit(0 if result.layout.fits else 1)


def _checked_plots(**paths: Path | None) -> dict[str, Path]:
    """Return the plots to draw, by name; raise ConfigError if one cannot be written."""
    plots = {name: path for name, path in paths.items() if path}
    if plots:
        from megajax.analysis.plan.plot import check_plot  # here, because it needs matplotlib

        for path in plots.values():
            check_plot(path)
    return plots


def _draw(plots: dict[str, Path], result: 'Plan', gpu: str, link: 'LinkName | None') -> None:
    if not plots:
        return
    from megajax.analysis.plan import plot, schedule_plot
    from megajax.analysis.plan.network import Cluster
    from megajax.core.hardware.records import hardware

    config = result.planned()
    cluster = Cluster.of(hardware(gpu, link), result.gpus, result.gpus_per_host)
    for name, path in plots.items():
        if name == 'schedule':
            schedule_plot.schedule(config).savefig(with_folder(path))
        else:
            getattr(plot, name)(config, cluster).savefig(with_folder(path))
