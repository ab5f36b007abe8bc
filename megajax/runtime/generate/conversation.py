"""A conversation, rendered by a chat template and kept within the model's context length."""

from collections.abc import Generator as GeneratorType

from megajax.core.config import Config, ConfigError
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.image_text.chat import Chat, Message
from megajax.runtime.data.image_text.turns import Vocabulary, end_of_turn, pieces_of_prompt
from megajax.runtime.generate.continuation import Continuation
from megajax.runtime.generate.generator import Generator, Request

PLACE = 'the conversation'  # the place in error messages of a template
NO_IMAGE = -1


class Conversation:
    """Turns with a model, each answered as the assistant.

    A conversation begins like a document in training, and text that spells a special token is
    encoded as text. An answer ends at the tokens that end a text or a turn of the template.
    `dropped` counts the oldest turns that the next answer no longer attends to. Turns are dropped
    if a prompt would leave too little of `model.max_seq_len` for the answer, which gets `room`
    tokens, or a quarter of the context if that is less. The system message is never dropped. Raises
    ConfigError if the template cannot be rendered.
    """

    def __init__(self, generator: Generator, chat: Chat, request: Request, system: str | None):
        assert generator.tokenizer is not None
        self.dropped = 0
        self._generator, self._chat, self._request = generator, chat, request
        self._tokenizer: Tokenizer = generator.tokenizer
        special = self._tokenizer.special_tokens()
        self._vocabulary = Vocabulary(special=special, image_token=NO_IMAGE)
        self._system = [] if system is None else [_message('system', system)]
        self._turns: list[Message] = []
        end = end_of_turn(self._vocabulary, chat, PLACE)
        self._tokenizer.also_ends([] if end is None else [end])

    def answer(self, text: str) -> GeneratorType[Continuation, None, None]:
        """Yield the answer each time it grows.

        Closing the generator ends the answer; the part generated so far stays in the conversation.
        If `text` alone leaves no room for an answer, it is dropped and ConfigError is raised.
        """
        self._turns.append(_message('user', text))
        try:
            prompt = self._prompt(self._generator.config)
        except ConfigError:
            self._turns.pop()
            raise
        row: Continuation | None = None
        try:
            for (row,) in self._generator.stream([prompt], self._request):
                assert row is not None
                yield row
        finally:
            self._turns.append(_message('assistant', row.text if row else ''))

    def _prompt(self, config: Config) -> list[int]:
        """Return the tokens of the turns that fit, and drop the older turns."""
        limit = config.model.max_seq_len
        room = min(self._request.max_tokens, limit // 4)
        ids, number = self._encode(self._turns), 0
        while len(ids) + room > limit and number + 2 < len(self._turns):
            number += 2  # one text and its answer
            ids = self._encode(self._turns[number:])
        if len(ids) >= limit:
            has, fix = 'this turn has', 'shorten it'
            if self._system:
                has, fix = "the system's message and this turn have", 'shorten one of them'
            raise ConfigError(
                f'{has} {len(ids)} tokens in the chat template, which leaves no '
                f'room in model.max_seq_len={limit}: {fix}'
            )
        del self._turns[:number]
        self.dropped += number // 2
        return ids

    def _encode(self, turns: list[Message]) -> list[int]:
        pieces = pieces_of_prompt([*self._system, *turns], self._vocabulary, self._chat, PLACE)
        ids, _ = self._tokenizer.encode_pieces(pieces)
        if self._chat.begins_texts and ids:
            return ids
        begin = self._tokenizer.start or [self._tokenizer.eod]
        return ids if ids[: len(begin)] == begin else [*begin, *ids]


def _message(role: str, content: str) -> Message:
    return {'role': role, 'content': content}
