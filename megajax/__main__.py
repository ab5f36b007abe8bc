"""`python -m megajax` is the `megajax` command."""

from megajax.cli import main

if __name__ == '__main__':
    main()
