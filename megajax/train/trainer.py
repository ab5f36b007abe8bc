"""The training loop: steps, what follows from them, evaluation and checkpoints."""

import math
import time
from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np

from megajax.config import Config, NumericError
from megajax.data import Data
from megajax.train.checkpoint import Checkpoints
from megajax.train.feed import Batch, abstract_batch, local_rows, place_batch, placed_batches
from megajax.train.guard import respond
from megajax.train.metrics import MetricsWriter
from megajax.train.report import Report, StepReport
from megajax.train.step import Metrics, TrainState, make_eval_step, make_train_step
from megajax.train.stop import StopWatch
from megajax.train.watchdog import Watchdog

ROLLBACKS = 3  # without a new checkpoint between them; then the run ends


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
        checkpoints: Checkpoints,
        stop: StopWatch,
        watchdog: Watchdog,
    ):
        self.config, self.data, self.state = config, data, state
        self.report, self.metrics, self.checkpoints, self.stop = report, metrics, checkpoints, stop
        self.step = self._saved = int(state.step)
        self.watchdog, self._first = watchdog, self.step + 1  # the first step also connects the devices
        self._save_due = False
        self._rollbacks = 0
        self._eval_step = make_eval_step(config)

    def train(self) -> None:
        """All steps that are left. Raises StopRequested at a safe point, NumericError if the numbers end the run."""
        steps = self.config.train.steps
        self.stop.check()
        if self.step >= steps:
            self.report.say(f'nothing to do: the checkpoint is of step {self.step} and train.steps is {steps}')
            return
        if self.step == 0:
            self._evaluate()
        self.watchdog.beat('compiling', patient=True)
        with self.report.waiting('compiling the training step'):
            self._train_step = make_train_step(self.config).lower(self.state, abstract_batch(self.config)).compile()
        self._batches = self._read_on()
        with self.report.progress(start=self.step, steps=steps, log_every=self.config.train.log_every) as progress:
            while self.step < steps:
                self.stop.check()
                metrics = self._take_step(progress)
                if respond(self.config, self.step, metrics) == 'roll back':
                    self._roll_back()
                else:
                    self._look_after(taken=bool(metrics['taken']))

    def save_now(self) -> None:
        """Save the state unless it is saved; before a run that was asked to stop leaves."""
        if self.step > self._saved:
            self._save()
        if not self.checkpoints.wait():
            self._save()

    def _take_step(self, progress: StepReport) -> dict[str, float]:
        """One step, timed from its batch to its metrics."""
        start = time.perf_counter()
        self.watchdog.beat('data')
        batch = next(self._batches)
        waited = time.perf_counter() - start
        self.watchdog.beat(f'step {self.step + 1}', patient=self.step + 1 == self._first)
        self.state, metrics = self._train_step(self.state, batch)
        values = _as_floats(metrics)
        seconds = time.perf_counter() - start
        self.step += 1
        tokens_per_second = self.config.train.batch_size * self.config.train.seq_len / seconds
        self.metrics.write(self.step, **values, tokens_per_s=tokens_per_second, step_ms=1e3 * seconds, data_wait_ms=1e3 * waited)
        progress.step(self.step, loss=values['loss'], tokens_per_second=tokens_per_second, skipped=not values['taken'])
        return values

    def _look_after(self, *, taken: bool) -> None:
        """After a step: evaluate and save if it is time; what a skipped step left is saved after the next one that is taken."""
        last = self.step == self.config.train.steps
        self.watchdog.beat('checkpoint')
        due = self.checkpoints.poll(self.step) or self._save_due
        loss = self._evaluate() if last or self.step % self.config.train.eval_every == 0 else None
        self._save_due = due and not taken
        if (due and taken) or last:
            self._save(loss)
        if last and not self.checkpoints.wait():
            self._save(loss)

    def _save(self, validation_loss: float | None = None) -> None:
        self.watchdog.beat('saving', patient=True)
        self.checkpoints.save(self.state, self.step, validation_loss=validation_loss)
        self._saved, self._rollbacks = self.step, 0

    def _roll_back(self) -> None:
        """Go back to the newest checkpoint, and on from there with the batches after the one that was refused."""
        self._rollbacks += 1
        self.watchdog.beat('rolling back', patient=True)
        self.checkpoints.wait()
        step = self.checkpoints.newest_verified()
        if step is None or self._rollbacks > ROLLBACKS:
            why = 'there is no checkpoint yet' if step is None else f'it was rolled back {ROLLBACKS} times without getting to another'
            raise NumericError(f'step {self.step} cannot be rolled back: {why}; lower optim.lr, or save more often (checkpoint.every)')
        if int(self.state.batches) + self.config.train.steps - step > len(self.data.train):
            raise NumericError(f'step {self.step} cannot be rolled back: the data has no more batches for the steps after {step}')
        self.report.say(f'step {self.step} is rolled back to step {step}; its batch and those before it are not read again')
        batches = np.asarray(self.state.batches)
        self.checkpoints.delete_after(step)
        restored = self.checkpoints.restore(step)
        self.state = restored._replace(batches=jax.device_put(batches, restored.batches.sharding))
        self.step = self._saved = step
        self.metrics.rewind(step)
        self._batches = self._read_on()

    def _read_on(self) -> Iterator[Batch]:
        first = int(self.state.batches)
        return placed_batches(self.data.train, first, first + self.config.train.steps - self.step)

    def _evaluate(self) -> float | None:
        """Validation loss in nats per token, reported in bits per byte of text too, which no tokenizer can flatter; None without data."""
        if not len(self.data.validation):
            return None
        sums: Counter[str] = Counter()
        self.watchdog.beat('evaluation', patient=True)  # its first batch compiles
        for batch in self._validation_batches():
            self.stop.check()
            sums.update({name: float(value) for name, value in self._eval_step(self.state.params, batch).items()})
            self.watchdog.beat('evaluation')
        losses = {'validation_loss': sums['nll'] / sums['tokens']}
        text = f'{losses["validation_loss"]:.3f} nats per token'
        if self.data.tokenizer is not None:
            losses['validation_bits_per_byte'] = sums['nll'] / sums['bytes'] / math.log(2)
            text = f'{losses["validation_bits_per_byte"]:.3f} bits per byte ({text})'
        self.metrics.write(self.step, **losses)
        self.report.say(f'step {self.step}  validation {text}')
        return losses['validation_loss']

    def _validation_batches(self) -> Iterator[Batch]:
        """The first `train.eval_batches` batches, with the bytes that each label stands for."""
        validation, tokenizer = self.data.validation, self.data.tokenizer
        rows = local_rows(validation.batch_size)
        for batch in validation.read_ahead(0, min(self.config.train.eval_batches, len(validation)), rows):
            if tokenizer is not None:
                batch = {**batch, 'label_bytes': tokenizer.token_bytes[batch['labels']] * (batch['loss_mask'] > 0)}
            yield place_batch(batch, batch_size=validation.batch_size)


def _as_floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in metrics.items()}
