"""The files of a run that a resume reads: its config, its tokenizer and the model's companions."""

from pathlib import Path

import jax

from megajax.core.config import Config, dump
from megajax.core.config.load import CONFIG
from megajax.runtime.checkpoint.hf_files import Companions
from megajax.runtime.checkpoint.record import TOKENIZER
from megajax.runtime.data import Tokenizer


def write_inputs(
    folder: Path, config: Config, tokenizer: Tokenizer | None, companions: Companions
) -> None:
    """Write a run's inputs to its folder; only the first process does so."""
    if jax.process_index():
        return
    (folder / CONFIG).write_text(dump(_to_keep(config)))
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
    companions.write(folder)


def _to_keep(config: Config) -> Config:
    """Return the config with which a later start resumes the run.

    The user allows changed data for one start: the data may change again before the next start.
    """
    run = config.run.model_copy(update={'allow_changed_data': False})
    return config.model_copy(update={'run': run})
