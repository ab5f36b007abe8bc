"""The limit of the files and connections that this process may have open."""

import resource

OTHERS = 1024  # number of files of a process that no call counts, and Linux's default limit


def allow_open_files(count: int) -> None:
    """Raise the limit of open files by `count`, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = max(soft, OTHERS) + count
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
