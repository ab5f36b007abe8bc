"""The outputs for a run's metrics: a JSON line per step, TensorBoard and, optionally, W&B.

A failure of an output never ends a run: it is logged once, and unwritten metrics wait for the next
step.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import jax

from megajax.base.errors import reason
from megajax.base.files.json_file import parse_json
from megajax.core.config import Config, ConfigError, RunError
from megajax.core.config.extras import install
from megajax.runtime.run.log.append import AppendedFile
from megajax.runtime.run.log.trackers import TensorBoard, WandB

TIMES = {'step_ms', 'data_wait_ms'}

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A receiver of the metrics of each step; each of its methods may raise an error."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of the next step."""

    def rewind(self, step: int) -> None:
        """Discard the metrics of steps after `step`; with 0, discard all metrics."""

    def close(self, exit_code: int) -> None:
        """Finish: no more metrics will come, and the run ends with `exit_code`."""


class MetricsWriter:
    """The writer of `folder`/metrics.jsonl and of the trackers, in the first process only.

    Lines of steps after `step` are deleted, because the run has lost these steps; each step thus
    appears once.
    """

    def __init__(self, folder: Path, step: int, *, config: Config | None = None):
        self._sinks: dict[str, Sink] = {}
        self._failed: set[str] = set()
        self._lines = JsonLines(folder / 'metrics.jsonl')
        if jax.process_index() == 0:
            self._sinks = {
                'metrics.jsonl': self._lines,
                'TensorBoard': TensorBoard(folder / 'tensorboard'),
            }
            if config and config.run.wandb:
                try:
                    self._sinks['wandb'] = WandB(
                        folder, config.run.wandb, config.model_dump(mode='json')
                    )
                except Exception as error:
                    logger.warning('wandb is not used: %s', reason(error))
        self.rewind(step)

    def write(self, step: int, **values: float) -> None:
        """Write the metrics of a step, by name; in JSON, values that are not finite are null."""
        self._each(lambda sink: sink.write(step, values))

    def rewind(self, step: int) -> None:
        """Delete the metrics of steps after `step`; with 0, step 0's metrics too.

        A new run writes step 0 again.
        """
        self._each(lambda sink: sink.rewind(step))

    def lost_seconds(self, *, until: float = math.inf) -> float:
        """Return the seconds of the applied steps that the last `rewind` deleted, up to `until`.

        A line without times, which an earlier version wrote before it exited with an error, does
        not count.
        """
        timed = (
            line
            for line in self._lines.removed
            if line.get('taken') and line['step'] <= until and line.keys() >= TIMES
        )
        return sum(line['step_ms'] - line['data_wait_ms'] for line in timed) / 1e3

    def _each(self, action: Callable[[Sink], None]) -> None:
        for name, sink in self._sinks.items():
            try:
                action(sink)
            except Exception as error:
                if name not in self._failed:
                    logger.warning(
                        '%s cannot be written (%s); the run continues', name, reason(error)
                    )
                self._failed.add(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        code = error.exit_code if isinstance(error, RunError) else int(error is not None)
        self._each(lambda sink: sink.close(code))


class JsonLines:
    """A file with a JSON object per line, in the order of steps.

    A line that cannot be written waits for the next line.
    """

    def __init__(self, path: Path):
        # lines that the last `rewind` deleted, newest first
        self.removed: list[dict[str, Any]] = []
        self._path, self._file = path, AppendedFile(path)
        self._last: int | None = None  # the last step to keep, until later lines are cut off

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line of `step` and its values."""
        self._append(
            step, {name: value if math.isfinite(value) else None for name, value in values.items()}
        )

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write a line of `step` and its texts."""
        self._append(step, texts)

    def rewind(self, step: int) -> None:
        """Delete the lines of later steps, and a last line that is incomplete because of a kill."""
        self._last, self.removed = step, []
        waiting = [(piece, _parse(piece)) for piece in self._file.waiting]
        self._file.waiting.clear()
        for piece, line in reversed(waiting):
            if line and not 0 < line['step'] <= step:
                self.removed.append(line)
            else:
                self._file.waiting.appendleft(piece)
        self._cut()

    def close(self, exit_code: int = 0) -> None:
        """Write the waiting lines and close the file."""
        self._cut()
        self._file.close()

    def _append(self, step: int, values: Mapping[str, Any]) -> None:
        self._file.waiting.append((json.dumps({'step': step, **values}) + '\n').encode())
        self._cut()
        self._file.flush()

    def _cut(self) -> None:
        if self._last is None:
            return
        content = self._path.read_bytes() if self._path.exists() else b''
        end = len(content)
        while end:
            start = content.rfind(b'\n', 0, end - 1) + 1
            line = _parse(content[start:end])
            if line and line['step'] <= self._last > 0:
                break
            self.removed += [line] if line else []
            end = start
        if end < len(content):
            self._file.truncate(end)
        self._last = None


def _parse(piece: bytes) -> dict[str, Any] | None:
    """Return the object in a complete line; None if the line is truncated or damaged."""
    try:
        line = parse_json(piece) if piece.endswith(b'\n') else None
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get('step'), int) else None


def check_wandb(config: Config) -> None:
    """Raise ConfigError if `run.wandb` is set and wandb is not installed."""
    if config.run.wandb and find_spec('wandb') is None:
        raise ConfigError(
            f'run.wandb={config.run.wandb} needs wandb, which is not installed: '
            f'{install("wandb")}, or leave the key out'
        )
