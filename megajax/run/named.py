"""The config of a `train` command that names none: of the run that it goes on with, or of what it starts from. Imports no jax."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from megajax.checkpoint.digests import find_candidates
from megajax.checkpoint.record import RECORD, START_FROM, TOKENIZER, read_record
from megajax.config import CheckpointError, Config, ConfigError, Problem, load, overridden, reload

CONFIG = 'config.yaml'
DEFAULT = 'tiny'


def config_of_overrides(overrides: Sequence[str]) -> tuple[Config, str]:
    """The config that these overrides change, and its name: that of the run in `run.dir`, else of `run.start_from`, else the default.

    Raises ConfigError if `run.dir` is set and holds no run, because the default is hardly what was meant then.
    """
    folder, start = (overridden(overrides, key) for key in ('run.dir', START_FROM))
    began = Path(folder) / CONFIG if isinstance(folder, str) and folder else None
    if began and began.is_file():
        return load(began, overrides), began.stem
    if isinstance(start, str) and start:
        return _config_of_start(Path(start), overrides)
    if began:
        raise ConfigError(_nothing_there(began.parent))
    return load(DEFAULT, overrides), DEFAULT


def _config_of_start(start: Path, overrides: Sequence[str]) -> tuple[Config, str]:
    """That of the checkpoint, without the keys of its own process, and with the tokenizer that its weights know."""
    for checkpoint in candidates_of_start(start):
        try:
            record = read_record(checkpoint)
        except CheckpointError:  # the one before is taken, as when it is verified
            continue
        settings = {section: keys for section, keys in record.config.items() if section != 'run'}
        if record.tokenizer_sha256:
            settings['data'] = settings['data'] | {'tokenizer': str(tokenizer_of(checkpoint))}
        name = checkpoint.absolute().parent.parent.name
        return reload(settings, overrides, place=str(checkpoint / RECORD)), name
    raise CheckpointError(
        f'{START_FROM}={start} cannot be used: run megajax checkpoint verify {start}'
    )


def candidates_of_start(start: Path) -> list[Path]:
    """`find_candidates`, whose error says which key asked for them."""
    try:
        return find_candidates(start)
    except ConfigError as error:
        raise ConfigError(Problem(path=START_FROM, message=str(error))) from None


def tokenizer_of(checkpoint: Path) -> Path:
    """The tokenizer.json of a checkpoint: that of its run, which stays when the checkpoint goes."""
    of_run = checkpoint.absolute().parent.parent / TOKENIZER
    return of_run if of_run.is_file() else checkpoint.absolute() / TOKENIZER


def _nothing_there(folder: Path) -> str:
    runs = (
        sorted(path.parent.name for path in folder.parent.glob(f'*/{CONFIG}'))
        if folder.parent.is_dir()
        else []
    )
    near = get_close_matches(folder.name, runs, n=1)
    guess = f'did you mean run.dir={folder.parent / near[0]}? ' if near else ''
    fix = f'to begin a run there name its config, for example megajax train {DEFAULT} run.dir={folder}'
    return f'run.dir={folder}: there is no run, and so no {CONFIG}, to go on with; {guess}{fix}'
