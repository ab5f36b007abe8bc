"""Tell faults of the machine, such as too little memory, from faults of a step."""

import errno
import re

import jax

# Errors of a system without disk space, memory, or free files and processes.
OF_MACHINE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN),
)
# A GPU compiler also reports RESOURCE_EXHAUSTED for registers and shared memory.
_OF_XLA = re.compile('RESOURCE_EXHAUSTED.*(out of memory|failed to allocate)', re.IGNORECASE)
# What a process prints before it aborts, because it gets no memory or no thread.
_ABORTED = re.compile(
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
    # the system sends SIGKILL if memory runs out
    return signal == 'SIGKILL' or (signal == 'SIGABRT' and bool(_ABORTED.search(output)))
