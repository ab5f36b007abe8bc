"""Faults of the machine are told from faults of a step."""

import errno

import jax
import jax.numpy as jnp
import pytest

from megajax.analysis.fuzz.machine import is_of_machine, lacked_memory


def test_memory_that_xla_cannot_allocate_is_a_fault_of_the_machine() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jnp.zeros((1 << 30, 1 << 18), jnp.int8)  # more than the addresses of a process
    assert is_of_machine(raised.value)


@pytest.mark.parametrize(
    'text',
    [
        'RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 300000, available 232448',
        'RESOURCE_EXHAUSTED: Register allocation failed',
        'INTERNAL: a pass failed',
    ],
)
def test_another_error_of_a_compiler_is_a_fault_of_the_step(text: str) -> None:
    assert not is_of_machine(jax.errors.JaxRuntimeError(text))


@pytest.mark.parametrize(('number', 'expected'), [(errno.ENOSPC, True), (errno.ENOENT, False)])
def test_an_error_of_the_system_is_told_by_its_number(number: int, expected: bool) -> None:
    assert is_of_machine(OSError(number, 'why')) == expected


@pytest.mark.parametrize(
    ('signal', 'output', 'expected'),
    [
        ('SIGKILL', '', True),
        ('SIGABRT', "terminate called after throwing an instance of 'std::bad_alloc'", True),
        ('SIGABRT', 'Check failed: ret == 0 Thread creation via pthread_create() failed.', True),
        ('SIGABRT', "Check failed\nterminate called\nwhat(): 'std::bad_alloc'", True),
        ('SIGABRT', 'pthread_create: Resource temporarily unavailable', True),
        ('SIGABRT', 'Resource temporarily unavailable\nCheck failed: shape.has_layout()', False),
        ('SIGABRT', 'Check failed: shape.has_layout()', False),
        ('SIGSEGV', 'std::bad_alloc', False),
    ],
)
def test_a_process_lacked_memory_if_it_was_killed_or_says_so(
    signal: str, output: str, expected: bool
) -> None:
    assert lacked_memory(signal, output) == expected
