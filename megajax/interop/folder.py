"""Where a conversion writes: a run that begins, or a folder that appears under its name when it is complete. Imports no jax."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megajax.checkpoint.digests import find_steps
from megajax.config import ConfigError

SEQ_LEN = 1024  # of training, where the model can read so many


def check_new(out: Path) -> None:
    """Raises ConfigError if a run cannot begin in `out`."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f'{out} is a file: choose another')
    if steps := find_steps(out / 'checkpoints'):
        raise ConfigError(
            f'{out} is a run already, at step {steps[-1]}: choose another, or take it away'
        )


def settings(
    model: Mapping[str, Any], out: Path, tokenizer: Path | None
) -> dict[str, dict[str, Any]]:
    """The config of a run with an imported model, before overrides: what the model asks of the keys beside it."""
    seq_len = min(SEQ_LEN, model.get('max_seq_len') or SEQ_LEN)
    return {
        'model': dict(model),
        'train': {'seq_len': seq_len},
        'data': {'tokenizer': tokenizer_of(out) if tokenizer else 'none'},
    }


def tokenizer_of(run: Path) -> str:
    """`data.tokenizer` of a run that has its own."""
    return str((run / 'tokenizer.json').absolute())


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, OUT.partial, which becomes OUT when the block has ended and all is on the disk.

    What a killed one has left there is taken away by the next. Raises ConfigError if OUT is there already, or being made.
    """
    out = out.absolute()
    if out.exists():
        raise ConfigError(f'{out} is there already: take it away, or choose another')
    partial = out.with_name(f'{out.name}.partial')
    try:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f'{partial} cannot be made: {error.strerror}') from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f'{partial} is being written by another process: wait for it, or choose another'
            ) from None
        _clear(partial)
        yield partial
        for folder, _, names in os.walk(partial):
            for name in (*names, '.'):
                _sync(Path(folder, name))
        partial.rename(out)
        _sync(out.parent)
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
