"""The compiled step that a run stores next to its config, for `megajax report`."""

import gzip
import json
import logging
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
from jax.stages import Compiled

from megajax.base.errors import reason
from megajax.base.files.outputs import write_file
from megajax.core.config import Config, reload
from megajax.core.parallel.mesh import devices_per_host
from megajax.core.train.compiled_step import CompiledStep, record_step
from megajax.core.train.step import TrainState
from megajax.xla.miscompiles import target_of

PROGRAM, RECORD = 'step.hlo.gz', 'step.json'

logger = logging.getLogger(__name__)


class KeptStep(NamedTuple):
    """The step that the newest start of a run compiled, and the kind of devices that it runs on."""

    compiled: CompiledStep
    device_kind: str  # jax's name of the devices
    target: str  # the device that the step is inspected as: cpu, or the name of a GPU
    # The config of the step; a later start may have changed the run's without compiling a step.
    # None if an older megajax has stored the step.
    config: Config | None


def keep_step(
    folder: Path, config: Config, compiled: Compiled, state: TrainState, *, seconds: float
) -> None:
    """Write the text of a compiled step, its config and its metadata into a run directory.

    All processes must call this; the first one writes. A failure is logged and does not end a run.
    """
    mesh = jax.sharding.get_mesh()
    per_host = devices_per_host(mesh)
    if jax.process_index():
        return
    try:
        step = record_step(compiled, state, mesh, devices_per_host=per_host, seconds=seconds)
        device = mesh.devices.flat[0]
        record = {
            'device_kind': device.device_kind,
            'target': target_of(device),
            'config': config.model_dump(mode='json'),
            'step': json.loads(step.without_text().to_json()),
        }
        write_file(folder / PROGRAM, compressed(step.text))
        write_file(folder / RECORD, f'{json.dumps(record)}\n'.encode())
    except Exception as error:
        logger.warning('%s cannot be written (%s); the run continues', PROGRAM, reason(error))


def read_step(folder: Path) -> KeptStep | None:
    """Return the step that a run has stored, or None if there is none.

    Raises ConfigError, ValueError or OSError for files that cannot be read.
    """
    if not (folder / RECORD).is_file() or not (folder / PROGRAM).is_file():
        return None
    text = decompressed((folder / PROGRAM).read_bytes())
    record = json.loads((folder / RECORD).read_bytes())
    step = CompiledStep.from_json(json.dumps(record['step']), text=text)
    config = reload(record['config'], place=RECORD) if 'config' in record else None
    return KeptStep(step, record['device_kind'], record['target'], config)


def compressed(text: str) -> bytes:
    """Return the text of a program as the contents of a .gz file; equal texts give equal bytes."""
    return gzip.compress(text.encode(), mtime=0)


def decompressed(content: bytes) -> str:
    """Return the text that `compressed` has compressed.

    Raises ValueError if the content is not a .gz file, or is truncated or damaged.
    """
    try:
        return gzip.decompress(content).decode()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f'not a whole .gz file: {error}') from error
