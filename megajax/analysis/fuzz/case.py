"""One executed random step, stored as a line of a file that a later call extends."""

import hashlib
from typing import Any, Literal

from pydantic import Field

from megajax.base.result import Result

Key = tuple[int, int, str, tuple[str, ...], str, str, str]
Verdict = Literal['right', 'wrong', 'failed', 'rejected']


class Worst(Result):
    """The result that is closest to its limit, or furthest above it."""

    name: str
    error: float | None = Field(description='null: not a finite number')
    limit: float
    wrong: int = Field(description='number of results above their limits')
    results: int = Field(description='number of results that were compared')


class Case(Result):
    """A random step, compiled for a GPU, executed on a CPU and compared with one device."""

    seed: int
    number: int
    target: str
    fixed: list[str] = Field(description='settings that were not drawn')
    jax_version: str
    compiler: str = Field(
        default='', description="digest of the compiler, its flags and the GPU's description"
    )
    step: str = Field(
        default='', description='digest of the source that draws, makes and checks a step'
    )
    config: dict[str, dict[str, Any]] = Field(description='the keys that the config gives')
    verdict: Verdict = Field(
        description='right; wrong: a result is above its limit; failed: the step did not compile '
        'or could not be executed; rejected: with a ConfigError, after the config was valid, or '
        'because no valid config was drawn, and then config is empty'
    )
    as_compiled: Worst | None = None
    exact: Worst | None = Field(
        default=None, description='with fp32 instead of 16-bit types; null for a step in fp32'
    )
    message: str = Field(default='', description='the error, if there was one')
    culprit: str = Field(default='', description='the compiler pass after which it is wrong')
    smallest: str = Field(default='', description='the smallest wrong config, as KEY=VALUE')
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def is_finding(self) -> bool:
        """Whether someone has to look at the case."""
        return self.verdict in ('wrong', 'failed')

    @property
    def name(self) -> str:
        """The name of the folder of a finding, which differs for different keys."""
        digest = hashlib.sha256(repr(self.key).encode()).hexdigest()
        return f'{self.seed}-{self.number}-{self.target}-{digest[:8]}'

    @property
    def key(self) -> Key:
        """The identity of the case: two calls with the same key compute the same results."""
        made_by = self.jax_version, self.compiler, self.step
        return self.seed, self.number, self.target, tuple(self.fixed), *made_by
