"""Where the numbers of a run go: a JSON line per step and TensorBoard."""

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
from tensorboardX import SummaryWriter


class MetricsWriter:
    """Appends to `metrics.jsonl`, and to TensorBoard's event files beside it; processes other than the first write nothing.

    What a run wrote of steps after `step`, which it lost, is taken away, so that each step is there once.
    """

    def __init__(self, folder: Path, step: int):
        self.path = folder / 'metrics.jsonl'
        self._first = jax.process_index() == 0
        self._open(step)

    def write(self, step: int, **values: float) -> None:
        """One line: the step and its values, by name; those that are not finite are null."""
        if not self._first:
            return
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines.write(json.dumps({'step': step, **line}) + '\n')
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        """Take away what was written of steps after `step`."""
        self._close()
        self._open(step)

    def _open(self, step: int) -> None:
        if self._first:
            _keep_steps(self.path, step)
            self._lines = self.path.open('a', buffering=1)
            self._board = SummaryWriter(str(self.path.with_name('tensorboard')), purge_step=step + 1)

    def _close(self) -> None:
        if self._first:
            self._lines.close()
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()


def _keep_steps(path: Path, step: int) -> None:
    """Only the whole lines of steps up to `step`; a kill may have cut the last."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith('\n') and json.loads(line)['step'] <= step]
    if kept != lines:
        new = path.with_name('metrics.jsonl.new')
        new.write_text(''.join(kept))
        os.replace(new, path)
