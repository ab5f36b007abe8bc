"""Encode units of raw bytes as token ids, in worker processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Self

import numpy as np

from megajax.base.errors import ConfigError, Problem
from megajax.corpus.partial import UnfinishedError
from megajax.runtime.data.sources.parse import parse, places
from megajax.runtime.data.sources.pieces import Position, Unit
from megajax.runtime.data.text.long_texts import WHOLE, UncuttableError
from megajax.runtime.data.text.spelled_tokens import SpelledTokens
from megajax.runtime.data.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for parsing and encoding a unit."""

    key: str  # JSON key or Parquet column of the text
    append_eod: bool  # whether documents end with an end-of-document token
    skip_bad: bool  # whether bad lines are skipped
    parse_special: bool = False  # whether special tokens that a text spells out are read as tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """The tokens of a unit.

    `ids` includes end-of-document tokens, unless the document began in an earlier unit.
    """

    ids: np.ndarray  # [tokens], token ids of all documents
    lengths: np.ndarray  # int32 [documents], tokens of each document in this unit
    first: bool  # whether the first document begins in this unit
    last: bool  # whether the last document ends in this unit
    text_bytes: int  # bytes of text encoded
    max_token: int  # largest token id
    spells: np.ndarray  # bool [documents], whether each spells special tokens
    spelled: set[str]  # names of the spelled special tokens
    skipped: list[Problem]  # bad lines that were skipped
    error: Problem | None  # bad line that must end the build


def encode(
    unit: Unit, tokenizer: Tokenizer, options: Options, special: SpelledTokens | None = None
) -> Encoded:
    """Parse and encode a unit; the first bad line ends it, unless bad lines are skipped.

    `special` finds the tokenizer's special tokens in a text. A start or end-of-document token that
    a document has already is not added again.
    """
    special = special or SpelledTokens(tokenizer.special_tokens())
    texts, skipped, error = _parse_unit(unit, options)
    ids: list[np.ndarray] = []
    if error is None:
        before, after = map(_decode_context, (unit.pieces[0].before, unit.pieces[-1].after))
        try:
            ids = tokenizer.encode_batch(texts, before=before, after=after)
        except ConfigError as of_unit:
            error = _unencodable(of_unit, unit, options, tokenizer, before, after)
    first, last = unit.pieces[0].first, unit.pieces[-1].last
    if tokenizer.start:
        begin = np.array(tokenizer.start, tokenizer.dtype)
        ids = [
            np.concatenate([begin, part])
            if (i or first) and len(part) and not np.array_equal(part[: len(begin)], begin)
            else part
            for i, part in enumerate(ids)
        ]
    if options.append_eod:
        eod = np.array([tokenizer.eod], tokenizer.dtype)
        complete = range(0 if first else 1, len(ids) if last else len(ids) - 1)
        ids = [
            np.concatenate([part, eod])
            if i in complete and len(part) and part[-1] != tokenizer.eod
            else part
            for i, part in enumerate(ids)
        ]
    spelled = [special.find(text) for text in texts]
    all_ids = np.concatenate([np.empty(0, tokenizer.dtype), *ids])
    return Encoded(
        ids=all_ids,
        lengths=np.array([len(part) for part in ids], np.int32),
        first=first,
        last=last,
        text_bytes=sum(len(text) if text.isascii() else len(text.encode()) for text in texts),
        max_token=int(all_ids.max(initial=0)),
        spells=np.array([bool(names) for names in spelled], bool),
        spelled=set().union(*spelled),
        skipped=skipped,
        error=error,
    )


def _unencodable(
    of_unit: ConfigError,
    unit: Unit,
    options: Options,
    tokenizer: Tokenizer,
    before: str,
    after: str,
) -> Problem:
    """Return the problem of the first text that the tokenizer cannot encode, with its place."""
    texts = [
        (text, place)
        for piece in unit.pieces
        for text, place in zip(parse(piece, options.key), places(piece), strict=True)
        if isinstance(text, str)
    ]
    for number, (text, place) in enumerate(texts, 1):
        around = {
            'before': before if number == 1 else '',
            'after': after if number == len(texts) else '',
        }
        try:
            tokenizer.encode_batch([text], **around)
        except UncuttableError:
            message = (
                'has a text that the tokenizer does not read in parts as it reads the whole, or of '
                f'more than {WHOLE >> 20} million characters in a line; split it into several '
                'documents'
            )
            return Problem(place, message)
        except ConfigError as error:
            return Problem('--tokenizer', getattr(error.problems[0], 'message', ''), place=place)
    return Problem('--tokenizer', str(of_unit))


def _decode_context(data: bytes) -> str:
    return data.decode(errors='ignore')  # a character may be cut off; the others are read


def _parse_unit(unit: Unit, options: Options) -> tuple[list[str], list[Problem], Problem | None]:
    texts: list[str] = []
    skipped: list[Problem] = []
    for piece in unit.pieces:
        for item in parse(piece, options.key):
            if isinstance(item, str):
                texts.append(item)
            elif options.skip_bad and piece.input.format != 'text':
                skipped.append(item)
            else:
                return texts, skipped, item
    return texts, skipped, None


PROGRAM = (
    'import sys; sys.path[:] = sys.argv[2:]; '
    'from megajax.corpus.encode import serve; serve(int(sys.argv[1]))'
)


class Workers:
    """A context manager for processes that encode units, each with its own tokenizer.

    Leaving the context ends them. A worker receives a unit only after it has returned the previous
    one, so a pipe is never full at both ends. A worker ends when its pipe is closed, so no worker
    outlives a killed builder. Raises UnfinishedError if a worker ends by itself.
    """

    def __init__(self, count: int, tokenizer: Path, options: Options) -> None:
        self._count = count
        self._start = str(tokenizer), options
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        # only the builder handles an interrupt; a worker inherits the mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(self._count):
                ours, theirs = Pipe()
                # multiprocessing.Process would import the command line again in each worker
                command = [sys.executable, '-c', PROGRAM, str(theirs.fileno()), *sys.path]
                self._processes[ours] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
                theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for connection in self._processes:
            self._send(connection, self._start)
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            process.kill()
        for process in self._processes.values():
            process.wait()

    def encode(self, units: Iterator[Unit]) -> Iterator[tuple[Position, Encoded]]:
        """Yield the encoded units in order, each with the position to resume from after it.

        At most two units per worker are in memory.
        """
        idle, busy = list(self._processes), dict[Connection, int]()
        after: dict[int, Position] = {}
        done: dict[int, Encoded] = {}
        taken = written = 0
        while True:
            while idle and taken - written < 2 * self._count and (unit := next(units, None)):
                self._send(connection := idle.pop(), unit)
                busy[connection], after[taken] = taken, unit.after
                taken += 1
            if written in done:
                yield after.pop(written), done.pop(written)
                written += 1
            elif busy:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    done[busy.pop(ready)] = self._receive(ready)
                    idle.append(ready)
            else:
                return

    def _send(self, connection: Connection, message: object) -> None:
        try:
            connection.send(message)
        except OSError as error:
            raise self._death(connection) from error

    def _receive(self, connection: Connection) -> Encoded:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(connection) from error

    def _death(self, connection: Connection) -> UnfinishedError:
        process = self._processes[connection]
        process.wait()  # does not block: the worker has closed its end of the pipe
        reason = f'{self._count}: a worker ended with exit code {process.returncode}'
        if process.returncode == -signal.SIGKILL:
            fix = '(killed, perhaps for lack of memory); use fewer workers'
        else:
            fix = 'for the reason printed above; remove its cause'
        return UnfinishedError(Problem('--workers', f'{reason} {fix}'))


def serve(descriptor: int) -> None:
    """Encode units from the pipe `descriptor` until it is closed; the main function of a worker."""
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # the other cores are busy with other workers
    with suppress(EOFError, OSError):  # the builder has closed the pipe, or has died
        connection = Connection(descriptor)
        path, options = connection.recv()
        tokenizer = load_tokenizer(path)
        if options.parse_special:
            tokenizer = tokenizer.parsing_special()
        special = SpelledTokens(tokenizer.special_tokens())
        while True:
            connection.send(encode(connection.recv(), tokenizer, options, special))
