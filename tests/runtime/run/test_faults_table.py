"""The table of faults has all cases, and names tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
ROWS = re.findall(
    r'^\| (\d\d) \| [^|]+ \| [^|]+ \| (.*) \|$',
    (TESTS.parent / 'docs/when_a_run_breaks.md').read_text(),
    flags=re.MULTILINE,
)


def test_every_case_is_there_once() -> None:
    assert len(ROWS) > 50
    assert [number for number, _ in ROWS] == [f'{number:02}' for number in range(1, len(ROWS) + 1)]


def test_every_test_that_the_table_names_is_there() -> None:
    for number, cell in ROWS:
        for name in re.findall(r'`([^`]+)`', cell):
            file, _, test = name.partition('.')
            folder, _, file = file.rpartition('/')
            paths = [
                path
                for path in TESTS.rglob(f'test_{file}.py')
                if path.parent.name == (folder or path.parent.name)
            ]
            found = re.findall(
                rf'^def test_{test}\w*\(',
                '\n'.join(path.read_text() for path in paths),
                flags=re.MULTILINE,
            )
            assert len(found) == 1, (number, name, found)
