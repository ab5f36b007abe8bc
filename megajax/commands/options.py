"""Command groups with a default command, former names of options, and errors of wrong options."""

from collections.abc import Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from megajax.base.render.text import shorten
from megajax.core.config import ConfigError
from megajax.core.config.overrides import KEYS
from megajax.core.config.synonyms import key_of_option, without_a_key

OVERRIDE = 'KEY=VALUE'
_CONFIG = 'config', 'cfg', 'config_file', 'config_path', 'preset'


class DefaultGroup(TyperGroup):
    """A group that turns `megajax GROUP CONFIG` into `megajax GROUP DEFAULT CONFIG` for click."""

    default: ClassVar[str]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        is_verb = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_verb or not args else [self.default, *args])


def with_old_names(new_of: Mapping[str, str]) -> type[TyperCommand]:
    """Return a class of commands that also accept old names of options, with a warning."""

    class Renamed(TyperCommand):
        def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
            return super().parse_args(ctx, [self._current(word) for word in args])

        def _current(self, word: str) -> str:
            name, equals, value = word.partition('=')
            if name not in new_of:
                return word
            typer.echo(f'warning: {name} is now {new_of[name]}', err=True)
            return f'{new_of[name]}{equals}{value}'

    return Renamed


class KeysGroup(TyperGroup):
    """A group of commands that explains wrong values, and unknown options that are config keys."""

    _WORDS: ClassVar[str] = f'{__name__}.words'  # key in click's storage for a command line

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.meta.setdefault(self._WORDS, list(args))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command.

        Raises ConfigError for a wrong value, and for an option that means a config key.
        """
        try:
            return super().invoke(ctx)
        except Exception as error:
            if wrong := _wrong_value(error):
                raise ConfigError(wrong) from error
            option, where = getattr(error, 'option_name', None), getattr(error, 'ctx', None)
            if not option or where is None or not _takes_overrides(where):
                raise
            verbs = where.command_path.removeprefix(ctx.find_root().command_path)
            fix = _fix(option, ctx.meta[self._WORDS], f'megajax{verbs}')
            if not fix:
                raise
            raise ConfigError(f'{option}: no such option; {fix}') from error


def _wrong_value(error: Exception) -> str | None:
    """Return the option, its value, what it must be and a value that works.

    Return None for other errors, and for a version of typer whose messages have the value.
    """
    param, details = getattr(error, 'param', None), getattr(error.__cause__, 'errors', None)
    if param is None or details is None:
        return None
    detail = details()[0]
    name = param.opts[0] if param.opts[0].startswith('-') else param.metavar or param.name
    text = detail['msg'].removeprefix('Value error, ').removesuffix('.')
    if not text.startswith('Input should be '):
        return f'{name}: {text}'
    allowed = text.removeprefix('Input should be ').partition(', unable')[0]
    return f'{name}: must be {allowed}, not {shorten(str(detail["input"]))}; use {_range(param)}'


def _range(param: Any) -> str:
    """Return the values that an option can have, or an example of a number."""
    if param.min is None and param.max is None:
        return 'for example 1'
    if param.max is None:
        return f'{param.min:,} or more'
    return f'{param.min or 0:,} to {param.max:,}'


def _takes_overrides(where: Any) -> bool:
    return any(OVERRIDE in str(param.metavar) for param in where.command.params)


def _fix(option: str, words: list[str], command: str) -> str | None:
    """Return what to write instead of an option; None if it means nothing in a config."""
    value = 'VALUE'
    for word, following in zip(words, [*words[1:], '-'], strict=True):
        name, equals, text = word.partition('=')
        if name == option:
            value = text if equals else value if following.startswith('-') else following
    if option.lstrip('-').replace('-', '_') in _CONFIG:
        return f'the config is an argument: {command} {value}'
    if instead := without_a_key(option.lstrip('-')):
        return instead
    key = key_of_option(option, KEYS)
    return key and f'config keys are set by {OVERRIDE}: {key}={value}'
