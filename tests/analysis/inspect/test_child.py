"""What a process of its own prints, refuses and fails with reaches the one that asked for it."""

import contextlib
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import gone

from megajax.analysis.inspect.child import EndedBySignal, call_in_child
from megajax.core.config import ConfigError
from megajax.core.hardware.cpu_flags import LIMIT


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.setenv('PYTHONPATH', f'{tmp_path}:{Path(__file__).parents[3]}')

    def call(code: str, *arguments: object, **options: Any) -> list[str]:
        (tmp_path / 'child.py').write_text(textwrap.dedent(code))
        heard: list[str] = []
        call_in_child('child', *arguments, target='h100', **{'say': heard.append, **options})
        return heard

    return call


def test_each_line_is_heard(call: Callable[..., list[str]]) -> None:
    assert call('import sys; print("one"); print(*sys.argv[1:])', 2, Path('a')) == ['one', '2 a']


def test_the_caller_works_while_its_child_does(
    call: Callable[..., list[str]], tmp_path: Path
) -> None:
    code = """
        import pathlib, sys, time
        tries = iter(range(1000))
        while not (seen := pathlib.Path(sys.argv[1]).exists()) and next(tries, None) is not None:
            time.sleep(0.01)
        print('seen' if seen else 'never seen')
    """
    file = tmp_path / 'made meanwhile'
    assert call(code, file, meanwhile=file.touch) == ['seen']


def test_a_child_is_on_the_cpu(call: Callable[..., list[str]]) -> None:
    assert call('import os; print(os.environ["JAX_PLATFORMS"])') == ['cpu']


@pytest.mark.parametrize(
    ('own', 'then'),
    [
        ('', f'{LIMIT}=600'),
        ('--xla_cpu_enable_fast_math=false', f'--xla_cpu_enable_fast_math=false {LIMIT}=600'),
        (f'{LIMIT}=7', f'{LIMIT}=7'),
    ],
)
def test_its_devices_may_be_late_for_a_collective(
    own: str, then: str, call: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('XLA_FLAGS', own)
    assert call('import os; print(os.environ["XLA_FLAGS"])') == [then]


def test_what_it_refuses_is_refused_here_line_by_line(call: Callable[..., list[str]]) -> None:
    code = """
        import sys
        from megajax.core.config import ConfigError
        from megajax.analysis.inspect.child import telling_parent
        with telling_parent():
            print('a plugin says something', file=sys.stderr)
            raise ConfigError('mesh.data: 3', 'mesh.model: 5')
    """
    with pytest.raises(ConfigError) as error:
        call(code)
    assert str(error.value) == 'mesh.data: 3\nmesh.model: 5'


def test_what_it_fails_with_is_told(call: Callable[..., list[str]]) -> None:
    with pytest.raises(
        RuntimeError, match=r'did not compile for h100:\n(.|\n)*ValueError: what went wrong'
    ):
        call("raise ValueError('what went wrong')")


def test_a_mistake_in_its_arguments_is_a_failure_with_its_words(
    call: Callable[..., list[str]],
) -> None:
    with pytest.raises(RuntimeError, match=r'error: no pass dumps in x') as error:
        call("import argparse; argparse.ArgumentParser().error('no pass dumps in x')")
    assert not isinstance(error.value, ConfigError)


def test_it_has_a_time_limit(call: Callable[..., list[str]]) -> None:
    with pytest.raises(EndedBySignal, match=r'^SIGALRM ended .* \(it took too long\):') as error:
        call('import time; time.sleep(100)', seconds=0.3)
    assert error.value.signal == 'SIGALRM'


def test_an_error_of_the_caller_ends_it(call: Callable[..., list[str]], tmp_path: Path) -> None:
    def meanwhile() -> None:
        raise OSError('no space')

    start = time.monotonic()
    with pytest.raises(OSError, match='no space'):
        call('import time; time.sleep(100)', meanwhile=meanwhile)
    assert time.monotonic() - start < 50


@pytest.mark.parametrize('then', ['killed', 'waits', 'done'])
def test_what_it_has_started_ends_with_it(call: Callable[..., list[str]], then: str) -> None:
    code = """
        import os, signal, subprocess, sys, time
        quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
        print(subprocess.Popen(['sleep', '100'], **quiet).pid, flush=True)
        if sys.argv[1] == 'killed':
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100 if sys.argv[1] == 'waits' else 0)
    """
    heard: list[str] = []

    def hear(line: str) -> None:
        heard.append(line)
        if then == 'waits':
            raise OSError('no space')

    ends = {
        'killed': pytest.raises(EndedBySignal, match='SIGKILL'),
        'waits': pytest.raises(OSError, match='no space'),
        'done': contextlib.nullcontext(),
    }
    with ends[then]:
        call(code, then, say=hear, leads_group=True)
    assert gone(int(heard[0]))


def test_the_signal_that_ends_it_is_told(call: Callable[..., list[str]]) -> None:
    with pytest.raises(RuntimeError, match=r'^SIGKILL ended .* for h100 \(.*memory runs out\):\n'):
        call('import os, signal; os.kill(os.getpid(), signal.SIGKILL)')


def test_without_cudnn_the_fix_is_told(call: Callable[..., list[str]]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^target h100: flash attention needs cuDNN's library to compile: pip install",
    ):
        call("raise RuntimeError('INTERNAL: cuDNN not found')")
