"""The checkpoint that `run.start_from` names: found, verified, and held against the config of the run that begins with it."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import jax

from megajax.checkpoint.digests import SUMS, find_sound, find_steps
from megajax.checkpoint.record import START_FROM, config_differences, make_record, read_record
from megajax.config import CheckpointError, Config, ConfigError, Problem, RunError
from megajax.data.text.tokenizer import Tokenizer
from megajax.processes.agree import from_first
from megajax.run.named import candidates_of_start, tokenizer_of

HARMLESS = ('model.dropout', 'model.init_std')  # the weights mean the same with another value
ROTARY = (
    'model.max_seq_len',
    'model.rope_theta',
    'model.rope_scaling',
)  # which longer contexts ask to change

logger = logging.getLogger(__name__)


def find_start(config: Config, run: Path) -> Path | None:
    """The checkpoint whose weights the run begins with, verified by its digests, on any mesh and in any number of processes.

    None if the run has checkpoints of its own, or begins with random weights. What may differ is logged. Raises ConfigError, with
    every key of `model` that must not differ, or CheckpointError if no checkpoint holds what was written.
    """
    wanted = config.run.start_from
    if wanted is None or from_first(len(find_steps(run / 'checkpoints')))[0]:
        return None
    start = _find_sound(Path(wanted))
    _check_same_model(start, config)
    return start


def check_tokenizer(start: Path, tokenizer: Tokenizer | None) -> None:
    """Raises ConfigError if the ids of the run are not those that the weights were trained on."""
    there, here = read_record(start).tokenizer_sha256, tokenizer.fingerprint if tokenizer else None
    if there and here and there != here:
        message = (
            f'another than that of {start} ({there} there, {here} here), whose ids the weights know'
        )
        raise ConfigError(
            Problem(
                path='data.tokenizer',
                message=f'{message}; set data.tokenizer={tokenizer_of(start)}',
            )
        )


def origin_of(start: Path) -> dict[str, str]:
    """The checkpoint for the records of the run that begins with it."""
    digest = hashlib.sha256((start / SUMS).read_bytes()).hexdigest()
    return {'checkpoint': str(start), 'step': str(read_record(start).step), 'sha256': digest}


def _find_sound(wanted: Path) -> Path:
    """`find_sound`, by the first process, of which all take the same."""
    found, error = None, None
    if jax.process_index() == 0:
        try:
            candidates_of_start(wanted)
            found = find_sound(wanted)
        except RunError as failure:
            error = failure
    step = from_first(int(found.name) if found else -1)[0]
    if step < 0:
        raise error or CheckpointError(
            f'{START_FROM}={wanted} cannot be used: the first process says why'
        )
    return found or next(
        path.absolute() for path in candidates_of_start(wanted) if path.name == str(step)
    )


def _check_same_model(start: Path, config: Config) -> None:
    there = read_record(start)
    different = config_differences(there, make_record(config, there.step))
    free = HARMLESS + (ROTARY if config.model.position == 'rope' else ())
    problems = []
    for key, (old, new) in different.items():
        if key in free:
            logger.info('start      %s: %s -> %s', key, old, new)
        elif key.startswith('model.'):
            message = f'{_text(new)}, and {_text(old)} in {start}, whose weights {START_FROM} asks for; set {key}={_text(old)}'
            problems.append(Problem(path=key, message=message))
    if problems:
        raise ConfigError(*problems)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
