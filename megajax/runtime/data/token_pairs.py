"""Open the token files of a config, on the disk or by their URLs, and check their ids."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from megajax.base.errors import changing_problems
from megajax.core.config import Config, ConfigError, mistake
from megajax.runtime.data.corpus_tokenizer import CORPUS
from megajax.runtime.data.sources.block_cache import BlockCache
from megajax.runtime.data.sources.manifest import Manifest
from megajax.runtime.data.sources.remote import is_remote
from megajax.runtime.data.text.tokenizer import Tokenizer
from megajax.runtime.data.tokens.indexed import Sequences, is_pair, read_pair
from megajax.runtime.data.tokens.remote_pair import is_remote_pair, read_remote_pair
from megajax.runtime.data.tokens.token_ids import NO_ID, check_token_ids, first_bad, token_range
from megajax.runtime.data.tokens.watched import watched
from megajax.runtime.processes.consensus import from_all

GB = 10**9


class Pair(NamedTuple):
    """Token files: their sequences, and their manifest if they have one."""

    sequences: Sequences
    manifest: Manifest | None
    versions: dict[str, str]  # versions of remote files, by the names that a checkpoint records

    def __str__(self) -> str:
        special = ' (built with --parse-special)'
        return (
            f'{self.sequences.name}{special * bool(self.manifest and self.manifest.parse_special)}'
        )


def open_pair(config: Config, prefix: str) -> Pair:
    """Open token files.

    Raises ConfigError with file, byte and fix, also if the manifest belongs to other files.
    """
    if is_remote(prefix):
        with naming_key(config):
            return Pair(*read_remote_pair(prefix, cache_of(config), config.model.vocab_size))
    sequences = watched(read_pair(prefix), config.model.vocab_size)
    if manifest := Manifest.read(prefix):
        manifest.check_counts(len(sequences.documents) - 1, len(sequences.tokens))
    return Pair(sequences, manifest, {})


def manifest_of(config: Config, prefix: str) -> Manifest | None:
    """Return the manifest of token files, or None if they have none."""
    return open_pair(config, prefix).manifest if is_remote(prefix) else Manifest.read(prefix)


def check_pairs(config: Config, pairs: Sequence[Pair], tokenizer: Tokenizer | None) -> list[Pair]:
    """Return the pairs if the model has a row for every id, and the tokenizer knows every id.

    Otherwise, raises ConfigError. Ids of remote files without a manifest are checked when they are
    read from the pairs that are returned. All processes must call it.
    """
    vocab_size = config.model.vocab_size
    checked = list(pairs)
    for number, (sequences, manifest, versions) in enumerate(pairs):
        high = manifest.max_token if manifest else None
        unchecked = tokenizer if manifest is None else None
        if not versions:
            if manifest and manifest.max_token >= vocab_size and len(sequences.tokens):
                _check_largest(manifest, sequences)
            known = _range(sequences) if high is None else (0, high)
            limit = vocab_size if unchecked is None else min(vocab_size, unchecked.vocab_size)
            if high is None and (known[0] < 0 or known[1] >= limit):
                known = _range(sequences, anew=True)
            check_token_ids(sequences, vocab_size, known)
            if unchecked is not None and known[1] >= unchecked.vocab_size:
                raise _unknown_token(config, unchecked, sequences, known[1])
        elif high is not None and high >= vocab_size:
            message = f'{vocab_size} ids end below {high}, the largest in {sequences.name}'
            raise mistake('model.vocab_size', f'{message}; use {high + 1} or more', *CORPUS)
        elif unchecked is not None:
            read = partial(_read_known, config, unchecked, sequences)
            checked[number] = checked[number]._replace(sequences=replace(sequences, reader=read))
    return checked


def _range(sequences: Sequences, *, anew: bool = False) -> tuple[int, int]:
    """Return the smallest and the largest id; each process reads its share of the file.

    Ids beyond the largest vocabulary are returned as the nearest of -1 and `NO_ID`. Before an
    error, set `anew`: the cached range may belong to a damaged file, which was then replaced by a
    good one with the same modification time.
    """
    low, high = token_range(sequences, jax.process_index(), jax.process_count(), anew=anew)
    lows, highs = from_all(max(low, -1), min(high, NO_ID)).T
    return int(lows.min()), int(highs.max())


def _check_largest(manifest: Manifest, sequences: Sequences) -> None:
    _, largest = _range(sequences)
    if largest != manifest.max_token:
        _, largest = _range(sequences, anew=True)
    if largest != manifest.max_token:
        difference = f'{manifest.max_token}, but the largest id in the files is {largest}'
        raise manifest.of_other_files('max_token', difference)


def _read_known(
    config: Config, tokenizer: Tokenizer, sequences: Sequences, start: int, stop: int
) -> np.ndarray:
    """Return token ids `start` to `stop`; raise ConfigError if the tokenizer lacks one."""
    ids = sequences.read(start, stop)
    if (bad := first_bad(ids, tokenizer.vocab_size)) is not None:
        raise _unknown_token(config, tokenizer, sequences, int(ids[bad]))
    return ids


def _unknown_token(
    config: Config, tokenizer: Tokenizer, sequences: Sequences, token: int
) -> ConfigError:
    message = (
        f'{config.data.tokenizer} has {tokenizer.vocab_size} tokens, but the corpus has token '
        f'{token} in {sequences.name}; give the tokenizer.json that made it, or none'
    )
    return mistake('data.tokenizer', message, *CORPUS)


def prefixes_of(config: Config) -> list[str]:
    """Return the prefixes of the corpus's .bin and .idx files; none if the corpus is text."""
    corpus = config.data.corpus
    if config.data.blend:
        return list(config.data.blend)
    with naming_key(config):
        if corpus.endswith(('.bin', '.idx')) and has_tokens(corpus[:-4]):
            open_pair(config, corpus[:-4])  # raises if one of the files is missing
            message = f'{corpus}: give the prefix of the two files, {corpus[:-4]}'
            raise mistake('data.corpus', message)
        return [corpus] if has_tokens(corpus) else []


def has_tokens(corpus: str) -> bool:
    """Whether a path or URL is the prefix of token files."""
    return is_remote_pair(corpus) if is_remote(corpus) else is_pair(corpus)


def cache_of(config: Config) -> BlockCache:
    """Return the cache of corpora that are read from URLs."""
    folder = config.run.data_cache
    if folder == 'auto':
        folder = f'{os.environ.get("XDG_CACHE_HOME") or "~/.cache"}/megajax/corpora'
    return _open_cache(Path(folder).expanduser(), int(config.run.data_cache_gb * GB))


@lru_cache(maxsize=1)
def _open_cache(folder: Path, limit: int) -> BlockCache:
    return BlockCache(folder, limit)


def naming_key(config: Config) -> AbstractContextManager[None]:
    """Name the key of the corpus before the URL in errors that the block raises."""
    key = 'data.blend' if config.data.blend else 'data.corpus'
    return changing_problems(
        lambda problem: (
            replace(problem, path=key, message=f'{problem.path}: {problem.message}')
            if is_remote(problem.path)
            else problem
        )
    )
