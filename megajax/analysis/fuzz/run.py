"""Execute random steps in several processes, and append a line for each to a file."""

import collections
import importlib.metadata
import itertools
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax

from megajax.analysis.fuzz.case import Case, Key
from megajax.analysis.fuzz.draw import LAYOUTS, draw
from megajax.analysis.fuzz.execute import BEGUN, DONE, FOUND, UNABLE
from megajax.analysis.fuzz.machine import lacked_memory
from megajax.analysis.inspect.child import EndedBySignal, call_in_child
from megajax.base.errors import ResourceError, StopRequested, reason
from megajax.base.files.outputs import with_folder
from megajax.base.source import source_digest
from megajax.core.config import ConfigError
from megajax.runtime.processes.signals import STOPS
from megajax.xla.emulate.result import NOT_FOUND
from megajax.xla.miscompiles import answers

EXECUTE = 'megajax.analysis.fuzz.execute'  # the module that a process runs
# The source that decides the config of a number, its program and its verdict.
SOURCE = (
    'core',
    'xla',
    'runtime/data',  # random_batch.py has the shapes of its rows from there
    'analysis/inspect',
    *(f'analysis/fuzz/{name}.py' for name in ('choices', 'draw', 'execute', 'machine')),
)
MOST_STEPS = 40  # most steps per process, because compilers do not return all of their memory
ENDED = 'the process ended: '
MOST_CHARACTERS = 2000  # most characters of the error with which a process ends


def read(file: Path) -> list[Case]:
    """Return the cases in a file; none if the file does not exist.

    A later line replaces one with the same key.

    Raises ConfigError for a line that is not a case, except for an unfinished last line.
    """
    if not file.exists():
        return []
    text = file.read_text()
    lines = text.splitlines() if text.endswith('\n') or not text else text.splitlines()[:-1]
    try:
        cases = [Case.model_validate_json(line) for line in lines]
    except ValueError as error:
        raise ConfigError(
            f'{file} was not written by megajax inspect fuzz of this version: '
            f'{str(error).splitlines()[0]}; choose another file'
        ) from error
    return [*{case.key: case for case in cases}.values()]


def fuzz(
    file: Path,
    *,
    seed: int,
    count: int,
    target: str,
    fixed: Sequence[str] = (),
    jobs: int = 1,
    reports: Path | None = None,
    say: Callable[[Case], None] = lambda case: None,
) -> list[Case]:
    """Execute the first `count` steps of a seed, and return their cases in order.

    Cases that `file` already has for this target, compiler and source of megajax are not executed
    again; the others are appended. `say` is called with each case when it is done. With `reports`,
    each finding is minimized and bisected, and gets a folder in `reports`; a finding that `file`
    has without this is executed again.

    Ctrl-C and an error end all processes. A fault of the machine is never stored as a fault of a
    step: a step whose process ends because memory runs out has no case, as if it had not been
    executed. Raises StopRequested if a signal such as SIGTERM ends a process, ResourceError if
    there is too little memory to start one or too little disk space, and ConfigError if cuDNN is
    missing.
    """
    made = made_by(target)
    versions = made['jax_version'], made['compiler'], made['step']
    wanted: dict[Key, int] = {
        (seed, number, target, tuple(fixed), *versions): number for number in range(count)
    }
    found = {case.key: case for case in read(file) if case.key in wanted}
    _end_line(with_folder(file))
    numbers = (
        number
        for key, number in wanted.items()
        if key not in found or (reports is not None and _is_unexplained(found[key]))
    )
    models = itertools.groupby(numbers, lambda number: number // LAYOUTS)
    left = collections.deque([*layouts] for _, layouts in models)
    lock = threading.Lock()

    def keep(case: Case) -> None:
        with lock:
            _append(file, case.model_dump_json() + '\n')
            found[case.key] = case
            say(case)

    task = {
        'about': {'seed': seed, 'target': target, 'fixed': [*fixed], **made},
        'reports': None if reports is None else str(reports),
    }
    _execute(left, jobs, task, lock, keep)
    return [found[key] for key in wanted if key in found]


def _execute(
    left: collections.deque[list[int]],
    jobs: int,
    task: Mapping[str, Any],
    lock: threading.Lock,
    keep: Callable[[Case], None],
) -> None:
    """Execute the models that are left in `jobs` processes at a time."""
    children = _Children()
    with ThreadPoolExecutor(jobs) as pool:
        at_once = max(1, min(MOST_STEPS // LAYOUTS, len(left) // jobs))
        given = left, at_once, task, lock, keep, children
        try:
            for done in as_completed([pool.submit(_worker, *given) for _ in range(jobs)]):
                done.result()
        except BaseException:
            with lock:
                left.clear()
            children.end()
            raise


def made_by(target: str) -> dict[str, str]:
    """Return the fields of a case that tell which compiler and source it was executed with."""
    libraries = {name: importlib.metadata.version(name) for name in ('flax', 'numpy', 'optax')}
    return {
        'jax_version': jax.__version__,
        'compiler': answers.digest(answers.compiler(target, with_times=False)),
        'step': answers.digest({'source': source_digest(*SOURCE), **libraries}),
    }


def _is_unexplained(case: Case) -> bool:
    """Return whether a finding can be minimized, which one that ends its process cannot."""
    is_stopped = case.message.startswith(ENDED) or case.culprit
    return case.is_finding and not case.smallest and not is_stopped


def _end_line(file: Path) -> None:
    """Remove an unfinished last line that a stopped call has left."""
    if file.exists() and not (text := file.read_text()).endswith('\n') and text:
        file.write_text(text[: text.rfind('\n') + 1])


def _append(file: Path, line: str) -> None:
    """Append a whole line, or nothing if the disk is full."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open('a') as lines:
            lines.write(line)
    except OSError as error:
        if file.exists():
            os.truncate(file, size)
        raise ResourceError(f'{file}: {reason(error)}; the same command continues') from error


class _Children:
    """The processes of all threads."""

    def __init__(self) -> None:
        self._started = list[subprocess.Popen[str]]()
        self._is_over = threading.Event()

    def add(self, child: subprocess.Popen[str]) -> None:
        self._started.append(child)
        if self._is_over.is_set():
            child.terminate()

    def end(self) -> None:
        """End all processes, also one that a thread starts later."""
        self._is_over.set()
        for child in [*self._started]:
            child.terminate()


def _worker(
    left: collections.deque[list[int]],
    at_once: int,
    task: Mapping[str, Any],
    lock: threading.Lock,
    keep: Callable[[Case], None],
    children: _Children,
) -> None:
    while True:
        with lock:
            models = [left.popleft() for _ in range(min(at_once, len(left)))]
        numbers = [*itertools.chain(*models)]
        if not numbers:
            return
        while numbers:
            numbers = _in_child(numbers, task, keep, children)


def _in_child(
    numbers: list[int],
    task: Mapping[str, Any],
    keep: Callable[[Case], None],
    children: _Children,
) -> list[int]:
    """Execute steps in one process, and return the numbers that are left if it ends early."""
    begun: list[int] = []
    done: set[int] = set()
    unexplained: dict[int, Case] = {}
    unable: list[str] = []
    ended: RuntimeError | None = None

    def hear(line: str) -> None:
        if line.startswith(BEGUN):
            begun.append(int(line.removeprefix(BEGUN)))
        elif line.startswith(FOUND):
            unexplained[begun[-1]] = Case.model_validate_json(line.removeprefix(FOUND))
        elif line.startswith(DONE):
            keep(Case.model_validate_json(line.removeprefix(DONE)))
            done.add(begun[-1])
        elif line.startswith(UNABLE):
            unable.append(line.removeprefix(UNABLE))

    # a process that is ending may still write dumps to the folder
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder, 'task.json')
        file.write_text(json.dumps({**task, 'numbers': numbers}))
        try:
            call_in_child(
                EXECUTE,
                file,
                target=task['about']['target'],
                say=hear,
                started=children.add,
                leads_group=True,  # it starts the reducer
            )
        except RuntimeError as error:
            ended = error
    if unable:
        if found := unexplained.get(begun[-1]):
            # without its compiler pass, the next call minimizes it again
            keep(found if found.culprit else found.model_copy(update={'smallest': ''}))
        raise ResourceError(f'{unable[-1]}; the same command continues') from ended
    _check_stopped(ended, is_started=bool(begun))
    if begun and begun[-1] not in done:
        if found := _unfinished(task['about'], begun[-1], unexplained.get(begun[-1]), ended):
            keep(found)
        done.add(begun[-1])
    elif not done:
        raise ended or RuntimeError(f'{EXECUTE} executed no step')
    return [number for number in numbers if number not in done]


def _check_stopped(ended: RuntimeError | None, *, is_started: bool) -> None:
    """Raise an error if a process ended for a reason that no step has."""
    if not isinstance(ended, EndedBySignal):
        return
    if ended.signal in {each.name for each in STOPS}:
        raise StopRequested(f'{ended.signal} ended a process; the same command continues')
    if lacked_memory(ended.signal, str(ended)) and not is_started:
        raise ResourceError(f'{str(ended).splitlines()[0]}; use fewer --jobs or more memory')


def _unfinished(
    about: Mapping[str, Any], number: int, found: Case | None, ended: RuntimeError | None
) -> Case | None:
    """Return the case of a step that ended its process, which may be a finding already."""
    no_memory = isinstance(ended, EndedBySignal) and lacked_memory(ended.signal, str(ended))
    why = f'{ENDED}{str(ended)[-MOST_CHARACTERS:]}'
    if found is None:
        return None if no_memory else _failed(about, number, why)
    if found.culprit or (no_memory and not found.smallest):
        return found
    return found.model_copy(update={'culprit': f'{NOT_FOUND}{why}'})


def _failed(about: Mapping[str, Any], number: int, message: str) -> Case:
    config = draw(about['seed'], number, about['fixed'])
    written = config.model_dump(mode='json', exclude_unset=True)
    found = {'number': number, 'config': written, 'verdict': 'failed', 'message': message}
    return Case.model_validate({**about, **found})


def summary(cases: Iterable[Case]) -> dict[str, int]:
    """Return the number of cases with each verdict."""
    return dict(collections.Counter(case.verdict for case in cases))
