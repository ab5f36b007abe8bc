"""Load the tokenizer of a build, or train it on a sample of the inputs."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megajax.base.errors import ConfigError, Problem, changing_problems, mistake
from megajax.corpus.job import Job, Report
from megajax.corpus.partial import FIX, NEW, TOKEN_NAMES, TOKENIZER, Partial, UnfinishedError
from megajax.runtime.data.sources.inputs import Input
from megajax.runtime.data.sources.parse import parse
from megajax.runtime.data.sources.pieces import UNIT, Position
from megajax.runtime.data.sources.read import read_pieces
from megajax.runtime.data.text.byte_level import END_OF_DOCUMENT
from megajax.runtime.data.text.tokenizer import Tokenizer, load_tokenizer, train_bpe

logger = logging.getLogger(__name__)

TRAINING_BYTES = 256_000_000  # most bytes of text on which a BPE is trained


def given_tokenizer(job: Job, inputs: Sequence[Input]) -> Tokenizer | None:
    """Return the tokenizer that the job names; None if one must be trained."""
    if job.tokenizer is None:
        if streams := [input.path for input in inputs if input.stream]:
            message = (
                'cannot be read twice, to train a tokenizer and to encode; '
                'write it to a file, or give --tokenizer'
            )
            raise mistake(streams[0], message)
        return None
    return load_given(job.tokenizer, or_else=', or --train-bpe to train one')


def load_given(path: str, *, or_else: str = '') -> Tokenizer:
    """Load the tokenizer that --tokenizer gives; a ConfigError names this option."""
    with changing_problems(lambda problem: replace(problem, path='--tokenizer')):
        return load_tokenizer(path, or_else=or_else)


def saved_tokenizer(
    job: Job,
    inputs: Sequence[Input],
    partial: Partial,
    tokenizer: Tokenizer | None,
    report: Report,
) -> Tokenizer:
    """Return the tokenizer, saved in the folder for the workers and for a resumed build.

    If the folder has no tokenizer yet, the job's tokenizer is saved, or a new one is trained.
    """
    saved = partial.folder / TOKENIZER
    if saved.exists():
        return load_tokenizer(str(saved))
    if tokenizer is None:
        assert job.train_bpe is not None
        logger.info('training a BPE of %d entries', job.train_bpe)
        tokenizer = train_bpe(_sample(job, inputs, report), job.train_bpe)
        if (size := tokenizer.vocab_size) < job.train_bpe:
            logger.warning(
                '--train-bpe %d: the text has too few pairs to merge, so the BPE has %d entries; '
                'use --train-bpe %d, or more text',
                job.train_bpe,
                size,
                size,
            )
    try:
        tokenizer.save_json(partial.folder / NEW)  # without the names, which are written below
    except Exception as error:  # tokenizers raises no narrower exception
        message = f'cannot be written: {error}; {FIX}'
        raise UnfinishedError(Problem(str(saved), message)) from error
    saved_json = (partial.folder / NEW).read_bytes()
    if content := tokenizer.names.content:
        partial.write(TOKEN_NAMES, content)
    partial.write(TOKENIZER, saved_json)
    return tokenizer


def _sample(job: Job, inputs: Sequence[Input], report: Report) -> Iterator[str]:
    """Yield the first texts of each file, in proportion to its size on disk.

    If these are less than a unit per file, yield a unit of some files, evenly spaced.
    """
    total = sum(input.size for input in inputs)
    due, used = 0, 0  # bytes of text that the files so far should yield; bytes that were yielded
    for input in inputs:
        share = -(-TRAINING_BYTES * input.size // max(total, 1))
        due = min(due + share, TRAINING_BYTES)
        if used >= due:
            continue
        end = min(max(due, used + UNIT), TRAINING_BYTES)
        for text in _texts(job, input):
            if job.parse_special:  # the BPE will not read these letters as text
                text = text.replace(END_OF_DOCUMENT[0], '')
            part = text.encode()[: end - used]
            yield part.decode(errors='ignore')  # the text may be cut inside a character
            used += len(part)
            report(min(used, total), min(TRAINING_BYTES, total))
            if used >= end:
                break


def _texts(job: Job, input: Input) -> Iterator[str]:
    for piece, _ in read_pieces([input], job.json_key, Position()):
        for item in parse(piece, job.json_key):
            if isinstance(item, str):
                yield item
            elif input.format == 'text' or not job.skip_bad:
                raise ConfigError(item)
