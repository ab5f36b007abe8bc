"""Open the corpus of a config, and make the batches of its run."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megajax.core.config import Config, mistake
from megajax.core.config.rules import batch_multiple
from megajax.runtime.data.batches import Batches, Order
from megajax.runtime.data.blend_notes import note_early_end, note_unvalidated
from megajax.runtime.data.corpus_tokenizer import (
    CORPUS,
    check_image_token,
    tokenizer_of_pairs,
    tokenizer_of_text,
)
from megajax.runtime.data.image_rows import EmptySlots
from megajax.runtime.data.image_text.chat import Template
from megajax.runtime.data.image_text.load import (
    Progress,
    check_unused_images,
    keeps_documents,
    load_image_text,
    read_training_texts,
)
from megajax.runtime.data.load_streamed import load_streamed
from megajax.runtime.data.loss_check import check_counted
from megajax.runtime.data.masked import (
    NUM_SPECIAL,
    DocumentPieces,
    MaskedBatches,
    Vocabulary,
    check_documents,
)
from megajax.runtime.data.megatron_order import MegatronSamples, blend_index, blend_sizes
from megajax.runtime.data.remote_text import local_text
from megajax.runtime.data.samples import Joined, Samples, Windows
from megajax.runtime.data.sources.remote import is_remote
from megajax.runtime.data.sources.remote_file import FETCHES
from megajax.runtime.data.synthetic_corpus import (
    PICTURES,
    document_row_shape,
    draw_pictures,
    row_shape,
)
from megajax.runtime.data.text.parts import Part, split_sequences
from megajax.runtime.data.text.tokenizer import Tokenizer
from megajax.runtime.data.text_tokens import KeptTokens, tokenize_once
from megajax.runtime.data.token_pairs import check_pairs, open_pair, prefixes_of

# Beginning of the name under which a checkpoint records the validation documents of a text; the
# corpus follows.
VALIDATION_OF = 'validation documents of '

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training and validation batches of a run, and their tokenizer."""

    tokenizer: Tokenizer | None  # None if unknown
    train: Batches
    validation: Batches  # has no batches if `data.split` leaves no validation data
    summary: str  # line printed at the start of a run
    fingerprints: dict[str, str]  # fingerprint of each corpus, by name
    # Returns the training batches in the order of a run with this many samples; only if the number
    # of samples decides the order.
    train_of: Callable[[int], Batches] | None = None


def load_data(
    config: Config, template: Template | None = None, *, progress: Progress | None = None
) -> Data:
    """Open the corpus of `config`.

    Messages are rendered with the chat `template`, by default the config's. While messages or
    images are read, `progress` is called again and again. Raises ConfigError if the corpus cannot
    be used, does not fit the model, does not fill a batch, or has no token that counts in the loss.
    """
    if config.data.corpus in PICTURES:
        drawn = draw_pictures(config)
        return Data(
            tokenizer=drawn.tokenizer,
            train=drawn.train,
            validation=drawn.validation,
            summary=drawn.summary,
            fingerprints={config.data.corpus: drawn.fingerprint},
        )
    if config.data.order == 'streamed':
        if prefixes := prefixes_of(config):
            message = f'streamed is for text, and {prefixes[0]} has token files; use stateless'
            raise mistake('data.order', message, *CORPUS)
        streamed = load_streamed(config)
        check_counted(config, streamed.tokenizer, streamed.train, streamed.validation)
        return Data(**streamed._asdict())
    with local_text(config) as (local, versions, kept):
        data = _load_files(local, template, kept, progress)
        check_counted(local, data.tokenizer, data.train, data.validation)
    if not versions:
        return data
    contents = {
        f'{name.removesuffix(local.data.corpus)}{config.data.corpus}': value
        for name, value in data.fingerprints.items()
    }
    return replace(data, fingerprints={**contents, **versions})


def _load_files(
    config: Config,
    template: Template | None,
    kept: KeptTokens | None,
    progress: Progress | None,
) -> Data:
    if kept and kept.found:
        return _load_text(config, kept)
    prefixes = prefixes_of(config)
    if not prefixes and keeps_documents(config, config.data.corpus):
        return _load_image_text(config, template, progress)
    if config.data.chat_template is not None:
        message = 'is for JSON lines with messages, and the corpus has none; remove it'
        raise mistake('data.chat_template', message, *CORPUS)
    if config.vision is not None and not prefixes:
        check_unused_images(config.data.corpus)
    data = _load_pairs(config, prefixes) if prefixes else _load_text(config, kept)
    if config.vision is None:
        return data
    check_image_token(config, data.tokenizer)
    shape = row_shape(config)
    train, validation = (EmptySlots(batches, shape) for batches in (data.train, data.validation))
    data = replace(data, train=train, validation=validation)
    if (of_text := data.train_of) is None:
        return data
    return replace(data, train_of=lambda num_samples: EmptySlots(of_text(num_samples), shape))


def _load_pairs(config: Config, prefixes: Sequence[str]) -> Data:
    pairs = [open_pair(config, prefix) for prefix in prefixes]
    manifests = {pair.sequences.name: pair.manifest for pair in pairs}
    tokenizer = tokenizer_of_pairs(config, manifests)
    pairs = check_pairs(config, pairs, tokenizer)
    parts = [split_sequences(pair.sequences, config.data.split) for pair in pairs]
    train, validation = [part[0] for part in parts], [part[1] for part in parts]
    for part in train:
        _check_tokens(part)
    note_unvalidated(config, validation)
    names = ', '.join(map(str, pairs))
    summary = f'{_size(train)} to train on, {_size(validation)} to validate, of {names}'
    data = _make(config, tokenizer, train, validation, summary)
    versions = {name: version for pair in pairs for name, version in pair.versions.items()}
    return replace(data, fingerprints=data.fingerprints | versions)


def _load_image_text(config: Config, template: Template | None, progress: Progress | None) -> Data:
    data, train = config.data, config.train
    if config.model.is_bert:
        reads = f'model.objective={config.model.objective} reads text, not chats'
        if data.chat_template is not None:
            raise mistake('data.chat_template', f'{reads}; remove it', 'model.objective')
        fix = 'give text, or use model.objective=next_token'
        message = f'{data.corpus} has messages, and {reads}; {fix}'
        raise mistake('data.corpus', message, 'model.objective')
    if data.order == 'megatron':
        message = 'megatron cuts sequences from a token stream, but these documents are not split'
        raise mistake('data.order', f'{message}; use stateless', 'data.corpus')
    tokenizer = tokenizer_of_text(config, partial(read_training_texts, data.corpus, data.split))
    check_image_token(config, tokenizer)
    loaded = load_image_text(
        data.corpus,
        document_row_shape(config),
        tokenizer,
        batch_size=train.batch_size,
        multiple=batch_multiple(config),
        seed=train.seed,
        split=data.split,
        template=template or data.chat_template,
        ignored=data.ignored_keys,
        progress=progress,
    )
    return Data(
        tokenizer=tokenizer,
        train=loaded.train,
        validation=loaded.validation,
        summary=loaded.summary,
        fingerprints=loaded.fingerprints,
    )


def _load_text(config: Config, kept: KeptTokens | None) -> Data:
    tokens = kept.get() if kept else tokenize_once(config)
    tokenizer, (train, validation), summary, warnings = tokens
    for warning in warnings:
        logger.warning(warning)
    _check_tokens(train)
    data = _make(config, tokenizer, [train], [validation], summary)
    if not validation.num_tokens:
        return data
    # The fingerprint of token files covers all parts of them.
    name = f'{VALIDATION_OF}{validation.sequences.name}'
    contents = data.fingerprints | {name: validation.sequences.fingerprint()}
    return replace(data, fingerprints=contents)


def _check_tokens(part: Part) -> None:
    if part.num_tokens < 2:  # a token and its label are two
        message = (
            f'{part.sequences.name} has {part.num_tokens} tokens to train on, '
            f'in {len(part)} of {len(part.sequences)} sequences'
        )
        fix = 'give more text, or another data.split'
        raise mistake('data.corpus', f'{message}; {fix}', 'data.split', *CORPUS)


def _make(
    config: Config,
    tokenizer: Tokenizer | None,
    train: list[Part],
    validation: list[Part],
    summary: str,
) -> Data:
    is_megatron = config.data.order == 'megatron'
    make_batches = _megatron if is_megatron else partial(_stateless, tokenizer=tokenizer)
    return Data(
        tokenizer=tokenizer,
        train=make_batches(config, train),
        train_of=partial(_megatron, config, train) if is_megatron else None,
        validation=make_batches(config, validation, validation=True),
        summary=summary,
        fingerprints={part.sequences.name: part.sequences.fingerprint() for part in train},
    )


def _stateless(
    config: Config, parts: list[Part], *, tokenizer: Tokenizer | None, validation: bool = False
) -> Batches:
    """Return batches in megajax's own order.

    Training batches are endless and shuffled. Validation batches come once and in order, so that
    every evaluation reads the same ones.
    """
    from megajax.runtime.data import stateless_order

    batch_size, seq_len = config.train.batch_size, config.train.seq_len
    batches: Callable[[Samples, Order], Batches] = partial(_batches, config)
    if not config.model.is_bert:
        samples = Joined(
            [
                Windows(part, seq_len=seq_len, find_documents=config.data.document_mask)
                for part in parts
            ]
        )
    else:
        assert tokenizer is not None
        vocabulary, length = Vocabulary.of(tokenizer), seq_len - NUM_SPECIAL
        datasets = [DocumentPieces(part, length=length, eod=tokenizer.eod) for part in parts]
        samples = Joined(datasets)
        check_documents(parts, datasets, validation=validation)
        batches = partial(
            MaskedBatches,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=config.train.seed,
            vocabulary=vocabulary,
        )
    weights = list(config.data.blend.values()) or [1.0]
    if validation:
        order = stateless_order.in_order(samples.starts, weights)
        note_early_end(config, parts, samples, order)
        return batches(samples, order)
    if len(samples) < batch_size:
        multiple = batch_multiple(config)
        largest = len(samples) // multiple * multiple
        message = (
            f'{batch_size} is more than the {len(samples)} sequences of train.seq_len={seq_len} in '
            f'{sum(part.num_tokens for part in parts)} tokens; '
            f'use {f"{largest}, " if largest else ""}a shorter train.seq_len or a larger corpus'
        )
        raise mistake('train.batch_size', message, 'train.seq_len', *CORPUS)
    return batches(samples, stateless_order.shuffled(samples.starts, weights, config.train.seed))


def _megatron(
    config: Config, parts: list[Part], num_samples: int | None = None, *, validation: bool = False
) -> Batches:
    """Return the batches that Megatron-LM reads with the same settings.

    `num_samples` is the number of samples of the run; by default it follows from the config. Every
    evaluation reads the batches that Megatron-LM reads in its first evaluation.
    """
    train = config.train
    steps = (
        (train.steps // train.eval_every + 1) * train.eval_batches if validation else train.steps
    )
    num_samples = num_samples or steps * train.batch_size
    blend = config.data.blend
    weights = [*blend.values()] or [1.0]
    # Only validation parts can be empty: `_check_tokens` raises for training parts. Megatron-LM
    # hangs on an empty part.
    filled = [pair for pair in zip(parts, weights, strict=True) if pair[0].num_tokens]
    if not filled:
        return _batches(config, Joined([]), [])
    weights = [weight for _, weight in filled]
    shares, sizes = blend_sizes(weights, num_samples) if blend else ([num_samples], [num_samples])
    datasets = [
        MegatronSamples(part, seq_len=train.seq_len, num_samples=size, seed=train.seed)
        for (part, _), size in zip(filled, sizes, strict=True)
    ]
    samples = Joined(datasets)
    passes = tuple(dataset.passes for dataset in datasets)
    if not blend:
        batches = _batches(config, samples, range(len(samples)))
        batches.order_of, batches.passes = num_samples, passes
        return batches
    index, numbers = blend_index(weights, sum(shares))
    # Megatron raises here, too: a dataset's surplus samples do not suffice
    if (numbers >= np.diff(samples.starts)[index]).any():
        raise mistake(
            'data.blend',
            f'{sum(shares)} samples are too few for these weights; increase train.steps',
            'train.steps',
        )
    batches = _batches(config, samples, np.array(samples.starts)[index] + numbers)
    batches.order_of, batches.passes = num_samples, passes
    return batches


def _batches(config: Config, samples: Samples, order: Order) -> Batches:
    train = config.train
    batches = Batches(
        samples,
        order,
        seq_len=train.seq_len,
        batch_size=train.batch_size,
        document_mask=config.data.document_mask,
    )
    if any(map(is_remote, config.data.blend or [config.data.corpus])):
        batches.read_threads = FETCHES
    return batches


def _size(parts: Sequence[Part]) -> str:
    sequences, tokens = sum(len(part) for part in parts), sum(part.num_tokens for part in parts)
    return f'{sequences:,} sequences ({tokens:,} tokens)'
