"""Tell faults of the machine, such as too little memory, from faults of a step."""

import errno
import re

import jax

from megajax.base.files.outputs import NO_SPACE

# Errors of a system without disk space, memory, or free files and processes.
OF_MACHINE = *NO_SPACE, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN
# A GPU compiler also reports RESOURCE_EXHAUSTED for registers and shared memory.
_OF_XLA = re.compile('RESOURCE_EXHAUSTED.*(out of memory|failed to allocate)', re.IGNORECASE)
# The beginning of what a process prints before it aborts.
_ABORT = re.compile('Check failed|LLVM ERROR|terminate called')
# What it prints if it gets no memory or no thread.
_LACKING = re.compile(
    r'std::bad_alloc|LLVM ERROR: out of memory|Cannot allocate memory'
    r'|pthread_create(\(\))? failed|Resource temporarily unavailable'
)


def is_of_machine(error: Exception) -> bool:
    """Return whether the machine has too little of something, whatever the step."""
    if isinstance(error, OSError):
        return error.errno in OF_MACHINE
    is_of_xla = isinstance(error, jax.errors.JaxRuntimeError) and _OF_XLA.search(str(error))
    return bool(is_of_xla) or isinstance(error, MemoryError)


def lacked_memory(signal: str, output: str) -> bool:
    """Return whether a signal ended a process with this output because memory ran out."""
    if signal != 'SIGABRT':
        return signal == 'SIGKILL'  # the system sends it if memory runs out
    # Earlier steps may have printed warnings to the same output.
    last = max((match.start() for match in _ABORT.finditer(output)), default=0)
    return bool(_LACKING.search(output, last))
