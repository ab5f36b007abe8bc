"""A model for EleutherAI's lm-evaluation-harness, which answers with `Scorer` and `Generator`.

Needs the extra `harness`. As in the harness's own models, a text begins with the start tokens of
its tokenizer, and an empty context is a start token, or the end of a document. A request has the
same result as with the harness's `HFLM`; if `HFLM` fails, ConfigError is raised.
"""

import logging
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flax import nnx
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megajax.core.config import Config, ConfigError
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.text.pieces import Piece
from megajax.runtime.evaluate.harness_requests import requests_of
from megajax.runtime.evaluate.score import Scorer, Window
from megajax.runtime.generate import Generator, Request

logger = logging.getLogger(__name__)

# Attributes of the harness's tasks, and what such a task does.
UNSUPPORTED = {
    'UNSAFE_CODE': 'executes code that the model writes',
    'MULTIMODAL': 'shows images or plays sounds',
}

NO_KEYS: Mapping[str, Any] = {}
# Keys of a generation_config.json that transformers applies, and that have no effect here.
UNUSED = (
    *('num_beams', 'repetition_penalty', 'no_repeat_ngram_size', 'bad_words_ids', 'min_length'),
    *('min_new_tokens', 'suppress_tokens', 'min_p', 'typical_p'),
)
NOTHING = r'[^\s\S]'  # a pattern that never matches


class HarnessModel(TemplateLM):
    """The model in the form that `lm_eval.simple_evaluate(model=...)` takes.

    `generation` is the model's generation_config.json, whose `top_k` and `top_p` apply to tasks
    that sample but do not set them.
    """

    def __init__(
        self,
        config: Config,
        params: nnx.State,
        tokenizer: Tokenizer,
        generation: Mapping[str, Any] = NO_KEYS,
    ):
        super().__init__()
        self._unused = {key: generation.get(key) for key in UNUSED}
        self._defaults = {key: generation.get(key) for key in ('top_k', 'top_p')}
        self._config, self._params, self._text = config, params, tokenizer
        self._scorer = Scorer(config, params)
        self._generator: Generator | None = None
        self._special = tokenizer.special_tokens()
        longest_first = sorted(self._special, key=len, reverse=True)
        self._spelled = re.compile(f'({"|".join(map(re.escape, longest_first)) or NOTHING})')

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._text.eod

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context: the tokenizer's bos_token if it has one."""
        bos = self._special.get(self._text.named_tokens.get('bos_token', ''))
        return (self._text.start or [self._text.eod])[-1] if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, after the tokenizer's start tokens unless told to omit them.

        As in `HFLM`, text that spells a special token is encoded as that token, and a text that
        begins with the token of an empty context gets no other start token.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._text.decode([self.prefix_token_id]))
        start = self._text.start if add_special_tokens else []
        parts = [part for part in self._spelled.split(string) if part]
        if self._special.keys().isdisjoint(parts):
            return [*start, *map(int, self._text.encode_batch([string])[0])]
        tokens = [self._special.get(part) for part in parts]
        pieces = [
            Piece(text=part) if token is None else Piece(token=token)
            for part, token in zip(parts, tokens, strict=True)
        ]
        return [*start, *self._text.encode_pieces(pieces)[0]]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each full text.

        The windows of a text do not overlap, except that the last one overlaps the one before it.
        """
        windows: list[Window] = []
        counts = []
        for request in requests:
            pairs = get_rolling_token_windows(
                self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._limit,
                context_len=1,
            )
            text_windows = [
                Window([*context, *target], len(target))
                for context, target in map(make_disjoint_window, pairs)
            ]
            windows += text_windows
            counts.append(len(text_windows))
        scored = iter(self._scorer.in_any_order(windows))
        return [-sum(float(next(scored).nll.sum()) for _ in range(count)) for count in counts]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the most probable.

        Raises ConfigError for an empty continuation.
        """
        if empty := [request for request in requests if not request.args[1]]:
            raise _no_likelihood(empty[0].args, 'an empty continuation', 'give it text')
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the stops that its task sets.

        Raises ConfigError with every key of `generation_kwargs` that is not supported.
        """
        asked = [
            (getattr(x, 'task_name', None) or 'a task', self._defaults | x.args[1])
            for x in requests
        ]
        by_request: dict[Request, list[int]] = {}
        for number, wanted in enumerate(requests_of(asked, self._limit)):
            by_request.setdefault(wanted, []).append(number)
        texts, cut = [''] * len(requests), 0
        for wanted, numbers in by_request.items():
            room = self._limit - wanted.max_tokens
            contexts = [
                self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in numbers
            ]
            prompts = [context[-room:] for context in contexts]
            cut += sum(len(context) > room for context in contexts)
            for i, text in zip(numbers, self._continue(prompts, wanted), strict=True):
                texts[i] = text
        self._warn_of_cut(cut, len(requests))
        if unused := [f'{x}={y}' for x, y in self._unused.items() if y not in (None, 0, 1)]:
            logger.warning(
                'generation_config.json: %s has no effect here, and gives other answers in '
                'transformers',
                ', '.join(unused),
            )
        return texts

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        for asked, context, target in requests:
            if not context or not target:
                part = 'continuation' if context else 'context'
                raise _no_likelihood(
                    asked, f'no token of the {part} alone', 'end the context between two tokens'
                )
            if len(target) > self._limit:
                raise _no_likelihood(
                    asked,
                    f'{len(target)} tokens to score, more than model.max_seq_len={self._limit}',
                    'shorten the continuation, or evaluate a model with a longer context',
                )
        windows = [
            Window([*context, *target][-self._limit - 1 :], len(target))
            for _, context, target in requests
        ]
        cut = sum(
            len(window.tokens) < len(context) + len(target)
            for window, (_, context, target) in zip(windows, requests, strict=True)
        )
        self._warn_of_cut(cut, len(requests))
        scored = self._scorer.in_any_order(windows)
        return [(-float(scores.nll.sum()), bool(scores.is_top.all())) for scores in scored]

    def _continue(self, prompts: Sequence[Sequence[int]], request: Request) -> Iterable[str]:
        self._generator = self._generator or Generator(self._config, self._params, self._text)
        for rows in self._generator.stream(prompts, replace(request, stops=())):
            for row in rows:
                if row and not row.end and self._has(row.ids, request.stops):
                    row.end = 'stop'
        return [self._answer(row.ids, request.stops) for row in rows if row]

    def _has(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        text = self._text.decode(ids)
        return any(stop in text for stop in stops)

    def _answer(self, ids: Sequence[int], stops: Sequence[str]) -> str:
        """Return the text of generated ids as `HFLM` decodes it: without context or special tokens.

        The last id is the first one that completes a stop, which may be a special token's name.
        """
        before = bisect_left(range(len(ids)), True, key=lambda i: self._has(ids[: i + 1], stops))
        special = self._special.values()
        text = self._text.decode(i for i in ids[: before + 1] if i not in special)
        end = self._text.decode([self._text.eod])
        answer: str = postprocess_generated_text(text, [*stops, end], None)
        return answer

    def _warn_of_cut(self, number: int, total: int) -> None:
        if number:
            logger.warning(
                '%d of %d contexts lost their first tokens: with the continuation they are longer '
                'than model.max_seq_len=%d',
                *(number, total, self._limit),
            )

    @property
    def _limit(self) -> int:
        return self._config.model.max_seq_len


class Tasks(TaskManager):
    """The harness's tasks; all requests are checked before the first one is run."""

    def __init__(self, limit: int, include_path: Sequence[str] | None):
        super().__init__(include_path=include_path)
        self._limit = limit

    def load(self, task_list: Any) -> Any:
        """Load tasks and groups."""
        loaded = super().load(task_list)
        for name, task in loaded['tasks'].items():
            for kind, does in UNSUPPORTED.items():
                if getattr(task, kind, False):
                    raise ConfigError(f'{name} {does}, which is not supported; choose other tasks')
        asked = [
            (name, task.get_config('generation_kwargs') or {})
            for name, task in loaded['tasks'].items()
            if task.get_config('output_type') == 'generate_until'
        ]
        requests_of(asked, self._limit)
        return loaded


def evaluate_tasks(
    config: Config,
    params: nnx.State,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    generation: Mapping[str, Any] = NO_KEYS,
) -> dict[str, dict[str, float]]:
    """Return the harness's results for each task, by name and metric.

    A task is NAME, which may have wildcards, or FOLDER/NAME for your own task, from the YAML files
    in a folder. `generation` is the model's generation_config.json. Raises ConfigError for a task
    that the harness does not know, or that needs what is not supported.
    """
    folders = sorted({str(Path(task).parent) for task in tasks if '/' in task})
    manager = Tasks(config.model.max_seq_len, folders or None)
    found = {name: manager.match_tasks([name]) for name in (Path(task).name for task in tasks)}
    if unknown := [name for name, matches in found.items() if not matches]:
        raise ConfigError(
            f'lm-evaluation-harness knows no task {", ".join(unknown)}: '
            'lm_eval ls tasks lists its own'
        )
    evaluation = simple_evaluate(
        model=HarnessModel(config, params, tokenizer, generation),
        tasks=[*dict.fromkeys(name for matches in found.values() for name in matches)],
        task_manager=manager,
        bootstrap_iters=0,
    )
    return {
        name: {key: x for key, x in values.items() if isinstance(x, float)}
        for name, values in evaluation['results'].items()
    }


def _no_likelihood(asked: tuple[str, str] | None, problem: str, fix: str) -> ConfigError:
    context, continuation = asked or ('', '')
    return ConfigError(
        f'a task asks for the likelihood of {continuation[:40]!r} after {context[-40:]!r}, '
        f'which has {problem}: {fix}'
    )
