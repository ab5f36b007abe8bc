"""The record stored with each checkpoint, and the differences that a resume allows.

The record contains config, tokenizer, versions and data. Imports no jax.
"""

import datetime
import functools
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megajax.base.files.json_file import parse_json
from megajax.base.render.text import typed
from megajax.core.config import CheckpointError, Config, ConfigError, reload
from megajax.core.config.differences import differences
from megajax.core.config.renamed import current
from megajax.core.config.schema import keys_of

RECORD, TOKENIZER = 'record.json', 'tokenizer.json'
# validation loss of a state that was evaluated after it was saved
VALIDATION = 'validation_loss.json'
PACKAGES = ('megajax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
# Keys that change the arrays, or the numbers computed from them.
FIXED = ('model.', 'vision.', 'relevance.', 'lora.', 'train.dtype', 'optim.kind')
EXPERTS = 'model.experts'
# Keys that only change how many images, patches and tokens of images a batch has.
OF_ROWS = (
    'vision.images',
    'vision.max_patches',
    'vision.min_patches',
    'relevance.total_tokens',
)
OWN = ('run.', 'checkpoint.')  # keys that configure the process, not the training
# Keys that change the fingerprint of a corpus whose files are the same. Other keys do not: a corpus
# or a share of a blend is compared only with the corpus of its own name.
OF_FINGERPRINT = ('data.split', 'data.chat_template', *OF_ROWS[1:])
FAMILY = 'imported as'  # key of `data` and `origin`: the Hugging Face family of an import
START_FROM = 'run.start_from'
# Keys that matter only when a run begins, and change nothing afterwards.
AT_THE_START = frozenset({START_FROM, 'train.loss_scale'})


class Record(BaseModel):
    """The provenance of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra='ignore')

    step: int  # the step after which the state was saved
    # The number of samples in the training order before the next batch; None in records of old
    # versions, in which all batches had the size in the config.
    samples: int | None = None
    # The number of samples for which Megatron-LM's order was made, because the order depends on it;
    # None in megajax's own order.
    order_of: int | None = None
    # Whether a blend in megajax's own order has its exact weights; earlier versions rounded them.
    exact_weights: bool = False
    # The earlier step since which the save was due, if that step was skipped or its save failed.
    due: int | None = None
    # With data.order=streamed: the share, document and token at which each stream continues.
    streams: list[tuple[int, int, int]] | None = None
    time: datetime.datetime  # time of the state, in UTC
    config: dict[str, dict[str, Any]]  # the resolved config, by section and key
    tokenizer_sha256: str | None = None  # SHA-256 of tokenizer.json, or None if there is none
    # validation loss in nats per token, None if it was not measured
    validation_loss: float | None = None
    data: dict[str, str] = {}  # fingerprint of each corpus, by name
    versions: dict[str, str] = {}  # versions of the libraries and of Python
    # The checkpoint in `run.start_from`, its step and the SHA-256 of its SHA256SUMS, and the family
    # of the import with which the run or that checkpoint began; otherwise empty.
    origin: dict[str, str] = {}

    @property
    def family(self) -> str | None:
        """The Hugging Face family of the import with which the training began; None if unknown."""
        return (self.data | self.origin).get(FAMILY)

    @property
    def next_origin(self) -> dict[str, str]:
        """The origin of the checkpoints that follow this one in its run."""
        return self.origin if self.family is None else self.origin | {FAMILY: self.family}

    @property
    def mesh(self) -> str:
        """The mesh on which the checkpoint was written, and the ZeRO stage.

        Axes of size 1 are left out, except data and model, and so is `optim.shard=none`.
        """
        mesh, shard = self.config.get('mesh', {}), self.config.get('optim', {}).get('shard')
        groups = (
            [f'{key}={mesh[key]}' for key in keys if mesh.get(key, 1) != 1]
            for keys in (
                ('stages', 'virtual_stages'),
                ('replicas', 'experts'),
                ('context',),
                ('model_rows',),
            )
        )
        stages, replicas, context, rows = map(list, groups)
        data, model = ([f'{key}={mesh.get(key, "?")}'] for key in ('data', 'model'))
        parts = stages, data + replicas, context, rows + model
        rung = 'optimizer' if shard is True else shard or 'none'
        layout = ' x '.join(' '.join(part) for part in parts if part)
        return layout if rung == 'none' else f'{layout}, {rung}'


def make_record(
    config: Config,
    step: int,
    *,
    samples: int | None = None,
    order_of: int | None = None,
    streams: Sequence[tuple[int, int, int]] | None = None,
    due: int | None = None,
    tokenizer_sha256: str | None = None,
    validation_loss: float | None = None,
    data: Mapping[str, str] | None = None,
    origin: Mapping[str, str] | None = None,
) -> Record:
    """Return the record of this run's state after `step`."""
    return Record(
        step=step,
        samples=samples,
        order_of=order_of,
        exact_weights=True,
        due=due,
        streams=None if streams is None else [*streams],
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
    """Read the record in a step's folder. Raises CheckpointError if it cannot be read."""
    try:
        record = Record.model_validate_json((folder / RECORD).read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f'{folder / RECORD} cannot be read: run megajax checkpoint verify {typed(folder)}'
        ) from error
    if record.validation_loss is None:
        return record.model_copy(update={'validation_loss': _noted_loss(folder)})
    return record


def recorded_step(folder: Path) -> int | None:
    """Return the step of the state in a checkpoint's folder; None if its record is unreadable."""
    try:
        return int(parse_json((folder / RECORD).read_bytes())['step'])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def recorded_due(folder: Path) -> int | None:
    """Return the step since which a checkpoint's save was due, or None if it was not delayed."""
    try:
        due = parse_json((folder / RECORD).read_bytes())['due']
        return None if due is None else int(due)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _noted_loss(folder: Path) -> float | None:
    try:
        return float(parse_json((folder / VALIDATION).read_bytes()))
    except (OSError, ValueError, TypeError, OverflowError):
        return None


def is_fixed(key: str, there: Any, here: Any) -> bool:
    """Whether a resumed run is forbidden to change a config key from `there` to `here`."""
    if key == 'train.dtype' and {there, here} == {'bfloat16', 'fp8'}:
        # fp8 and bf16 differ only in some matmuls, and the scales of fp8 are initialized again
        return False
    return key.startswith(FIXED) and key not in OF_ROWS


def config_differences(there: Record, here: Record) -> dict[str, tuple[Any, Any]]:
    """Return the config keys whose values differ, with both values.

    If a key is missing in one record, its default is compared. If both models have experts, these
    differ in keys of their own.
    """
    different = differences(_with_defaults(there.config), _with_defaults(here.config))
    if all(isinstance(experts, dict) for experts in different.get(EXPERTS, (None,))):
        pair = different.pop(EXPERTS)
        different |= differences(*({EXPERTS: experts} for experts in pair))
    return different


def other_differences(there: Record, here: Record) -> dict[str, tuple[Any, Any]]:
    """Return the changes that a resume permits: of config keys that are not fixed, and of data."""
    different = {
        key: pair
        for key, pair in config_differences(there, here).items()
        if not is_fixed(key, *pair)
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
    """Return the libraries whose versions differ, and Python, with both versions."""
    return _changed(there.versions, here.versions)


def changed_corpora(there: Record, here: Record) -> dict[str, tuple[str, str]]:
    """Return the corpora whose contents have changed, unless the config asks for other contents.

    A different model or tokenizer may read other contents from the same files, so none are
    returned for it. A tokenizer that was trained on the corpus differs because the corpus does.
    """
    different = config_differences(there, here)
    # Streamed text has its files' fingerprint, and other text its tokens'.
    asked = 'streamed' in different.get('data.order', ())
    asked = asked or any(
        key in OF_FINGERPRINT or is_fixed(key, *pair) for key, pair in different.items()
    )
    asked = asked or ('data.tokenizer' in different and has_other_tokenizer(there, here))
    return {} if asked else _changed(there.data, here.data)


def has_other_tokenizer(there: Record, here: Record) -> bool:
    """Whether both records have a tokenizer, and not the same one."""
    hashes = {there.tokenizer_sha256, here.tokenizer_sha256}
    return len(hashes) > 1 and None not in hashes


def _with_defaults(config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    try:
        known = {
            name: _known(name, section)
            for name, section in config.items()
            if name in Config.model_fields
        }
        return reload(known, place=RECORD).model_dump(mode='json') | {
            name: config[name] for name in config.keys() - known.keys()
        }
    except ConfigError:  # the record is from a version of megajax with different rules
        return config


def _known(name: str, section: dict[str, Any]) -> dict[str, Any]:
    today = dict(current(f'{name}.{key}', value) for key, value in section.items())
    return {key: today[f'{name}.{key}'] for key in keys_of(name) if f'{name}.{key}' in today}


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {
        key: (old[key], new[key]) for key in sorted(old.keys() & new.keys()) if old[key] != new[key]
    }


@functools.cache
def _version(package: str) -> str:
    # Python takes 2 ms to find and parse the metadata of a package, and each save asks for all.
    try:
        return version(package)
    except PackageNotFoundError:  # megajax runs from a clone that is not installed
        return 'unknown'
