"""Make batches of documents with images from JSON lines."""

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath

import numpy as np

from megajax.base.errors import Problem, changing_problems
from megajax.core.config import Config, ConfigError, mistake
from megajax.runtime.data.batches import Batch, Batches, Order
from megajax.runtime.data.image_rows import RowShape
from megajax.runtime.data.image_text.chat import (
    Chat,
    PlainChat,
    Template,
    TemplateChat,
    read_template,
)
from megajax.runtime.data.image_text.documents import FileDocument, read_documents
from megajax.runtime.data.image_text.fit import check_fit
from megajax.runtime.data.image_text.lines import spelled
from megajax.runtime.data.image_text.turns import Vocabulary, end_of_turn
from megajax.runtime.data.sources.image_keys import is_image
from megajax.runtime.data.sources.objects import read_objects
from megajax.runtime.data.synthetic_corpus import NO_TOKEN, PICTURES
from megajax.runtime.data.text.corpus import Document, copies_warning, split_documents
from megajax.runtime.data.text.files import find_corpus
from megajax.runtime.data.text.tokenizer import Tokenizer
from megajax.runtime.data.token_pairs import has_tokens

Row = Sequence[FileDocument]
Progress = Callable[[], object]  # is called again and again while a corpus is read
# Beginning of the name under which a checkpoint records the lines of a corpus with images; the
# corpus follows.
LINES_OF = 'lines of '
BETWEEN_CALLS = 1000  # number of documents between two calls that report progress
CAPTION_SUFFIXES = '.txt', '.caption', '.json'  # of the files with the caption of an image
# The program that writes the images of a folder, and their captions, as JSON lines.
CAPTIONS = (
    'python -c "import json, pathlib; '
    "[print(json.dumps({{'text': '<image>\\n' + text.read_text('utf-8'), "
    "'images': [str(image)]}})) for text in sorted(pathlib.Path('.').rglob('*{text}')) "
    'for image in map(text.with_suffix, {images}) if image.exists()]" > NEW.jsonl'
)

logger = logging.getLogger(__name__)


class ImageTextBatches(Batches):
    """Sequences of documents with images, which are decoded when their batch is read.

    `RowShape` lists the arrays; `order` has the numbers of the sequences.
    """

    read_threads = 4

    def __init__(self, rows: Sequence[Row], shape: RowShape, order: Order, *, batch_size: int):
        self.batch_size, self.order = batch_size, order
        self.shape, self._packed = shape, rows

    @property
    def num_samples(self) -> int:
        """The number of different sequences."""
        return len(self._packed)

    def counted(self, sample: int) -> np.ndarray:
        """Return the labels of a sequence that count in the loss, without decoding images."""
        return np.concatenate(
            [document.tokens[1:][document.answered[1:]] for document in self._packed[sample]]
        )

    def _rows(self, places: range, count: int) -> Batch:
        batch = self.shape.empty(count)
        for row, index in enumerate(places):
            with changing_problems(_with_resume):
                documents = [x.read(self.shape) for x in self._packed[self.order[index]]]
            self.shape.fill({name: x[row] for name, x in batch.items()}, documents)
        return batch


@dataclass(frozen=True, kw_only=True)
class ImageTextData:
    """Batches of documents with images."""

    train: ImageTextBatches  # endless and shuffled batches
    validation: ImageTextBatches  # batches that come once and in order
    summary: str
    # by the name of the corpus, the hash of the tokens, and of the names and sizes (bytes, patches)
    # of images; of a corpus with images, under LINES_OF also the hash without the bytes
    fingerprints: dict[str, str]


def load_image_text(
    corpus: str,
    shape: RowShape,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    multiple: int = 1,
    seed: int,
    split: str,
    template: Template | str | Path | None = None,
    ignored: Container[str] = (),
    progress: Progress | None = None,
) -> ImageTextData:
    """Open a file of JSON lines or Parquet, or all of them in a folder, but no other files.

    Documents are divided into training and validation by the hash of file and line, as for text.
    They are packed whole and in order into sequences; training reshuffles the sequences in each
    epoch. `template` and `ignored` are as for `open_chat`. `progress` is called after every
    `BETWEEN_CALLS` documents. Raises ConfigError if a line cannot be used, if documents do not fit
    into sequences, or if the sequences do not fill a batch, whose size must be a multiple of
    `multiple`.
    """
    from megajax.runtime.data import stateless_order

    with open_chat(tokenizer, shape.image_token, template, ignored=ignored) as chat:
        documents = _read(corpus, shape, tokenizer, chat, progress)
        _warn_of_endless_answers(list(documents.values()), tokenizer, chat)
    check_fit(list(documents.values()), shape)
    find_corpus(corpus).log_unread(corpus)
    pictures = sum(len(document.paths) for document in documents.values())
    if shape.images and not pictures:
        check_unused_images(corpus)
    parts = [[documents[name] for name in names] for names in _split(list(documents), split)]
    _warn_of_copies(parts)
    train, validation = (pack(part, shape) for part in parts)
    if len(train) < batch_size:
        largest = len(train) // multiple * multiple
        smaller = f'train.batch_size={largest}, or ' if largest else ''
        raise mistake(
            'data.corpus',
            f'{corpus!r} fills {len(train)} training sequences of train.seq_len={shape.seq_len}, '
            f'and train.batch_size is {batch_size}; use {smaller}more documents',
            'train.batch_size',
            'train.seq_len',
            'data.split',
        )
    with_images = f' with {pictures:,} images' if shape.images else ''
    shuffled = stateless_order.shuffled([0, len(train)], [1.0], seed)
    in_order = stateless_order.in_order([0, len(validation)], [1.0])
    return ImageTextData(
        train=ImageTextBatches(train, shape, shuffled, batch_size=batch_size),
        validation=ImageTextBatches(validation, shape, in_order, batch_size=batch_size),
        summary=f'{len(documents):,} documents{with_images}; {len(train):,} sequences to train on, '
        f'{len(validation):,} to validate',
        fingerprints=_fingerprints(corpus, documents),
    )


def _read(
    corpus: str,
    shape: RowShape,
    tokenizer: Tokenizer,
    chat: Chat,
    progress: Progress | None,
) -> dict[str, FileDocument]:
    """Return the documents of a corpus by name; raise ConfigError if there are none."""
    documents: dict[str, FileDocument] = {}
    for path, name in files_of(corpus):
        for document in read_documents(path, shape, tokenizer, chat):
            documents[_name(name, document.place)] = document
            if progress and len(documents) % BETWEEN_CALLS == 0:
                progress()
    if not documents:
        fix = 'give JSON lines or Parquet that do'
        raise mistake('data.corpus', f'{corpus!r} contains no documents; {fix}')
    return documents


def pack(documents: Iterable[FileDocument], shape: RowShape) -> list[list[FileDocument]]:
    """Return sequences of whole documents in order; a document that does not fit begins a new one.

    With relevance, each document begins a sequence, because a sequence has one question.
    """
    rows: list[list[FileDocument]] = []
    tokens = images = 0
    for document in documents:
        tokens += len(document.tokens)
        images += len(document.grids)
        is_full = tokens > shape.seq_len + 1 or images > shape.images
        if not rows or is_full or shape.patches.budget:
            rows.append([])
            tokens, images = len(document.tokens), len(document.grids)
        rows[-1].append(document)
    return rows


def read_training_texts(corpus: str, split: str) -> list[str]:
    """Return the texts of the documents to train on, for a tokenizer that is trained on them."""
    texts = {
        _name(name, place): spelled(line)
        for path, name in files_of(corpus)
        for place, line in read_objects(path)
    }
    return [texts[name] for name in _split(list(texts), split)[0]] if texts else []


@contextmanager
def open_chat(
    tokenizer: Tokenizer,
    image_token: int,
    template: Template | str | Path | None,
    *,
    ignored: Container[str] = (),
) -> Iterator[Chat]:
    """Open a Hugging Face chat template, or the plain form of a tokenizer without one.

    `template` may be the path of its file. `ignored` are keys of lines and messages that the
    template may leave unread.
    """
    special = tokenizer.special_tokens()
    eod = next((name for name, i in special.items() if i == tokenizer.eod), '')
    if template is None:
        image = Vocabulary(special=special, image_token=image_token).image
        yield PlainChat(special, image=image, eod=eod, ignored=ignored)
        return
    bos = next((name for name, i in special.items() if [i] == tokenizer.start[:1]), '')
    named = tokenizer.named_tokens or {'bos_token': bos, 'eos_token': eod}
    opened = template if isinstance(template, Template) else read_template(template)
    with TemplateChat(opened, named, ignored=ignored) as chat:
        yield chat


def files_of(corpus: str) -> list[tuple[Path, str]]:
    """Return the JSON lines and Parquet files of a corpus, each with its name inside the corpus.

    Raises ConfigError if there is no such corpus.
    """
    return [(file.path, file.name) for file in find_corpus(corpus).files if file.format != 'text']


def check_unused_images(corpus: str) -> None:
    """Log that the images in the folder of a corpus are not used.

    Raises ConfigError if the documents are text files and most of them have an image of the same
    name, as captions have.
    """
    files, unread = find_corpus(corpus)
    names = {PurePosixPath(name) for name in (*unread, *(file.name for file in files))}
    images = {name.with_suffix(''): name for name in names if is_image(name.name)}
    texts = sorted(names - {*images.values()})
    captions = [
        name
        for name in texts
        if name.suffix.lower() in CAPTION_SUFFIXES and name.with_suffix('') in images
    ]
    are_texts = all(file.format == 'text' for file in files)
    if images and not (are_texts and 2 * len(captions) > len(texts)):
        logger.warning(
            'data.corpus: %s: no line names an image, so the %s images of the folder are not used',
            *(corpus, f'{len(images):,}'),
        )
    elif captions:
        text = next((name for name in captions if name.suffix != '.json'), captions[0])
        image, kinds = images[text.with_suffix('')], {x.suffix for x in images.values()}
        raise mistake(
            'data.corpus',
            f'{corpus!r} has an image for {len(captions):,} of its texts, such as {image} for '
            f'{text}, and only JSON lines show images to the model; to train on the text alone, '
            'move the images out of the folder; to train on both, write JSON lines in the folder: '
            f'{CAPTIONS.format(text=text.suffix, images=sorted(kinds))}',
        )


def keeps_documents(config: Config, corpus: str) -> bool:
    """Whether a corpus is JSON lines whose documents stay whole in a sequence.

    This is so for vision-language models, and if a text model learns the turns of messages. Raises
    ConfigError if there is no such corpus.
    """
    if corpus in PICTURES or has_tokens(corpus):
        return False
    files = files_of(corpus)
    if config.vision is not None or config.data.chat_template is not None:
        return bool(files)
    return any('messages' in next(read_objects(path), ('', {}))[1] for path, _ in files)


def _warn_of_copies(parts: Sequence[Sequence[FileDocument]]) -> None:
    train, validation = (
        [(sha256(x.tokens.tobytes()).digest(), *x.paths) for x in part] for part in parts
    )
    if said := copies_warning(train, validation):
        logger.warning(said)


def _warn_of_endless_answers(
    documents: Sequence[FileDocument], tokenizer: Tokenizer, chat: Chat
) -> None:
    """Log how many documents have answers after which the template writes no special token."""
    begins = (np.diff(document.answered.astype(int), prepend=0) > 0 for document in documents)
    several = sum(np.count_nonzero(places) > 1 for places in begins)
    vocabulary = Vocabulary(special=tokenizer.special_tokens(), image_token=NO_TOKEN)
    try:
        end = end_of_turn(vocabulary, chat, 'a conversation of two turns') if several else None
    except ConfigError:  # a template may need more than two turns
        return
    if several and end is None:
        logger.warning(
            'data.chat_template: writes no special token after an answer, so in %s documents the '
            'model learns to end only the last answer; set one that ends each answer',
            f'{several:,}',
        )


def _name(file: str, place: str) -> str:
    """Return the name of a line, which sorts by file and line number."""
    return f'{file}:{int(place.rpartition(":")[2]):012}'


def _split(names: Sequence[str], split: str) -> tuple[list[str], list[str]]:
    if len(names) == 1:  # a single document stays whole
        return list(names), []
    train, validation, _ = split_documents([Document(name=name, text='') for name in names], split)
    return [document.name for document in train], [document.name for document in validation]


def _with_resume(problem: Problem) -> Problem:
    fix = 'a run that resumes with a different file needs run.allow_changed_data=true'
    return replace(problem, message=f'{problem.message} ({fix})')


def _fingerprints(corpus: str, documents: dict[str, FileDocument]) -> dict[str, str]:
    lines = {f'{LINES_OF}{corpus}': _fingerprint(documents, sizes=False)}
    has_images = any(document.paths for document in documents.values())
    return {corpus: _fingerprint(documents), **(lines if has_images else {})}


def _fingerprint(documents: dict[str, FileDocument], *, sizes: bool = True) -> str:
    digest = sha256()
    for name in sorted(documents):
        document = documents[name]
        files = [(path.name, path.stat().st_size if sizes else 0) for path in document.paths]
        content = f'{name} {len(document.tokens)} {files} {document.grids}'
        digest.update(content.encode(errors='surrogateescape'))  # a name may not be UTF-8
        digest.update(document.tokens.tobytes())
    return digest.hexdigest()
