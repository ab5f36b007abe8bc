"""Generate text from prompts of different lengths, a few tokens per dispatch."""

import dataclasses
from collections.abc import Generator as GeneratorType
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from flax import nnx

from megajax.core.config import Config, ConfigError
from megajax.core.counts.prompts import padded_length, slots_of_cache
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.sources.image_keys import MARKER
from megajax.runtime.data.text.corpus import Document, naming_lines
from megajax.runtime.generate.continuation import Continuation
from megajax.runtime.generate.engine import NO_TOKEN, Start, engine
from megajax.runtime.generate.image_prompts import PromptImages, stack
from megajax.runtime.generate.prompt_images import PromptBatch
from megajax.runtime.generate.sampling import Sampling
from megajax.runtime.generate.weights import delete, inference_config, make_weights

TOKENS_AT_ONCE = 16  # number of tokens generated per dispatch, between two searches for stops
BATCH_SIZE = 16  # number of prompts in a batch

Prompt = Sequence[int]
T = TypeVar('T')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request for up to `max_tokens` tokens after each prompt.

    A text ends at the first of `stops`. With `to_eod`, it also ends at a token of the tokenizer's
    `ends`, which end a document or a turn. Raises ConfigError for values out of range.
    """

    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    seed: int = 0
    stops: tuple[str, ...] = ()
    to_eod: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f'max-tokens {self.max_tokens} must be at least 1')
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f'seed {self.seed} must be from 0 to 2^32 - 1')
        if '' in self.stops:
            raise ConfigError(
                'a stop is empty, and every text contains the empty string: leave it out'
            )


class Batch(NamedTuple):
    """Prompts that are continued together."""

    first: int  # number of the first prompt
    rows: list[Continuation]
    arrays: PromptBatch
    limit_B: np.ndarray  # maximum number of tokens after each prompt


# The number of a batch's first prompt, and the batch's continuations; finally, the start of the
# next batch.
_Growth = GeneratorType[tuple[int, list[Continuation]], None, Start | None]


class Generator:
    """A model that generates text on the current mesh.

    The weights are stored in the compute dtype, in addition to `params`; with `donate`, `params`
    are deleted. A generator with the same config but different parameters recompiles nothing.
    """

    def __init__(
        self,
        config: Config,
        params: nnx.State,
        tokenizer: Tokenizer | None = None,
        *,
        donate: bool = False,
    ):
        self.config, self.tokenizer = config, tokenizer
        self._weights = make_weights(config, params)
        if donate:
            delete(params, keep=self._weights)
        self._engine = engine(config)

    def texts(self, prompts: Sequence[str], request: Request) -> list[str]:
        """Return the continuation of each prompt.

        A continuation does not depend on the mesh or on the other prompts.
        """
        encoded = encode_prompts(self.config, self.tokenizer, prompts)
        *_, rows = [], *self.stream(encoded, request)
        return [row.text for row in rows if row]

    def stream(
        self,
        prompts: Sequence[Prompt],
        request: Request,
        images: Sequence[PromptImages] | None = None,
    ) -> Iterator[list[Continuation | None]]:
        """Yield all continuations each time they grow, with None for those that have not begun.

        `images` has the images of each prompt. The random numbers of a prompt follow from its
        number. Raises ConfigError for a prompt that is empty or longer than `model.max_seq_len`.
        """
        _check_lengths(prompts, self.config.model.max_seq_len)
        all_rows: list[Continuation | None] = [None] * len(prompts)
        parts = [slice(at, at + BATCH_SIZE) for at in range(0, len(prompts), BATCH_SIZE)]
        batches = ((prompts[part], images and images[part]) for part in parts)
        for first, rows in self.batches(batches, request, min(len(prompts), BATCH_SIZE)):
            all_rows[first : first + len(rows)] = rows
            yield all_rows

    def batches(
        self,
        batches: Iterable[tuple[Sequence[Prompt], Sequence[PromptImages] | None]],
        request: Request,
        size: int,
    ) -> Iterator[tuple[int, list[Continuation]]]:
        """Yield a batch's continuations each time they grow, and the number of its first prompt.

        A batch of fewer than `size` prompts is padded, so that it is not compiled separately. The
        images of the next batch are encoded during the prefill of this one.
        """
        start: Start | None = None
        for batch, following in with_next(self._prepared(batches, request, size)):
            if start is None and following is not None and batch.arrays.images is not None:
                start = self._engine.look(self._weights, batch.arrays)
            # Pass the last batch as its own successor, so that `read` is not compiled again with a
            # different signature.
            ahead = None if start is None else following or batch
            start = yield from self._grow(batch, request, start, ahead)

    def _continuation(self, prompt: Prompt, request: Request) -> Continuation:
        limit = min(request.max_tokens, self.config.model.max_seq_len - len(prompt))
        ends = self._ends(request)
        return Continuation(prompt, self.tokenizer, limit=limit, ends=ends, stops=request.stops)

    def _ends(self, request: Request) -> tuple[int, ...]:
        return self.tokenizer.ends if self.tokenizer and request.to_eod else (NO_TOKEN,)

    def _prepared(
        self,
        batches: Iterable[tuple[Sequence[Prompt], Sequence[PromptImages] | None]],
        request: Request,
        size: int,
    ) -> Iterator[Batch]:
        """Yield the arrays of each batch, and the continuations of its prompts."""
        size, first = -(-size // self.config.mesh.data) * self.config.mesh.data, 0
        for prompts, images in batches:
            longest = max(map(len, prompts))
            length = padded_length(longest, self.config.model.max_seq_len)
            rows = [self._continuation(prompt, request) for prompt in prompts]
            token_BS = np.zeros((size, length), np.int32)
            length_B, limit_B = np.ones(size, np.int32), np.zeros(size, np.int32)
            for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
                token_BS[i, length - len(prompt) :] = prompt
                length_B[i], limit_B[i] = len(prompt), row.limit
            beside = () if images is None else stack(images, size, length)
            yield Batch(first, rows, PromptBatch(token_BS, length_B, *beside), limit_B)
            first += len(prompts)

    def _grow(
        self, batch: Batch, request: Request, start: Start | None, ahead: Batch | None
    ) -> _Growth:
        """Yield as `batches` does until all texts have ended; return the start of `ahead`."""
        size, length = batch.arrays.token_BS.shape
        seed = np.uint32(request.seed)
        end_ids = np.array(self._ends(request), np.int32)
        limit = length + min(request.max_tokens, self.config.model.max_seq_len)
        state, new_BS, after = self._engine.read(
            self._weights,
            batch.arrays,
            batch.limit_B,
            batch.first + np.arange(size, dtype=np.int32),
            seed,
            end_ids,
            start,
            None if ahead is None else ahead.arrays,
            num_slots=slots_of_cache(limit),
            sampling=request.sampling,
        )
        rows = batch.rows
        if state.tokens_BIR is not None:
            for row, tokens_IR in zip(rows, np.asarray(state.tokens_BIR), strict=False):
                row.region_tokens = tokens_IR
        while True:
            for row, ids in zip(rows, np.asarray(new_BS), strict=False):
                row.add(ids[ids != NO_TOKEN].tolist())
            yield batch.first, rows
            is_wanted_B = np.array([row.end is None for row in rows] + [False] * (size - len(rows)))
            if not is_wanted_B.any():
                return after
            state, new_BS = self._engine.make(
                self._weights,
                state,
                is_wanted_B,
                seed,
                end_ids,
                num_tokens=TOKENS_AT_ONCE,
                sampling=request.sampling,
            )


def _check_lengths(prompts: Sequence[Prompt], limit: int) -> None:
    numbered = [(number, len(prompt)) for number, prompt in enumerate(prompts, 1)]
    if problems := [
        f'prompt {number} has no token: begin it with the token that ends a document'
        if not n
        else f'prompt {number} has {n} tokens, more than model.max_seq_len={limit}: shorten it'
        for number, n in numbered
        if not 0 < n <= limit
    ]:
        raise ConfigError(*problems)


def with_next(items: Iterable[T]) -> Iterator[tuple[T, T | None]]:
    """Yield each item with the one after it, or None.

    If making the next item raises ConfigError, the error is raised after this item is yielded.
    """
    rest = iter(items)
    item, failure = next(rest, None), None
    while item is not None:
        following = None
        try:
            following = next(rest, None)
        except ConfigError as error:
            failure = error
        yield item, following
        if failure is not None:
            raise failure
        item = following


def generate(
    config: Config,
    params: nnx.State,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stops: Sequence[str] = (),
) -> list[str]:
    """Continue each prompt by `max_tokens` tokens, to a stop or to the end of the document.

    A prompt is read as the start of a document. Its continuation does not depend on the mesh or on
    the other prompts. Raises ConfigError for a prompt that leaves no room for a token in
    `max_seq_len`.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    request = Request(max_tokens=max_tokens, sampling=sampling, seed=seed, stops=tuple(stops))
    return Generator(config, params, tokenizer).texts(prompts, request)


def encode_prompts(
    config: Config, tokenizer: Tokenizer | None, prompts: Sequence[str]
) -> list[list[int]]:
    """Encode each prompt as the start of a document.

    Raises ConfigError with every prompt that leaves no room for a token in `model.max_seq_len`, or
    that stands for images.
    """
    config = inference_config(config)
    if tokenizer is None:
        raise ConfigError(
            'the model has no tokenizer, so it cannot read a prompt: import it with '
            'its tokenizer.json, or train it with data.tokenizer'
        )
    if config.vision is not None and (
        places := [number for number, text in enumerate(prompts, 1) if MARKER in text]
    ):
        raise ConfigError(
            f'prompt {places[0]} contains {MARKER}, which stands for an image, and no image is '
            f'given: run megajax generate with a single --prompt and --image for each {MARKER}'
        )
    limit = config.model.max_seq_len
    before = tokenizer.start or [tokenizer.eod]  # the end of the previous document
    with naming_lines([Document(name=f'prompt {i}', text=x) for i, x in enumerate(prompts, 1)]):
        encoded = [[*before, *map(int, ids)] for ids in tokenizer.encode_batch(list(prompts))]
    if long := [(number, len(ids)) for number, ids in enumerate(encoded, 1) if len(ids) >= limit]:
        raise ConfigError(
            *(
                f'prompt {i} has {n} tokens, which leaves no room in model.max_seq_len={limit}: '
                'shorten it'
                for i, n in long
            )
        )
    return encoded
