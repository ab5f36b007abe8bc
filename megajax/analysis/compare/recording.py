"""The numbers of a forward and a backward pass by site, and the file that stores them."""

import dataclasses
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from megajax.base.files.outputs import write_output
from megajax.core.config import ConfigError
from megajax.runtime.checkpoint.old_names import current

SUFFIX = '.npz'
ABOUT = 'about'
GROUPS = 'batch', 'forward', 'gradients'
Arrays = dict[str, np.ndarray]


class About(BaseModel):
    """The origin of the numbers."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    source: str  # a config, a run or a directory, as the user gave it
    config: dict[str, dict[str, Any]]  # the config that was executed, by section and key
    executed_with: str  # jax or transformers, and its version
    megajax: str  # version of megajax
    platform: str  # platform of the devices
    weights: dict[str, str]  # SHA-256 of each parameter, by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """The numbers of one forward and one backward pass, all in fp32 and in the order of a model.

    `forward` has results by site and `gradients` has gradients by parameter, each in the order in
    which a pass computes them. Arrays span the global batch, without the vocabulary's padding.
    """

    about: About
    batch: Arrays
    forward: Arrays
    gradients: Arrays


def write_recording(path: Path, recording: Recording) -> None:
    """Write a recording, completely or not at all."""
    about = np.frombuffer(recording.about.model_dump_json().encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{ABOUT: about, **dict(_named(recording))})
    write_output(path, file.getvalue())


def _named(recording: Recording) -> Iterator[tuple[str, np.ndarray]]:
    for group in GROUPS:
        for name, x in getattr(recording, group).items():
            yield f'{group}/{name}', x


def read_recording(path: Path) -> Recording:
    """Read a file that `write_recording` wrote.

    Raises ConfigError if the file is not a recording, or is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            about = About.model_validate_json(file[ABOUT].tobytes())
            weights = {current(name): digest for name, digest in about.weights.items()}
            groups = {group: dict(_group(file, group)) for group in GROUPS}
    except OSError as error:
        raise ConfigError(f'{path} cannot be read: {error.strerror or error}') from error
    except Exception as error:  # numpy and zipfile raise almost anything for a broken file
        raise ConfigError(
            f'{path} was not written by this version of megajax compare --dump: write it again'
        ) from error
    return Recording(about=about.model_copy(update={'weights': weights}), **groups)


def _group(file: Mapping[str, np.ndarray], group: str) -> Iterator[tuple[str, np.ndarray]]:
    for name in file:
        if name.startswith(f'{group}/'):
            yield current(name.removeprefix(f'{group}/')), file[name]
