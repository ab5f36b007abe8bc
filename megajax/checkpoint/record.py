"""What is kept with each checkpoint beside the state: config, tokenizer, versions, data; and what may differ on resume. Imports no jax."""

import datetime
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megajax.config import CheckpointError, Config
from megajax.config.renamed import current

RECORD, TOKENIZER = 'record.json', 'tokenizer.json'
VALIDATION = 'validation_loss.json'  # of a state that was evaluated after it was saved
PACKAGES = ('megajax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
FIXED = ('model.', 'train.dtype')  # other arrays, or other numbers from the same ones
OWN = ('run.', 'checkpoint.')  # of a process, not of the training
START_FROM = 'run.start_from'
AT_THE_START = frozenset(
    {START_FROM, 'train.loss_scale'}
)  # keys that a run begins with, and which change nothing afterwards


class Record(BaseModel):
    """How a checkpoint came about. `config` is the resolved one, `tokenizer_sha256` that of tokenizer.json, None if there is none."""

    model_config = ConfigDict(frozen=True, extra='ignore')

    step: int
    time: datetime.datetime  # of the state, in UTC
    config: dict[str, dict[str, Any]]
    tokenizer_sha256: str | None = None
    validation_loss: float | None = None  # nats per token, None if it was not measured
    data: dict[str, str] = {}
    versions: dict[str, str] = {}
    origin: dict[
        str, str
    ] = {}  # of a run that `run.start_from` began: the checkpoint, its step and the SHA-256 of its SHA256SUMS

    @property
    def mesh(self) -> str:
        """The mesh that it was written on."""
        return ' x '.join(
            f'{axis}={self.config.get("mesh", {}).get(axis, "?")}' for axis in ('data', 'model')
        )


def make_record(
    config: Config,
    step: int,
    *,
    tokenizer_sha256: str | None = None,
    validation_loss: float | None = None,
    data: Mapping[str, str] | None = None,
    origin: Mapping[str, str] | None = None,
) -> Record:
    """The record of a state of this run after `step`."""
    return Record(
        step=step,
        time=datetime.datetime.now(datetime.UTC),
        config=config.model_dump(mode='json'),
        tokenizer_sha256=tokenizer_sha256,
        validation_loss=validation_loss,
        data=dict(data or {}),
        origin=dict(origin or {}),
        versions={name: _version(name) for name in PACKAGES}
        | {'python': platform.python_version()},
    )


def read_record(folder: Path) -> Record:
    """The record in a step's folder. Raises CheckpointError if it cannot be read."""
    try:
        record = Record.model_validate_json((folder / RECORD).read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f'{folder / RECORD} cannot be read: run megajax checkpoint verify {folder}'
        ) from error
    if record.validation_loss is None:
        return record.model_copy(update={'validation_loss': _noted_loss(folder)})
    return record


def recorded_step(folder: Path) -> int | None:
    """The step of the state in a checkpoint's folder, None if its record does not tell."""
    try:
        return int(json.loads((folder / RECORD).read_bytes())['step'])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _noted_loss(folder: Path) -> float | None:
    try:
        return float(json.loads((folder / VALIDATION).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def is_fixed(key: str) -> bool:
    """Whether a resumed run must have the same value of a config key."""
    return key.startswith(FIXED)


def config_differences(there: Record, here: Record) -> dict[str, tuple[Any, Any]]:
    """The config keys with other values, and both values; a key that one of them does not know has its default."""
    old, new = _flat(there.config), _flat(here.config)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return {key: (old.get(key), new.get(key)) for key in keys}


def other_differences(there: Record, here: Record) -> dict[str, tuple[Any, Any]]:
    """What a resumed run may have changed: keys of the config that are not fixed, and the contents of the data."""
    different = {
        key: pair for key, pair in config_differences(there, here).items() if not is_fixed(key)
    }
    config = {
        key: pair
        for key, pair in different.items()
        if key in AT_THE_START or not key.startswith(OWN)
    }
    return {
        **config,
        **{f'data {name}': pair for name, pair in _changed(there.data, here.data).items()},
    }


def version_differences(there: Record, here: Record) -> dict[str, tuple[str, str]]:
    """The libraries, and Python, of which both know another version."""
    return _changed(there.versions, here.versions)


def changed_corpora(there: Record, here: Record) -> dict[str, tuple[str, str]]:
    """The corpora that hold something else than they did, though nothing in the config's `data` asks for that."""
    asked = any(key.startswith('data.') for key in config_differences(there, here))
    return {} if asked else _changed(there.data, here.data)


def _flat(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    try:
        known = {
            name: _known(name, section)
            for name, section in config.items()
            if name in Config.model_fields
        }
        config = Config.model_validate(known).model_dump(mode='json') | {
            name: config[name] for name in config.keys() - known.keys()
        }
    except ValidationError:  # of a version with other rules
        pass
    return {
        f'{name}.{key}': value for name, section in config.items() for key, value in section.items()
    }


def _known(name: str, section: dict[str, Any]) -> dict[str, Any]:
    fields = Config.model_fields[name].annotation.model_fields  # type: ignore[union-attr]
    today = dict(current(f'{name}.{key}', value) for key, value in section.items())
    return {key: today[f'{name}.{key}'] for key in fields if f'{name}.{key}' in today}


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {
        key: (old[key], new[key]) for key in sorted(old.keys() & new.keys()) if old[key] != new[key]
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a clone that is not installed
        return 'unknown'
