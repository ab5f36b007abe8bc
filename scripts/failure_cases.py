"""Write the page on failure cases: python scripts/failure_cases.py > docs/failure_cases.md

The cases are lines of tests/failure_cases.txt. A test is named there by its file and by as many of
its words as are unique: `faults_disk.a_disk_that_fails`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / 'tests'
CASES = TESTS / 'failure_cases.txt'
HEAD = """\
# Failure cases

What each failure does to a run, and the test that shows it; [Handle failures](failures.md) explains
the most common ones. `make test-faults` kills, signals and damages real runs to check them. Tests
are below `tests/`. `python scripts/failure_cases.py` writes this page from
`tests/failure_cases.txt`.
"""
TABLE = '| | failure | result | tests |', '|---|---|---|---|'


def page() -> str:
    """Return the page docs/failure_cases.md."""
    lines = [HEAD.rstrip()]
    for line in CASES.read_text().splitlines():
        if line.startswith('# '):
            lines += ['', f'## {line[2:]}', '', *TABLE]
        else:
            number, failure, result, names = line.split(' | ')
            tests = ', '.join(f'`{test_of(name)}`' for name in names.split())
            lines.append(f'| {number} | {failure} | {result} | {tests} |')
    return '\n'.join([*lines, ''])


def test_of(name: str) -> str:
    """Return the file and the function of a test; exactly one must match."""
    file, _, words = name.partition('.')
    folder, _, file = file.rpartition('/')
    found = [
        f'{path.relative_to(TESTS)}::{function}'
        for path in TESTS.rglob(f'test_{file}.py')
        if path.parent.name == (folder or path.parent.name)
        for function in re.findall(rf'^def (test_{words}\w*)\(', path.read_text(), re.MULTILINE)
    ]
    assert len(found) == 1, (name, found)
    return found[0]


if __name__ == '__main__':
    print(page(), end='')
