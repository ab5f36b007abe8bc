"""The training loop: steps, what follows from them, evaluation and checkpoints."""

import logging
import math
from collections import Counter
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Compiled

from megajax.checkpoint.checkpoints import Checkpoints
from megajax.config import Config, NumericError, StopRequested
from megajax.data import Batch as HostBatch
from megajax.data import Data
from megajax.miscompiles import check_compiled, mesh_target
from megajax.processes.agree import all_are_here
from megajax.run.clock import Activity, Summary
from megajax.run.limits import MEASURED
from megajax.run.log.metrics import MetricsWriter
from megajax.run.log.report import Report, StepReport
from megajax.run.meter import Meter, slowest
from megajax.run.profile import Profiler
from megajax.run.sampler import Sampler
from megajax.run.stop import StopWatch
from megajax.run.watchdog import Watchdog
from megajax.train.feed import Batch, PlacedBatches, abstract_batch
from megajax.train.first_step import take_first_step
from megajax.train.guard import respond
from megajax.train.step import Metrics, TrainState, before_skipped, make_eval_step, make_train_step

logger = logging.getLogger(__name__)

ROLLBACKS = 3  # without a new checkpoint between them; then the run ends
COMPANY = 5.0  # seconds in which the other processes fail in the same place, or do not


class _Dispatched(NamedTuple):
    """A step that the devices have been given, by its number; metrics are on the devices."""

    step: int
    metrics: Metrics
    start: float  # seconds by the clock, before its batch
    after_batch: float


class Trainer:
    """Holds the state of a run, which `train` brings to the last step; between two safe points it is that of a whole step."""

    def __init__(
        self,
        config: Config,
        data: Data,
        state: TrainState,
        *,
        report: Report,
        metrics: MetricsWriter,
        sampler: Sampler,
        summary: Summary,
        profiler: Profiler,
        checkpoints: Checkpoints,
        stop: StopWatch,
        watchdog: Watchdog,
    ):
        self.config, self.data, self.state = config, data, state
        self.report, self.metrics, self.sampler, self.checkpoints, self.stop = (
            report,
            metrics,
            sampler,
            checkpoints,
            stop,
        )
        self.step = self._saved = int(state.step)
        self.watchdog, self._first = (
            watchdog,
            self.step + 1,
        )  # the first step also connects the devices
        self.summary, self.clock, self.profiler = summary, summary.clock, profiler
        self._skipped = self.step - int(state.guard.taken)
        self._own_seconds = self._checkpoint_seconds = 0.0  # until the last line that tells of them
        self._due = self._save_due = False
        self._rollbacks = 0
        self._ahead: _Dispatched | None = (
            None  # of the step after `step`, whose metrics nobody read
        )
        self._failure: Exception | None = None  # of dispatching it
        self._last_end = 0.0  # of the last step, by the clock
        self._eval_step: Compiled | None = None

    def train(self) -> None:
        """All steps that are left. Raises StopRequested at a safe point, NumericError if the numbers end the run."""
        steps = self.config.train.steps
        self.stop.check()
        if self.step == 0 or (
            len(self.data.validation) and not self.checkpoints.is_evaluated(self.step)
        ):
            self._evaluate_if_due()
        if self.step >= steps:
            self.report.say(
                f'nothing to do: the checkpoint is of step {self.step} and train.steps is {steps}'
            )
            return
        self._begin('compile', 'compiling', 'compile')
        with self.report.waiting('compiling the training step'):
            self._train_step = (
                make_train_step(self.config)
                .lower(self.state, abstract_batch(self.config))
                .compile()
            )
            self._check_compiled(self._train_step)
        self._meter = Meter(
            self.config, self._train_step, list(jax.sharding.get_mesh().devices.flat)
        )
        self.clock.begin('other')
        self._batches = self._read_on()
        self._own_seconds = self.clock.seconds('data_wait', 'other')
        with (
            self.profiler,
            self.report.progress(
                start=self.step, steps=steps, log_every=self.config.train.log_every
            ) as progress,
        ):
            while self.step < steps:
                try:
                    self.stop.check()
                except StopRequested:
                    if self._ahead is not None:
                        self._one_step(progress, go_ahead=False)
                    raise
                self._one_step(progress)

    def _one_step(self, progress: StepReport, *, go_ahead: bool = True) -> None:
        """One step and what follows from it."""
        values = self._take_step(go_ahead=go_ahead)
        progress.step(self.step, values)
        if self._goes_on(values):
            self._save_if_due(taken=bool(values['taken']))
            self._evaluate_if_due()
        else:
            self._roll_back()

    def _check_compiled(self, step: Compiled) -> None:
        """Raise MiscompileError for a step that XLA has compiled wrongly for these GPUs."""
        target = mesh_target()
        if target != 'cpu':
            for finding in check_compiled(step.as_text() or '', target):
                self.report.say(str(finding))

    def save_now(self) -> None:
        """Save the state unless it is saved; before a run that was asked to stop leaves."""
        if self.step > self._saved:
            self._save()
        if not self.checkpoints.wait():
            self._save()

    def rescue(self) -> None:
        """Save the newest state, if it is whole and not itself the reason, before the run leaves with an error; say where it is.

        A process that fails alone, while the others are in a step, cannot save: they will not come to write their part.
        """
        if not self._is_whole():
            self.checkpoints.abandon()
            return
        if not all_are_here(f'failed_after_{self.step}', COMPANY):
            logger.warning(
                'step %d is not saved: the other processes did not fail with this one', self.step
            )
            self.checkpoints.abandon()
            return
        if self.step:
            self.save_now()
            if self.checkpoints.wait():
                self.report.say(f'step {self.step} is saved: {self.checkpoints.folder}/{self.step}')

    def _is_whole(self) -> bool:
        try:
            if self._ahead is not None:
                self.metrics.write(self._ahead.step, **self._take_step(go_ahead=False))
            return int(self.state.step) == self.step
        except RuntimeError:  # a step that failed took the state with it
            return False

    def _take_step(self, *, go_ahead: bool) -> dict[str, float]:
        """One step, timed from its batch to its metrics; all that is known of it so far.

        The next step is dispatched before the metrics of this one are read, so that the devices do
        not wait for the host, unless something may need the state between the two.
        """
        if self._failure is not None:
            raise self._failure
        current, self._ahead = self._ahead or self._dispatch(self.step + 1), None
        self._due = self.checkpoints.poll(current.step) or self._save_due
        if go_ahead and self._may_go_ahead(current.step):
            try:
                self._ahead = self._dispatch(current.step + 1)
            except Exception as error:  # after this step, which it has nothing to do with
                self._failure = error
        kind = 'first step' if current.step == self._first else 'step'
        self._begin('productive', f'step {current.step}', kind)
        got = jax.device_get(current.metrics)
        values = {name: float(value) for name, value in got.items()}
        end = self.clock.begin('other')
        if not values['finite']:
            self._check_read()
        start = max(current.start, self._last_end)
        self._last_end = end
        if self.config.run.watchdog_seconds == 'auto':
            self.watchdog.allow('step', MEASURED * (end - start))
        self.step = self.summary.step = current.step
        if not values['taken']:
            self._skipped += 1
            self.clock.lose(end - max(current.after_batch, start))
        times = {
            'step_ms': 1e3 * (end - start),
            'data_wait_ms': 1e3 * (current.after_batch - current.start),
            'checkpoint_ms': self._checkpoint_ms(),
        }
        values |= self._meter.measure(end - start) | times | {'skipped_steps': self._skipped}
        if self.step % self.config.train.log_every == 0:
            values |= self._find_slowest()
            self.summary.write_sometimes()
        return values

    def _dispatch(self, step: int) -> _Dispatched:
        """Give the devices a step."""
        with self.profiler.step(step):
            start = self._begin('data_wait', 'data')
            batch = next(self._batches)
            kind = 'first step' if step == self._first else 'step'
            after_batch = self._begin('productive', f'step {step}', kind)
            self.state, metrics = self._run_step(batch)
            if self.profiler.covers(step):
                jax.block_until_ready(metrics)  # its kernels belong into its part of the trace
        return _Dispatched(step, metrics, start, after_batch)

    def _may_go_ahead(self, step: int) -> bool:
        """Whether nothing needs the state after `step` but the step that follows it."""
        is_searching_scale = self.config.train.loss_scale == 'auto' and self.step <= self._skipped
        return not (
            step == self._first
            or step == self.config.train.steps
            or step % self.config.train.eval_every == 0
            or self._due
            or (self.state.loss_scale is not None and is_searching_scale)
            or self.profiler.covers(step + 1)
        )

    def _run_step(self, batch: Batch) -> tuple[TrainState, Metrics]:
        """The compiled step; the first one that a run takes in fp16 finds its loss scale, unless the config gives it."""
        if (
            self.state.loss_scale is None
            or self.config.train.loss_scale != 'auto'
            or self.step > self._skipped
        ):
            return self._train_step(self.state, batch)
        first = float(self.state.loss_scale.value)
        state, metrics = take_first_step(self._train_step, self.state, batch)
        if metrics['taken']:
            self.report.loss_scale(first, float(metrics['loss_scale']))
        return state, metrics

    def _goes_on(self, values: dict[str, float]) -> bool:
        """Write what is known of the step; False if it is to be rolled back."""
        self.metrics.write(self.step, **values)
        return respond(self.config, self.step, values) == 'go on'

    def _check_read(self) -> None:
        """Raise in all processes what one of them could not read for this step, with the state before it."""
        try:
            self._batches.check()
        except Exception:
            self.state = before_skipped(self.state)
            if self._ahead is not None:  # it had no rows to read either
                self.state, self._ahead = before_skipped(self.state), None
            raise

    def _evaluate_if_due(self) -> None:
        """Evaluate a state that is saved already: what fails here costs no step. A run that was stopped here does it when it goes on."""
        if self.step % self.config.train.eval_every and self.step != self.config.train.steps:
            return
        if losses := self._evaluate():
            self.metrics.write(self.step, **losses)
            if self.step:
                self.checkpoints.note_validation_loss(self.step, losses['validation_loss'])

    def _save_if_due(self, *, taken: bool) -> None:
        """Save if it is time; what a skipped step left is saved after the next one that is taken."""
        last = self.step == self.config.train.steps
        self._begin('checkpoint', 'checkpoint')
        self._save_due = self._due and not taken
        if (self._due and taken) or last:
            self._save()
        if last and not self.checkpoints.wait():
            self._save()
        self.clock.begin('other')

    def _save(self) -> None:
        self._begin('checkpoint', 'saving', 'checkpoint')
        self.checkpoints.save(self.state, self.step)
        self._saved, self._rollbacks = self.step, 0

    def _roll_back(self) -> None:
        """Go back to the newest checkpoint, and on from there with the batches after the one that was refused."""
        self._rollbacks += 1
        self._begin('restore', 'rolling back', 'checkpoint')
        self.checkpoints.wait()
        step = self.checkpoints.newest_verified()
        if step is None or self._rollbacks > ROLLBACKS:
            why = (
                'there is no checkpoint yet'
                if step is None
                else f'it was rolled back {ROLLBACKS} times without getting to another'
            )
            raise NumericError(
                f'step {self.step} cannot be rolled back: {why}; lower optim.lr, or save more often (checkpoint.every)'
            )
        batches = int(self.state.batches) - (self._ahead is not None)
        self._ahead = self._failure = None
        if batches + self.config.train.steps - step > len(self.data.train):
            raise NumericError(
                f'step {self.step} cannot be rolled back: the data has no more batches for the steps after {step}'
            )
        self.report.say(
            f'step {self.step} is rolled back to step {step}; its batch and those before it are not read again'
        )
        self.checkpoints.delete_after(step)
        restored = self.checkpoints.restore(step)
        self.state = restored._replace(
            batches=jax.device_put(np.int32(batches), restored.batches.sharding)
        )
        self.step = self._saved = self.summary.step = step
        self._skipped = step - int(restored.guard.taken)
        self.metrics.rewind(step)
        self.sampler.rewind(step)
        self.clock.lose(self.metrics.lost_seconds())
        self._batches = self._read_on()
        self.clock.begin('other')

    def _read_on(self) -> PlacedBatches:
        first = int(self.state.batches)
        return PlacedBatches(self.data.train, first, first + self.config.train.steps - self.step)

    def _evaluate(self) -> dict[str, float]:
        """Validation loss in nats per token, and in bits per byte of text, which no tokenizer can flatter; nothing without data.

        Of BERT, in nats per masked token, which is no measure of text, and for the order of the segments.
        """
        if not len(self.data.validation):
            self._sample()
            return {}
        sums: Counter[str] = Counter()
        start = self._begin(
            'evaluation', 'evaluation', 'compile'
        )  # with its first batch it is compiled
        batches = self._validation_batches()
        for batch in batches:
            self.stop.check()
            if self._eval_step is None:
                self.clock.begin('compile')
                self._eval_step = (
                    make_eval_step(self.config).lower(self.state.params, batch).compile()
                )
                start = self.clock.begin('evaluation')
            sums.update(
                {
                    name: float(value)
                    for name, value in self._eval_step(self.state.params, batch).items()
                }
            )
            self.watchdog.beat('evaluation')
        if not math.isfinite(sums['nll']):
            batches.check()
        losses = {'validation_loss': sums['nll'] / sums['tokens']}
        text = f'{losses["validation_loss"]:.3f} nats per token'
        if 'rows' in sums:
            losses['validation_order_loss'] = order_loss = sums['order_nll'] / sums['rows']
            text = f'{losses["validation_loss"]:.3f} nats per masked token, {order_loss:.3f} for the order of its segments'
        elif self.data.tokenizer is not None:
            losses['validation_bits_per_byte'] = sums['nll'] / sums['bytes'] / math.log(2)
            text = f'{losses["validation_bits_per_byte"]:.3f} bits per byte ({text})'
        self.report.say(f'step {self.step}  validation {text}')
        losses |= {'evaluation_ms': 1e3 * (self.clock.begin('other') - start)}
        self._sample()
        return losses

    def _sample(self) -> None:
        """Continue the prompts of the config; before the first step there is nothing to read."""
        if self.step and self.sampler.prompts:
            self._begin('evaluation', 'sampling', 'compile')
            self.sampler.sample(self.step, self.state.params, self.stop.check)
            self.clock.begin('other')

    def _validation_batches(self) -> PlacedBatches:
        """The first `train.eval_batches` batches, with the bytes that each label stands for."""
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
        return {
            **batch,
            'label_bytes': tokenizer.token_bytes[batch['labels']] * (batch['loss_mask'] > 0),
        }

    def _begin(self, activity: Activity, phase: str, kind: str = 'step') -> float:
        """What follows is `activity` for the clock and `phase`, of a kind with a limit, for the watchdog; the time, in seconds."""
        self.watchdog.beat(phase, kind)
        return self.clock.begin(activity)

    def _checkpoint_ms(self) -> float:
        """How long saving has held the run up since the last step."""
        before, self._checkpoint_seconds = (
            self._checkpoint_seconds,
            self.clock.seconds('checkpoint'),
        )
        return 1e3 * (self._checkpoint_seconds - before)

    def _find_slowest(self) -> dict[str, float]:
        """The process that was last to a step, on average over those since it was last asked."""
        own = self.clock.seconds('data_wait', 'other') - self._own_seconds
        found = slowest(own / self.config.train.log_every)
        self._own_seconds = self.clock.seconds(
            'data_wait', 'other'
        )  # without the wait for the others' answers
        return found
