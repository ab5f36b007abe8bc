"""Find the pass of XLA's GPU compiler that broke a correct program, from the compiler's dumps.

XLA writes the module after each pass that changed it. Every module from the partitioner's on can be
run, so that bisection finds the first wrong module.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megajax.xla.emulate.last_module import dumped
from megajax.xla.hlo.errors import HloError

_MODULE = r'(?P<module>module_\d+\..*?)'
_PASS = r'(?P<pipeline>.+?)\.after_(?P<after>.+?)(\.before_.+)?'
_DUMP = re.compile(rf'{_MODULE}\.(?P<place>\d{{4,}})\.{_PASS}\.txt')
_LAST = re.compile(rf'{_MODULE}\.sm_[\w.]+_gpu_after_optimizations\.txt')
_PARTITIONER = 'spmd-partitioning'
_START = 'pipeline-start'
Progress = Callable[[str], None]


class Culprit(NamedTuple):
    """The pass between the last correct module and the first wrong module.

    `before` is None if the partitioner's own module is already wrong. If modules between the two
    could not be run, `pass_name` lists every pass that may be the culprit, joined by ' or '.
    """

    pass_name: str
    pipeline: str
    before: Path | None
    after: Path

    def __str__(self) -> str:
        return f'{self.pass_name} (pipeline {self.pipeline})'


def dump_options(folder: Path) -> dict[str, str | bool]:
    """Return compiler options that make XLA write the module after each pass into `folder`."""
    return {
        'xla_dump_to': str(folder),
        'xla_dump_hlo_pass_re': '.*',
        'xla_dump_large_constants': True,
    }


def modules(folder: Path) -> list[Path]:
    """Return the dumps in the order of the passes, from the partitioner's to the executed module.

    A program for one device has no partitioner, so all of its dumps count. If the folder contains
    several programs, the one with the most dumps is used. Raises ValueError if it contains none.
    """
    programs: dict[str, list[re.Match[str]]] = {}
    for path in sorted(folder.iterdir()):
        if dump := _DUMP.fullmatch(path.name):
            programs.setdefault(dump['module'], []).append(dump)
    if not programs:
        raise ValueError(f'no pass dumps in {folder}: compile with dump_options, without a cache')
    name, dumps = max(programs.items(), key=lambda item: len(item[1]))
    dumps.sort(key=lambda dump: int(dump['place']))
    first = next((i for i, dump in enumerate(dumps) if dump['after'] == _PARTITIONER), 0)
    lasts = filter(None, (_LAST.fullmatch(path.name) for path in folder.iterdir()))
    last = [dump for dump in lasts if dump['module'] == name]
    return [folder / dump[0] for dump in (*dumps[first:], *last)]


def first_wrong(
    dumps: Sequence[Path],
    is_right: Callable[[str], bool],
    progress: Progress = lambda line: None,
    read: Callable[[Path], str] = dumped,
) -> Culprit:
    """Bisect the dumps until a single pass separates a correct one from a wrong one.

    `is_right` gets the text that `read` returns for a dump. A module that cannot be translated is
    skipped, and its neighbors are run instead. `progress` is called with a line for each module.
    Raises ValueError if the last module is correct.
    """
    verdicts = _Verdicts(dumps, lambda path: is_right(read(path)), progress)
    places = range(len(dumps))
    high = next((place for place in reversed(places) if verdicts(place) is not None), None)
    if high is None or verdicts(high):
        raise ValueError(
            'no pass is wrong: the last module is right, or no module can be translated'
        )
    low = next(place for place in places if verdicts(place) is not None)
    if not verdicts(low):
        return _culprit(dumps, None, low)
    while (middle := next(verdicts.known(low, high), None)) is not None:
        low, high = (middle, high) if verdicts(middle) else (low, middle)
    return _culprit(dumps, low, high)


class _Verdicts:
    """Whether each module is correct, determined once; None if it cannot be translated."""

    def __init__(self, dumps: Sequence[Path], is_right: Callable[[Path], bool], progress: Progress):
        self.dumps, self.is_right, self.progress = dumps, is_right, progress
        self.found: dict[int, bool | None] = {}

    def __call__(self, place: int) -> bool | None:
        if place not in self.found:
            self.found[place] = self._ask(self.dumps[place])
        return self.found[place]

    def known(self, low: int, high: int) -> Iterator[int]:
        """Return the indices between two others that have a verdict, from the middle outward."""
        middle = (low + high) / 2
        places = sorted(range(low + 1, high), key=lambda place: abs(place - middle))
        return (place for place in places if self(place) is not None)

    def _ask(self, path: Path) -> bool | None:
        try:
            is_right = self.is_right(path)
        except HloError as error:
            self.progress(f'no translation  {path.name}: {error}')
            return None
        self.progress(f'{"right" if is_right else "WRONG"}  {path.name}')
        return is_right


def _culprit(dumps: Sequence[Path], low: int | None, high: int) -> Culprit:
    names = [_pass_of(path) for path in dumps[0 if low is None else low + 1 : high + 1]]
    changing = [(name, pipeline) for name, pipeline in names if name != _START] or names[-1:]
    passes, pipelines = (' or '.join(dict.fromkeys(part)) for part in zip(*changing, strict=True))
    return Culprit(passes, pipelines, None if low is None else dumps[low], dumps[high])


def _pass_of(path: Path) -> tuple[str, str]:
    """Return the pass after which a module was written, and its pipeline."""
    dump = _DUMP.fullmatch(path.name)
    return (
        (dump['after'], dump['pipeline']) if dump else ('the end of compilation', 'of all passes')
    )
