"""A child process in which to compile, so that the caller's backend and devices stay unchanged.

The caller need not have imported jax.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megajax.core.config import Config, ConfigError
from megajax.core.config.extras import install
from megajax.core.hardware.cpu_flags import with_collective_limit
from megajax.core.hardware.tpus import ENVIRONMENT, TPUS

if TYPE_CHECKING:
    from megajax.core.train.compiled_step import CompiledStep

# Why a signal ends a compiler.
CAUSES = {'SIGALRM': ' (it took too long)', 'SIGKILL': ' (the system does this if memory runs out)'}
NO_CUDNN = 'cuDNN not found'  # the compiler's error
MARK = 'megajax config: '  # before each line of a ConfigError, since plugins write to stderr too


class EndedBySignal(RuntimeError):  # noqa: N818
    """A child that a signal ended; `signal` is its name, such as SIGKILL."""

    def __init__(self, name: str, message: str):
        self.signal = name
        super().__init__(message)


def compile_in_child(
    config: Config, target: str, hosts: int, meanwhile: Callable[[], object] = lambda: None
) -> 'CompiledStep':
    """Compile the training step in a child process, and call `meanwhile` while it compiles."""
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder, 'task'), Path(folder, 'result')
        task.write_bytes(config.model_dump_json().encode())
        arguments = task, result, target, hosts
        call_in_child(
            'megajax.analysis.inspect.compile', *arguments, target=target, meanwhile=meanwhile
        )
        from megajax.core.train.compiled_step import CompiledStep  # imports jax, so not at the top

        return CompiledStep.from_json(result.read_text())


def call_in_child(
    module: str,
    *arguments: object,
    target: str,
    say: Callable[[str], None] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    started: Callable[[subprocess.Popen[str]], object] = lambda child: None,
    seconds: float | None = None,
    leads_group: bool = False,
) -> None:
    """Run `python -m module arguments` on the CPU, and call `meanwhile` as soon as it has started;
    `say` gets each line that it prints.

    `started` gets the process, so that a different thread can end it. An exception in a callback,
    or Ctrl-C, ends the child, and so does SIGALRM after `seconds`. Raises ConfigError if cuDNN's
    library is missing or the child raises a ConfigError, EndedBySignal if a signal ends it, and
    RuntimeError if it fails in any other way; the last two have the child's errors. With
    `leads_group`, the processes that the child has started end with it, however it ends, and a
    terminal's Ctrl-C reaches the caller alone.
    """
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    environment['XLA_FLAGS'] = with_collective_limit(os.environ.get('XLA_FLAGS', ''))
    environment |= ENVIRONMENT if target in TPUS else {}
    command = [sys.executable, '-m', module, *map(str, arguments)]
    with tempfile.TemporaryFile('w+') as errors:
        start, group = (_Group, 0) if leads_group else (subprocess.Popen[str], None)
        child = start(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=group,
        )
        assert child.stdout is not None
        with child, _ending(child, seconds):
            started(child)
            meanwhile()
            for line in child.stdout:
                if say is not None:
                    say(line.rstrip())
        errors.seek(0)
        output = errors.read()
    if NO_CUDNN in output:
        raise ConfigError(
            f"target {target}: flash attention needs cuDNN's library to compile: "
            + install('gpu-compile')
        )
    told = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    if child.returncode == ConfigError.exit_code and told:  # argparse has the same exit code
        raise ConfigError(*told)
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise EndedBySignal(
            name, f'{name} ended the compilation for {target}{CAUSES.get(name, "")}:\n{output}'
        )
    if child.returncode:
        raise RuntimeError(f'the step did not compile for {target}:\n{output}')


class _Group(subprocess.Popen[str]):
    """A process that leads a group: a signal to it also reaches the processes that it has started.

    They end with the context.
    """

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:  # otherwise, a different group may have got the number
            self._send(sig)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._send(signal.SIGTERM)

    def _send(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, sig)


@contextlib.contextmanager
def _ending(child: subprocess.Popen[str], seconds: float | None) -> Iterator[None]:
    """End a child if the block raises or takes longer than some seconds."""
    limit = threading.Timer(seconds or 0, child.send_signal, (signal.SIGALRM,))
    try:
        if seconds is not None:
            limit.start()
        yield
    except BaseException:
        child.terminate()
        raise
    finally:
        limit.cancel()


@contextlib.contextmanager
def telling_parent() -> Iterator[None]:
    """Pass a ConfigError from the child on to the parent, which raises it again."""
    try:
        yield
    except ConfigError as error:
        print(*(f'{MARK}{line}' for line in str(error).splitlines()), sep='\n', file=sys.stderr)
        sys.exit(error.exit_code)
