"""Destinations of a conversion: a new run, or a folder that appears only when it is complete.

Imports no jax.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megajax.base.files.exists import exists
from megajax.base.files.locks import lock
from megajax.base.files.outputs import NO_SPACE, NO_URL, sync, url_of
from megajax.core.config import ConfigError
from megajax.runtime.checkpoint.digests import find_steps

SEQ_LEN = 1024  # tokens of a training sequence, unless the model's maximum is smaller


def check_new(out: Path) -> None:
    """Raise ConfigError unless a run can start in `out`."""
    _check_no_url(out)
    there = next(each for each in (out, *out.parents) if exists(each))
    if not there.is_dir():
        raise ConfigError(f'{there} is a file: choose another path')
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f'{there} is not writable: change its permissions, or choose another path'
        )
    if steps := find_steps(out / 'checkpoints'):
        raise ConfigError(
            f'{out} already holds a run, at step {steps[-1]}: choose another path, or delete it'
        )


def settings(
    model: Mapping[str, Any], out: Path, tokenizer: Path | None
) -> dict[str, dict[str, Any]]:
    """Return the config of a run with an imported model, before overrides.

    The config has the model, the section `vision` if the model has an encoder, and the keys of
    other sections that depend on the model.
    """
    model = dict(model)
    vision = {'vision': model.pop('vision')} if 'vision' in model else {}
    seq_len = min(SEQ_LEN, model.get('max_seq_len') or SEQ_LEN)
    return {
        'model': model,
        **vision,
        'train': {'seq_len': seq_len},
        'data': {'tokenizer': tokenizer_of(out) if tokenizer else 'none'},
    }


def tokenizer_of(run: Path) -> str:
    """Return the value of `data.tokenizer` for a run that has a tokenizer of its own."""
    return str((run / 'tokenizer.json').absolute())


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield the folder OUT.partial to fill; when the block ends, rename it to OUT.

    OUT appears only when all files are on disk.

    The next conversion deletes the remains of a killed one. Raises ConfigError if OUT already
    exists, if another process is writing it, or if there is no space, and then deletes OUT.partial.
    """
    _check_no_url(out)
    out = out.absolute()
    if out.exists():
        raise ConfigError(f'{out} already exists: delete it, or choose another path')
    partial = out.with_name(f'{out.name}.partial')
    try:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f'{partial} cannot be created: {error.strerror}; '
            'make its parent folder writable, or choose another path'
        ) from error
    try:
        try:
            lock(descriptor, partial)
        except BlockingIOError:
            raise ConfigError(
                f'{partial} is being written by another process: '
                'wait for it, or choose another path'
            ) from None
        _clear(partial)
        yield partial
        for folder, _, names in os.walk(partial):
            for name in (*names, '.'):
                sync(Path(folder, name))
        partial.rename(out)
        sync(out.parent)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(
            f'{partial} cannot be written: {error.strerror}; free some space, or choose another '
            'path'
        ) from error
    finally:
        os.close(descriptor)


def _check_no_url(out: Path) -> None:
    if url := url_of(out):
        raise ConfigError(f'{url} is a URL: {NO_URL}')


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
