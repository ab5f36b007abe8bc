"""Groups of commands with a default command."""

from typing import ClassVar

import typer
from typer.core import TyperGroup


class DefaultGroup(TyperGroup):
    """A group that turns `megajax GROUP CONFIG` into `megajax GROUP DEFAULT CONFIG` for click."""

    default: ClassVar[str]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        is_verb = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_verb or not args else [self.default, *args])
