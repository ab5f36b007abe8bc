"""Programs that draw the numbers of a run: TensorBoard's files, and Weights & Biases."""

import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import text as tensorboard_text

from megajax.run.log.append import AppendedFile

WANDB_ID = 'wandb_id'
SECONDS = 30  # that wandb may take to begin, and to send the rest at the end

logger = logging.getLogger(__name__)


class TensorBoard:
    """An event file in `folder`. tensorboardX's own writer has a thread that dies of a full disk, after which the run would wait for it."""

    def __init__(self, folder: Path):
        name = f'events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}'
        self._file = AppendedFile(folder / name)
        self._file.waiting.append(
            _record(Event(wall_time=time.time(), file_version='brain.Event:2'))
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each curve."""
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._file.append(_record(Event(wall_time=time.time(), step=step, summary=summary)))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Each under its name, as the plugin for text shows it: Markdown, in which four spaces before a line keep it as it is."""
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
        """TensorBoard leaves out what was said before of later steps."""
        self._file.append(
            _record(
                Event(
                    wall_time=time.time(),
                    step=step + (step > 0),
                    session_log=SessionLog(status=SessionLog.START),
                )
            )
        )

    def close(self) -> None:
        """Write what waits."""
        self._file.close()


def _record(event: Event) -> bytes:
    """An event as TFRecord frames it: length, its checksum, content, its checksum."""
    content = event.SerializeToString()
    length = struct.pack('<Q', len(content))
    return (
        length
        + struct.pack('<I', masked_crc32c(length))
        + content
        + struct.pack('<I', masked_crc32c(content))
    )


class WandB:
    """A run of project `project`, the same one after a restart: its id is in the run directory. Raises what wandb raises.

    Where the service cannot be reached, what it would have got stays in `folder`/wandb, for `wandb sync`.
    """

    def __init__(self, folder: Path, project: str, config: dict[str, Any]):
        import wandb  # here: an extra

        path = folder / WANDB_ID
        known = path.read_text().strip() if path.exists() else None
        # What is printed and the address of the repository, which may hold a token, are not sent.
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
                'wandb cannot be reached (%s): wandb sync %s/wandb/offline-* sends it later',
                str(error).partition('\n')[0],
                folder,
            )
            self._run = begin(mode='offline')
        if known is None:
            path.write_text(f'{self._run.id}\n')
        self._next, self._failed = self._run.step, False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each curve; wandb does not go back, so that of a step that it has stays as it is. Nothing more after a failure."""
        if self._failed or step < self._next:
            return
        try:
            self._run.log(
                dict(values), step=step
            )  # sent with the next step, so that a step may have two parts
        except Exception:
            self._failed = True  # each call might wait for it as long
            raise
        self._next = step

    def rewind(self, step: int) -> None:
        """Nothing: see `write`."""

    def close(self) -> None:
        """Send what is left, or keep it where there is no network."""
        self._run.finish()
