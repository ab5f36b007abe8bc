"""What a pair of token files holds, and whether it holds what it says."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megajax.config.errors import ConfigError, Problem
from megajax.data.build.manifest import Manifest, manifest_path
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.tokens.indexed import CHUNK, Sequences, paths, read_pair
from megajax.data.tokens.token_ids import check_token_ids, token_range

READ_BYTES = 1 << 24

SAMPLE_TOKENS = 32

Progress = Callable[[int, int], None]  # bytes read, of how many


@dataclass(frozen=True, kw_only=True)
class Description:
    """`histogram` counts the documents of up to 2**i tokens and more than 2**(i - 1), from i = 0; the first one counts the empty ones."""

    sequences: Sequences
    manifest: Manifest | None
    histogram: list[int]

    @property
    def num_documents(self) -> int:
        """One less than the boundaries."""
        return len(self.sequences.documents) - 1


def describe(prefix: str | Path) -> Description:
    """Read what lies under PREFIX; raises ConfigError as `read_pair` does."""
    sequences = read_pair(prefix)
    counts = np.zeros(1, np.int64)
    for lengths in document_lengths(sequences):
        found = np.bincount(
            np.where(lengths > 0, np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64) + 1, 0)
        )
        counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
        counts[: len(found)] += found
    return Description(
        sequences=sequences, manifest=Manifest.read(prefix), histogram=counts.tolist()
    )


def decode_samples(
    sequences: Sequences, tokenizer: Tokenizer, count: int
) -> Iterator[tuple[int, str]]:
    """The numbers and the beginnings of some documents, spread evenly over all; raises ConfigError if the tokenizer lacks an id."""
    total = len(sequences.documents) - 1
    for number in sorted({total * i // count for i in range(count)} if total else ()):
        start, stop = (
            sequences.start(int(bound)) for bound in sequences.documents[number : number + 2]
        )
        ids = sequences.tokens[start : min(stop, start + SAMPLE_TOKENS)]
        if ids.max(initial=0) >= tokenizer.vocab_size:
            message = f'has {tokenizer.vocab_size} entries, and document {number} holds {ids.max()}; give the one that made the tokens'
            raise ConfigError(Problem(path='--tokenizer', message=message))
        yield number, tokenizer.decode(ids)


def document_lengths(sequences: Sequences) -> Iterator[np.ndarray]:
    """The tokens of each document, int64, some at a time."""
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
    """Check every invariant of a pair, its manifest and its token ids, and say each; raises ConfigError at the first that is broken.

    Ids must be below `vocab_size`, by default that of the tokenizer beside the pair.
    """
    sequences = read_pair(prefix)
    bin_path, idx_path = paths(sequences.name)
    said = [
        f'{idx_path}: header, {len(sequences):,} lengths and pointers, {len(sequences.documents):,} document boundaries',
        f'{bin_path}: {len(sequences.tokens):,} tokens of {sequences.tokens.dtype.name}, as many as the lengths add up to',
    ]
    manifest = Manifest.read(prefix)
    if manifest:
        said.append(f'{manifest.tokenizer_path(prefix)}: the tokenizer that built the tokens')
        _check_manifest(manifest, manifest_path(prefix), sequences)
        _check_digest(bin_path, manifest.bin_sha256, progress)
        said.append(f'{bin_path}: as it was built, by its hash')
    limit = vocab_size or (manifest.vocab_size if manifest else None)
    if limit is not None:
        check_token_ids(sequences, limit)
    if len(sequences.tokens):
        low, high = token_range(sequences)
        said.append(
            f'{bin_path}: ids from {low} to {high}'
            + ('' if limit is None else f', all below {limit}')
        )
    return said


def _check_manifest(manifest: Manifest, path: Path, sequences: Sequences) -> None:
    found = {'documents': len(sequences.documents) - 1, 'tokens': len(sequences.tokens)}
    for key, value in found.items():
        if getattr(manifest, key) != value:
            message = f'{key} is {getattr(manifest, key)}, and the files hold {value}; the manifest is of other files: copy all of one build'
            raise ConfigError(Problem(path=str(path), message=message))


def _check_digest(path: Path, expected: str, progress: Progress) -> None:
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open('rb') as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            progress(file.tell(), size)
    if digest.hexdigest() != expected:
        raise ConfigError(
            Problem(
                path=str(path),
                message='differs from what was built, by its hash; copy it again, or build it again',
            )
        )
