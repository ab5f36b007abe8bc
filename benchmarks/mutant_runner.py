"""Tests in processes forked from this one, which has jax imported, for `benchmarks/mutants.py`.

They see a copy of the repository, and so do the processes that they start themselves: it comes
first on PYTHONPATH. A `sitecustomize` in it writes down which functions of the package each test
calls.
"""

import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = (
    'jax',
    'flax.nnx',
    'optax',
    'orbax.checkpoint',
    'grain',
    'pydantic',
    'ruamel.yaml',
    'rich',
    'tokenizers',
    'typer',
    'hypothesis',
)
FAST = 'not slow and not faults'
# A test hangs if it takes longer than this, and so many times what it took unchanged.
LIMIT_SECONDS, SLOWER = 60, 10
MOST_SECONDS = 7200  # of a file of tests
OUT_OF_TIME = 'none in time'

TRACER = """
import os, sys
from sys import monitoring
_folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'megajax') + os.sep
_file, _seen = None, set()

def _started(code, offset):
    if code.co_filename.startswith(_folder):
        name = (code.co_filename, code.co_qualname.partition('.<locals>')[0])
        if name not in _seen:
            _seen.add(name)
            with open(_file, 'a') as file:
                file.write(f'megajax/{os.path.relpath(name[0], _folder)}:{name[1]}\\n')
    return monitoring.DISABLE  # once for each function until the next test

monitoring.use_tool_id(monitoring.COVERAGE_ID, 'megajax')
monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.PY_START, _started)

def trace(file):
    global _file
    os.environ['MEGAJAX_TRACE'], _file = file, file
    _seen.clear()
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.PY_START)
    monitoring.restart_events()

def stop():
    monitoring.set_events(monitoring.COVERAGE_ID, 0)

if 'MEGAJAX_TRACE' in os.environ:
    trace(os.environ['MEGAJAX_TRACE'])
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Test:
    """A fast test that passes, its seconds, and the functions it calls, as `file:function`."""

    name: str
    seconds: float
    calls: frozenset[str]

    @property
    def file(self) -> str:
        return self.name.partition('::')[0]


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the repository at `root`, where this process and its children find the package."""
    with tempfile.TemporaryDirectory(prefix='megajax-mutants-') as folder:
        tree = Path(folder) / 'repository'
        listed = subprocess.run(
            ['git', 'ls-files', '--cached', '--others', '--exclude-standard'],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (root / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name)
        (tree / 'sitecustomize.py').write_text(TRACER)
        os.environ |= {
            'PYTHONPATH': str(tree),
            # A change of the same second and size would be taken for the file before it.
            'PYTHONDONTWRITEBYTECODE': '1',
            'JAX_COMPILATION_CACHE_DIR': str(Path(folder) / 'compiled'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        }
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(tree), str(tree / 'tests')]
        os.chdir(tree)
        yield tree


def import_libraries() -> None:
    """Import what takes longest, but nothing of the package.

    No backend is started: its threads would not be there after a fork.
    """
    for name in ('conftest', *LIBRARIES):
        importlib.import_module(name)
    assert not any(name.partition('.')[0] == 'megajax' for name in sys.modules)


def fork(function: Callable[[], None], *, output: Path, seconds: float) -> int | None:
    """Exit status of a forked process that calls `function`; None if it was not done in time."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            function()
            status = 0
        except SystemExit as left:  # with pytest's exit code
            status = int(left.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(status)
    deadline, ended, status = time.monotonic() + seconds, 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if not ended:
        os.waitpid(process, 0)
        return None
    return status


class Recorder:
    """A pytest plugin that writes one line of JSON about each test that passes."""

    def __init__(self, out: Path, trace_file: Path):
        self.out, self.trace_file = out, trace_file
        # Before any test is imported: some keep a copy of the environment for the processes they
        # start.
        os.environ['MEGAJAX_TRACE'] = str(trace_file)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        import sitecustomize  # that of the copy

        self.trace_file.write_text('')
        self.outcomes: list[str] = []
        start = time.monotonic()
        sitecustomize.trace(str(self.trace_file))
        result = yield
        sitecustomize.stop()
        if self.outcomes == ['passed'] * 3:
            calls = sorted(set(self.trace_file.read_text().split()))
            line = {
                'name': item.nodeid,
                'seconds': round(time.monotonic() - start, 3),
                'calls': calls,
            }
            with self.out.open('a') as file:
                file.write(json.dumps(line) + '\n')
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.append(report.outcome)


def record(file: str, scratch: Path) -> list[Test]:
    """The fast tests of a file of tests that pass as the code is."""
    out = scratch / 'recorded'
    out.write_text('')
    arguments = [file, '-m', FAST, '-p', 'no:cacheprovider', '-p', 'no:xdist']
    if (
        fork(
            lambda: exit_of(arguments, Recorder(out, scratch / 'trace')),
            output=scratch / 'output',
            seconds=MOST_SECONDS,
        )
        is None
    ):
        raise SystemExit(f'{file} was not done in {MOST_SECONDS} s')
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [
        Test(name=line['name'], seconds=line['seconds'], calls=frozenset(line['calls']))
        for line in lines
    ]


def exit_of(arguments: list[str], *plugins: object) -> None:
    """Run pytest; SystemExit if not all is well."""
    if code := pytest.main(arguments, plugins=list(plugins)):
        raise SystemExit(code)


class Chooser:
    """A pytest plugin that runs these tests in their order and writes down which one is running."""

    def __init__(self, tests: Sequence[Test], out: Path, seconds: float):
        self.tests, self.out, self.deadline = tests, out, time.monotonic() + seconds
        self.seconds = {test.name: test.seconds for test in tests}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[test.name] for test in self.tests if test.name in by_name]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if time.monotonic() > self.deadline:
            self.out.write_text(OUT_OF_TIME)
            os._exit(0)
        self.out.write_text(item.nodeid)
        signal.alarm(int(LIMIT_SECONDS + SLOWER * self.seconds[item.nodeid]))
        result = yield
        signal.alarm(0)
        return result

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == 0 and session.testsfailed == 0:
            self.out.write_text('')


def first_to_notice(tests: Sequence[Test], scratch: Path, *, seconds: float) -> str:
    """The name of the first of these tests that fails, or OUT_OF_TIME; empty if none does."""
    out = scratch / 'running'
    out.write_text('')
    files = list(dict.fromkeys(test.file for test in tests))
    arguments = [*files, '-m', FAST, '-x', '-p', 'no:cacheprovider', '-p', 'no:xdist']
    status = fork(
        lambda: exit_of(arguments, Chooser(tests, out, seconds)),
        output=scratch / 'output',
        seconds=2 * seconds,
    )
    running = out.read_text()
    if status == 0:
        return running
    code = None if status is None else os.waitstatus_to_exitcode(status)
    if code == pytest.ExitCode.TESTS_FAILED and running:
        return running
    if code == -signal.SIGALRM or code is None:
        return f'{running} (hangs)'
    if not running:  # with -x pytest takes a file that cannot be imported for a test that fails
        return f'one of {len(files)} files of tests from {files[0]} on (cannot be imported)'
    return f'{running} (exit code {code})'
