"""Infer the config of a `train` command that names none from the run it resumes or starts from.

Imports no jax.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.base.render.text import typed
from megajax.core.config import (
    CheckpointError,
    Config,
    ConfigError,
    load,
    mistake,
    overridden,
    reload,
)
from megajax.core.config.load import CONFIG, run_like, runs_in
from megajax.core.config.overrides import typed_override
from megajax.runtime.checkpoint.digests import find_candidates, find_steps, readable
from megajax.runtime.checkpoint.record import RECORD, START_FROM, TOKENIZER, read_record

DEFAULT = 'tiny'
TRAINED = 'auto', 'bpe'  # values of `data.tokenizer` that train a tokenizer on a text
NO_FILES = *TRAINED, 'bytes', 'none'  # values of `data.tokenizer` that name no file


def config_of_overrides(overrides: Sequence[str]) -> tuple[Config, str]:
    """Return the config that these overrides change, and its name.

    It is the config of the run in `run.dir`, else of the run in `run.start_from`, else the default
    config. Raises ConfigError if `run.dir` is set but contains no run, because the user hardly
    wants the default config.
    """
    folder, start = (overridden(overrides, key) for key in ('run.dir', START_FROM))
    began = Path(folder) / CONFIG if isinstance(folder, str) and folder else None
    if began:
        with readable(began.parent):
            if began.is_file():
                return load(began, overrides, is_recorded=True), began.stem
    if isinstance(start, str) and start:
        return _config_of_start(Path(start), overrides)
    if began:
        raise ConfigError(_nothing_there(began.parent))
    return load(DEFAULT, overrides), DEFAULT


def how_to_resume(folder: Path, *, is_alone: bool, resume: str = 'auto') -> str:
    """Return how to resume the run in a folder, or how to start it again if nothing is there yet.

    A run that is not alone needs more than its config: a launcher for its other processes, or a
    program with its own optimizer. `resume` is the `run.resume` of the same command.
    """
    has_config = (folder / CONFIG).is_file()
    if not has_config and not find_steps(folder / 'checkpoints'):
        return 'to start it again, run the same command'
    if has_config and is_alone:
        return f'to resume, run megajax train {typed_override("run.dir", folder)}'
    allowed = ' run.resume=auto' if resume == 'never' else ''
    return f'to resume, run the same command with {typed_override("run.dir", folder)}{allowed}'


def _config_of_start(start: Path, overrides: Sequence[str]) -> tuple[Config, str]:
    """Return the checkpoint's config, without the keys of its process, and a name for it.

    The tokenizer is the one that the weights were trained with, and the chat template is the one
    that the checkpoint carries.
    """
    for checkpoint in candidates_of_start(start):
        try:
            record = read_record(checkpoint)
        except CheckpointError:  # use the previous checkpoint, as the verification does
            continue
        settings = {section: keys for section, keys in record.config.items() if section != 'run'}
        settings['data'] = settings['data'] | {'chat_template': None}
        if record.tokenizer_sha256:
            settings['data'] |= {'tokenizer': str(tokenizer_of(checkpoint))}
        name = checkpoint.absolute().parent.parent.name
        return reload(settings, overrides, place=str(checkpoint / RECORD)), name
    raise CheckpointError(
        f'{START_FROM}={start} cannot be used: run megajax checkpoint verify {typed(start)}'
    )


def candidates_of_start(start: Path) -> list[Path]:
    """Return `find_candidates(start)`; its error names the key `run.start_from`."""
    try:
        return find_candidates(start)
    except ConfigError as error:
        raise mistake(START_FROM, str(error)) from None


def tokenizer_of(checkpoint: Path) -> Path:
    """Return the path of a checkpoint's tokenizer.json.

    The run's own file has precedence, because it outlives the checkpoint.
    """
    run_tokenizer = checkpoint.absolute().parent.parent / TOKENIZER
    return run_tokenizer if run_tokenizer.is_file() else checkpoint.absolute() / TOKENIZER


def with_own_tokenizer(config: Config, run: Path, start: Path | None = None) -> Config:
    """Return the config of a run with its own tokenizer.json in place of what it began with.

    A run can therefore resume after it was moved, and after that file was changed or deleted. A
    file that the config names for the first time is not replaced. A tokenizer that the run trained
    on its texts (`auto`, `bpe`) is not trained again, because the texts may have changed. With
    `data.tokenizer=auto`, the run's own tokenizer may also be its initial weights' tokenizer; a new
    run finds it in the checkpoint `start`.
    """
    checkpoint, begun = newest_data(run) if start is None else (start, {})
    tokenizer = config.data.tokenizer
    if tokenizer in TRAINED:
        is_own = begun.get('tokenizer') in TRAINED
        is_own = is_own or (tokenizer == 'auto' and config.run.start_from is not None)
    else:
        is_own = tokenizer not in NO_FILES and tokenizer == begun.get('tokenizer')
    if checkpoint is None or not is_own or not (own := tokenizer_of(checkpoint)).is_file():
        return config
    data = config.data.model_copy(update={'tokenizer': str(own)})
    return config.model_copy(update={'data': data})


def newest_data(run: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """Return a run's newest checkpoint that has a record, and the `data` section of its config."""
    for step in reversed(find_steps(run / 'checkpoints')):
        checkpoint = run / 'checkpoints' / str(step)
        try:
            return checkpoint, read_record(checkpoint).config.get('data', {})
        except CheckpointError:  # a checkpoint without a record is not restored
            continue
    return None, {}


def _nothing_there(folder: Path) -> str:
    inside = runs_in(folder)
    meant = inside[0] if inside else run_like(folder)
    guess = f'did you mean {typed_override("run.dir", meant)}? ' if meant else ''
    fix = 'to begin a run there name its config, for example '
    fix += f'megajax train {DEFAULT} {typed_override("run.dir", folder)}'
    return f'run.dir={folder}: there is no run to resume (no {CONFIG}); {guess}{fix}'
