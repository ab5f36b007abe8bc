"""Open a corpus of text to be read as streams while a run trains (`data.order=streamed`)."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from megajax.base.files.open_files import allow_open_files
from megajax.core.config import Config, mistake
from megajax.runtime.data import stateless_order
from megajax.runtime.data.corpus_tokenizer import check_image_token, tokenizer_of_text
from megajax.runtime.data.remote_text import open_files
from megajax.runtime.data.sources.block_cache import BLOCK
from megajax.runtime.data.sources.inputs import Input, format_of, is_table, readable
from megajax.runtime.data.sources.pieces import UNIT
from megajax.runtime.data.sources.remote import is_remote
from megajax.runtime.data.sources.remote_file import FETCHES, RemoteFile
from megajax.runtime.data.sources.shares import Shares
from megajax.runtime.data.streams import Documents, StreamedBatches
from megajax.runtime.data.synthetic_corpus import row_shape
from megajax.runtime.data.text.corpus import FIXES, split_names
from megajax.runtime.data.text.files import (
    KINDS,
    documents_among,
    find_corpus,
    format_in_folder,
    input_of,
)
from megajax.runtime.data.text.spelled_tokens import warn_of_letters
from megajax.runtime.data.text.tokenizer import Tokenizer
from megajax.runtime.data.token_pairs import naming_key
from megajax.runtime.data.tokens.remote_pair import VERSION_OF

BPE_SAMPLE = 1 << 24  # number of characters on which the default tokenizer is trained
LOOKED_AT = 100  # number of texts in which special tokens are looked for
LOCAL_THREADS = 4  # number of threads that make batches of files on the disk

logger = logging.getLogger(__name__)


class Streamed(NamedTuple):
    """The batches of a corpus that is read as streams, as in `load.Data`."""

    tokenizer: Tokenizer
    train: StreamedBatches
    validation: StreamedBatches
    summary: str
    fingerprints: dict[str, str]


def load_streamed(config: Config) -> Streamed:
    """Open a corpus of text on the disk or at a URL.

    Of the texts, only those are read that train the default tokenizer. Raises ConfigError if the
    corpus cannot be used, or has too few shares for a batch.
    """
    corpus, train = config.data.corpus, config.train
    if config.data.chat_template is not None:
        message = 'is for JSON lines with messages, which data.order=streamed does not read'
        raise mistake('data.chat_template', f'{message}; use data.order=stateless')
    with naming_key(config):
        inputs, versions = _remote(config) if is_remote(corpus) else (_local(corpus), {})
        shares, to_train, to_validate = _split(config, inputs)
        order = stateless_order.shuffled([0, len(to_train)], [1.0], train.seed)
        in_order = (int(to_train[order[index]]) for index in range(len(to_train)))
        tokenizer = tokenizer_of_text(config, lambda: list(_texts(shares, in_order)))
        check_image_token(config, tokenizer)
        head = islice(shares.texts(int(to_train[order[0]])), LOOKED_AT)
        warn_of_letters('data.corpus', head, tokenizer.special_tokens())
    make = partial(
        StreamedBatches,
        seq_len=train.seq_len,
        batch_size=train.batch_size,
        document_mask=config.data.document_mask,
        shape=None if config.vision is None else row_shape(config),
    )
    documents = Documents(shares=shares, numbers=to_train, order=order, tokenizer=tokenizer)
    batches = make(documents, streams=train.batch_size)
    validation = make(
        replace(documents, numbers=to_validate, order=range(len(to_validate))),
        streams=min(train.batch_size, len(to_validate)),
        steps=train.eval_batches if len(to_validate) else 0,
    )
    for each in (batches, validation):
        each.read_threads = FETCHES if is_remote(corpus) else LOCAL_THREADS
    if not is_remote(corpus):
        allow_open_files(2 * train.batch_size)  # a compressed file for each stream
    sizes = [[name, input.size] for name, input in sorted(inputs.items())]
    summary = (
        f'{sum(input.size for input in inputs.values()) / 1e6:,.1f} MB, streamed: '
        f'{len(to_train):,} shares to train on, {len(to_validate):,} to validate; '
        f'{tokenizer.vocab_size} tokens'
    )
    contents = {corpus: sha256(json.dumps(sizes).encode()).hexdigest()}
    return Streamed(tokenizer, batches, validation, summary, contents | versions)


def _split(config: Config, inputs: Mapping[str, Input]) -> tuple[Shares, np.ndarray, np.ndarray]:
    """Return the shares of a corpus, and the numbers of those to train and to validate on."""
    corpus, batch_size = config.data.corpus, config.train.batch_size
    fixes = FIXES._replace(
        messages='use data.order=stateless to train on chats',
        images=FIXES.images
        if config.vision is None
        else 'use data.order=stateless to train on images, or remove the images',
    )
    shares = Shares(inputs, fixes)
    if not len(shares):
        raise mistake('data.corpus', f'{corpus!r} contains no text; give {KINDS}')
    names = [shares.name(number) for number in range(len(shares))]
    to_train, to_validate, _ = map(np.array, split_names(names, config.data.split, of='shares'))
    if len(to_train) < batch_size:
        message = (
            f'streamed reads {batch_size} sequences at once (train.batch_size), each from shares '
            f'of its own, but {corpus} has {len(to_train)} shares to train on; '
            'use data.order=stateless, or a larger corpus'
        )
        raise mistake('data.order', message, 'train.batch_size', 'data.corpus')
    return shares, to_train, to_validate


def _local(corpus: str) -> dict[str, Input]:
    found = find_corpus(corpus)
    found.log_unread(corpus)
    return {file.name: input_of(file) for file in found.files}


def _remote(config: Config) -> tuple[dict[str, Input], dict[str, str]]:
    """Return the documents of a URL by name, and the versions that a checkpoint records."""
    url = config.data.corpus
    files = open_files(config, url)
    inputs = {name: _input(name, file) for name, file in files.items()}
    if len(files) > 1:
        with ThreadPoolExecutor(FETCHES) as threads:
            found = threads.map(format_in_folder, inputs.values(), inputs)
            formats = dict(zip(inputs, found, strict=True))
        names, alone = documents_among(formats)
        for name in inputs.keys() - names:
            logger.warning('data.corpus: not reading %s', files[name].url)
        inputs = {
            name: replace(inputs[name], format=formats[name], table=alone and is_table(name))
            for name in names
        }
    versions = {f'{VERSION_OF}{files[name].url}': files[name].fingerprint for name in inputs}
    return {name: readable(input) for name, input in inputs.items()}, versions


def _input(name: str, file: RemoteFile) -> Input:
    input = Input(
        path=file.url,
        format=format_of(file.url),
        size=file.size,
        mtime_ns=0,
        stream=False,
        version=file.version,
        table=is_table(name),
    )
    # A compressed file is read from its beginning to its end, and others at many places.
    return replace(input, cached=partial(file.open, UNIT if input.compression else BLOCK))


def _texts(shares: Shares, numbers: Iterable[int]) -> Iterator[str]:
    """Yield the texts of shares, up to `BPE_SAMPLE` characters."""
    size = 0
    for text in chain.from_iterable(map(shares.texts, numbers)):
        yield text
        size += len(text)
        if size >= BPE_SAMPLE:
            return
