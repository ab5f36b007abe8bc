"""The files of a run that a resume reads: its config, its tokenizer and the model's companions.

A run's directory may be chosen by the user, so it is first searched for files of other origin.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from megajax.base.errors import reason
from megajax.base.files.exists import exists
from megajax.base.files.outputs import write_file
from megajax.base.render.text import typed
from megajax.core.config import Config, ConfigError, dump, mistake
from megajax.core.config.load import CONFIG
from megajax.core.config.overrides import typed_override
from megajax.core.config.recorded import OF_START, is_written_by_run
from megajax.core.config.schema import RunConfig
from megajax.runtime.checkpoint.hf_files import COMPANIONS, FOLDER, OURS, TEMPLATES, Companions
from megajax.runtime.checkpoint.record import TOKENIZER
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.text.token_names import CONFIG as NAMES

# What a run without a checkpoint replaces. Other files in the folder of companions stay.
REPLACED = (
    *(CONFIG, TOKENIZER, NAMES, 'metrics.jsonl', 'samples.jsonl'),
    *(f'{FOLDER}/{name}' for name in (*COMPANIONS, *OURS, TEMPLATES)),
)


def check_replaced(folder: Path) -> None:
    """Raise ConfigError if a run in this folder would replace files that no run has written."""
    found = foreign_files(folder, REPLACED, 'run.dir')
    if not found:
        return
    fix = [f'megajax train {typed(folder / CONFIG)}'] if CONFIG in found else []
    fix += [typed_override('run.dir', folder / 'run')]
    message = (
        f'{folder} has files that no run has written and that this run would replace: '
        f'{", ".join(found)}; use a new folder, for example {" ".join(fix)}'
    )
    raise mistake('run.dir', message)


def foreign_files(folder: Path, names: Sequence[str], key: str = '') -> list[str]:
    """Return which of these files are in a folder in which no run has written anything.

    `key` is the key that gives the folder, for an error.
    """
    found = [name for name in names if exists(folder / name, key)]
    return [] if found and is_written_by_run(folder) else found


def write_inputs(
    folder: Path,
    config: Config,
    tokenizer: Tokenizer | None,
    companions: Companions,
    *,
    step: int = 0,
) -> None:
    """Write the inputs of a run that is at `step` to its folder; only the first process does so.

    This is for a start that has passed every check: a rejected one leaves the files as they were.
    So does one that has no step to take, because the run was not trained with these inputs.
    A file that has not changed is not written again; each file is complete, or as it was before.
    Raises ConfigError if a file cannot be written.
    """
    is_finished = step >= config.train.steps and (folder / CONFIG).is_file()
    if jax.process_index() or is_finished:
        return
    files = _files_of(tokenizer) if tokenizer is not None else {}
    # The config is written last: it makes the folder a run, which has its other files by then.
    files |= {CONFIG: dump(_to_keep(config)).encode()}
    try:
        companions.write(folder)
        if tokenizer is not None and NAMES not in files:
            (folder / NAMES).unlink(missing_ok=True)
        for name, content in files.items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != content:
                write_file(path, content)
    except OSError as error:
        raise ConfigError(
            f'{folder} cannot be written: {error.strerror}; free some space and allow it, or '
            'choose another run directory'
        ) from error


def _files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the contents of a tokenizer's files by name."""
    with TemporaryDirectory() as folder:
        try:
            tokenizer.save(Path(folder) / TOKENIZER)
        except Exception as error:  # `tokenizers` raises no OSError
            raise ConfigError(
                f'{TOKENIZER} cannot be written to {folder}: {reason(error)}; free some space, or '
                'set TMPDIR to another folder'
            ) from error
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _to_keep(config: Config) -> Config:
    """Return the config with which a later start resumes the run.

    It lacks the keys of one start, so that a copy of the folder is a run of its own. For example,
    the user allows changed data once: the data may change again before the next start.
    """
    run = config.run.model_copy(update={key: getattr(RunConfig(), key) for key in OF_START})
    return config.model_copy(update={'run': run})
