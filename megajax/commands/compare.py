"""`megajax compare`: parse, call, render."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megajax.base.files.outputs import check_outputs, writing
from megajax.base.render.console import plain_console
from megajax.base.render.logs import log_to_terminal
from megajax.core.config import ConfigError
from megajax.core.config.overrides import is_override

if TYPE_CHECKING:
    from megajax.analysis.compare.difference import Comparison

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar='A B [KEY=VALUE ...]',
        help='A preset, a YAML file, a run, RUN/STEP, a Hugging Face directory or a file written '
        'by --dump, twice; then overrides for both.',
    ),
]
OverridesOfA = Annotated[
    list[str] | None, typer.Option('--a', metavar='KEY=VALUE', help='An override for A only.')
]
OverridesOfB = Annotated[
    list[str] | None, typer.Option('--b', metavar='KEY=VALUE', help='An override for B only.')
]
DataOption = Annotated[
    bool,
    typer.Option(
        '--data',
        help="Use the first batch of A's data instead of random tokens (of B's if A is a Hugging "
        'Face directory).',
    ),
]
Transformers = Annotated[
    Literal['a', 'b'] | None,
    typer.Option(help='Execute this side, a Hugging Face directory, with transformers.'),
]
Tolerance = Annotated[
    float | None,
    typer.Option(min=0, help='Largest difference that passes; the default depends on the dtype.'),
]
DumpFile = Annotated[
    Path | None,
    typer.Option(help='Write the numbers of A to this file (.npz), to compare later.'),
]
AllOption = Annotated[bool, typer.Option('--all', help='Show every site of every layer.')]
JsonFile = Annotated[Path | None, typer.Option(help='Write everything to this file.')]


def compare(
    arguments: Arguments,
    a: OverridesOfA = None,
    b: OverridesOfB = None,
    data: DataOption = False,
    transformers: Transformers = None,
    tolerance: Tolerance = None,
    dump: DumpFile = None,
    every: AllOption = False,
    json: JsonFile = None,
) -> None:
    """Find where two models or meshes first differ.

    Runs one forward and one backward pass on each side, on the same batch. Exits with code 1 if a
    difference exceeds its limit.
    """
    sources = [argument for argument in arguments if not is_override(argument)]
    overrides = [argument for argument in arguments if is_override(argument)]
    if dump is None:
        _check_two(sources)
    else:
        is_compared = bool(json or every or tolerance is not None)
        _check_dump(sources, of_b=b, is_compared=is_compared)
    check_outputs(json)
    log_to_terminal()
    from megajax.analysis.compare import api

    if dump is not None:
        overrides += a or ()
        is_theirs = transformers is not None
        api.dump(sources[0], dump, overrides=overrides, transformers=is_theirs, data=data)
        print(dump)
        return
    comparison = api.compare(
        *sources,
        overrides=overrides,
        of_a=a or (),
        of_b=b or (),
        transformers=transformers,
        data=data,
        tolerance=tolerance,
    )
    with writing((json, comparison.model_dump_json(indent=2))):
        _print(comparison, every=every)
    raise typer.Exit(0 if comparison.first is None else 1)


def _print(comparison: 'Comparison', *, every: bool) -> None:
    from megajax.analysis.compare.report import to_text
    from megajax.base.render.console import as_text

    shown = to_text(comparison, every=every)
    if sys.stdout.isatty():
        plain_console().print(shown)
    else:
        print(as_text(shown), end='')


def _check_two(sources: list[str]) -> None:
    if len(sources) != 2:
        raise ConfigError(
            f'compare needs two sources, got {", ".join(sources) or "none"}: '
            'give A and B, or A and --dump FILE'
        )


def _check_dump(sources: list[str], *, of_b: list[str] | None, is_compared: bool) -> None:
    if len(sources) != 1 or of_b:
        raise ConfigError(
            f'--dump writes the numbers of one source, got {", ".join(sources) or "none"}: '
            'give only A, without --b'
        )
    if is_compared:
        raise ConfigError(
            '--json, --all and --tolerance have no effect with --dump, which compares nothing: '
            'use them when you compare the file'
        )
