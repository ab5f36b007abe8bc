"""Choose the run directory, and verify the checkpoint that `run.start_from` names."""

import hashlib
import itertools
import json
import logging
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from megajax.base.render.text import typed
from megajax.core.config import CheckpointError, Config, ConfigError, Problem, RunError, mistake
from megajax.core.config.load import CONFIG
from megajax.core.config.overrides import typed_override
from megajax.core.parallel.mesh import check_current_mesh
from megajax.runtime.checkpoint.digests import SUMS, find_steps, sound_checkpoint
from megajax.runtime.checkpoint.kept_weights import model_differences
from megajax.runtime.checkpoint.open import restore_params
from megajax.runtime.checkpoint.record import FAMILY, START_FROM, make_record, read_record
from megajax.runtime.checkpoint.shared_digests import UnreadableError, shared_problems
from megajax.runtime.data.synthetic_corpus import PICTURES, drawn_tokenizer
from megajax.runtime.data.text.tokenizer import Tokenizer, load_tokenizer
from megajax.runtime.data.token_pairs import manifest_of, prefixes_of
from megajax.runtime.processes.consensus import from_first, text_from_first
from megajax.runtime.run.infer_config import NO_FILES, candidates_of_start, tokenizer_of
from megajax.runtime.run.inputs import check_replaced
from megajax.runtime.run.lock import run_lock
from megajax.runtime.run.shared_folder import check_shared

# The parts of a model that a run cannot add, by section.
OF_IMAGES = {'vision': 'encoder of images', 'relevance': 'scorers of regions'}

logger = logging.getLogger(__name__)


@contextmanager
def start_checkpoint(config: Config, run: Path) -> Iterator[Path | None]:
    """Yield the checkpoint whose weights the run begins with, verified by its digests.

    The run that wrote it may have had any mesh and any number of processes; it does not delete the
    checkpoint during the block. Yields None if this run already has checkpoints, or if it begins
    with random weights. Permitted differences are logged. Raises ConfigError with every key of
    `model` that must not differ, or CheckpointError if every checkpoint is damaged.
    """
    wanted = config.run.start_from
    if wanted is None or from_first(len(find_steps(run / 'checkpoints')))[0]:
        yield None
        return
    with _sound_in_all(Path(wanted)) as start:
        _check_same_model(start, config)
        _check_corpus(start, config)
        yield start


def load_params(path: str | Path, config: Config) -> nnx.State:
    """Return the parameters of a run, an import or one checkpoint, placed on the current mesh.

    They may have been trained on any mesh, and get the shardings of the parameters of
    `init_state(config)`. To train them, pass them to `init_state`. For a run, they come from its
    newest checkpoint that verifies; `load('RUN/config.yaml', overrides)` returns the run's config.

    Raises ConfigError, with every key that differs, if the config has a different model. Also
    raises ConfigError if the config's mesh is not the current mesh. Raises CheckpointError if every
    checkpoint is damaged.
    """
    check_current_mesh(config)
    with sound_checkpoint(Path(path)) as start:
        _check_same_model(start, config, 'from which load_params reads the weights')
        return restore_params(start, config)


def check_tokenizer(start: Path, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError unless the run has the tokenizer that the weights were trained with."""
    there, here = read_record(start).tokenizer_sha256, tokenizer.fingerprint if tokenizer else None
    if there and here and there != here:
        message = (
            f'differs from the tokenizer of {start} ({there} there, {here} here), on whose ids '
            f'the weights were trained; set {typed_override("data.tokenizer", tokenizer_of(start))}'
        )
        raise mistake('data.tokenizer', message)


def origin_of(start: Path) -> dict[str, str]:
    """Describe the checkpoint for the records of the run that begins with it."""
    digest = hashlib.sha256((start / SUMS).read_bytes()).hexdigest()
    record = read_record(start)
    family = record.family
    origin = {'checkpoint': str(start), 'step': str(record.step), 'sha256': digest}
    return origin if family is None else origin | {FAMILY: family}


@contextmanager
def _sound_in_all(wanted: Path) -> Iterator[Path]:
    """Enter `sound_checkpoint` in the first process and yield its result in all of them.

    Each candidate is verified by all processes. Raises ConfigError in a process that cannot open
    the first process's candidate.
    """

    def verified(candidate: Path) -> list[str]:
        # A candidate may be next to `wanted`: RUN/checkpoints/STEP for RUN/STEP.
        text_from_first(str(candidate.relative_to(wanted.parent)))
        return shared_problems(candidate)

    sound, error = None, None
    with ExitStack() as held:
        if jax.process_index() == 0:
            try:
                candidates_of_start(wanted)
                sound = held.enter_context(sound_checkpoint(wanted, verified))
            except UnreadableError:  # raised in all processes
                raise
            except RunError as failure:
                error = failure
            text_from_first('')
        else:
            while name := text_from_first(''):
                candidate = _opened(wanted.parent / name)
                sound = None if shared_problems(candidate) else candidate.absolute()
        if from_first(sound is None)[0] or sound is None:
            raise error or CheckpointError(
                f'{START_FROM}={wanted} cannot be used: the first process reports the reason'
            )
        yield sound


def _opened(candidate: Path) -> Path:
    """Return the first process's candidate; raises ConfigError if this process cannot open it.

    The folder of a live run is not listed: a host may list it without the newest checkpoint.
    """
    try:
        candidate.stat()
    except OSError as error:
        message = (
            f'{candidate}: process {jax.process_index()} on {socket.gethostname()} cannot open '
            f'this checkpoint: {error.strerror}; use a path on a file system that all hosts share'
        )
        raise mistake(START_FROM, message) from None
    return candidate


def _check_same_model(
    start: Path, config: Config, source: str = f'the checkpoint of {START_FROM}'
) -> None:
    there = read_record(start)
    for section, part in OF_IMAGES.items():
        if getattr(config, section) is not None and there.config.get(section) is None:
            message = (
                f'{start}, {source}, has no {part}, and none can be added; remove the section '
                f'{section}'
            )
            raise mistake(section, message, START_FROM)
    free, others = model_differences(there, make_record(config, there.step))
    for key, (old, new) in free.items():
        logger.info('start      %s: %s -> %s', key, _text(old), _text(new))
    problems = []
    for key, (old, new) in others.items():
        fix = typed(f'{key}={_text(old)}')
        message = f'{_text(new)}, but {_text(old)} in {start}, {source}; set {fix}'
        problems.append(Problem(key, message))
    if problems:
        raise ConfigError(*problems)


def _check_corpus(start: Path, config: Config) -> None:
    """Raise ConfigError unless the corpus has the tokens and the tokenizer of these weights.

    The weights' vocabulary is fixed, so a corpus from a different tokenizer must be built again.
    """
    there = read_record(start).tokenizer_sha256
    if config.data.corpus in PICTURES:
        if there and drawn_tokenizer(config).fingerprint != there:
            message = (
                f'{config.data.corpus} uses the byte tokenizer, but the weights of {start} were '
                'trained with the ids of a different tokenizer; train on JSON lines with images, '
                'data.corpus=FILE.jsonl'
            )
            raise mistake('data.corpus', message, START_FROM)
        return
    for prefix in prefixes_of(config):
        if manifest := manifest_of(config, prefix):
            path = manifest.tokenizer_path
            made_by = load_tokenizer(str(path))
            if (
                made_by.fingerprint != there
                if there
                else made_by.vocab_size > config.model.vocab_size
            ):
                theirs = tokenizer_of(start) if there else 'TOKENIZER.json'
                new = f'{prefix}_{start.absolute().parent.parent.name}'
                message = (
                    f'{prefix} has tokens of {path}, but the weights of {start} were trained '
                    f'with the ids of a different tokenizer; build the corpus again: megajax data '
                    f'build {typed(new)} --input FILES --tokenizer {typed(theirs)}, and set '
                    f'{typed_override("data.corpus", new)}; '
                    'or train on the text itself, data.corpus=FILE.jsonl'
                )
                raise mistake('data.corpus', message)
    if config.data.tokenizer not in NO_FILES:
        check_tokenizer(start, load_tokenizer(config.data.tokenizer))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@contextmanager
def opened_folder(config: Config, name: str) -> Iterator[Path]:
    """Yield the run directory of a config, locked during the block.

    If it is new, the first process deletes it if the block fails there before the run has its
    config: the lock that is left in a folder is evidence that the files in it are a run's. Raises
    ConfigError, before it writes anything, if the directory has files of other origin that the run
    would replace; if another run has the lock; and in all processes if one of them does not see the
    directory of the first.
    """
    folder, is_new = run_folder(config, name), False
    if jax.process_index() == 0:
        check_replaced(folder)
        is_new = config.run.dir is None or _is_created(folder)
    try:
        with run_lock(folder):
            try:
                check_shared(folder)
                yield folder
            except BaseException:
                if is_new and not (folder / CONFIG).exists():
                    shutil.rmtree(folder, ignore_errors=True)
                raise
    finally:
        if is_new:
            # NFS keeps a folder while the lock in it is open. A folder that has files stays.
            with suppress(OSError):
                folder.rmdir()


def run_folder(config: Config, name: str) -> Path:
    """Return the run directory of a config, the same in all processes.

    Without `run.dir` it is a new directory, which the first process creates and names by its clock.
    """
    if config.run.dir is not None:
        return Path(config.run.dir)
    return Path(text_from_first(str(_new_folder(name)) if jax.process_index() == 0 else ''))


def _is_created(folder: Path) -> bool:
    """Create a folder; return False if it exists or cannot be created."""
    try:
        folder.mkdir(parents=True)
    except OSError:  # the lock, which needs the folder, explains it
        return False
    return True


def _new_folder(name: str) -> Path:
    """Create the folder of a new run; runs that start in the same second get different ones."""
    first = Path('runs') / f'{name}-{datetime.now():%Y%m%d-%H%M%S}'
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = first if number == 1 else first.with_name(f'{first.name}-{number}')
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise ConfigError(
            f'{first} cannot be created: {error.strerror}; allow it, or set run.dir'
        ) from error
    return folder
