"""The samples of a run: continuations of `train.sample_prompts` at every evaluation."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from megajax.core.config import Config, mistake
from megajax.core.config.one_dimensional import one_dimensional
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.sources.image_keys import MARKER
from megajax.runtime.generate import Generator, Request, encode_prompts
from megajax.runtime.generate.weights import make_one_dimensional
from megajax.runtime.run.log.metrics import JsonLines
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.log.trackers import TensorBoard

TOKENS = 160  # maximum number of tokens after each prompt

logger = logging.getLogger(__name__)


class Sampler:
    """The sampler, which writes to the terminal, samples.jsonl and TensorBoard's text (`samples`).

    The run resumes from `step`, and samples of later steps are deleted. Raises ConfigError for
    prompts that cannot be continued. A failed write does not end the run.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | None,
        folder: Path,
        step: int,
        *,
        report: Report,
    ):
        self.prompts = config.train.sample_prompts
        self._config, self._tokenizer, self._report = config, tokenizer, report
        if config.vision is not None and any(MARKER in prompt for prompt in self.prompts):
            message = f'samples show no images: remove {MARKER} from the prompts'
            raise mistake('train.sample_prompts', message)
        plain = one_dimensional(config)
        self._encoded = encode_prompts(plain, tokenizer, self.prompts) if self.prompts else []
        self._sinks: list[Any] = []
        if self.prompts and jax.process_index() == 0:
            self._sinks = [
                JsonLines(folder / 'samples.jsonl'),
                TensorBoard(folder / 'tensorboard' / 'samples'),
            ]
        self.rewind(step)

    def sample(self, step: int, params: nnx.State, check: Callable[[], None]) -> None:
        """Continue the prompts with the parameters after `step`; all processes must call this.

        `check` is called once every few tokens.
        """
        if not self.prompts:
            return
        if not self._report.console.is_terminal:  # on a terminal the bar keeps running
            self._report.say('sampling ...')
        config, mesh = self._config, jax.sharding.get_mesh()
        if not config.mesh.is_one_dimensional:
            config, mesh, params = make_one_dimensional(config, params)
        texts = [''] * len(self.prompts)
        with jax.set_mesh(mesh):
            generator = Generator(config, params, self._tokenizer)
            for rows in generator.stream(self._encoded, Request(max_tokens=TOKENS)):
                check()
                texts = [row.text if row else '' for row in rows]
        samples = dict(zip(self.prompts, texts, strict=True))
        for prompt, text in samples.items():
            self._report.say(f'\nsample after {prompt!r}:\n{prompt}{text}')
        self._each(lambda sink: sink.write_texts(step, samples))

    def rewind(self, step: int) -> None:
        """Delete the samples of steps after `step`."""
        self._each(lambda sink: sink.rewind(step))

    def close(self) -> None:
        """Write the waiting samples and close the files."""
        self._each(lambda sink: sink.close())

    def _each(self, action: Callable[[Any], None]) -> None:
        for sink in self._sinks:
            try:
                action(sink)
            except OSError as error:
                logger.warning('samples cannot be written (%s); the run continues', error.strerror)
