"""Models of the Hugging Face Hub, downloaded into its cache. Imports no jax.

Only files with the names below are fetched: weights as safetensors, and the files that describe the
model, the tokenizer and generation. Pickles and code are not fetched.
"""

import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from megajax.base.errors import reason
from megajax.base.files.json_file import read_json
from megajax.base.render.text import in_line, typed
from megajax.core.config import ConfigError
from megajax.core.config.extras import install
from megajax.interop.huggingface.tensors import ADAPTER, INDEX, SINGLE, check_adapter
from megajax.runtime.checkpoint.hf_files import COMPANIONS, TEMPLATES

DESCRIPTION = (
    'config.json',
    'tokenizer.json',
    INDEX,
    ADAPTER,
    *COMPANIONS,
    f'{TEMPLATES}/*.jinja',
)
NAME = re.compile(r'[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}', re.ASCII)
REVISION = re.compile(r'[\w][\w./-]{0,254}', re.ASCII)
WEIGHTS = re.compile(r'[\w.-]+\.safetensors', re.ASCII)
MAIN = 'main'

logger = logging.getLogger(__name__)


class Repository:
    """A revision of a model on the Hub, in the local cache.

    Creating an instance downloads the description of the model; `fetch_weights` downloads the rest.
    A rejected model or override therefore costs no download of weights. Raises ConfigError with the
    repository, the failure and the fix, but never with the token.
    """

    def __init__(self, name: str, revision: str | None = None):
        self.name, self._revision = name, revision or MAIN
        self.folder = self._fetch(DESCRIPTION, self._revision)
        self.commit = self.folder.name

    def __str__(self) -> str:
        return f'{self.name} at {self.commit}'

    def fetch_weights(self) -> None:
        """Download `model.safetensors`, or the files of its index if there is no such file."""
        check_adapter(self.folder)
        self._fetch([SINGLE], self.commit)
        index = self.folder / INDEX
        if (self.folder / SINGLE).is_file() or not index.is_file():
            return
        listed = read_json(index).get('weight_map')
        files = {str(file) for file in listed.values()} if isinstance(listed, dict) else set()
        # `read_tensors` rejects any other name.
        self._fetch(sorted(file for file in files if WEIGHTS.fullmatch(file)), self.commit)

    def _fetch(self, files: Sequence[str], revision: str) -> Path:
        try:
            from huggingface_hub import snapshot_download
            from huggingface_hub.utils.tqdm import disable_progress_bars
        except ImportError as error:
            fix = install('hub')
            raise ConfigError(f'{self.name}: needs huggingface_hub: {fix}') from error
        if not sys.stderr.isatty():
            disable_progress_bars()
        try:
            folder = snapshot_download(
                self.name, revision=revision, allow_patterns=list(files), library_name='megajax'
            )
        except Exception as error:  # errors of the HTTP library, which differs between versions
            self._refuse(error)
        return Path(folder)

    def _refuse(self, error: Exception) -> NoReturn:
        from huggingface_hub import constants, errors, get_token

        hub = urlsplit(constants.ENDPOINT).netloc.rpartition('@')[2]
        elsewhere = (
            f'download it with: hf download {typed(self.name)} '
            f'--local-dir {typed(self.name.split("/")[1])}, '
            'where there is a network, and give that folder'
        )
        if isinstance(error, errors.GatedRepoError):
            why = f'is gated on {hub}: accept its terms there, and set HF_TOKEN to your token'
        elif isinstance(error, errors.RepositoryNotFoundError):
            why = (
                f'is neither a folder here nor a repository that {hub} shows: correct the name; '
                'for a private one set HF_TOKEN to a token that may read it'
            )
        elif isinstance(error, errors.RevisionNotFoundError):
            why = f'has no revision {self._revision} on {hub}: give a branch, a tag or a commit'
        elif constants.HF_HUB_OFFLINE:
            cache = constants.HF_HUB_CACHE
            why = f'is missing or incomplete in {cache}, and HF_HUB_OFFLINE is set: unset it, or '
            why += elsewhere
        else:
            said = reason(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            token = get_token()
            said = said.replace(token, '***') if token else said
            why = f'cannot be downloaded from {hub} ({said}): try again, or {elsewhere}'
        # The cause is omitted, because its text may contain the request's headers.
        raise ConfigError(f'{self.name}: {why}') from None


def find_source(source: str, revision: str | None = None) -> tuple[Path, Repository | None]:
    """Return the folder of a model, and its repository if it is on the Hub.

    A local folder of that name takes precedence. Raises ConfigError if `source` is neither a folder
    nor the name of a repository, and in the same cases as `Repository`.
    """
    is_name = NAME.fullmatch(source) and '..' not in source
    if os.path.exists(source):
        if revision is not None:
            raise ConfigError(f'--revision is of a repository, and {source} is here: leave it out')
        if is_name:
            logger.warning('%s is a local folder, so nothing is downloaded', source)
        return Path(source), None
    if not is_name:
        raise ConfigError(
            f'{in_line(source, 200)}: no such folder, and no name of a repository, '
            'which is ORG/NAME, such as Qwen/Qwen3-0.6B'
        )
    if revision is not None and (not REVISION.fullmatch(revision) or '..' in revision):
        raise ConfigError(
            f'--revision {in_line(revision, 200)}: give a branch, a tag or a commit, such as main'
        )
    repository = Repository(source, revision)
    return repository.folder, repository
