"""The perplexity of documents with images or messages, which training does not split."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence

import numpy as np

from megajax.core.config import ConfigError
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.image_text.chat import Template
from megajax.runtime.data.image_text.documents import FileDocument, read_documents
from megajax.runtime.data.image_text.fit import check_fit
from megajax.runtime.data.image_text.load import files_of, keeps_documents, open_chat
from megajax.runtime.data.loss_check import ONLY_SPECIAL
from megajax.runtime.data.synthetic_corpus import document_row_shape
from megajax.runtime.evaluate.perplexity import Perplexity, exp
from megajax.runtime.evaluate.score import Scorer, Window
from megajax.runtime.generate import prompt_of

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentPerplexity(Perplexity):
    """The perplexity of the tokens that count; `tokens` and `bytes` include only these."""

    images: int


def are_documents(scorer: Scorer, files: Sequence[str]) -> bool:
    """Whether training would read these files as JSON lines of whole documents.

    Raises ConfigError if this is true for only some of the files.
    """
    kept = {file: keeps_documents(scorer.config, file) for file in files}
    if any(kept.values()) and not all(kept.values()):
        others = ', '.join(file for file, is_kept in kept.items() if not is_kept)
        raise ConfigError(f'{others}: no JSON lines, and other files are: evaluate them apart')
    return all(kept.values())


def document_perplexity(
    scorer: Scorer, tokenizer: Tokenizer, files: Sequence[str], template: Template | None = None
) -> DocumentPerplexity:
    """Evaluate JSON-lines files and folders of them, each document as a separate sequence.

    The same tokens count as in training: all tokens of a "text" except its images and, with
    relevance, the tokens directly after them, and the assistant's turns of "messages", rendered by
    the model's chat `template`, or else the config's. Raises ConfigError with file and line if a
    document cannot be used, or if some have more than `model.max_seq_len` tokens.
    """
    config = scorer.config
    shape = dataclasses.replace(
        document_row_shape(config), seq_len=config.model.max_seq_len, limited_by='model.max_seq_len'
    )
    with open_chat(
        tokenizer,
        shape.image_token,
        template or config.data.chat_template,
        ignored=config.data.ignored_keys,
    ) as chat:
        documents = [
            document
            for file in files
            for path, _ in files_of(file)
            for document in read_documents(path, shape, tokenizer, chat)
        ]
    check_fit(documents, shape)

    def windows() -> Iterator[Window]:
        for document in documents:
            targets = len(document.tokens) - 1
            images = None
            if shape.images:
                images = prompt_of(document.read(shape), shape, targets)[1]
            yield Window(document.tokens, targets, images, _answered(document))

    answered = [_answered(document) for document in documents]
    if not (tokens := sum(int(counts.sum()) for counts in answered)):
        raise ConfigError(f'{", ".join(files)}: no token counts: give documents with answers')
    nll = math.fsum(
        scored.nll[counts].sum() for scored, counts in zip(scorer(windows()), answered, strict=True)
    )
    num_bytes = sum(
        int(tokenizer.token_bytes[document.tokens[1:][counts]].sum())
        for document, counts in zip(documents, answered, strict=True)
    )
    if not num_bytes:
        logger.warning('%s: %s', ', '.join(files), ONLY_SPECIAL)
    return DocumentPerplexity(
        documents=len(documents),
        images=sum(len(document.paths) for document in documents),
        tokens=tokens,
        bytes=num_bytes,
        loss=nll / tokens,
        perplexity=exp(nll / tokens),
        bits_per_byte=nll / num_bytes / math.log(2) if num_bytes else None,
    )


def _answered(document: FileDocument) -> np.ndarray:
    """Return whether each token counts, for all tokens but the first."""
    return document.answered[1:]
