"""Change files of every format that megajax reads, at random and many times, and read them.

PYTHONPATH=tests python tests/mutants/mutate_files.py [--mutants 100000] [--seed 0] \
[--formats config,tokenizer] [--seconds 600] [--keep FOLDER] [--out FILE.json]

A reader may return, or raise an error that is printed without a traceback. Anything else is a hole:
another exception, an error of pages, too much memory or time, the end of the process. It is told
with the number of its mutant, which `--repeat FORMAT:NUMBER` makes again, and shows the traceback.
"""

import argparse
import json
import os
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from mutants import formats
from mutants.mutations import Structure, mutate
from proofs import circumstances, write_record

from megajax.base.errors import RunError

MEMORY = 2 << 30  # bytes of address space that reading may add
SECONDS = 30.0  # for one mutant, on a busy machine
IMPORTS = 300.0  # for what a process does before its first one
CHARACTERS = 100_000  # of a message: at most 40 problems of 2,600 characters
SHOWN = 5  # mutants that are told of each kind of hole


@dataclass
class Outcome:
    """What became of the mutants of a format."""

    format: str
    read: int = 0
    refused: int = 0
    seconds: float = 0.0
    holes: dict[str, list[int]] = field(default_factory=dict)  # numbers of mutants, by the error

    @property
    def mutants(self) -> int:
        return self.read + self.refused + sum(map(len, self.holes.values()))


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.work:
        work(*arguments.work)
        return
    with tempfile.TemporaryDirectory() as name:
        os.environ['XDG_CACHE_HOME'] = f'{name}/cache'
        if arguments.repeat:
            repeat(Path(name), arguments.seed, *arguments.repeat.split(':'))
            return
        names = arguments.formats.split(',') if arguments.formats else [*formats.ALL]
        about = circumstances(['tests/mutants/mutate_files.py', *sys.argv[1:]])
        outcomes = []
        for format in names:
            each = arguments.mutants // len(names), arguments.seconds / len(names)
            outcomes.append(run(Path(name), format, arguments.seed, *each))
            _show(outcomes[-1])
            if arguments.keep:
                _keep(Path(name), arguments.keep, arguments.seed, outcomes[-1])
            if arguments.out:
                rows = [{'mutants': each.mutants, **vars(each)} for each in outcomes]
                limits = {'bytes': MEMORY, 'seconds': SECONDS, 'characters': CHARACTERS}
                write_record(arguments.out, about, limits=limits, formats=rows)
    sys.exit(any(outcome.holes for outcome in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--mutants', type=int, default=100_000, help='of all formats together')
    parser.add_argument('--seconds', type=float, default=1e9, help='of all formats together')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--formats', default='', help=f'of {", ".join(formats.ALL)}')
    parser.add_argument('--keep', type=Path, help='a folder for the files of the holes')
    parser.add_argument('--out', type=Path)
    parser.add_argument('--repeat', help='FORMAT:NUMBER')
    parser.add_argument('--work', nargs=4, help=argparse.SUPPRESS)
    return parser


def run(folder: Path, format: str, seed: int, count: int, seconds: float) -> Outcome:
    """Read that many mutants, or as many as these seconds allow, in processes of their own."""
    seeds = _write_seeds(folder, format)
    outcome, first = Outcome(format), 0
    while first < count and outcome.seconds < seconds:
        first = _one_process(outcome, seeds, seed, range(first, count), seconds)
    return outcome


def _write_seeds(folder: Path, format: str) -> Path:
    """Write the files of a format to `folder`/FORMAT, or copy those of one that has the same."""
    write, seeds = formats.ALL[format].write, folder / format
    for other in formats.ALL:
        if formats.ALL[other].write is write and (folder / other).is_dir():
            return Path(shutil.copytree(folder / other, seeds))
    seeds.mkdir()
    write(seeds)
    return seeds


def _one_process(outcome: Outcome, seeds: Path, seed: int, numbers: range, seconds: float) -> int:
    """Read mutants until one ends the process, or these seconds are over but for those of imports;
    return the number of the next.
    """
    command = [sys.executable, __file__, '--work', outcome.format, str(seeds), str(seed)]
    with seeds.with_suffix('.log').open('w') as log:
        process = subprocess.Popen(
            [*command, f'{numbers.start}:{numbers.stop}'],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    results: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_hand_on, args=(process.stdout, results))
    reader.start()
    ready = results.get(timeout=IMPORTS)
    assert ready, seeds.with_suffix('.log').read_text()  # a fault of this program
    number, hole = numbers.start, ''
    before, begin = outcome.seconds, time.monotonic()
    while not hole and number < numbers.stop and outcome.seconds < seconds:
        try:
            line = results.get(timeout=SECONDS)
        except queue.Empty:
            hole = f'takes more than {SECONDS:g} s'
            _count(outcome, number, hole)
            number += 1
        else:
            code = process.wait() if not line else 0
            assert code <= 0, seeds.with_suffix('.log').read_text()
            hole = '' if line else f'ends the process with signal {-code}'
            _count(outcome, number, json.loads(line) if line else hole)
            number += 1
        outcome.seconds = round(before + time.monotonic() - begin, 1)
    process.kill()
    process.wait()
    reader.join()
    return number


def _hand_on(lines: Iterable[str], results: queue.Queue[str]) -> None:
    for line in lines:
        results.put(line)
    results.put('')


def _count(outcome: Outcome, number: int, result: str) -> None:
    if result == 'read':
        outcome.read += 1
    elif result == 'refused':
        outcome.refused += 1
    else:
        outcome.holes.setdefault(result, []).append(number)


def work(format: str, seeds: str, seed: str, numbers: str) -> None:
    """Say that all is imported, read mutants, and say a line of each: read, refused, or what else
    became of it.
    """
    said, sys.stdout = sys.stdout, sys.stderr  # a reader may print
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / 'work'
        shutil.copytree(seeds, folder)
        for path in targets(format, folder):
            formats.ALL[format].read(path)
        _limit_memory()
        print('ready', file=said, flush=True)
        for number in range(*map(int, numbers.split(':'))):
            with changed(folder, Path(seeds), format, seed, number) as path:
                print(json.dumps(judge(format, path)), file=said, flush=True)


@contextmanager
def changed(folder: Path, seeds: Path, format: str, seed: str, number: int) -> Iterator[Path]:
    """Put mutant `number` of one file in the place of that file in `folder`; yield its path."""
    random = Random(f'{seed} {format} {number}')
    structures = targets(format, seeds)
    path = random.choice([*structures])
    content, there = path.read_bytes(), folder / path.relative_to(seeds)
    there.write_bytes(mutate(content, structures[path], random))
    yield there
    there.write_bytes(content)


def targets(format: str, folder: Path) -> dict[Path, tuple[Structure, ...]]:
    """The files that are changed, each with the structures of its format."""
    return {
        path: structures
        for pattern, structures in formats.ALL[format].files.items()
        for path in sorted(folder.rglob(pattern))
        if path.is_file()
    }


def judge(format: str, path: Path) -> str:
    """Read the file: 'read', 'refused' for an expected error, or what else became of them."""
    try:
        formats.ALL[format].read(path)
    except RunError as error:
        return 'refused' if len(str(error)) <= CHARACTERS else 'refused with an endless message'
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if '/megajax/' in frame.filename] or frames
        place = f'{own[-1].filename.rpartition("/megajax/")[2]}, {own[-1].name}'
        return f'{type(error).__name__} in {place}: {own[-1].line}'
    return 'read'


def _limit_memory() -> None:
    status = Path('/proc/self/status').read_text()
    size = int(status.partition('VmSize:')[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def repeat(folder: Path, seed: int, format: str, number: str) -> None:
    """Make one mutant again, and read it with a traceback."""
    seeds, again = _write_seeds(folder, format), folder / 'again'
    shutil.copytree(seeds, again)
    with changed(again, seeds, format, str(seed), int(number)) as path:
        print(f'{path.name}: {path.read_bytes()[:2000]!r}')
        formats.ALL[format].read(path)


def _show(outcome: Outcome) -> None:
    mutants = outcome.mutants
    print(
        f'{outcome.format}: {mutants:,} mutants, {outcome.read:,} read, {outcome.refused:,} '
        f'refused, {mutants - outcome.read - outcome.refused:,} holes, '
        f'{mutants / max(outcome.seconds, 0.1):.0f} a second',
        flush=True,
    )
    for hole, numbers in outcome.holes.items():
        print(f'  {len(numbers)}, such as {numbers[:SHOWN]}: {hole}', flush=True)


def _keep(folder: Path, to: Path, seed: int, outcome: Outcome) -> None:
    """Copy the file of the first mutants of each hole to `to`/FORMAT-NUMBER-NAME."""
    seeds = folder / outcome.format
    to.mkdir(parents=True, exist_ok=True)
    for numbers in outcome.holes.values():
        for number in numbers[:SHOWN]:
            with tempfile.TemporaryDirectory() as name:
                copied = shutil.copytree(seeds, Path(name) / 'copied')
                with changed(copied, seeds, outcome.format, str(seed), number) as path:
                    shutil.copy(path, to / f'{outcome.format}-{number}-{path.name}')


if __name__ == '__main__':
    main()
