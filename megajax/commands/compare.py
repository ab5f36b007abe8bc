"""`megajax compare`: parse, call, render."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from megajax.config import ConfigError
from megajax.files.outputs import check_outputs
from megajax.render.logs import log_to_terminal


def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar='A B [KEY=VALUE ...]',
            help='Each a preset, a YAML file, a run, RUN/STEP, a Hugging Face directory or a file '
            'of --dump; then overrides of both.',
        ),
    ],
    a: Annotated[
        list[str] | None, typer.Option(metavar='KEY=VALUE', help='An override of A alone.')
    ] = None,
    b: Annotated[
        list[str] | None, typer.Option(metavar='KEY=VALUE', help='An override of B alone.')
    ] = None,
    data: Annotated[
        bool,
        typer.Option('--data', help="Take the first batch of A's data, not random tokens."),
    ] = False,
    transformers: Annotated[
        Literal['a', 'b'] | None,
        typer.Option(help='Execute this Hugging Face directory with transformers.'),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help='Limit of a difference; by default it depends on the dtype.'),
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(help='Write the numbers of A to this file (.npz), to be compared later.'),
    ] = None,
    every: Annotated[bool, typer.Option('--all', help='Show every site of every layer.')] = False,
    json: Annotated[Path | None, typer.Option(help='Write everything to this file.')] = None,
) -> None:
    """Name the first site at which two models, meshes or versions differ.

    Both make one forward and one backward pass over the same batch. Exits with 1 if a difference is
    beyond the limit.
    """
    sources = [argument for argument in arguments if '=' not in argument]
    overrides = [argument for argument in arguments if '=' in argument]
    _check(sources, dump, b)
    check_outputs(dump, json)
    log_to_terminal()
    from megajax.compare.compared import compare_sources, dump_source

    if dump is not None:
        dump_source(
            sources[0],
            dump,
            overrides=[*overrides, *(a or ())],
            transformers=transformers is not None,
            data=data,
        )
        print(dump)
        return
    comparison = compare_sources(
        *sources,
        overrides=overrides,
        of_a=a or (),
        of_b=b or (),
        transformers=transformers,
        data=data,
        tolerance=tolerance,
    )
    if json:
        json.write_text(comparison.model_dump_json(indent=2))
    from megajax.compare.report import to_text
    from megajax.render.console import as_text

    shown = to_text(comparison, every=every)
    console = Console(highlight=False)
    if sys.stdout.isatty():
        console.print(shown, markup=False)
    else:
        print(as_text(shown, width=120), end='')
    raise typer.Exit(0 if comparison.first is None else 1)


def _check(sources: list[str], dump: Path | None, of_b: list[str] | None) -> None:
    wanted = 2 if dump is None else 1
    if len(sources) != wanted or (dump is not None and of_b):
        fix = 'give A and B, or A and --dump FILE' if dump is None else 'give A alone, without --b'
        raise ConfigError(f'compare got {", ".join(sources) or "nothing"} to compare: {fix}')
    if dump is not None and dump.suffix != '.npz':
        raise ConfigError(f'--dump {dump}: a dump is an .npz file; name it {dump.stem}.npz')
