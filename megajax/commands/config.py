"""The subcommands of `megajax config`: parse, call, render."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from megajax.base.render.console import plain_console, print_fitting
from megajax.base.render.folded import Folded
from megajax.commands.config_conflicts import conflicts
from megajax.commands.config_keys import keys
from megajax.commands.options import KeysGroup
from megajax.core.config import ModelConfig, dump, load, presets, recipes
from megajax.core.config.differences import differences
from megajax.core.config.load import CONFIG
from megajax.core.counts.parameters import num_parameters

config_app = typer.Typer(
    cls=KeysGroup, no_args_is_help=True, rich_markup_mode=None, help='Show and compare configs.'
)

Source = Annotated[str, typer.Argument(help='A preset, a YAML file or the folder of a run.')]


@config_app.command()
def show(
    source: Annotated[str, typer.Argument(metavar='CONFIG', help='A preset or a YAML file.')],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar='KEY=VALUE', help='For example train.steps=100 mesh.model=4.'),
    ] = None,
) -> None:
    """Print the resolved config and the model's parameter count."""
    config = load(source, overrides or ())
    print(dump(config), end='')
    print(f'# {_parameters(config.model)}')


@config_app.command('list')
def list_presets() -> None:
    """List the presets and the recipes, smallest first."""
    configs = {name: load(name).model for name in (*presets(), *recipes())}
    sizes = [
        Column(name, justify='right', no_wrap=True)
        for name in ('layers', 'hidden', 'heads', 'parameters')
    ]
    table = Table(Column('preset', no_wrap=True), *sizes, box=None, pad_edge=False)
    for name, model in sorted(configs.items(), key=lambda item: num_parameters(item[1])):
        table.add_row(
            name,
            f'{model.num_layers}',
            f'{model.hidden_size}',
            f'{model.num_heads}',
            _short(num_parameters(model)),
        )
    print_fitting(Folded(table), plain_console())


config_app.command()(conflicts)
config_app.command('combinations', hidden=True)(conflicts)  # the former name


@config_app.command()
def diff(before: Source, after: Source) -> None:
    """Show the keys in which two configs differ.

    Keys that are not in a file have their defaults.
    """
    for key, (old, new) in differences(_sections(before), _sections(after)).items():
        print(f'{key}: {old} -> {new}')


# Megatron-LM's arguments are not options of this command; `interop/megatron/command_line/line.py`
# reads them.
@config_app.command('from-megatron', context_settings={'ignore_unknown_options': True})
def from_megatron(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar='COMMAND',
            help='A command line of pretrain_gpt.py or pretrain_bert.py, with or without its '
            'launcher; @FILE reads it from a file, - from standard input.',
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help='Number of GPUs, if the command does not set it.'),
    ] = None,
) -> None:
    """Convert a Megatron-LM command line to a config, and print it."""
    from megajax.interop.megatron.command_line.line import read_line
    from megajax.interop.megatron.command_line.to_config import from_megatron

    print(from_megatron(read_line(arguments, world_size=gpus)), end='')


config_app.command()(keys)


def _sections(source: str) -> dict[str, dict[str, Any]]:
    config = Path(source) / CONFIG
    is_run = config.is_file()
    return load(config if is_run else source, is_recorded=is_run).model_dump(mode='json')


def _parameters(model: ModelConfig) -> str:
    count, padded = num_parameters(model), num_parameters(model, padded=True)
    line = f'parameters: {count:,} ({_short(count)})'
    if model.experts:
        active = num_parameters(model, active=True)
        line += f', of which a token uses {active:,} ({_short(active)})'
    trained = num_parameters(model, trained=True)
    if trained < count:
        line += f', of which {trained:,} ({_short(trained)}) are trained'
    if padded == count:
        return line
    return (
        f'{line}; with the vocabulary padded to {model.padded_vocab_size}: '
        f'{padded:,} ({_short(padded)})'
    )


def _short(count: int) -> str:
    return f'{count / 1e9:.2f}B' if count >= 1e9 else f'{count / 1e6:.1f}M'
