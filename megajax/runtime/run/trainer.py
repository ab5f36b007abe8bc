"""The training loop: steps, rollbacks, evaluation and checkpoints."""

import logging
from functools import partial

import jax

from megajax.core.config import Config, StopRequested
from megajax.core.train.first_step import Calibration, take_first_step
from megajax.core.train.guard import respond
from megajax.core.train.step import Metrics, TrainState, before_skipped
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.data import Data
from megajax.runtime.processes.consensus import all_are_here
from megajax.runtime.run.clock import Activity, RunSummary
from megajax.runtime.run.compile_step import compile_step
from megajax.runtime.run.evaluation import Evaluation
from megajax.runtime.run.log.metrics import MetricsWriter
from megajax.runtime.run.log.report import Report, StepReport
from megajax.runtime.run.meter import BetweenSteps, Meter
from megajax.runtime.run.placed_batches import PlacedBatches
from megajax.runtime.run.profile import Profiler
from megajax.runtime.run.replay import Replay
from megajax.runtime.run.rollback import Rollbacks
from megajax.runtime.run.sampler import Sampler
from megajax.runtime.run.step_times import Dispatched, StepTimes, noting_end
from megajax.runtime.run.stop import StopWatch
from megajax.runtime.run.watchdog import Watchdog
from megajax.runtime.run.watchdog_limits import step_limit

logger = logging.getLogger(__name__)

COMPANY = 5.0  # seconds to wait for other processes to fail after the same step


class Trainer:
    """The state of a run, which `train` advances to the last step.

    At a safe point, it is the state after a complete step.
    """

    def __init__(
        self,
        config: Config,
        data: Data,
        state: TrainState,
        *,
        report: Report,
        metrics: MetricsWriter,
        sampler: Sampler,
        summary: RunSummary,
        profiler: Profiler,
        checkpoints: Checkpoints,
        stop: StopWatch,
        watchdog: Watchdog,
    ):
        self.config, self.state = config, state
        self.report, self.metrics, self.sampler = report, metrics, sampler
        self.checkpoints, self.stop, self.watchdog = checkpoints, stop, watchdog
        step = self.step = self._saved = int(state.step)
        self._first = step + 1  # the first step also connects the devices
        self._calibration = Calibration(config, self.step)
        self.summary, self.clock, self.profiler = summary, summary.clock, profiler
        self._skipped = self.step - int(state.guard.taken)
        self._between_steps = BetweenSteps(self.clock)
        # The step since which a save is due, or was due when the restored state was saved.
        self._due = checkpoints.restored.due if checkpoints.restored else None
        self._ahead: Dispatched | None = None  # the step after `step`, with its metrics unread
        self._failure: Exception | None = None  # the error that dispatching this step raised
        self._times = StepTimes(self.clock)
        folder, clock = checkpoints.folder.parent, self.clock
        self._evaluation = Evaluation(
            config, data, folder, step, report=report, clock=clock, stop=stop, watchdog=watchdog
        )
        self._rollbacks = Rollbacks(config, data, report=report, checkpoints=checkpoints)

    def train(self) -> None:
        """Take all remaining steps.

        Raises StopRequested at a safe point, and NumericError if loss or gradients end the run.
        """
        steps = self.config.train.steps
        self.stop.check()
        has_validation = len(self._rollbacks.data.validation) > 0
        if self.step == 0 or (has_validation and not self.checkpoints.is_evaluated(self.step)):
            self._evaluate_if_due()
        if self.step >= steps:
            self.report.say(
                f'nothing to do: the checkpoint is at step {self.step} and train.steps is {steps}'
            )
            return
        self._begin('compile', 'compiling', 'compile')
        folder, optimizer = self.checkpoints.folder.parent, self.checkpoints.optimizer
        self._train_step = compile_step(self.config, self.state, folder, self.report, optimizer)
        self.profiler.compiled = self._train_step
        self._replay = Replay(
            self.config,
            self._train_step,
            self.state,
            report=self.report,
            clock=self.clock,
            watchdog=self.watchdog,
            optimizer=optimizer,
        )
        self._meter = Meter(self.config, self._train_step, [*jax.sharding.get_mesh().devices.flat])
        self.clock.begin('other')
        self._batches, every = self._read_on(), self.config.train.log_every
        self._between_steps.begin()
        lines = self.report.progress(start=self.step, steps=steps, log_every=every)
        with self.profiler, lines as progress:
            while self.step < steps:
                try:
                    self.stop.check()
                except StopRequested:
                    if self._ahead is not None:
                        self._one_step(progress, go_ahead=False)
                    raise
                self._one_step(progress)

    def _one_step(self, progress: StepReport, *, go_ahead: bool = True) -> None:
        """Take one step, then save and evaluate if due, or roll back.

        An evaluation waits with the save, so that the checkpoint has a loss of its own.
        """
        values = self._take_step(go_ahead=go_ahead)
        self.metrics.write(self.step, **values)  # first, because printing may fail
        progress.step(self.step, values)
        if respond(self.config, self.step, values) != 'go on':
            self._roll_back()
        elif self._save_if_due(taken=bool(values['taken'])):
            self._evaluate_if_due()

    def save_now(self) -> None:
        """Save the state unless it is saved already; called before a requested exit."""
        if self.step > self._saved:
            self._save()
        if not self.checkpoints.wait():
            self._save()

    def rescue(self) -> None:
        """Save the newest state before the run exits with an error, and report its path.

        The state must be complete, and must not be the cause of the error. A process that fails
        alone cannot save, because the other processes are in a step and will not write their parts.
        """
        failed_after = self.step
        if not self._is_whole():
            self.checkpoints.abandon()
            return
        if not all_are_here(f'failed_after_{failed_after}', COMPANY):
            why = 'the other processes did not fail with this one'
            logger.warning('step %d is not saved: %s', failed_after, why)
            self.checkpoints.abandon()
            return
        if self.step:
            self.save_now()
            if self.checkpoints.wait():
                self.report.say(f'step {self.step} is saved: {self.checkpoints.folder}/{self.step}')

    def _is_whole(self) -> bool:
        """Whether the state is the result of the last step, including a step in flight."""
        try:
            if self._ahead is not None:
                values = self._ahead.values()
                ahead, self._ahead = self._ahead, None
                values |= self._complete(ahead, self.clock.begin('other'), taken=values['taken'])
                self.metrics.write(self.step, **values)
            return int(self.state.step) == self.step
        except RuntimeError:  # the failed step has consumed the donated state
            return False

    def _take_step(self, *, go_ahead: bool) -> dict[str, float]:
        """Take one step, timed from its batch to its metrics, and return its metrics so far.

        The next step is dispatched first, to keep the devices busy, unless the state may be needed.
        """
        if self._failure is not None:
            raise self._failure
        current, self._ahead = self._ahead or self._dispatch(self.step + 1), None
        self._begin_step(current.step)  # where processes ask each other, they wait for its end
        on_end = partial(self._begin, 'checkpoint', 'saving', 'checkpoint')
        with noting_end(current.metrics if self.checkpoints.is_saving else None) as ends:
            self._due = self.checkpoints.poll(current.step, on_end)
        if go_ahead and self._may_go_ahead(current.step):
            try:
                self._ahead = self._dispatch(current.step + 1, current.metrics)
            except Exception as error:  # raised after this step, which is completed first
                self._failure = error
        self._begin_step(current.step)
        values = current.values()
        end = min([self.clock.begin('other'), *ends])
        self.profiler.end(current.step)
        if not values['finite']:
            self._check_read()
        values |= self._complete(current, end, taken=values['taken'])
        if self.step % self.config.train.log_every == 0:
            values |= self._between_steps.compare_processes(self._meter)
        return values

    def _complete(self, done: Dispatched, end: float, *, taken: float) -> dict[str, float]:
        """Count a step whose metrics were read at `end`; return its rates and times."""
        times = self._times.complete(done, end, self._ahead, taken=bool(taken))
        if self.config.run.watchdog_seconds == 'auto':
            self.watchdog.allow('step', step_limit(times.total, is_first=done.step == self._first))
        self.step = done.step
        self.summary.reach(done.step)
        self._skipped += not taken
        return self._meter.measure(times.total) | {
            'step_ms': 1e3 * times.total,
            'data_wait_ms': 1e3 * times.data_wait,
            **({'replay_ms': 1e3 * done.replay} if done.replay else {}),
            'checkpoint_ms': self._between_steps.checkpoint_ms(),
            'skipped_steps': self._skipped,
        }

    def _dispatch(self, step: int, previous: Metrics | None = None) -> Dispatched:
        """Read the batch of a step and dispatch the step to the devices.

        `previous` are the metrics of the step before it, unless they have been read.
        """
        self.summary.dispatched = step
        if self._calibration.is_due(step):  # before the step, whose trace is of one program
            self._begin('data_wait', 'data')
            batch = self._batches.peek()
            self._begin('compile', f'step {step}', 'first step')
            self.state = self._calibration.scaled(step, self.state, batch)
        with self.profiler.step(step):
            start = self._begin('data_wait', 'data')
            with noting_end(previous) as ends:
                batch = next(self._batches)
            after_batch = self._begin_step(step)
            replayed = self.clock.seconds('replay')
            self.state, metrics = self._run_step(step, batch)
            replay = self.clock.seconds('replay') - replayed
            if self.profiler.covers(step):
                jax.block_until_ready(metrics)  # the step's kernels must end within its trace event
        return Dispatched(step, metrics, start, after_batch, replay, *ends)

    def _may_go_ahead(self, step: int) -> bool:
        """Whether only the next step needs the state after `step`."""
        is_searching_scale = self.config.train.loss_scale == 'auto' and self.step <= self._skipped
        return not (
            step == self._first
            or step == self.config.train.steps
            or self._calibration.is_due(step + 1)
            or step % self.config.train.eval_every == 0
            or self._due is not None
            or (self.state.loss_scale is not None and is_searching_scale)
            or self.profiler.covers(step + 1)
            or self._replay.is_due(step + 1)
        )

    def _run_step(self, step: int, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        """Run the compiled step; in fp16, the first step finds the loss scale unless one is set.

        Raises CorruptionError if the step is repeated and the results differ.
        """
        train_step, scale = self._replay.of_step(step), self.state.loss_scale
        if scale is None or self.config.train.loss_scale != 'auto' or self.step > self._skipped:
            return train_step(self.state, batch)
        first = float(scale.value)
        state, metrics = take_first_step(train_step, self.state, batch)
        if metrics['taken']:
            self.report.loss_scale(first, float(metrics['loss_scale']))
        return state, metrics

    def _check_read(self) -> None:
        """Raise one process's error in reading this step's batch in all processes.

        Before raising, restore the state before this step.
        """
        try:
            self._batches.check()
        except Exception:
            self.state = before_skipped(self.state)
            # the step that was dispatched ahead could not read its batch either
            if self._ahead is not None:
                self.state, self._ahead = before_skipped(self.state), None
            raise

    def _evaluate_if_due(self) -> None:
        """Evaluate and sample if due, after the state is saved, so that a failure loses no step.

        If a run is stopped here, it repeats the evaluation when it resumes.
        """
        if self._evaluation.is_due(self.step, since=self._due):
            losses = self._evaluation.evaluate(self.step, self.state.params)
            try:
                if self.step and self.sampler.prompts:  # not before the first step
                    self._begin('evaluation', 'sampling', 'compile')
                    self.sampler.sample(self.step, self.state.params, self.stop.check)
                    self.clock.begin('other')
            except StopRequested:
                losses = {}
                raise
            finally:  # a sample that fails does not lose the losses
                if losses:
                    self.metrics.write(self.step, **losses)
                    if self.step:
                        self.checkpoints.note_validation_loss(self.step, losses['validation_loss'])

    def _save_if_due(self, *, taken: bool) -> bool:
        """Save if it is due; after a skipped step, wait for an applied one and return False."""
        last = self.step == self.config.train.steps
        saves = last or (self._due is not None and taken)
        self._begin('checkpoint', 'checkpoint')
        if saves:
            self._save()
        if last and not self.checkpoints.wait():
            self._save()
        self.clock.begin('other')
        return saves or self._due is None

    def _save(self) -> None:
        self._begin('checkpoint', 'saving', 'checkpoint')
        self.checkpoints.save(self.state, self.step, **self._batches.place(self.state.batches))
        self._saved = self.step
        self._rollbacks.reset()

    def _roll_back(self) -> None:
        """Return to the newest checkpoint; continue with the batches after the rejected one."""
        self._begin('restore', 'rolling back', 'corpus' if self.config.data.blend else 'checkpoint')
        step = self._rollbacks.find_target(self.step)
        batches = int(self.state.batches) - (self._ahead is not None)
        self._ahead = self._failure = self._due = None
        self.state = self._rollbacks.restore(self.step, step, batches)
        self.step = self._saved = step
        self._calibration.rewind(step)
        self._skipped = step - int(self.state.guard.taken)
        for output in (self.metrics, self.sampler, self._evaluation):
            output.rewind(step)
        self.summary.roll_back(step, lost_seconds=self.metrics.lost_seconds())
        self._batches = self._read_on()
        self.clock.begin('other')
        if step == 0:  # an import, whose metrics are deleted too
            self._evaluate_if_due()

    def _read_on(self) -> PlacedBatches:
        first, left = int(self.state.batches), self.config.train.steps - self.step
        return PlacedBatches(self._rollbacks.data.train, first, first + left)

    def _begin_step(self, step: int) -> float:
        kind = 'first step' if step == self._first else 'step'
        return self._begin('productive', f'step {step}', kind)

    def _begin(self, activity: Activity, phase: str, kind: str = 'step') -> float:
        """Begin an activity, and a phase with the limit of `kind`; return the time in seconds."""
        self.watchdog.beat(phase, kind)
        self.summary.write_sometimes()
        return self.clock.begin(activity)
