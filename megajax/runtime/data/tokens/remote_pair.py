"""Token files that stay on their server: ranges of PREFIX.bin are fetched when they are needed.

PREFIX.idx, the manifest and the tokenizer are copied to the cache when a run starts.
"""

import logging
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from megajax.base.errors import mistake, replacing
from megajax.runtime.data.sources.block_cache import BlockCache, locked
from megajax.runtime.data.sources.inputs import COMPRESSED, SUFFIXES
from megajax.runtime.data.sources.manifest import Manifest
from megajax.runtime.data.sources.remote import MissingError, RefusedError, look
from megajax.runtime.data.sources.remote_file import RemoteFile, patiently
from megajax.runtime.data.tokens.indexed import Sequences, read_index
from megajax.runtime.data.tokens.token_ids import first_bad

# Beginning of the name under which a checkpoint records the version of a remote file; the file's
# URL follows.
VERSION_OF = 'ETag and size of '
# Suffixes of the token files, and of the files that `megajax data build` writes next to them.
FILES = '.bin', '.idx', '.json', '.tokenizer.json', '.tokenizer_config.json'


logger = logging.getLogger(__name__)


class RemotePair(NamedTuple):
    """The sequences of remote token files, their manifest and the versions of the files."""

    sequences: Sequences
    manifest: Manifest | None
    versions: dict[str, str]


def read_remote_pair(prefix: str, cache: BlockCache, vocab_size: int) -> RemotePair:
    """Open PREFIX.bin and PREFIX.idx by their URLs, and check the whole index.

    An id that is negative or not below `vocab_size` is an error when it is read. Raises ConfigError
    with file and fix.
    """
    names = [f'{prefix}{suffix}' for suffix in FILES]
    files = [RemoteFile(url, cache) for url in (*names[:2], *filter(_exists, names[2:]))]
    bin_file = files[0]
    name = prefix.rpartition('/')[2]
    here = cache.folder / sha256(' '.join(file.key for file in files).encode()).hexdigest()[:32]
    with replacing(f'{here}/{name}', prefix):
        here.mkdir(exist_ok=True)
        with locked(here):  # only one process of a host downloads
            for file in files[1:]:
                file.download(here / file.url.rpartition('/')[2])
            dtype, (lengths, pointers, documents) = read_index(here / f'{name}.idx', bin_file.size)
            tokens = RemoteTokens(bin_file, dtype)
            if manifest := Manifest.read(here / name):
                manifest.check_counts(len(documents) - 1, len(tokens))
    sequences = Sequences(
        name=prefix,
        tokens=tokens,
        lengths=lengths,
        pointers=pointers,
        documents=documents,
        reader=lambda start, stop: tokens.read(start, stop, vocab_size),
    )
    versions = {f'{VERSION_OF}{file.url}': file.fingerprint for file in files[:2]}
    return RemotePair(sequences, manifest, versions)


def is_remote_pair(prefix: str) -> bool:
    """Whether a URL is the prefix of token files; one of the files suffices, as for local files.

    If access is denied to both, it is not: the file may be a text.
    """
    if any(x in prefix for x in '*?[') or prefix.lower().endswith((*SUFFIXES, *COMPRESSED)):
        return False
    return any(_exists(f'{prefix}{suffix}') for suffix in ('.idx', '.bin'))


def _exists(url: str) -> bool:
    """Whether a server shows a file; it may deny access to one that does not exist."""
    try:
        patiently(url, lambda: look(url))
    except MissingError:
        return False
    except RefusedError:
        if url.endswith('.json'):
            logger.warning(
                '%s: access is denied, as some servers do for a missing file; if it exists, tokens '
                'and tokenizer are not compared without it',
                url,
            )
        return False
    return True


class RemoteTokens:
    """The token ids of a remote PREFIX.bin, [tokens]."""

    def __init__(self, file: RemoteFile, dtype: np.dtype) -> None:
        self._file, self.dtype, self.itemsize = file, dtype, dtype.itemsize
        self.nbytes = file.size

    def __len__(self) -> int:
        return self.nbytes // self.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        assert step == 1
        stop = max(start, stop)
        return np.frombuffer(
            self._file.read(start * self.itemsize, stop * self.itemsize), self.dtype
        )

    def read(self, start: int, stop: int, vocab_size: int) -> np.ndarray:
        """Return token ids `start` to `stop`; raise ConfigError if one is not in the vocabulary."""
        ids = self[start:stop]
        if (bad := first_bad(ids, vocab_size)) is not None:
            message = f'{vocab_size} ids end below {ids[bad]}, which is token {start + bad}'
            raise mistake(
                'model.vocab_size',
                f'{message}; use {ids[bad] + 1} or more, or build the files again',
                place=f'{self._file.url}: at byte {(start + bad) * self.itemsize}',
            )
        return ids
