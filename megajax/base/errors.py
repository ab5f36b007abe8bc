"""The errors that end a run, each with its exit code.

The watchdog (`runtime/run/watchdog.py`) exits with code 124. Imports no jax.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from megajax.base.render.text import in_line, shorten, visible

MAX_REASON_CHARACTERS = 300
MAX_MESSAGE_CHARACTERS = 2000
MAX_PROBLEMS = 40  # maximum number that is printed; a file may have thousands


class RunError(Exception):
    """An expected failure, which is printed without a traceback and exits with `exit_code`.

    Any other exception is a bug.
    """

    exit_code: ClassVar[int]

    def __str__(self) -> str:
        return visible(super().__str__())


@dataclass(frozen=True)
class Problem:
    """A mistake in a config: its key, a message and the place where it was written.

    The message contains the value, the limit and a value that works.
    """

    path: str
    message: str
    others: tuple[str, ...] = ()  # further keys that the message depends on
    place: str = ''  # 'configs/tiny.yaml:12' or 'override mesh.model=3'

    def __str__(self) -> str:
        parts = (
            in_line(self.place, MAX_REASON_CHARACTERS),
            in_line(self.path, MAX_REASON_CHARACTERS),
            shorten(self.message, MAX_MESSAGE_CHARACTERS),
        )
        return ': '.join(part for part in parts if part)


class ConfigError(RunError, ValueError):
    """All mistakes of a user, found before anything compiles. Do not retry."""

    exit_code = 2

    def __init__(self, *problems: 'Problem | str') -> None:
        self.problems = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        shown = [str(problem) for problem in self.problems[:MAX_PROBLEMS]]
        more = len(self.problems) - len(shown)
        return visible('\n'.join([*shown, *([f'and {more:,} more'] if more else [])]))


def mistake(path: object, message: str, *others: str, place: str = '') -> ConfigError:
    """Return the error of a single mistake."""
    return ConfigError(Problem(str(path), message, others, place))


@contextmanager
def changing_problems(change: Callable[[Problem], Problem]) -> Iterator[None]:
    """Change the problems that the block raises."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            *(change(each) if isinstance(each, Problem) else each for each in error.problems)
        ) from error


def problems_at(place: str) -> AbstractContextManager[None]:
    """Add a place, such as file and line, to the problems in the block that have none."""
    return changing_problems(lambda problem: replace(problem, place=problem.place or place))


def replacing(text: str, by: str) -> AbstractContextManager[None]:
    """Replace a text, such as the path of a copy, in the problems that the block raises."""
    return changing_problems(
        lambda problem: replace(
            problem,
            path=problem.path.replace(text, by),
            message=problem.message.replace(text, by),
            place=problem.place.replace(text, by),
        )
    )


class NumericError(RunError):
    """A loss or gradients with which the run must not continue."""

    exit_code = 3


class CheckpointError(RunError):
    """A corrupt checkpoint, or a last checkpoint that could not be written."""

    exit_code = 4


class CorruptionError(RunError):
    """Silent data corruption: a repeated step gave a different result (`runtime/run/replay.py`).

    Do not retry on the same devices.
    """

    exit_code = 5


class StopRequested(RunError):  # noqa: N818
    """A stop on request, of a run that has saved a checkpoint or of `inspect fuzz`.

    The message names the cause. The exit code is EX_TEMPFAIL, which means: start it again.
    """

    exit_code = 75


class UnreachableError(RunError):
    """A corpus whose server does not answer, even after many attempts.

    The exit code means: start the run again.
    """

    exit_code = 75


class ResourceError(RunError):
    """A machine without enough memory or disk space for `inspect fuzz`.

    The exit code means: start the command again.
    """

    exit_code = 75


class MiscompileError(RunError):
    """A step that XLA has compiled incorrectly. Do not retry."""

    exit_code = 1  # the same code as `inspect` returns for the same program


def reason(error: Exception) -> str:
    """Return the first line of an error, or the error's type; tensorstore's messages fill pages.

    A long line is shortened in the middle, because the operating system's reason is at the end.
    """
    lines = visible(str(error)).strip().splitlines() or [type(error).__name__]
    return shorten(lines[0], MAX_REASON_CHARACTERS)
