"""Describe and verify a pair of token files."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megajax.base.errors import mistake
from megajax.runtime.data.sources.manifest import Manifest
from megajax.runtime.data.text.spelled_tokens import SpelledTokens
from megajax.runtime.data.text.tokenizer import Tokenizer
from megajax.runtime.data.tokens.indexed import CHUNK, Sequences, paths, read_pair
from megajax.runtime.data.tokens.token_ids import check_token_ids, first_bad, token_range

READ_BYTES = 1 << 24  # bytes read at a time

SAMPLE_TOKENS = 32  # most tokens of a decoded sample

Progress = Callable[[int, int], None]  # bytes read, bytes of the file


@dataclass(frozen=True, kw_only=True)
class Description:
    """A pair of token files with its manifest and a histogram of document lengths."""

    sequences: Sequences
    manifest: Manifest | None
    # Numbers of documents: first the empty documents; then, for i = 0, 1, ..., the documents of
    # more than 2**(i - 1) and up to 2**i tokens.
    histogram: list[int]

    @property
    def num_documents(self) -> int:
        """The number of documents, one less than the number of boundaries."""
        return len(self.sequences.documents) - 1


def describe(prefix: str | Path) -> Description:
    """Describe the token files of PREFIX. Raises ConfigError, as `read_pair` does."""
    sequences = read_pair(prefix)
    counts = np.zeros(1, np.int64)
    for lengths in document_lengths(sequences):
        chunk_counts = np.bincount(
            np.where(lengths > 0, np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64) + 1, 0)
        )
        counts = np.pad(counts, (0, max(0, len(chunk_counts) - len(counts))))
        counts[: len(chunk_counts)] += chunk_counts
    return Description(
        sequences=sequences, manifest=Manifest.read(prefix), histogram=counts.tolist()
    )


def decode_samples(
    sequences: Sequences, tokenizer: Tokenizer, count: int
) -> Iterator[tuple[int, str, bool]]:
    """Yield the numbers and decoded beginnings of `count` documents, evenly spread over all.

    The third value is whether the text spells out a special token in letters. Raises ConfigError if
    the tokenizer lacks an id.
    """
    total, special = len(sequences.documents) - 1, tokenizer.special_tokens()
    spelled = SpelledTokens(special)
    for number in sorted({total * i // count for i in range(count)} if total else ()):
        start, stop = (
            sequences.start(int(bound)) for bound in sequences.documents[number : number + 2]
        )
        ids = sequences.tokens[start : min(stop, start + SAMPLE_TOKENS)]
        if (bad := first_bad(ids, tokenizer.vocab_size)) is not None:
            message = (
                f'has {tokenizer.vocab_size} entries, but document {number} contains '
                f'id {ids[bad]}; give the tokenizer that made the tokens'
            )
            raise mistake('--tokenizer', message)
        text = tokenizer.decode(ids)
        real = np.isin(ids, list(special.values())).sum()
        yield number, text, spelled.count(text) > real


def document_lengths(sequences: Sequences) -> Iterator[np.ndarray]:
    """Yield the lengths of documents in tokens, int64, one chunk of documents at a time."""
    for first in range(0, len(sequences.documents) - 1, CHUNK):
        bounds = sequences.documents[first : first + CHUNK + 1]
        starts = np.full(len(bounds), len(sequences.tokens), np.int64)
        inside = bounds < len(sequences)
        starts[inside] = sequences.pointers[bounds[inside]] // sequences.tokens.itemsize
        yield np.diff(starts)


def verify(
    prefix: str | Path,
    *,
    vocab_size: int | None = None,
    progress: Progress = lambda read, total: None,
) -> list[str]:
    """Check every invariant of a pair, its manifest and its token ids; return a line for each.

    Ids must be below `vocab_size`, by default the size of the tokenizer next to the pair. Raises
    ConfigError at the first violation.
    """
    sequences = read_pair(prefix)
    bin_path, idx_path = paths(sequences.name)
    lines = [
        f'{idx_path}: header, {len(sequences):,} lengths and pointers, '
        f'{len(sequences.documents):,} document boundaries',
        f'{bin_path}: {len(sequences.tokens):,} tokens of {sequences.tokens.dtype.name}, '
        'the sum of the lengths',
    ]
    manifest = Manifest.read(prefix)
    if manifest:
        lines.append(f'{manifest.tokenizer_path}: the tokenizer that made the tokens')
        manifest.check_counts(len(sequences.documents) - 1, len(sequences.tokens))
        _check_digest(bin_path, manifest.bin_sha256, progress)
        lines.append(f'{bin_path}: matches the SHA-256 in its manifest')
    limit = vocab_size or (manifest.vocab_size if manifest else None)
    if len(sequences.tokens):
        # If the digest of a manifest has been checked, an earlier reading of its ids still holds.
        anew = manifest is None or token_range(sequences)[1] != manifest.max_token
        low, high = token_range(sequences, anew=anew)
        if limit is not None:
            check_token_ids(sequences, limit, (low, high))
        lines.append(
            f'{bin_path}: ids from {low} to {high}'
            + ('' if limit is None else f', all below {limit}')
        )
    return lines


def _check_digest(path: Path, expected: str, progress: Progress) -> None:
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open('rb') as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            progress(file.tell(), size)
    if digest.hexdigest() != expected:
        raise mistake(
            path, 'does not match the SHA-256 in its manifest; copy it again, or build it again'
        )
