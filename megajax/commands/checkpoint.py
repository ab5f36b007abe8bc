"""The subcommands of `megajax checkpoint`: parse, call, render."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from megajax.base.files.locks import folder_lock
from megajax.base.render.console import plain_console, print_fitting
from megajax.base.render.folded import Folded
from megajax.base.render.logs import log_to_terminal
from megajax.base.render.text import visible
from megajax.core.config import CheckpointError, ConfigError
from megajax.runtime.checkpoint.digests import (
    find_foreign,
    find_step,
    find_steps,
    problems,
    read_sums,
    readable,
    sound_checkpoint,
)
from megajax.runtime.checkpoint.record import config_differences, read_record

checkpoint_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help='List, verify and compare the checkpoints of a run.',
)

Run = Annotated[
    Path,
    typer.Argument(
        metavar='RUN', help="A run's directory, or RUN/STEP for one of its checkpoints."
    ),
]


@checkpoint_app.command()
def ls(run: Run) -> None:
    """List the checkpoints of a run.

    This checks the names and sizes of files; `verify` checks their contents.
    """
    right = [Column(name, justify='right') for name in ('step', 'MB', 'validation loss')]
    table = Table(right[0], 'written (UTC)', *right[1:], 'mesh', 'files', box=None, pad_edge=False)
    for path in _steps(run):
        broken = problems(path, contents=False)
        try:
            record = read_record(path)
            loss = '-' if record.validation_loss is None else f'{record.validation_loss:.4f}'
            table.add_row(
                path.name,
                f'{record.time:%F %T}',
                _megabytes(path),
                loss,
                record.mesh,
                broken[0] if broken else 'complete',
            )
        except CheckpointError:
            table.add_row(
                path.name, '?', _megabytes(path), '?', '?', broken[0] if broken else 'no record'
            )
    print_fitting(Folded(table), plain_console())


@checkpoint_app.command()
def verify(run: Run) -> None:
    """Hash every file of a run's checkpoints.

    If a hash differs from the recorded one, names the file and exits with code 4.
    """
    any_broken = False
    for path in _steps(run):
        with folder_lock(path, shared=True) as is_there:
            if not is_there:  # the run has deleted the checkpoint in the meantime
                continue
            broken = problems(path)
        any_broken = any_broken or bool(broken)
        print(f'{path.name}  ' + ('ok' if not broken else f'{len(broken)} wrong'))
        for problem in broken:
            print(f'  {visible(problem)}')
    raise typer.Exit(4 if any_broken else 0)


@checkpoint_app.command()
def diff(
    where: Annotated[
        list[str],
        typer.Argument(metavar='RUN STEP STEP | RUN/STEP RUN/STEP', help='Two checkpoints.'),
    ],
) -> None:
    """Show how two checkpoints differ: config keys, then parameters.

    The difference of a parameter is max |a - b| / max |b|. Exits with code 4 if a checkpoint is
    damaged.
    """
    if len(where) not in (2, 3):
        raise ConfigError(
            f'diff compares two checkpoints, not {len(where)} arguments: '
            'give RUN STEP STEP, or RUN/STEP RUN/STEP'
        )
    paths = where if len(where) == 2 else [f'{where[0]}/{step}' for step in where[1:]]
    log_to_terminal()
    with ExitStack() as held:
        a, b = (held.enter_context(sound_checkpoint(find_step(Path(path)))) for path in paths)
        for key, (old, new) in config_differences(read_record(a), read_record(b)).items():
            print(f'{key}: {old} -> {new}')
        os.environ['JAX_PLATFORMS'] = 'cpu'  # no device is needed, and a run may be using them
        from megajax.runtime.checkpoint.compare import (
            parameter_differences,  # here, because it imports jax
        )

        for name, found in parameter_differences(a, b):
            print(f'{name}: {found}' if isinstance(found, str) else f'{name}: {found:.3g}')


def _steps(run: Path) -> list[Path]:
    """Return the finished checkpoints of RUN, or the single checkpoint RUN/STEP."""
    with readable(run):
        folder = run / 'checkpoints' if (run / 'checkpoints').is_dir() else run
    foreign = find_foreign(folder)
    if steps := [folder / str(step) for step in find_steps(folder)] + foreign:
        return sorted(steps, key=lambda path: int(path.name))
    return [find_step(run)]


def _megabytes(path: Path) -> str:
    try:
        return f'{read_sums(path).size / 1e6:.1f}'
    except (OSError, ValueError):
        return '?'
