"""`python -m megajax.xla.miscompiles [TARGET]`: one line per bug of the installed XLA."""

import argparse

from megajax.core.hardware.records import record_name
from megajax.core.hardware.targets import GPUS
from megajax.xla.miscompiles.entry import Miscompile, Options
from megajax.xla.miscompiles.probe import DEFAULT_TARGET, Answer, ask
from megajax.xla.miscompiles.register import REGISTER


def report(target: str) -> list[str]:
    """Return a line for each bug that the compiler for `target` has or may have."""
    answers = [(entry, ask(entry, target)) for entry in REGISTER]
    present = [(entry, answer) for entry, answer in answers if answer.is_faulty is not False]
    lines = [f'{entry.name} ({entry.source}): {_deed(entry, answer)}' for entry, answer in present]
    return lines or [f'none of the {len(REGISTER)} known miscompiles']


def _deed(entry: Miscompile, answer: Answer) -> str:
    """Return what megajax does about the bug."""
    if answer.is_faulty is None:
        given = f'; {_given(answer.workaround)}' if answer.workaround else ''
        return f'unknown, {answer.why}{given}'
    if entry.platform == 'cpu':
        return 'inspect rejects an affected program'
    if answer.workaround:
        return _given(answer.workaround)
    if entry.affected_keys:
        return f'{answer.why}; affected configs are rejected ({", ".join(entry.affected_keys)})'
    return 'inspect and train reject an affected program'


def _given(workaround: Options) -> str:
    options = ' '.join(f'{name}={value}' for name, value in workaround.items())
    return f'every program is compiled with {options}'


def main() -> None:
    """Print the report for the GPU that the command line names."""
    parser = argparse.ArgumentParser(prog='python -m megajax.xla.miscompiles')
    parser.add_argument(
        'target', nargs='?', default=DEFAULT_TARGET, type=record_name, help='GPU to compile for'
    )
    target = parser.parse_args().target
    if target not in GPUS:
        parser.error(f'target {target}: choose among {", ".join(GPUS)}')
    print('\n'.join(report(target)))


if __name__ == '__main__':
    main()
