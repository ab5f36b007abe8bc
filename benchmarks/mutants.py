"""Measure which random small changes the fast tests notice:
`python benchmarks/mutants.py OUT.csv --seed 1`.

Changes are drawn from each package in turn, and applied one at a time to a copy of the repository.
For each change, the fast tests that call the changed function run, the folder that mirrors its
package first, and then the other tests of their files, up to the first failure. Which tests call
which functions is measured once, with Python 3.12 or later, and stored next to OUT.csv, for each
file of tests until it changes. Changes that are in OUT.csv already are skipped, so that a stopped
run resumes. Fill in the column `equivalent` by hand: why a change that no test noticed makes no
difference. `--count 0` prints the shares again.

mutmut leaves out decorated functions (here every `custom_vjp`, cached function and property) and
draws no sample, and cosmic-ray starts a process, which imports jax anew, for each change: so this
forks from a process that has jax imported.
"""

import argparse
import csv
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from code_changes import Change, room_of, sample
from mutant_runner import OUT_OF_TIME, Test, copied, first_to_notice, import_libraries, record

ROOT = Path(__file__).parents[1]
COLUMNS = ['room', 'file', 'line', 'kind', 'change', 'noticed_by', 'tests', 'seconds', 'equivalent']
HELPERS = 'conftest.py', 'support.py', 'runs.py', 'checkpoints.py', 'inspect_collectives.py'


def main() -> None:
    arguments = parse()
    rows = list(csv.DictReader(arguments.out.open(newline=''))) if arguments.out.exists() else []
    done = {(row['file'], row['line'], row['change']) for row in rows}
    recorded = arguments.out.with_suffix('.calls.json').absolute()
    out = arguments.out.absolute()
    with copied(ROOT) as tree, out.open('a', newline='') as file:
        import_libraries()
        scratch = tree.parent
        tests = measure_calls(tree, arguments.tests, recorded, scratch)
        drawn = sample(
            tree, package_files(arguments.since), seed=arguments.seed, packages=arguments.packages
        )
        writer = csv.DictWriter(file, COLUMNS)
        if not rows:
            writer.writeheader()
        for number, change in enumerate(
            islice(drawn, arguments.first, arguments.first + arguments.count), arguments.first
        ):
            if (change.file, str(change.line), change.text) in done:
                continue
            row = try_change(change, tests, tree, scratch, seconds=arguments.seconds)
            writer.writerow(row)
            file.flush()
            print(
                f'{number:3}  {row["seconds"]:6.1f} s  {change.file}:{change.line}  '
                f'{change.text}  {row["noticed_by"] or "NOT NOTICED"}'
            )
    report(list(csv.DictReader(out.open(newline=''))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    parser.add_argument(
        '--count',
        type=int,
        default=150,
        help='how many changes of the sequence that the seed gives',
    )
    parser.add_argument(
        '--first', type=int, default=0, help='the number of the change to begin with'
    )
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument(
        '--packages',
        nargs='+',
        default=(),
        help='folders of megajax/; `megajax` for the files that are in none',
    )
    parser.add_argument(
        '--tests', nargs='+', default=['tests'], help='folders of tests to choose from'
    )
    parser.add_argument(
        '--since', metavar='COMMIT', help='only in files that differ from those of a commit'
    )
    parser.add_argument(
        '--seconds', type=float, default=600, help='the most that is spent on one change'
    )
    return parser.parse_args()


def package_files(since: str | None) -> list[str]:
    """The modules of the package, from the root of the repository."""
    command = (
        ['git', 'ls-files', 'megajax/*.py']
        if since is None
        else ['git', 'diff', '--name-only', '--diff-filter=d', since, '--', 'megajax/*.py']
    )
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def measure_calls(tree: Path, folders: Sequence[str], recorded: Path, scratch: Path) -> list[Test]:
    """Every fast test with the functions that it calls.

    What `recorded` has of files of tests that have not changed is taken from there.
    """
    known = json.loads(recorded.read_text()) if recorded.exists() else {}
    tests: list[Test] = []
    for path in sorted({path for folder in folders for path in (tree / folder).rglob('test_*.py')}):
        file = str(path.relative_to(tree))
        digest = hashlib.sha256(
            b''.join(
                each.read_bytes() for each in (path, *(tree / 'tests' / name for name in HELPERS))
            )
        ).hexdigest()
        if known.get(file, {}).get('sha256') != digest:
            found = record(file, scratch)
            print(
                f'{sum(test.seconds for test in found):6.1f} s  {file}: '
                f'{len(found)} fast tests pass',
                flush=True,
            )
            known[file] = {
                'sha256': digest,
                'tests': [
                    {'name': x.name, 'seconds': x.seconds, 'calls': sorted(x.calls)} for x in found
                ],
            }
            recorded.write_text(json.dumps(known))
        tests += [
            Test(name=x['name'], seconds=x['seconds'], calls=frozenset(x['calls']))
            for x in known[file]['tests']
        ]
    return tests


def try_change(
    change: Change, tests: Sequence[Test], tree: Path, scratch: Path, *, seconds: float
) -> dict[str, object]:
    """Run the tests that can notice a change with it applied; a row of the file."""
    able = able_to_notice(tests, change)
    path, start = tree / change.file, time.monotonic()
    source = path.read_text()
    path.write_text(change.apply(source))
    try:
        noticed_by = first_to_notice(able, scratch, seconds=seconds) if able else ''
    finally:
        path.write_text(source)
    return {
        'room': room_of(change.file),
        'file': change.file,
        'line': change.line,
        'kind': change.kind,
        'change': change.text,
        'noticed_by': noticed_by,
        'tests': len(able),
        'seconds': round(time.monotonic() - start, 1),
        'equivalent': '',
    }


def able_to_notice(tests: Sequence[Test], change: Change) -> list[Test]:
    """The tests that call the changed function, then the others of their files.

    A fixture or a cached function is called by the first test of a file that needs it, and the
    others read its result.
    """
    called = f'{change.file}:{change.function}'
    callers = [test for test in tests if called in test.calls]
    files = {test.file for test in callers}
    others = [test for test in tests if test.file in files and called not in test.calls]
    return [*in_order(callers, change), *in_order(others, change)]


def in_order(tests: Sequence[Test], change: Change) -> list[Test]:
    """The folder that mirrors the changed room first, then the quickest file of tests.

    The tests of a file stay together.
    """
    seconds: dict[str, float] = {}
    for test in tests:
        seconds[test.file] = seconds.get(test.file, 0) + test.seconds
    mirror = f'tests/{room_of(change.file)}/'
    return sorted(
        tests, key=lambda test: (not test.file.startswith(mirror), seconds[test.file], test.file)
    )


def report(rows: Sequence[dict[str, str]]) -> None:
    """Print the share that was noticed, of each room and of all, and what was not."""
    for name, of_room in by_room(rows):
        noticed = sum(is_noticed(row) for row in of_room)
        print(f'{name:12} {noticed:4} of {len(of_room):4} noticed ({noticed / len(of_room):.0%})')
    for row in rows:
        if not is_noticed(row):
            print(f'{row["file"]}:{row["line"]}  {row["change"]}  {row["equivalent"]}')


def by_room(rows: Sequence[dict[str, str]]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Rows of each room and of all, without changes that make no difference."""
    real = [row for row in rows if not row['equivalent']]
    for room in sorted({row['room'] for row in real}):
        yield room, [row for row in real if row['room'] == room]
    if real:
        yield 'all', real


def is_noticed(row: dict[str, str]) -> bool:
    return row['noticed_by'] not in ('', OUT_OF_TIME)


if __name__ == '__main__':
    sys.exit(main())
