"""A conversation, rendered by a chat template and kept within the model's context length."""

import dataclasses
from collections.abc import Generator as GeneratorType
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megajax.core.config import Config, ConfigError
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.image_text.chat import Chat, Message
from megajax.runtime.data.image_text.documents import FileDocument
from megajax.runtime.data.image_text.fit import check_pictures
from megajax.runtime.data.image_text.lines import content_of
from megajax.runtime.data.image_text.turns import Vocabulary, end_of_turn, pieces_of_prompt
from megajax.runtime.data.images import read_size
from megajax.runtime.data.sources.image_keys import MARKER
from megajax.runtime.data.synthetic_corpus import document_row_shape
from megajax.runtime.generate.continuation import Continuation
from megajax.runtime.generate.generator import Generator, Request
from megajax.runtime.generate.image_prompts import PromptImages, prompt_of

PLACE = 'the conversation'  # the place in error messages of a template


@dataclasses.dataclass(frozen=True)
class Turn:
    """A message, and the files of the images in it."""

    message: Message
    images: Sequence[Path] = ()


class Conversation:
    """Turns with a model, each answered as the assistant.

    A conversation begins like a document in training, and text that spells a special token is
    encoded as text. For a model that reads images, each <image> in a text is the next of `images`.
    An answer ends at the tokens that end a text or a turn of the template. Later turns see the text
    after its last special token, without reasoning or channels before it. `dropped` counts the
    oldest turns that the next answer no longer attends to. Turns are dropped if a prompt would
    leave too little of `model.max_seq_len` for the answer, which gets `room` tokens, or a quarter
    of the context if that is less, or if the turns have more than `vision.images`. The system
    message is never dropped.
    """

    def __init__(
        self,
        generator: Generator,
        chat: Chat,
        request: Request,
        system: str | None,
        images: Sequence[Path] = (),
    ):
        assert generator.tokenizer is not None
        self.dropped = 0
        self._generator, self._chat, self._request = generator, chat, request
        self._tokenizer: Tokenizer = generator.tokenizer
        config = generator.config
        shape = document_row_shape(config)
        self._shape = dataclasses.replace(shape, seq_len=config.model.max_seq_len)
        special = self._tokenizer.special_tokens()
        self._vocabulary = Vocabulary(special=special, image_token=shape.image_token)
        self._system = [] if system is None else [Turn(_message('system', system))]
        self._turns: list[Turn] = []
        self._images = list(images)  # for later turns
        self._tokenizer.also_ends(self._ends_of_turn())

    def _ends_of_turn(self) -> list[int]:
        """Return the tokens that end a turn of the template besides those that end a text."""
        before = [turn.message for turn in self._system]
        try:
            end = end_of_turn(self._vocabulary, self._chat, PLACE, before)
        except ConfigError:  # a template may need other turns; an error in it is raised by a turn
            return []
        return [] if end is None else [end]

    def answer(self, text: str) -> GeneratorType[Continuation, None, None]:
        """Yield the answer each time it grows.

        Closing the generator ends the answer; the part generated so far stays in the conversation.
        If `text` alone leaves no room for an answer, or an image cannot be read, it is dropped and
        ConfigError is raised.
        """
        self._turns.append(self._asked(text))
        try:
            prompt, images = self._prompt(self._generator.config)
        except ConfigError:
            self._turns.pop()
            raise
        del self._images[: len(self._turns[-1].images)]
        row: Continuation | None = None
        try:
            for (row,) in self._generator.stream([prompt], self._request, images):
                assert row is not None
                yield row
        finally:
            self._turns.append(Turn(_message('assistant', self._last_part(row) if row else '')))

    def _last_part(self, row: Continuation) -> str:
        """Return the last text of an answer that no special token divides.

        Special tokens separate reasoning or a name of a channel from the answer that they precede.
        Templates write these tokens themselves, and may raise an error if a message spells them.
        """
        text, special = row.text, {i: name for name, i in self._vocabulary.special.items()}
        for name in (special[i] for i in reversed(row.ids) if i in special):
            before, found, after = text.rpartition(name)  # a stop may have cut it off
            if after.strip() and found:
                return after
            text = before if found else text
        return text

    def _asked(self, text: str) -> Turn:
        places = text.count(MARKER) if self._vocabulary.sees else 0
        if places > len(self._images):
            raise ConfigError(
                f'this turn contains {MARKER} {places} times, and {len(self._images)} images are '
                f'left: give --image once for each {MARKER}'
            )
        message = {'role': 'user', 'content': content_of(text, self._vocabulary, PLACE)}
        return Turn(message, self._images[:places])

    def _prompt(self, config: Config) -> tuple[list[int], list[PromptImages] | None]:
        """Return the tokens and images of the turns that fit, and drop the older turns."""
        limit = config.model.max_seq_len
        room = min(self._request.max_tokens, limit // 4)
        document, number = self._encode(self._turns), 0
        while not self._fits(document, limit - room) and number + 2 < len(self._turns):
            number += 2  # one text and its answer
            document = self._encode(self._turns[number:])
        ids = document.tokens.tolist()
        if len(ids) >= limit:
            has, fix = 'this turn has', 'shorten it'
            if self._system:
                has, fix = "the system's message and this turn have", 'shorten one of them'
            raise ConfigError(
                f'{has} {len(ids)} tokens in the chat template, which leaves no '
                f'room in model.max_seq_len={limit}: {fix}'
            )
        check_pictures(document, self._shape)
        images = None
        if document.paths:
            images = [prompt_of(document.read(self._shape), self._shape, len(ids))[1]]
        del self._turns[:number]
        self.dropped += number // 2
        return ids, images

    def _fits(self, document: FileDocument, limit: int) -> bool:
        most = self._shape.images
        return len(document.tokens) <= limit and len(document.grids) <= most

    def _encode(self, turns: Sequence[Turn]) -> FileDocument:
        paths = [path for turn in turns for path in turn.images]
        grids = [self._shape.patches.fit(*read_size(path), name=str(path)) for path in paths]
        messages = [turn.message for turn in (*self._system, *turns)]
        pieces = pieces_of_prompt(
            messages, self._vocabulary, self._chat, PLACE, list(map(str, paths))
        )
        ids, _ = self._tokenizer.encode_pieces(
            pieces,
            sizes=list(map(self._shape.patches.tokens, grids)),
            image_token=self._vocabulary.image_token,
        )
        begin = self._tokenizer.start or [self._tokenizer.eod]
        if not (self._chat.begins_texts and ids) and ids[: len(begin)] != begin:
            ids = [*begin, *ids]
        tokens = np.array(ids, np.int32)
        answered = np.zeros(len(ids), bool)
        return FileDocument(place=PLACE, tokens=tokens, answered=answered, paths=paths, grids=grids)


def _message(role: str, content: str) -> Message:
    return {'role': role, 'content': content}
