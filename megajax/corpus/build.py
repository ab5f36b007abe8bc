"""Convert corpus files to Megatron's token files: the command `megajax data build`.

The builder reads and writes; workers (`encode.py`) parse and encode. Incomplete output is in a
separate folder (`partial.py`), from which a killed build resumes.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from megajax.base.cores import usable_cores
from megajax.base.errors import ConfigError, Problem, mistake
from megajax.base.files.exists import exists
from megajax.base.files.outputs import sync
from megajax.base.render.text import visible
from megajax.corpus.choose_tokenizer import given_tokenizer, saved_tokenizer
from megajax.corpus.encode import Encoded, Options, Workers
from megajax.corpus.job import Job, Report, check_job, fingerprint, is_resumable
from megajax.corpus.partial import (
    DOCUMENTS,
    LENGTHS,
    MANIFEST,
    TOKENIZER,
    TOKENS,
    Partial,
    Progress,
    UnfinishedError,
    finals,
    read_progress,
)
from megajax.runtime.data.sources.inputs import Input, find_inputs
from megajax.runtime.data.sources.manifest import Manifest
from megajax.runtime.data.sources.pieces import UNIT
from megajax.runtime.data.sources.read import check_inputs, read_units
from megajax.runtime.data.sources.remote import MissingError, RefusedError, UnansweredError
from megajax.runtime.data.text.spelled_tokens import letters_warning, tokens_note
from megajax.runtime.data.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PLACES = 5  # most skipped lines that the summary names
CHECKPOINT_SECONDS = 2.0  # longest time between two checkpoints of a build


@dataclass(frozen=True, kw_only=True)
class BuildSummary:
    """The result of a build; its string is the line that `megajax data build` prints."""

    progress: Progress
    encoded: int  # bytes of text that this run encoded
    seconds: float  # duration of this run
    files: tuple[Path, ...]

    def __str__(self) -> str:
        done = self.progress
        bytes_per_token = done.text_bytes / done.tokens
        size = f'{done.documents} documents, {done.tokens} tokens, {bytes_per_token:.2f} bytes each'
        speed = f'{self.seconds:.1f} s, {self.encoded / self.seconds / 1e6:.2f} MB/s'
        places = ', '.join(done.skipped_places) + (
            ', ...' if done.skipped > len(done.skipped_places) else ''
        )
        skipped = f'; {done.skipped} bad lines skipped ({places})' if done.skipped else ''
        return f'{size}; {speed}{skipped}; wrote {", ".join(map(str, self.files))}'


def build(
    job: Job,
    *,
    report: Report = lambda read, total: None,
    unit: int = UNIT,
    checkpoint_units: int = 64,
) -> BuildSummary:
    """Build OUT.bin, OUT.idx, OUT.json and OUT.tokenizer.json.

    The files appear only when they are complete, OUT.idx last. Each document becomes one sequence,
    unless it has no tokens. A text document of more than `unit` bytes is encoded in pieces, which
    are cut after a line break and joined again. The output does not depend on the number of
    workers. `train_bpe` trains on the first bytes of each file, in proportion to its size on disk,
    with a total of 256 MB of text. If that is less than 1 MiB per file, it reads 1 MiB of some
    files, evenly spaced. `report` gets the bytes read to train, and then the bytes of the inputs.

    After a kill or a network error, the same job resumes from its last checkpoint, unless it reads
    a stream. The same holds for every ConfigError that you can mend without a change of the inputs
    or the job, such as a full disk or expired credentials. If an input or the job is faulty, the
    ConfigError names the file, the position and the fix, and no files are left behind.
    """
    started = time.perf_counter()
    out = Path(job.out).expanduser()
    check_job(job, out)
    inputs = find_inputs(job.inputs, job.format)
    check_inputs(inputs, job.json_key)
    tokenizer = given_tokenizer(job, inputs)
    wanted = fingerprint(job, inputs, tokenizer, unit)
    _progress(out, wanted)  # raises an error before any file is changed
    resumable = is_resumable(inputs)
    with Partial.lock(out) as partial:
        with _cleaned_up(partial, resumable):
            progress = _progress(out, wanted)
            before = progress.text_bytes if progress else 0
            if progress is None:
                progress = Progress(fingerprint=wanted)
                partial.start(progress)
            if not progress.complete:
                builder = _Builder(
                    job,
                    inputs,
                    partial,
                    progress,
                    saved_tokenizer(job, inputs, partial, tokenizer, report),
                    report,
                )
                builder.encode(unit, checkpoint_units)
                builder.complete(out)
        partial.publish(resumable)
    return BuildSummary(
        progress=progress,
        encoded=progress.text_bytes - before,
        seconds=time.perf_counter() - started,
        files=tuple(sorted(path for path in finals(out) if path.exists())),
    )


@contextmanager
def _cleaned_up(partial: Partial, resumable: bool) -> Iterator[None]:
    """Delete the folder after a ConfigError, unless the same command can resume the build.

    If the inputs are `resumable`, it can after an interrupt, an UnfinishedError, or an error in
    reaching an input, which need not have changed.
    """
    try:
        yield
    except (UnfinishedError, UnansweredError, RefusedError, MissingError) as error:
        if not resumable:
            partial.discard()
            raise
        raise UnfinishedError(
            *(
                replace(each, message=f'{each.message}; run the same command again to resume')
                for each in error.problems
                if isinstance(each, Problem)
            )
        ) from error
    except ConfigError:
        partial.discard()
        raise


class _Builder:
    """Write encoded units in order, with checkpoints, and finally the index and the manifest."""

    def __init__(
        self,
        job: Job,
        inputs: Sequence[Input],
        partial: Partial,
        progress: Progress,
        tokenizer: Tokenizer,
        report: Report,
    ) -> None:
        self._job, self._inputs, self._partial, self._progress = job, inputs, partial, progress
        self._tokenizer, self._report = tokenizer, report
        self._total = sum(input.size for input in inputs)
        progress.itemsize = tokenizer.dtype.itemsize
        if progress.tokens:
            logger.info(
                'resuming after %d documents and %d tokens', progress.documents, progress.tokens
            )
        partial.open(progress)

    def encode(self, unit: int, checkpoint_units: int) -> None:
        """Read, encode and write all units from `progress.position` on."""
        job, progress = self._job, self._progress
        options = Options(
            key=job.json_key,
            append_eod=job.append_eod,
            skip_bad=job.skip_bad,
            parse_special=job.parse_special,
        )
        units = read_units(self._inputs, job.json_key, progress.position, unit)
        saved_at, units_since = time.monotonic(), 0
        with Workers(
            job.workers or usable_cores(), self._partial.folder / TOKENIZER, options
        ) as workers:
            for after, encoded in workers.encode(units):
                self._add(encoded)
                progress.position = after
                self._report(after.read, self._total)
                units_since += 1
                seconds_since = time.monotonic() - saved_at
                if units_since >= checkpoint_units or seconds_since > CHECKPOINT_SECONDS:
                    self._partial.checkpoint(progress)
                    saved_at, units_since = time.monotonic(), 0

    def _add(self, encoded: Encoded) -> None:
        progress = self._progress
        if encoded.error:
            raise ConfigError(encoded.error)
        progress.skipped += len(encoded.skipped)
        progress.skipped_places += [
            visible(problem.path)
            for problem in encoded.skipped[: PLACES - len(progress.skipped_places)]
        ]
        progress.text_bytes += encoded.text_bytes
        progress.max_token = max(progress.max_token, encoded.max_token)
        self._count_spelling(encoded)
        ids, lengths = encoded.ids, encoded.lengths.astype(np.int64)
        if not encoded.first:
            ids, lengths = self._join(ids, lengths, encoded.last)
        progress.open_tokens = 0 if encoded.last else int(lengths[-1])
        ended = lengths if encoded.last else lengths[:-1]
        filled = ended > 0
        self._partial.append(TOKENS, ids)
        self._partial.append(LENGTHS, self._fitting(ended[filled]).astype('<i4'))
        self._partial.append(DOCUMENTS, (progress.sequences + np.cumsum(filled)).astype('<i8'))
        progress.tokens += len(ids)
        progress.sequences += int(filled.sum())
        progress.documents += len(ended)

    def _count_spelling(self, encoded: Encoded) -> None:
        progress, spells = self._progress, encoded.spells.copy()
        # The document was counted in an earlier unit.
        again = not encoded.first and progress.open_spells
        if again:
            spells[0] = True
        progress.spelling += int(spells.sum()) - again
        progress.open_spells = not encoded.last and bool(spells[-1])
        progress.spelled = sorted({*progress.spelled, *encoded.spelled})

    def _join(
        self, ids: np.ndarray, lengths: np.ndarray, last: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and lengths with the first document continued from earlier units.

        The first length then counts the document's tokens in all units. With `append_eod`, the
        end-of-document token is added if the document ends in this unit without one.
        """
        num_here, eod = int(lengths[0]), self._tokenizer.eod
        lengths[0] += self._progress.open_tokens
        ends = lengths[0] and (last or len(lengths) > 1)
        if self._job.append_eod and ends and eod not in ids[num_here - 1 : num_here]:
            ids = np.insert(ids, num_here, eod)
            lengths[0] += 1
            self._progress.max_token = max(self._progress.max_token, eod)
        return ids, lengths

    def _fitting(self, lengths: np.ndarray) -> np.ndarray:
        limit = np.iinfo(np.int32).max
        if lengths.max(initial=0) > limit:
            message = (
                f'a document has {lengths.max()} tokens, but the index allows at most {limit}; '
                'split the document'
            )
            raise mistake(', '.join(self._job.inputs), message)
        return lengths

    def complete(self, out: Path) -> None:
        """Write the index and the manifest, so that only renames are left to do."""
        job, progress, partial, tokenizer = (
            self._job,
            self._progress,
            self._partial,
            self._tokenizer,
        )
        if not (progress.tokens and progress.text_bytes):
            message = (
                f'contains no text: {progress.documents} documents without a text token, '
                f'{progress.skipped} bad lines; give other files'
            )
            raise mistake('--input', message)
        if progress.spelling:
            if job.parse_special:
                logger.info(tokens_note(progress.spelling, progress.spelled))
            else:
                logger.warning(letters_warning(progress.spelling, progress.spelled))
        partial.write_index(tokenizer.dtype)
        manifest = Manifest(
            tokenizer=finals(out)[0].name,
            tokenizer_sha256=sha256((partial.folder / TOKENIZER).read_bytes()).hexdigest(),
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            append_eod=job.append_eod,
            parse_special=job.parse_special,
            documents=progress.documents,
            tokens=progress.tokens,
            max_token=progress.max_token,
            text_bytes=progress.text_bytes,
            bin_sha256=partial.digest,
        )
        partial.write(MANIFEST, manifest.model_dump_json(indent=2).encode())
        progress.complete = True
        partial.checkpoint(progress)
        sync(partial.folder)


def _progress(out: Path, fingerprint: str) -> Progress | None:
    """Return the progress of this build; None if there is nothing to resume.

    Raises ConfigError if output files of a different build exist.
    """
    progress = read_progress(out)
    if progress and progress.fingerprint != fingerprint:
        logger.info(
            '%s.partial belongs to different inputs or options, or to a stream: starting over', out
        )
        progress = None
    if not (progress and progress.complete) and (
        existing := [path for path in finals(out) if exists(path)]
    ):
        raise ConfigError(
            *(
                Problem(str(path), 'already exists; move it, or choose another OUT')
                for path in existing
            )
        )
    return progress
