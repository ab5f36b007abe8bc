"""Where the numbers of a run go: a JSON line per step and TensorBoard."""

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboardX import SummaryWriter


class MetricsWriter:
    """Appends to `metrics.jsonl`, and to TensorBoard's event files beside it."""

    def __init__(self, folder: Path):
        self.path = folder / 'metrics.jsonl'
        self._lines = self.path.open('a', buffering=1)
        self._board = SummaryWriter(str(folder / 'tensorboard'))

    def write(self, step: int, **values: float) -> None:
        """One line: the step and its values, by name."""
        self._lines.write(json.dumps({'step': step, **values}) + '\n')
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lines.close()
        self._board.close()
