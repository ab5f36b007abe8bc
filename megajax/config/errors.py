"""What a run can end with, and the exit code of each; the watchdog adds 124 (`run/watchdog.py`). Imports no jax."""

from dataclasses import dataclass
from typing import ClassVar

MAX_REASON_CHARACTERS = 300


class RunError(Exception):
    """What the command prints in a line or more and exits with `exit_code` for; anything else is a mistake of the program's."""

    exit_code: ClassVar[int]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mistake: the key, a message with its value, the limit and what would work, and where it was written."""

    path: str
    message: str
    others: tuple[str, ...] = ()  # the further keys that the message rests on
    place: str = ''  # 'configs/tiny.yaml:12' or 'override mesh.model=3'

    def __str__(self) -> str:
        return ': '.join(part for part in (self.place, self.path, self.message) if part)


class ConfigError(RunError, ValueError):
    """A user's mistakes, all of them, found before anything compiles; do not retry."""

    exit_code = 2

    def __init__(self, *problems: 'Problem | str') -> None:
        self.problems = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        return '\n'.join(str(problem) for problem in self.problems)


class NumericError(RunError):
    """Loss or gradients went where the run must not follow."""

    exit_code = 3


class CheckpointError(RunError):
    """A checkpoint cannot be trusted, or the last one could not be written."""

    exit_code = 4


class StopRequested(RunError):  # noqa: N818
    """The run was asked to stop, by what its text says, and has saved; EX_TEMPFAIL: start it again."""

    exit_code = 75


class MiscompileError(RunError):
    """XLA has compiled a step that computes something else than was written; do not retry."""

    exit_code = 1  # as `inspect` exits for the same program


def reason(error: Exception) -> str:
    """The first line of an error, or its kind; tensorstore's are pages."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:MAX_REASON_CHARACTERS]
