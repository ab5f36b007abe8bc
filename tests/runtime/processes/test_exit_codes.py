"""The exit code of a launch tells a supervisor whether to start it again."""

import signal

import pytest

from megajax.runtime.processes.launch import MENDABLE, RETRY, _describe, _exit_code


@pytest.mark.parametrize('code', [0, 1, 2, 75, 124])
def test_a_launch_has_the_code_of_its_process(code: int) -> None:
    assert _exit_code(code) == code
    assert _describe(code) == f'exit code {code}'


def test_a_launch_has_the_code_of_a_shell_for_a_signal_or_is_started_again() -> None:
    assert signal.SIGSEGV not in MENDABLE
    assert _exit_code(-signal.SIGSEGV) == 128 + signal.SIGSEGV
    assert _describe(-signal.SIGSEGV) == f'signal SIGSEGV ({128 + signal.SIGSEGV})'
    for number in MENDABLE:
        assert _exit_code(-number) == RETRY
        assert f'the launch exits with {RETRY}' in _describe(-number)
