"""The options of a build, their checks, and the hash that identifies a build to resume."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from megajax.base.errors import ConfigError, Problem
from megajax.base.files.exists import exists
from megajax.base.files.outputs import NO_URL, url_of
from megajax.runtime.data.sources.inputs import Format, Input
from megajax.runtime.data.text.tokenizer import Tokenizer

# Version of the conversion from bytes to tokens; builds of other versions are not resumed.
VERSION = 3

Report = Callable[[int, int], None]  # bytes read, bytes to read


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of `megajax data build`: its inputs, its output and how to encode them.

    Exactly one of `tokenizer` (a tokenizer.json, or 'bytes') and `train_bpe` (number of entries)
    is given. With `format` None, the suffix of each file decides; with `workers` None, there is one
    worker per core.
    """

    out: str
    inputs: tuple[str, ...]
    format: Format | None = None
    json_key: str = 'text'
    tokenizer: str | None = None
    train_bpe: int | None = None
    workers: int | None = None
    append_eod: bool = False
    skip_bad: bool = False
    parse_special: bool = False  # whether special tokens that a text spells out are read as tokens


def check_job(job: Job, out: Path) -> None:
    """Raise ConfigError with every mistake in the options."""
    problems = []
    is_folder = job.out.endswith('/') or out.name in ('', '..')
    if url := url_of(out):
        problems.append(Problem(url, f'is a URL; {NO_URL}'))
    elif is_folder or out.suffix in ('.bin', '.idx', '.json'):
        kind = 'a folder' if is_folder else 'one of the files'
        example = (out if is_folder else out.parent) / 'corpus'
        problems.append(
            Problem(
                job.out or 'OUT',
                f'is the name of {kind}; give the prefix of the files, for example {example}',
            )
        )
    elif not (there := next(path for path in out.absolute().parents if exists(path))).is_dir():
        problems.append(Problem(job.out, f'{there} is a file; choose another OUT'))
    if (job.tokenizer is None) == (job.train_bpe is None):
        given = (
            'both --tokenizer and --train-bpe are given'
            if job.tokenizer
            else 'neither --tokenizer nor --train-bpe is given'
        )
        fix = (
            "give one: --tokenizer with a tokenizer.json or 'bytes', "
            'or --train-bpe with a number of entries'
        )
        problems.append(Problem('--tokenizer', f'{given}; {fix}'))
    if job.train_bpe is not None and job.train_bpe < 257:
        problems.append(
            Problem(
                '--train-bpe',
                f'{job.train_bpe} is below 257 (256 bytes and an end-of-document token); '
                'use 257 or more',
            )
        )
    if job.workers is not None and job.workers < 1:
        problems.append(
            Problem(
                '--workers',
                f'{job.workers} is below 1; use 1 or more, or omit it for one worker per core',
            )
        )
    if problems:
        raise ConfigError(*problems)


def is_resumable(inputs: Sequence[Input]) -> bool:
    """Return whether each input can be recognized later: not a stream, or a URL without version."""
    return not any(input.stream or (input.is_remote and not input.version) for input in inputs)


def fingerprint(job: Job, inputs: Sequence[Input], tokenizer: Tokenizer | None, unit: int) -> str:
    """Return the hash of everything that determines the output; for a stream it is unique."""
    import tokenizers

    files = [_identity(input) for input in inputs]
    once = '' if is_resumable(inputs) else uuid4().hex
    trained = f'bpe {job.train_bpe} spaced'  # on evenly spaced files, if there are many
    spec = f'{tokenizer.fingerprint} {tokenizer.eod}' if tokenizer else trained
    options = (job.json_key, job.append_eod, job.skip_bad, job.parse_special, unit)
    return sha256(
        json.dumps([VERSION, tokenizers.__version__, files, once, spec, *options]).encode()
    ).hexdigest()


def _identity(input: Input) -> dict[str, Any]:
    """Return the values that identify a file and its version."""
    identity = asdict(input)
    del identity['table']  # the table decides whether the file is read, not how
    if not input.is_remote:
        identity['path'] = os.path.abspath(input.path)
        del identity['version']
    return identity
