"""A model for EleutherAI's lm-evaluation-harness, which answers with `Scorer` and `Generator`.

Needs the extra `harness`. As in the harness's own models, a text begins with the start
tokens of its tokenizer, and an empty context is a start token, or the end of a document.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flax import nnx
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megajax.config import Config, ConfigError
from megajax.data import Tokenizer
from megajax.evaluate.score import Scorer, Window
from megajax.generate import Generator, Request, Sampling

MAX_TOKENS = 256  # tokens of a continuation unless the task sets it, as in the harness's own models


class HarnessModel(TemplateLM):
    """The model in the form that `lm_eval.simple_evaluate(model=...)` takes."""

    def __init__(self, config: Config, params: nnx.State, tokenizer: Tokenizer):
        super().__init__()
        self._config, self._params, self._text = config, params, tokenizer
        self._scorer = Scorer(config, params)
        self._generator: Generator | None = None

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._text.eod

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        return (self._text.start or [self._text.eod])[-1]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, after the tokenizer's start tokens unless told to omit them."""
        start = [] if add_special_tokens is False else self._text.start
        return [*start, *map(int, self._text.encode_batch([string])[0])]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each full text.

        Its windows do not overlap, except for the last.
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

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the end that its task sets."""
        by_request: dict[tuple[Request, int], list[int]] = {}
        for number, request in enumerate(requests):
            by_request.setdefault(_request(request.args[1]), []).append(number)
        texts = [''] * len(requests)
        for (wanted, max_tokens), numbers in by_request.items():
            room = max(self._limit - max_tokens, 1)
            prompts = [
                (self.tok_encode(requests[i].args[0]) or [self.prefix_token_id])[-room:]
                for i in numbers
            ]
            for i, text in zip(numbers, self._continue(prompts, wanted), strict=True):
                texts[i] = text
        return texts

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        limit = self._limit + 1
        windows = [
            Window([*context, *target][-limit:], min(len(target), limit - 1))
            for _, context, target in requests
        ]
        scored = self._scorer.in_any_order(windows)
        return [(-float(scores.nll.sum()), bool(scores.is_top.all())) for scores in scored]

    def _continue(self, prompts: Sequence[Sequence[int]], request: Request) -> Iterable[str]:
        self._generator = self._generator or Generator(self._config, self._params, self._text)
        *_, rows = self._generator.stream(prompts, request)
        return [row.text for row in rows if row]

    @property
    def _limit(self) -> int:
        return self._config.model.max_seq_len


def evaluate_tasks(
    config: Config, params: nnx.State, tokenizer: Tokenizer, tasks: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the harness's results for each task, by name and metric.

    A task is NAME, or FOLDER/NAME for one of your own, from the YAML files in a folder. Raises
    ConfigError for a task that the harness does not know.
    """
    folders = sorted({str(Path(task).parent) for task in tasks if '/' in task})
    manager, names = TaskManager(include_path=folders or None), [Path(task).name for task in tasks]
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ConfigError(
            f'lm-evaluation-harness knows no task {", ".join(unknown)}: '
            'lm_eval ls tasks lists its own'
        )
    evaluation = simple_evaluate(
        model=HarnessModel(config, params, tokenizer),
        tasks=names,
        task_manager=manager,
        bootstrap_iters=0,
    )
    return {
        name: {key: x for key, x in values.items() if isinstance(x, float)}
        for name, values in evaluation['results'].items()
    }


def _request(given: dict[str, Any]) -> tuple[Request, int]:
    stops = given.get('until') or ()
    max_tokens = int(given.get('max_gen_toks', MAX_TOKENS))
    at_random = given.get('do_sample', bool(given.get('temperature')))
    sampling = Sampling(
        temperature=float(given.get('temperature') or 1),
        top_k=given.get('top_k'),
        top_p=given.get('top_p'),
    )
    request = Request(
        max_tokens=max_tokens,
        sampling=sampling if at_random else Sampling(temperature=0),
        stops=tuple(stop for stop in ([stops] if isinstance(stops, str) else stops) if stop),
    )
    return request, max_tokens
