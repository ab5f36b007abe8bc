"""Read run directories, even if a run is in progress or has only just started."""

import dataclasses
import logging
import shlex
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.analysis.report.downsample import Floats
from megajax.base.errors import reason
from megajax.base.files.exists import exists, is_file
from megajax.base.files.json_file import parse_json
from megajax.core.config import Config, ConfigError, RunError, load
from megajax.core.config.load import CONFIG, run_like, runs_in
from megajax.runtime.checkpoint.digests import find_steps, problems, read_sums
from megajax.runtime.checkpoint.record import TOKENIZER, Record, read_record
from megajax.runtime.data.text.tokenizer import load_tokenizer
from megajax.runtime.run.clock import SUMMARY
from megajax.runtime.run.lock import running_in
from megajax.runtime.run.readings import find_readings
from megajax.runtime.run.saved_step import KeptStep, read_step

METRICS, SAMPLES = 'metrics.jsonl', 'samples.jsonl'
MAX_STEPS = 2**53  # integers below it are exact in float64, the dtype of columns
LARGEST_FLOAT = 2**1023
MAX_PNG_BYTES = 400_000  # maximum size of an image in a report
_PNG = b'\x89PNG\r\n'

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The metrics of a run's steps as columns, with NaN for the values that a step lacks."""

    number: Floats
    columns: Mapping[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        return self.columns.get(name, np.full(len(self.number), np.nan))

    def known(self, name: str) -> Floats:
        """Return the finite values of a column."""
        column = self[name]
        return column[np.isfinite(column)]

    def median(self, name: str) -> float | None:
        """Return the median of a column; None if it has no finite value."""
        known = self.known(name)
        return float(np.median(known)) if len(known) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One finished checkpoint of a run."""

    step: int
    record: Record | None
    bytes: int | None
    fault: str | None  # the first fault of its files, judged by names and sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
    """The content of a run directory, as far as it exists."""

    name: str
    folder: Path
    config: Config
    steps: Steps
    # The lines of metrics.jsonl that do not belong to a step.
    evaluations: Sequence[Mapping[str, float]]
    summary: Mapping[str, Any]  # summary.json; empty if there is none
    samples: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[Checkpoint]
    tokenizer: str | None  # digest of the tokenizer; None if the run has none
    readings: bytes | None  # the newest PNG of held-out images with transcriptions
    kept: KeptStep | None  # the compiled step of the run
    unreadable: Sequence[str]  # a sentence for each file that cannot be read
    running: str | None  # the process that is training the run now

    @property
    def last_step(self) -> int:
        """Return the last step taken; 0 before the first."""
        return int(self.steps.number[-1]) if len(self.steps.number) else 0

    @property
    def compiled_config(self) -> Config:
        """Return the config of the compiled step; the run's if no step or no config is stored."""
        return self.kept.config if self.kept and self.kept.config else self.config

    @property
    def is_finished(self) -> bool:
        """Return whether all steps of the config were taken."""
        return self.last_step >= self.config.train.steps

    def evaluated(self, name: str) -> tuple[Floats, Floats]:
        """Return the steps and values of one result; NaN or infinite where it was not finite."""
        pairs = [
            (line['step'], np.nan if line[name] is None else line[name])  # JSON has no NaN
            for line in self.evaluations
            if name in line and (line[name] is None or _is_number(line[name]))
        ]
        both = np.array(pairs, float).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def finite(self, name: str) -> Floats:
        """Return the finite values of one result of the evaluations."""
        _, values = self.evaluated(name)
        return values[np.isfinite(values)]


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read run directories; among runs, leave out paths without a run, with a warning.

    Raises ConfigError for a missing or repeated folder, and if none has a run.
    """
    has_run = any(is_file(folder / CONFIG) for folder in folders)
    # A pattern such as runs/* also finds the folder of a start that was killed.
    left_out = [
        folder
        for folder in folders
        if has_run and not is_file(folder / CONFIG) and exists(folder) and not runs_in(folder)
    ]
    folders = [folder for folder in folders if folder not in left_out]
    faults = [*_faults(folders)]
    if faults:
        raise ConfigError(*faults)
    for folder in left_out:
        logger.warning('%s is left out: it is not a run directory (no %s)', folder, CONFIG)
    names = [folder.absolute().name for folder in folders]
    return [
        _read(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def _faults(folders: Sequence[Path]) -> Iterator[str]:
    for place, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:place]]:
            yield f'{folder} is given twice: remove one'
        if is_file(folder / CONFIG):
            continue
        guess = f'did you mean {near}? ' if (near := run_like(folder)) else ''
        fix = (
            f'give the runs in it: {shlex.join(below)}'
            if (below := runs_in(folder))
            else f'{guess}give the folder that megajax train printed after `run`'
        )
        yield f'{folder} is not a run directory (no {CONFIG}): {fix}'


def _read(folder: Path, name: str) -> RunData:
    unreadable = list[str]()
    steps, evaluations = _metrics(folder / METRICS)
    checkpoints = _checkpoints(folder / 'checkpoints')
    return RunData(
        name=name,
        folder=folder,
        config=load(folder / CONFIG, is_recorded=True),
        steps=steps,
        evaluations=evaluations,
        summary=_summary(folder / SUMMARY),
        samples=[*_lines(folder / SAMPLES)],
        checkpoints=checkpoints,
        tokenizer=_tokenizer(folder / TOKENIZER, checkpoints, unreadable),
        readings=_readings(folder),
        kept=_kept(folder, unreadable),
        unreadable=unreadable,
        running=running_in(folder),
    )


def _metrics(path: Path) -> tuple[Steps, list[dict[str, float]]]:
    """Read the metrics line by line, because the file of a long run is larger than its columns."""
    columns, numbers = defaultdict[str, Any](lambda: array('d')), array('d')
    evaluations = []
    for line in _lines(path):
        if 'loss' not in line:
            evaluations.append(line)
            continue
        for name, value in line.items():
            column = columns[name]
            column.extend([np.nan] * (len(numbers) - len(column)))  # the column begins at this step
            column.append(value if _is_number(value) else np.nan)
        numbers.append(line['step'])
    for column in columns.values():
        column.extend([np.nan] * (len(numbers) - len(column)))
    return Steps(np.array(numbers), {name: np.array(x) for name, x in columns.items()}), evaluations


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file with one per line; skip incomplete lines."""
    try:
        with path.open('rb') as file:
            for piece in file:
                try:
                    line = parse_json(piece)
                except ValueError:
                    continue
                if isinstance(line, dict) and _is_step(line.get('step')):
                    yield line
    except OSError:
        return


def _is_step(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < MAX_STEPS


def _is_number(value: object) -> bool:
    """Return whether a value is a number that fits a float; a 400-digit integer does not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < LARGEST_FLOAT
    return isinstance(value, float)


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = parse_json(path.read_bytes())
        return summary if isinstance(summary['seconds'], dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _checkpoints(folder: Path) -> list[Checkpoint]:
    if not folder.is_dir():
        return []
    found = [(folder / str(step), step) for step in find_steps(folder)]
    read = [(path, _checkpoint(path, step)) for path, step in found]
    # a run may have deleted an old one
    return [checkpoint for path, checkpoint in read if path.exists()]


def _checkpoint(path: Path, step: int) -> Checkpoint:
    record, size = None, None
    faults = problems(path, contents=False)
    try:
        record = read_record(path)
        size = read_sums(path).size
    except (RunError, OSError, ValueError) as error:
        faults.append(reason(error))
    return Checkpoint(step=step, record=record, bytes=size, fault=faults[0] if faults else None)


def _tokenizer(file: Path, checkpoints: Sequence[Checkpoint], unreadable: list[str]) -> str | None:
    records = [checkpoint.record for checkpoint in reversed(checkpoints)]
    known = [record.tokenizer_sha256 for record in records if record and record.tokenizer_sha256]
    if known or not file.is_file():
        return known[0] if known else None
    try:
        return load_tokenizer(str(file)).fingerprint
    except (ConfigError, OSError, ValueError) as error:
        unreadable.append(f'{TOKENIZER} cannot be read ({reason(error)})')
        return None


def _readings(folder: Path) -> bytes | None:
    _, newest = max(find_readings(folder).items(), default=(0, None))
    try:
        content = newest.read_bytes() if newest else b''
    except OSError:
        return None
    return content if content.startswith(_PNG) and len(content) <= MAX_PNG_BYTES else None


def _kept(folder: Path, unreadable: list[str]) -> KeptStep | None:
    try:
        return read_step(folder)
    except Exception as error:  # a damaged file, or one of a different version
        unreadable.append(f'the compiled step cannot be read ({reason(error)})')
        return None
