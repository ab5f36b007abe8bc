"""The entry point of both `megajax` and `python -m megajax`."""

import sys

from megajax.runtime.processes.signals import leave_when_asked


def main() -> None:
    """Run the command.

    The imports below take seconds on a busy machine, and a run may be asked to stop meanwhile.
    """
    if sys.argv[1:2] in (['train'], ['launch']):
        leave_when_asked()
    from megajax.commands.main import main

    main()


if __name__ == '__main__':
    main()
