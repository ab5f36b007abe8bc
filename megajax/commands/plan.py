"""The subcommands of `megajax plan`: parse, call, render."""

import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megajax.base.files.outputs import check_outputs, write_output, writing
from megajax.base.render.console import plain_console, print_fitting
from megajax.base.render.folded import Folded
from megajax.commands.options import DefaultGroup, with_old_names
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
from megajax.core.config.overrides import read_overrides

if TYPE_CHECKING:
    from megajax.analysis.plan import Plan
    from megajax.analysis.plan.programs import ProgramName
    from megajax.core.hardware.records import LinkName

# The options that apply in each mode, in addition to the option that selects it.
OPTIONS_OF = {
    'table': (),
    'generate': ('gpu', 'gpus', 'link', 'prompt', 'tokens', 'batch', 'json'),
    'compare': ('gpus', 'gpus_per_host', 'tokens', 'global_batch_size', 'program', 'json'),
}
OLD_NAMES = {
    '--failures': '--mtbf-gpu-hours',
    '--price': '--gpu-hour-price',
    '--storage': '--storage-bandwidth',
    '--target-batch': '--global-batch-size',
}


Asked = dict[str, Any]  # keyword arguments of `plan` and `compare`


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
    context: typer.Context,
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
    _check_options(context, json, write, roofline, scaling, schedule)
    if table:
        return _show_table(table)
    config = _config(source, overrides, gpus, program, compares=bool(compare))
    plots = _checked_plots(roofline=roofline, scaling=scaling, schedule=schedule)
    if generate:
        return _show_generation(config, json, gpu, gpus, link, prompt, tokens, batch)
    asked: Asked = {'gpus': gpus, 'gpus_per_host': gpus_per_host, 'tokens': tokens}
    asked |= {'target_batch': global_batch_size, 'program': program}
    if compare:
        return _show_comparison(config, compare, json, asked, _imbalance(config, source))
    if imbalance is None:
        imbalance = _imbalance(config, source)
    costs = {'price': gpu_hour_price, 'storage': storage_bandwidth, 'savings': what_if}
    result = _planned(
        config, gpu, verify, mtbf_gpu_hours, **asked, **costs, link=link, imbalance=imbalance
    )
    try:
        _show(result, json=json, layout=write)
    finally:
        _draw(plots, result, config, program, gpu, gpus_per_host, link)
    raise typer.Exit(0 if result.layout.fits else 1)


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
    source: str | None,
    overrides: list[str] | None,
    gpus: int | None,
    program: 'ProgramName',
    *,
    compares: bool,
) -> Config:
    """Return the config. Its layout may have conflicts if a search will replace it.

    A search replaces the layout of the file, and not a layout of as many GPUs in `overrides`.
    """
    if source is None:
        raise ConfigError(
            'plan needs a config: megajax plan CONFIG --gpu h100 --gpus 64, or --table scaling'
        )
    is_own = program == 'megajax'
    try:
        return load(source, overrides or (), own=is_own)
    except ConfigError as error:
        from megajax.analysis.plan.advice import CHOSEN

        config = load(source, overrides or (), own=is_own, chosen=CHOSEN)
        own, set_here = config.mesh.num_devices, read_overrides(overrides or (), [])
        if compares or (gpus and (gpus != own or set_here.keys().isdisjoint(CHOSEN))):
            return config
        search = () if gpus else (f'or add --gpus {own} to search for a layout',)
        raise ConfigError(*error.problems, *search) from None


def _imbalance(config: Config, source: str | None) -> float:
    if source is None or config.model.experts is None:
        return 1.0
    from megajax.analysis.plan.experts import imbalance_of_run

    return imbalance_of_run(Path(source))


def _show_table(name: str) -> None:
    from megajax.analysis.plan.published.comparison import summary, table_of
    from megajax.analysis.plan.published.tables import TABLES

    if name not in (*TABLES, 'all'):
        raise ConfigError(f'--table {name}: choose among {", ".join(TABLES)}, all')
    shown = summary() if name == 'all' else table_of(name)
    print_fitting(Folded(shown), plain_console())


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


def _check_options(context: typer.Context, *outputs: Path | None) -> None:
    """Raise ConfigError for options that would be ignored, and for outputs that are no files."""
    check_outputs(*outputs)
    given = {
        str(option.name): option.opts[0]
        for option in context.command.params
        if getattr(context.get_parameter_source(str(option.name)), 'name', '') == 'COMMANDLINE'
        and option.opts[0].startswith('--')
    }
    mode = next((name for name in OPTIONS_OF if name in given), None)
    if mode is None:
        if {'prompt', 'batch'} & {*given}:
            raise ConfigError('--prompt and --batch apply to generation only: add --generate')
        return
    ignored = [option for name, option in given.items() if name not in (mode, *OPTIONS_OF[mode])]
    if ignored:
        priced = mode == 'compare' and '--gpu-hour-price' in ignored
        raise ConfigError(
            f'{", ".join(ignored)}: not supported with --{mode}; '
            f'remove {"it" if len(ignored) == 1 else "them"}, or remove --{mode}',
            *(['write the prices as --compare h100=2.5,h200=3.2'] if priced else []),
        )


def _show_generation(
    config: Config,
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

    result = plan_generation(
        config,
        gpu=gpu,
        gpus=gpus,
        prompt=prompt,
        tokens=None if tokens is None else int(tokens),
        batch=batch or 1,
        link=link,
    )
    with writing((json, result.model_dump_json(indent=2))):
        print_fitting(generation_table(result), plain_console())


def _show_comparison(
    config: Config, machines: str, json: Path | None, asked: Asked, imbalance: float
) -> None:
    from megajax.analysis.plan.compare import compare, read_prices

    asked |= {'tokens': asked['tokens'] or 1e9}
    result = compare(config, read_prices(machines), **asked, imbalance=imbalance)
    with writing((json, result.model_dump_json(indent=2))):
        plain_console().print(str(result), soft_wrap=True)


def _show(result: 'Plan', *, json: Path | None, layout: Path | None) -> None:
    from megajax.analysis.plan.report import tables

    console = plain_console()
    with writing((json, result.model_dump_json(indent=2)), (layout, result.best_config)):
        console.print(
            tables(result) if console.is_terminal else str(result),
            soft_wrap=not console.is_terminal,
        )


def _checked_plots(**paths: Path | None) -> dict[str, Path]:
    """Return the plots to draw, by name; raise ConfigError if one cannot be drawn."""
    plots = {name: path for name, path in paths.items() if path}
    if plots:
        from megajax.analysis.plan.plot import check_plot  # here, because it needs matplotlib

        for path in plots.values():
            check_plot(path)
    return plots


def _draw(
    plots: dict[str, Path],
    result: 'Plan',
    asked: Config,
    program: 'ProgramName',
    gpu: str,
    gpus_per_host: int | None,
    link: 'LinkName | None',
) -> None:
    if not plots:
        return
    from megajax.analysis.plan import plot, schedule_plot
    from megajax.analysis.plan.layouts import changed
    from megajax.analysis.plan.network import Cluster
    from megajax.analysis.plan.programs import BY_NAME
    from megajax.core.hardware.records import hardware

    config = result.planned()
    software = replace(BY_NAME[program], imbalance=result.imbalance or 1.0)
    cluster = Cluster.of(hardware(gpu, link), result.gpus, gpus_per_host)
    for name, path in plots.items():
        if name == 'schedule':
            figure = schedule_plot.schedule(config)
        elif name == 'roofline':
            figure = plot.roofline(config, cluster)
        else:  # which searches: the overlap schedule of `config` is already chosen
            of_batch = changed(asked, train__batch_size=config.train.batch_size)
            figure = plot.scaling(of_batch, cluster, software)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=path.suffix.removeprefix('.'))
        write_output(path, drawn.getvalue())
