"""`python -m megajax.xla.miscompiles [TARGET]`: one line per fault that the installed XLA has."""

import sys

from megajax.xla.miscompiles.entry import Miscompile
from megajax.xla.miscompiles.guard import DEFAULT_TARGET
from megajax.xla.miscompiles.probe import Answer, ask
from megajax.xla.miscompiles.register import REGISTER


def report(target: str) -> list[str]:
    """One line for each entry whose fault the compiler for `target` has, or may have."""
    answers = [(entry, ask(entry, target)) for entry in REGISTER]
    present = [(entry, answer) for entry, answer in answers if answer.is_faulty is not False]
    lines = [f'{entry.name} ({entry.source}): {_deed(entry, answer)}' for entry, answer in present]
    return lines or [f'none of the {len(REGISTER)} known miscompiles']


def _deed(entry: Miscompile, answer: Answer) -> str:
    """Return what megajax does about the fault."""
    if answer.is_faulty is None:
        return f'unknown, {answer.why}'
    if entry.platform == 'cpu':
        return 'inspect rejects a program that shows it'
    if answer.cure:
        options = ' '.join(f'{name}={value}' for name, value in answer.cure.items())
        return f'every program is compiled with {options}'
    if entry.bitten_keys:
        return f'{answer.why}; affected configs are rejected ({", ".join(entry.bitten_keys)})'
    return 'inspect and train reject a program that shows it'


if __name__ == '__main__':
    print('\n'.join(report(*sys.argv[1:] or [DEFAULT_TARGET])))
