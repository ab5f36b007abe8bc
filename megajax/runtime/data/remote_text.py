"""Text, JSON lines and Parquet files with URLs: copied to the cache, and tokenized there."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megajax.base.errors import replacing
from megajax.base.render.text import typed
from megajax.core.config import Config, mistake
from megajax.runtime.data.sources.block_cache import locked
from megajax.runtime.data.sources.inputs import format_of, without_query
from megajax.runtime.data.sources.remote import expand, is_remote, is_web, names_below
from megajax.runtime.data.sources.remote_file import RemoteFile
from megajax.runtime.data.text.files import check_no_tokens
from megajax.runtime.data.text_tokens import KeptTokens
from megajax.runtime.data.token_pairs import GB, cache_of, naming_key, prefixes_of
from megajax.runtime.data.tokens.indexed import prefixes_among
from megajax.runtime.data.tokens.remote_pair import FILES, VERSION_OF

DOWNLOADS = 8  # files that are downloaded at the same time
COPYING = '.copying'  # the folder whose lock a process holds while it downloads

logger = logging.getLogger(__name__)


class LocalText(NamedTuple):
    """A config whose corpus is on the disk, and what a checkpoint records of its remote files."""

    config: Config
    versions: Mapping[str, str]
    kept: KeptTokens | None = None  # place for the tokens of a corpus with a URL


@contextmanager
def local_text(config: Config) -> Iterator[LocalText]:
    """Yield the config with a text corpus that has a URL replaced by a copy in the cache.

    The copies have the names that the files have below the URL, so they are split into training and
    validation like any other copy. If the cache has the tokens of these files, there need be no
    copies. The cache keeps them during the block, and errors in the block name the URL. Raises
    ConfigError if there are no such files, or if they exceed the cache.
    """
    url = config.data.corpus
    if config.data.blend or not is_remote(url) or prefixes_of(config):
        yield LocalText(config, {})
        return
    with naming_key(config):
        if config.vision is not None:
            message = 'is not supported with a vision section, unless it has token files'
            raise mistake(url, f'{message}; copy the files, and set data.corpus to their folder')
        files = open_files(config, url)
    keys = json.dumps({name: file.key for name, file in files.items()})
    here = cache_of(config).folder / sha256(keys.encode()).hexdigest()[:32]
    here.mkdir(exist_ok=True)
    corpus = here / next(iter(files)) if len(files) == 1 else here
    path = url.partition('?')[0] if is_web(url) else url
    root = url[: path.rindex('/')] if len(files) == 1 else url
    data = config.data.model_copy(update={'corpus': str(corpus)})
    local = config.model_copy(update={'data': data})
    versions = {f'{VERSION_OF}{file.url}': file.fingerprint for file in files.values()}
    with replacing(str(here), root), locked(here, shared=True):
        kept = None if config.data.chat_template is not None else KeptTokens(local, here)
        if kept is None or kept.found is None:
            with naming_key(config):
                _download(config, here, files)
        yield LocalText(local, versions, kept)


def open_files(config: Config, url: str) -> dict[str, RemoteFile]:
    """Return the files of a corpus by their names below its URL.

    Raises ConfigError if there are none, if texts are next to token files, or if one cannot be
    read.
    """
    found = expand(url)
    names = _without_queries(names_below(url, found))
    prefixes = prefixes_among(set(names.values()))
    built = {f'{prefix}{suffix}' for prefix in prefixes for suffix in FILES}
    if all(format_of(each) == 'text' for each in set(names.values()) - built):
        check_no_tokens(url, prefixes)
    if unsafe := [name for name in names if '..' in PurePosixPath(name).parts]:
        raise mistake(url, f'{unsafe[0]} leads out of its folder; rename it')
    with ThreadPoolExecutor(DOWNLOADS) as threads:
        cache = cache_of(config)
        opened = threads.map(lambda each: RemoteFile(each, cache, found[each]), names.values())
        return dict(zip(names, opened, strict=True))


def _without_queries(urls: Mapping[str, str]) -> dict[str, str]:
    """Return the URLs by their names without queries such as `?download=true`.

    A query stays if it names the file, or if two files would get the same name.
    """
    short = {name: without_query(name) if is_web(url) else name for name, url in urls.items()}
    count = Counter(short.values())
    for name, without in short.items():
        if not without or count[without] > 1:
            short[name] = name
    return {short[name]: url for name, url in urls.items()}


def _download(config: Config, here: Path, files: Mapping[str, RemoteFile]) -> None:
    """Copy the files to a folder of the cache."""
    size, url = sum(file.size for file in files.values()), config.data.corpus
    if size > config.run.data_cache_gb * GB:
        build = f'megajax data build OUT --input {typed(url)}, and set data.corpus=OUT'
        limit = f'run.data_cache_gb={config.run.data_cache_gb:g}'
        fix = f'set data.order=streamed, raise the limit, or {build}'
        raise mistake(url, f'has {size / GB:.1f} GB, and {limit} is less; {fix}')
    copies = here / COPYING
    copies.mkdir(exist_ok=True)
    with locked(copies), ThreadPoolExecutor(DOWNLOADS) as threads:
        missing = [name for name, file in files.items() if not file.is_at(here / name)]
        if missing:
            logger.info('data       copying %s (%.1f MB) to %s', url, size / 1e6, here)
        list(threads.map(lambda name: files[name].download(here / name), missing))
