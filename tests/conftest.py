"""Eight simulated CPU devices for every test, made before jax is first used."""

import functools
import gc
import importlib.metadata
import os
import platform
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

# On a busy machine a simulated device may be late to a collective, and XLA's default ends the
# process then.
FLAGS = {
    '--xla_cpu_collective_call_terminate_timeout_seconds': '600',
    # Cutting a program into parts for other cores costs a sixth of its compilation.
    '--xla_cpu_parallel_codegen_split_count': '1',
}
if importlib.metadata.version('jax').startswith('0.10.'):  # later ones have no such flag
    FLAGS['--xla_cpu_use_fusion_emitters'] = 'false'  # they take twice as long to compile
for flag, value in FLAGS.items():
    if flag not in os.environ.get('XLA_FLAGS', ''):
        os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}={value}'.strip()
os.environ['JAX_PLATFORMS'] = 'cpu'
# The tests, and the processes that they start, compile far more than they run. This halves the
# time; the SPMD partitioner works all the same. What one of them has compiled the others read, and
# so do later runs of the tests: JAX looks programs up by their text, options and versions.
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = 'true'
COMPILED = Path(__file__).parents[1] / '.compiled'  # by machine: a program may need its processor
MOST_COMPILED = 2**30  # bytes, after which all is compiled again
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    if sum(file.stat().st_size for file in COMPILED.glob('*/*')) > MOST_COMPILED:
        shutil.rmtree(COMPILED, ignore_errors=True)
    os.environ['JAX_COMPILATION_CACHE_DIR'] = str(COMPILED / platform.node())
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
# By default ten Python frames of each operation go through all passes over a program, which takes a
# twentieth of its compilation. A finding shows at most four.
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '4'
# Images of containers often forbid bytecode. Every process would then read jax from its source,
# which takes 3 of the 4.5 seconds of its imports.
if os.environ.pop('PYTHONDONTWRITEBYTECODE', None):
    os.environ['PYTHONPYCACHEPREFIX'] = sys.pycache_prefix = str(COMPILED / 'bytecode')
    sys.dont_write_bytecode = False

# Tracing makes many objects that live long. To look through them as often as Python does by default
# takes a tenth of the time.
gc.set_threshold(100_000, 50, 1000)
# No test is about a loss of power. On some disks each of these calls takes 8 ms.
os.fsync = lambda _: None
# `nohup` has SIGHUP ignored, and a shell has SIGINT ignored in what it starts in the background.
# Whatever the tests start would ignore them too. A handler is not inherited, and the tests
# themselves go on after the terminal was closed.
if 'PYTEST_XDIST_WORKER' in os.environ or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
import typer.main  # noqa: E402

# Typer builds all commands anew for each call, and the tests make hundreds.
typer.main.get_command = functools.cache(typer.main.get_command)
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
# No property is about time, and a busy machine may be late.
hypothesis.settings.register_profile('without a deadline', deadline=None)
hypothesis.settings.load_profile('without a deadline')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--share', metavar='K/N', default='1/1', help='run share K of N of the tests')


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of `--share`, and begin with the longest: alone, it takes two minutes."""
    share, shares = map(int, config.getoption('--share').split('/'))
    items[:] = [x for x in items if zlib.crc32(x.nodeid.encode()) % shares == share % shares]
    items.sort(key=lambda item: item.path.name != 'test_readme_commands.py')


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what is there before the first test: it is not looked through again.

    `make test` leaves out tests by `slow` and `faults`, so an exhaustive test has one of these too.
    """
    marks = ({mark.name for mark in item.iter_markers()} for item in session.items)
    assert all(names & {'slow', 'faults'} for names in marks if 'exhaustive' in names)
    gc.freeze()


@pytest.fixture
def forked_renderers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that render chat templates from one that has imported jinja2.

    What `TemplateChat` asks of `subprocess.Popen` is ignored. `test_generate_images.py` and
    `test_chat_template.py` start the real processes.
    """
    from renderers import Renderer

    made = SimpleNamespace(Popen=Renderer, PIPE=None, DEVNULL=None)
    monkeypatch.setattr('megajax.runtime.data.image_text.chat.subprocess', made)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a build have one worker, a thread, unless it asks for several."""
    from encoders import OneThread

    monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'false')  # as each worker has it
    monkeypatch.setattr('megajax.corpus.build.Workers', OneThread)
    monkeypatch.setattr('megajax.corpus.build.usable_cores', lambda: 1)


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test() -> Iterator[None]:
    """A run that a failed test has left would slow all others."""
    yield
    if 'runs' in sys.modules:
        for process in sys.modules['runs'].STARTED:
            process.kill()
        sys.modules['runs'].STARTED.clear()
