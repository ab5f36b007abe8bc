"""Answer a prompt for all images of a folder, in batches that are prefetched."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megajax.core.config import ConfigError, Problem
from megajax.runtime.data.image_text.documents import FileDocument
from megajax.runtime.generate.continuation import Continuation
from megajax.runtime.generate.generator import BATCH_SIZE, Generator, Request
from megajax.runtime.generate.image_prompts import Prompt, PromptReader

SHOWN = 5  # maximum number of files named in an error


class Answer(NamedTuple):
    """An image, and the model's continuation of the prompt with this image."""

    picture: Path
    continuation: Continuation


def find_pictures(folder: Path) -> list[Path]:
    """Return the files of a folder by name, without hidden files and subfolders.

    Raises ConfigError if there are no files.
    """
    try:
        files = [path for path in sorted(folder.iterdir()) if not path.name.startswith('.')]
    except OSError as error:
        raise ConfigError(f'{folder}: {error.strerror}: give a folder of images') from error
    if not (pictures := [path for path in files if not path.is_dir()]):
        raise ConfigError(f'{folder}: contains no images: give a folder that does')
    return pictures


def check_prompts(
    reader: PromptReader, prompt: str, pictures: Sequence[Path]
) -> list[FileDocument]:
    """Return the prompt for each image; only the headers of the files are read.

    Raises ConfigError for files that are not images or are too large; it names the first five.
    """
    documents: list[FileDocument] = []
    problems: list[Problem | str] = []
    for picture in pictures:
        try:
            documents.append(reader.check(prompt, [picture]))
        except ConfigError as error:
            problems += error.problems
    if len(problems) > SHOWN:
        problems[SHOWN:] = [f'and {len(problems) - SHOWN} more of {len(pictures)} files']
    if problems:
        raise ConfigError(*problems)
    return documents


def answer_all(
    generator: Generator,
    reader: PromptReader,
    documents: Sequence[FileDocument],
    request: Request,
    *,
    batch_size: int = BATCH_SIZE,
) -> Iterator[Answer]:
    """Yield the answer for each image, in order, as soon as it is complete.

    An answer does not depend on its batch. If an image is truncated, raises ConfigError with its
    name after all images of earlier batches are answered.
    """
    read = read_ahead(reader, documents, batch_size)
    batches = (tuple(zip(*prompts, strict=True)) for prompts in read)
    answered = 0
    for first, rows in generator.batches(batches, request, min(len(documents), batch_size)):
        while answered < first + len(rows) and (row := rows[answered - first]).end:
            yield Answer(documents[answered].paths[0], row)
            answered += 1


def read_ahead(
    reader: PromptReader, documents: Sequence[FileDocument], batch_size: int
) -> Iterator[list[Prompt]]:
    """Yield batches of prompts with their images; a thread prefetches the next batch."""

    def read(start: int) -> list[Prompt]:
        return [reader.read(document) for document in documents[start : start + batch_size]]

    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(read, 0)
        for start in range(batch_size, len(documents) + batch_size, batch_size):
            batch = ahead.result()
            ahead = thread.submit(read, start)
            yield batch
