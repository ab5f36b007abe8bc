"""Trackers that plot a run's metrics: TensorBoard's event files, and Weights & Biases."""

import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from megajax.base.files.outputs import write_file
from megajax.core.config import StopRequested
from megajax.runtime.run.log.append import AppendedFile


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let `import torch` raise ImportError in the block, unless torch is imported already.

    The import takes seconds, and a broken torch may raise any error.
    """
    if 'torch' in sys.modules:
        yield
        return
    modules = cast('dict[str, Any]', sys.modules)
    modules['torch'] = None  # the import system's own mark of a module that must not be imported
    try:
        yield
    finally:
        del modules['torch']


with _without_torch():
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c
    from tensorboardX.summary import text as tensorboard_text

WANDB_ID = 'wandb_id'
SECONDS = 30  # seconds within which wandb must start and, at the end, send the rest

logger = logging.getLogger(__name__)


class TensorBoard:
    """An event file in `folder`.

    tensorboardX's own writer has a thread that dies if the disk is full; the run would then hang.
    """

    def __init__(self, folder: Path):
        name = f'events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}'
        self._file = AppendedFile(folder / name)
        self._file.waiting.append(
            _record(Event(wall_time=time.time(), file_version='brain.Event:2'))
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._file.append(_record(Event(wall_time=time.time(), step=step, summary=summary)))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write each text under its name for the text plugin.

        The plugin renders Markdown, in which four spaces before a line leave it unchanged.
        """
        indented = {
            name: ''.join(f'    {line}' for line in text.splitlines(keepends=True))
            for name, text in texts.items()
        }
        values = [
            value for name, text in indented.items() for value in tensorboard_text(name, text).value
        ]
        self._file.append(
            _record(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        )

    def rewind(self, step: int) -> None:
        """Start a session after `step`, so that TensorBoard drops earlier points of later steps."""
        self._file.append(
            _record(
                Event(
                    wall_time=time.time(),
                    step=step + (step > 0),
                    session_log=SessionLog(status=SessionLog.START),
                )
            )
        )

    def close(self, exit_code: int = 0) -> None:
        """Write the waiting events and close the file."""
        self._file.close()


def _record(event: Event) -> bytes:
    """Return the TFRecord frame of an event: length, its checksum, content, its checksum."""
    content = event.SerializeToString()
    length = struct.pack('<Q', len(content))
    return (
        length
        + struct.pack('<I', masked_crc32c(length))
        + content
        + struct.pack('<I', masked_crc32c(content))
    )


class WandB:
    """A run of the wandb project `project`; an id in the run directory lets restarts continue it.

    A copy of a run directory, next to its original, is a new run of wandb. If the service cannot be
    reached, the data are kept in `folder`/wandb, for `wandb sync`. Errors of wandb are passed on.
    """

    def __init__(self, folder: Path, project: str, config: dict[str, Any]):
        import wandb  # imported here, because it is an extra

        path = folder / WANDB_ID
        known = _known_run(path)
        # Do not send the console output or the repository's URL, which may contain a token.
        settings = wandb.Settings(
            console='off',
            disable_git=True,
            disable_code=True,
            init_timeout=SECONDS,
            finish_timeout=SECONDS,
        )
        begin = partial(
            wandb.init,
            project=project,
            id=known,
            resume='allow',
            name=folder.name,
            dir=folder,
            config=config,
            settings=settings,
        )
        try:
            self._run = begin()
        except wandb.errors.CommError as error:
            logger.warning(
                'wandb cannot be reached (%s): send the data later with '
                'wandb sync %s/wandb/offline-*',
                str(error).partition('\n')[0],
                folder,
            )
            self._run = begin(mode='offline')
        content = os.fsencode(f'{self._run.id}\n{folder.absolute()}\n')
        if not path.exists() or path.read_bytes() != content:
            write_file(path, content)
        self._next, self._failed = self._run.step, False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve; after a failure, write nothing more.

        wandb cannot go back, so a step that it already has keeps its old point. An evaluation of
        the last of these steps, which was stopped and is repeated on resume, is added to the next.
        """
        if 'loss' not in values and step == self._next - 1:
            step = self._next
        if self._failed or step < self._next:
            return
        try:
            # wandb sends a step's values with the next step, so that they can be logged in two
            # parts.
            self._run.log(dict(values), step=step)
        except Exception:
            self._failed = True  # each further call might block for as long
            raise
        self._next = step

    def rewind(self, step: int) -> None:
        """Warn if wandb has points after the next step, which it keeps: see `write`."""
        if not self._failed and step + 1 < self._next:
            logger.warning(
                'wandb cannot go back to step %d: it keeps its old points, and gets no new ones '
                'before step %d; metrics.jsonl and TensorBoard have all of them',
                step,
                self._next,
            )

    def close(self, exit_code: int = 0) -> None:
        """Send the remaining data, or keep them on disk if there is no network.

        wandb shows a run with another `exit_code` than 0 as failed, or as preempted if the code
        asks for a restart.
        """
        if exit_code == StopRequested.exit_code:
            self._run.mark_preempting()
        self._run.finish(exit_code)


def _known_run(path: Path) -> str | None:
    """Return the id in a file, or None if there is none or the file's folder is a copy.

    The file contains an id and the folder that it was written in, which is the original if it still
    has this id. Earlier versions wrote only the id.
    """
    id, folder = _read_id(path)
    if folder and os.path.exists(folder) and not os.path.samefile(folder, path.parent):
        original, _ = _read_id(Path(folder, WANDB_ID))
        return None if original == id else id
    return id


def _read_id(path: Path) -> tuple[str | None, str]:
    if not path.exists():
        return None, ''
    id, _, folder = os.fsdecode(path.read_bytes()).partition('\n')
    return id or None, folder.removesuffix('\n')
