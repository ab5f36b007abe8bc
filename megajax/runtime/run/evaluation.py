"""Evaluate a state: compute its losses on the validation data and report them."""

import logging
import math
from collections import Counter
from pathlib import Path

import numpy as np
from flax import nnx
from jax.stages import Compiled

from megajax.core.config import Config, mistake
from megajax.core.train.evaluation import make_eval_step
from megajax.runtime.checkpoint.digests import find_steps
from megajax.runtime.data import Batch as HostBatch
from megajax.runtime.data import Data
from megajax.runtime.data.synthetic_batches import PictureBatches
from megajax.runtime.run.clock import Clock
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.ocr_eval import Reader
from megajax.runtime.run.placed_batches import PlacedBatches
from megajax.runtime.run.stop import StopWatch
from megajax.runtime.run.watchdog import Watchdog

logger = logging.getLogger(__name__)


class Evaluation:
    """The evaluation of a run's states, which is compiled once.

    The run resumes from `step`, and drawn transcriptions of later steps are deleted.
    """

    def __init__(
        self,
        config: Config,
        data: Data,
        folder: Path,
        step: int,
        *,
        report: Report,
        clock: Clock,
        stop: StopWatch,
        watchdog: Watchdog,
    ):
        self.config, self.data, self.report = config, data, report
        self.clock, self.stop, self.watchdog = clock, stop, watchdog
        self._eval_step: Compiled | None = None
        self._reader = None
        if isinstance(data.validation, PictureBatches) and data.tokenizer is not None:
            self._reader = Reader(config, data.validation, data.tokenizer, folder)
        self.rewind(step)

    def is_due(self, step: int, *, since: int | None) -> bool:
        """Whether the state after `step` is evaluated.

        It is at multiples of `train.eval_every`, at the last step, and if its checkpoint is due
        since a multiple, because its save was delayed.
        """
        every, before = self.config.train.eval_every, (since or step) - 1
        return step // every != before // every or step == self.config.train.steps

    def evaluate(self, step: int, params: nnx.State) -> dict[str, float]:
        """Return and report the losses of the parameters after `step`; empty without data.

        The validation loss is in nats per token and in bits per byte. Bits per byte of text do not
        depend on the tokenizer. For BERT, the losses are nats per masked token, for which there are
        no bits per byte, and the loss of sentence-order prediction.
        """
        if not len(self.data.validation):
            return {}
        # Use the time limit for compiling, because the first batch compiles the evaluation step.
        self.watchdog.beat('evaluation', 'compile')
        start = self.clock.begin('evaluation')
        sums: Counter[str] = Counter()
        batches = self._batches()
        for batch in batches:
            self.stop.check()
            if self._eval_step is None:
                self.clock.begin('compile')
                self._eval_step = make_eval_step(self.config).lower(params, batch).compile()
                start = self.clock.begin('evaluation')
            batch_sums = self._eval_step(params, batch)
            sums.update({name: float(value) for name, value in batch_sums.items()})
            self.watchdog.beat('evaluation')
        if not math.isfinite(sums['nll']):
            batches.check()
        losses, text = losses_of(sums)
        self.report.say(f'step {step}  validation {text}')
        if step and self._reader is not None:
            self.watchdog.beat('reading', 'compile')
            losses |= self._reader.read(step, params, self.report, self._check)
        return losses | {'evaluation_ms': 1e3 * (self.clock.begin('other') - start)}

    def rewind(self, step: int) -> None:
        """Delete what evaluations of steps after `step` have drawn."""
        if self._reader is not None:
            self._reader.rewind(step)

    def _check(self) -> None:
        self.watchdog.beat('reading', 'compile')  # prompts of a new shape are compiled
        self.stop.check()

    def _batches(self) -> PlacedBatches:
        """Return the first `train.eval_batches` batches, with the text bytes of each label."""
        validation = self.data.validation
        return PlacedBatches(
            validation,
            0,
            min(self.config.train.eval_batches, len(validation)),
            prepare=self._with_label_bytes,
        )

    def _with_label_bytes(self, batch: HostBatch) -> HostBatch:
        tokenizer = self.data.tokenizer
        if tokenizer is None or self.config.model.is_bert:
            return batch
        # A label that does not count may be an image token, which may not be in the tokenizer.
        labels = np.where(batch['loss_mask'] > 0, batch['labels'], tokenizer.eod)
        return {**batch, 'label_bytes': tokenizer.token_bytes[labels]}


def check_best_interval(config: Config) -> None:
    """Raise ConfigError if the best checkpoints are to be kept, and some are never evaluated.

    A run that has begun continues, with a warning.
    """
    every, eval_every = config.checkpoint.every, config.train.eval_every
    if config.checkpoint.keep_best and every < config.train.steps and every % eval_every:
        multiple = -(-every // eval_every) * eval_every
        message = (
            f'{config.checkpoint.keep_best} needs the validation loss of each checkpoint, and '
            f'checkpoint.every={every} is not a multiple of train.eval_every={eval_every}; use '
            f'checkpoint.every={multiple}, or train.eval_every={every}'
        )
        error = mistake('checkpoint.keep_best', message)
        if not (config.run.dir and find_steps(Path(config.run.dir) / 'checkpoints')):
            raise error
        logger.warning('%s', error)


def check_best(config: Config, data: Data) -> None:
    """Raise ConfigError if the best checkpoints are to be kept, and there are no losses of them."""
    if config.checkpoint.keep_best and not len(data.validation):
        message = (
            f'{config.checkpoint.keep_best} has no effect, because there is nothing to validate on '
            f'with data.split={config.data.split} and train.batch_size={config.train.batch_size}; '
            'raise the second number of data.split, or use checkpoint.keep_best=null'
        )
        raise mistake('checkpoint.keep_best', message)


def losses_of(sums: Counter[str]) -> tuple[dict[str, float], str]:
    """Return the losses of all batches, by name and as text; no bits per byte without bytes."""
    losses = {'validation_loss': sums['nll'] / sums['tokens']}
    text = f'{losses["validation_loss"]:.3f} nats per token'
    if 'rows' in sums:
        losses['validation_order_loss'] = order_loss = sums['order_nll'] / sums['rows']
        text = (
            f'{losses["validation_loss"]:.3f} nats per masked token, '
            f'{order_loss:.3f} for the order of its segments'
        )
    elif sums['bytes']:
        losses['validation_bits_per_byte'] = sums['nll'] / sums['bytes'] / math.log(2)
        text = f'{losses["validation_bits_per_byte"]:.3f} bits per byte ({text})'
    return losses, text
