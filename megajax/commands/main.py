"""The command line: parse, call, render."""

import io
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from megajax.base.render.logs import log_to_terminal
from megajax.commands.checkpoint import checkpoint_app
from megajax.commands.compare import compare
from megajax.commands.config import config_app
from megajax.commands.data import data_app
from megajax.commands.generate import evaluate, generate
from megajax.commands.inspect import inspect_app
from megajax.commands.interop import export_app, import_app
from megajax.commands.options import KeysGroup
from megajax.commands.plan import plan_app
from megajax.commands.profile import profile
from megajax.commands.report import report
from megajax.core.config import Config, ConfigError, RunError, load
from megajax.core.config.overrides import is_override
from megajax.runtime.processes.environment import read_start
from megajax.runtime.processes.signals import leave_when_asked
from megajax.runtime.run.infer_config import config_of_overrides

app = typer.Typer(
    cls=KeysGroup,
    no_args_is_help=True,
    context_settings={'help_option_names': ['-h', '--help']},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command; print a RunError line by line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        # a character that cannot be encoded must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')
    try:
        app()
    except RunError as error:
        for line in str(error).splitlines():
            print(f'error: {line}', file=sys.stderr)
        sys.exit(error.exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f'megajax {version("megajax")}')
        raise typer.Exit


@app.callback()
def megajax(
    _: Annotated[
        bool,
        typer.Option(
            '--version', callback=_print_version, is_eager=True, help='Print the version and exit.'
        ),
    ] = False,
) -> None:
    """Train transformers in JAX with Megatron-LM's parallelism."""


@app.command()
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar='CONFIG | KEY=VALUE',
            help='A preset or a YAML file, then overrides. Default: the config of the run in '
            'run.dir or run.start_from, otherwise tiny.',
        ),
    ] = None,
) -> None:
    """Train the model of a config."""
    leave_when_asked()  # until `runtime/run/stop.py` takes over, once there is a run to save
    config, name = _read(arguments)
    log_to_terminal()
    start = read_start()
    # All processes of a run would log the same.
    is_first = start is None or start.index == 0
    logging.getLogger('megajax').setLevel(logging.INFO if is_first else logging.WARNING)
    # Not at the top, because they import jax: an invalid config or environment fails earlier.
    from megajax.commands.mesh_advice import mesh_advice
    from megajax.runtime.processes.distributed import processes
    from megajax.runtime.run.run import run

    with processes(start):
        run(config, name=name, advise=mesh_advice, at_end=_write_report)


def _write_report(folder: Path) -> Path | None:
    # Not at the top, because only the end of a run needs it.
    from megajax.analysis.report import write_at_end

    return write_at_end(folder)


@app.command()
def launch(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar='-- train CONFIG KEY=VALUE', help='The command that each process runs.'
        ),
    ],
    processes: Annotated[int, typer.Option(min=1, help='Number of processes on this machine.')],
    devices_per_process: Annotated[
        int | None,
        typer.Option(
            min=1,
            help='Devices per process; default: an equal share of the GPUs or of the mesh.',
        ),
    ] = None,
    hosts: Annotated[
        int, typer.Option(min=1, help='Number of hosts that run this command for one run.')
    ] = 1,
    host: Annotated[
        int | None,
        typer.Option(
            help='Index of this host, from 0; default: the index of the pod, in an Indexed Job.'
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option('--dry-run', help='Print the variables and the command of each process.')
    ] = False,
) -> None:
    """Train in several processes, on one host or several.

    Each process has its own GPUs or simulated devices. All processes end together.
    """
    command, *rest = arguments
    if command != 'train':
        raise ConfigError(
            f'launch starts train, not {command}: '
            f'megajax launch --processes {processes} -- train CONFIG'
        )
    mesh = _read(rest)[0].mesh
    from megajax.runtime.processes.launch import launch
    from megajax.runtime.processes.launch_plan import make_plan

    plan = make_plan(
        arguments,
        processes=processes,
        needed=mesh.num_devices,
        devices_per_process=devices_per_process,
        hosts=hosts,
        host=host,
    )
    if dry_run:
        print(plan)
    else:
        raise typer.Exit(launch(plan))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option('--dir', help='The folder for runs.')] = Path('.'),
) -> None:
    """Check this machine, and suggest a fix for each problem.

    It checks versions, devices, the network and the file system.

    Exits with code 1 if there is a problem.
    """
    from megajax.commands.doctor import diagnose

    diagnosis = diagnose(folder)
    print(diagnosis)
    raise typer.Exit(1 if diagnosis.findings else 0)


app.command()(generate)
app.command('eval')(evaluate)
app.command()(compare)
app.command()(profile)
app.command()(report)
for group, name in (
    (config_app, 'config'),
    (data_app, 'data'),
    (checkpoint_app, 'checkpoint'),
    (import_app, 'import'),
    (export_app, 'export'),
    (plan_app, 'plan'),
    (inspect_app, 'inspect'),
):
    app.add_typer(group, name=name)


def _read(arguments: list[str] | None) -> tuple[Config, str]:
    """Return the config that the arguments of `train` describe, and its name."""
    source, *overrides = arguments or ['tiny']
    if is_override(source):
        return config_of_overrides([source, *overrides])
    return load(source, overrides), Path(source).name.removesuffix('.yaml')
