"""The result of `megajax doctor`: facts about the machine, and problems with their fixes."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem and its fix."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f'{self.what}\n  fix: {self.fix}'


@dataclass
class Diagnosis:
    """Facts about a machine, one per line, and its problems."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Problem] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f'{name:<18}{value}' for name, value in self.facts]
        problems = '\n'.join(f'{i}. {finding}' for i, finding in enumerate(self.findings, 1))
        return '\n'.join(lines) + f'\n\n{problems or "no problems found"}'

    def fact(self, name: str, value: str) -> None:
        """Add a fact, a line of the output."""
        self.facts.append((name, value))

    def wrong(self, what: str, fix: str) -> None:
        """Add a problem and its fix."""
        self.findings.append(Problem(what=what, fix=fix))
