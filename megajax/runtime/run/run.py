"""Run a config from start to end: data, state, training and samples."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from optax import GradientTransformation

from megajax.base.render.text import typed
from megajax.core.config import (
    CheckpointError,
    Config,
    ConfigError,
    CorruptionError,
    NumericError,
    RunError,
    StopRequested,
)
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.records import check_dtype, hardware_of
from megajax.core.parallel.mesh import mesh_for
from megajax.core.parallel.placements import placements
from megajax.core.train.own_optimizer import check_keys
from megajax.core.train.step import TrainState, init_state
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.hf_files import Companions
from megajax.runtime.checkpoint.open import restore_params
from megajax.runtime.data import Data
from megajax.runtime.processes.distributed import processes
from megajax.runtime.processes.log_once import logged_once
from megajax.runtime.processes.peers import LEAVING
from megajax.runtime.processes.signals import telling
from megajax.runtime.run.chat_template import read_corpus
from megajax.runtime.run.clock import Clock, RunSummary
from megajax.runtime.run.compile_cache import compile_cache
from megajax.runtime.run.evaluation import check_best, check_best_interval
from megajax.runtime.run.host_memory import check_host_memory
from megajax.runtime.run.infer_config import how_to_resume
from megajax.runtime.run.inputs import write_inputs
from megajax.runtime.run.log.metrics import MetricsWriter, check_wandb
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.nvlink_check import note_links
from megajax.runtime.run.profile import Profiler
from megajax.runtime.run.resumed_data import imported, resumed_data
from megajax.runtime.run.sample_memory import check_sample_memory
from megajax.runtime.run.sampler import Sampler
from megajax.runtime.run.start import check_tokenizer, opened_folder, origin_of, start_checkpoint
from megajax.runtime.run.status import where_it_stands
from megajax.runtime.run.stop import StopWatch
from megajax.runtime.run.trainer import Trainer
from megajax.runtime.run.watchdog import Watchdog
from megajax.runtime.run.watchdog_limits import make_watchdog

# Called with the run's folder when the run ends; returns a file, or None if it has failed.
AtEnd = Callable[[Path], Path | None]


@dataclasses.dataclass(frozen=True)
class Run:
    """A completed run: its folder, its last step and its metrics."""

    folder: Path
    step: int

    @property
    def checkpoint(self) -> Path:
        """The path of the newest checkpoint, for `megajax generate`, `eval` and `export`."""
        return self.folder / 'checkpoints' / str(self.step)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one for each step and each evaluation."""
        lines = (self.folder / 'metrics.jsonl').read_text().splitlines()
        return [json.loads(line) for line in lines]


# A function that returns a line about the mesh of a config, or ''.
Advise = Callable[[Config, Mesh], str]


def train(
    config: Config, *, name: str = 'run', optimizer: GradientTransformation | None = None
) -> Run:
    """Train `config` as `megajax train` does; call it in every process of the run.

    Processes find each other through the environment (`megajax launch`, Slurm, Kubernetes). Unless
    `run.dir` is set, a new run directory is created and named after `name`. If `run.dir` holds an
    interrupted run, that run is resumed. `optimizer` is as in `make_train_step`; give it again to
    resume. Signals stop a run in one process only if it is in the main thread.

    Raises RunError, which contains the exit code of the command: ConfigError if the machine, the
    data or the run directory does not fit the config, CheckpointError or NumericError if the run
    cannot continue, and StopRequested after a signal or `run.max_minutes`, once every step is
    saved.
    """
    try:
        with processes():
            return run(config, name=name, optimizer=optimizer)
    except SystemExit as leaving:
        if not isinstance(leaving.__cause__, StopRequested):
            raise
        raise leaving.__cause__ from None


def run(
    config: Config,
    *,
    name: str,
    advise: Advise | None = None,
    at_end: AtEnd | None = None,
    optimizer: GradientTransformation | None = None,
) -> Run:
    """Train `config` on its mesh, in processes that are already connected; see `train`.

    The line that `advise` returns is printed below the mesh. When a run that has begun ends for any
    reason, the first process calls `at_end` with the run directory. When a signal
    (`runtime/processes/signals.py`) or `run.max_minutes` asks the run to stop, it saves and raises
    SystemExit(75).
    """
    check_wandb(config)
    check_best_interval(config)
    if optimizer is not None:
        check_keys(config)
    clock = Clock()
    with (
        StopWatch(config.run.max_minutes) as stop,
        _started(config, name, advise) as (mesh, folder, report),
        _leaving(folder, config, is_alone=jax.process_count() == 1 and optimizer is None),
    ):
        watchdog = make_watchdog(config, folder)
        with (
            _summed(folder, clock, report, at_end) as summary,
            watchdog,
            telling(lambda: where_it_stands(folder, config.train.steps, summary, watchdog)),
            jax.set_mesh(mesh),
            compile_cache(config.run, folder),
        ):
            if jax.process_index() == 0:
                stop.progress = lambda: _what_is_saved(summary)
            watchdog.beat('verifying the checkpoint to start from', 'checkpoint')
            with start_checkpoint(config, folder) as start:
                watchdog.beat('reading the corpus', 'corpus')
                with report.waiting('reading the corpus'), logged_once():
                    data, carried = read_corpus(config, folder, start, watchdog)
                    watchdog.beat('waiting for the other processes', 'corpus')
                check_best(config, data)
                report.say(f'data       {data.summary}')
                stop.check()
                step = _train(
                    *(config, optimizer, data, carried, folder, start),
                    *(report, summary, stop, watchdog),
                )
    report.say(
        f'run        {folder}\n'
        f'metrics    {folder}/metrics.jsonl, tensorboard --logdir {typed(f"{folder}/tensorboard")}'
    )
    report.say(f'checkpoint {folder}/checkpoints/{step}')
    return Run(folder, step)


@contextmanager
def _started(
    config: Config, name: str, advise: Advise | None
) -> Iterator[tuple[Mesh, Path, Report]]:
    """Open the devices, and the run directory, which is locked during the block.

    What hangs meanwhile ends the run with its stacks on stderr.
    """
    with ExitStack() as held:
        with make_watchdog(config, None):
            mesh = mesh_for(config)
            _check_dtype(config, mesh)
            check_host_memory(config, mesh)
            check_sample_memory(config, mesh)
            report = Report()
            _describe(config, mesh, report, advise)
            folder = held.enter_context(opened_folder(config, name))
        yield mesh, folder, report


def _train(
    config: Config,
    optimizer: GradientTransformation | None,
    data: Data,
    companions: Companions,
    folder: Path,
    start: Path | None,
    report: Report,
    summary: RunSummary,
    stop: StopWatch,
    watchdog: Watchdog,
) -> int:
    """Train to the last step and return the step of the newest checkpoint."""
    watchdog.beat('restoring', 'checkpoint')
    saved = folder / 'checkpoints'
    with Checkpoints(
        saved, config, tokenizer=data.tokenizer, data=data.fingerprints, optimizer=optimizer
    ) as checkpoints:
        with logged_once():
            state = _first_state(config, checkpoints, start, report, summary.clock)
            before = checkpoints.restored or (imported(start) if start else None)
            data = resumed_data(data, config, before, batches=int(state.batches))
            watchdog.beat('waiting for the other processes', 'checkpoint')
        report.placements(placements(state.params), config.model)
        report.say(f'run        {folder}')
        step = int(state.step)
        with (
            MetricsWriter(folder, step, config=config) as metrics,
            closing(Sampler(config, data.tokenizer, folder, step, report=report)) as sampler,
        ):
            summary.begin(step, lost_seconds=metrics.lost_seconds(until=summary.last_step))
            trainer = Trainer(
                config,
                data,
                state,
                report=report,
                metrics=metrics,
                sampler=sampler,
                summary=summary,
                profiler=Profiler(folder, config, done=step),
                checkpoints=checkpoints,
                stop=stop,
                watchdog=watchdog,
            )
            companions = _carry_along(checkpoints, companions)
            write_inputs(folder, config, data.tokenizer, companions, step=step)
            try:
                trainer.train()
            except StopRequested:
                _stop(trainer, folder)
                raise
            # The newest state may be the cause of the error, so it is not saved.
            except (NumericError, CheckpointError, CorruptionError):
                raise
            except Exception:
                watchdog.beat('saving', 'checkpoint')
                trainer.rescue()
                raise
    stop.check()
    return trainer.step


def _stop(trainer: Trainer, folder: Path) -> None:
    """Save the state before a requested exit, and print where it is."""
    trainer.watchdog.beat('saving', 'checkpoint')
    trainer.save_now()
    trainer.checkpoints.close(final=True)
    saved = f'{folder}/checkpoints/{trainer.step}' if trainer.step else 'none'
    trainer.report.say(f'run        {folder}\ncheckpoint {saved}')


def _what_is_saved(summary: RunSummary) -> str:
    if not summary.step and not summary.dispatched:
        return 'exiting before the first step, when the current operation is done'
    return f'saving after the current step ({summary.step or 0} done), then exiting'


@contextmanager
def _leaving(folder: Path, config: Config, *, is_alone: bool) -> Iterator[None]:
    """Report a requested stop, and exit with the code that asks for a restart."""
    try:
        yield
    except StopRequested as request:
        how = how_to_resume(folder, is_alone=is_alone, resume=config.run.resume)
        Report().say(f'stopped by {request}; {how}')
        raise SystemExit(StopRequested.exit_code) from request


def _describe(config: Config, mesh: Mesh, report: Report, advise: Advise | None) -> None:
    report.mesh(mesh)
    note_links(mesh, report)
    report.parallelism(resolved(config, on_gpu=mesh.devices.flat[0].platform not in ('cpu', 'tpu')))
    report.experts(config)
    if advise and (line := advise(config, mesh)):
        report.say(line)


def _check_dtype(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError if these devices do not compute in fp8; a CPU emulates it."""
    known = hardware_of(mesh.devices.flat[0].device_kind)
    if known and config.train.dtype == 'fp8':
        check_dtype(config.train.dtype, known)


@contextmanager
def _summed(
    folder: Path, clock: Clock, report: Report, at_end: AtEnd | None
) -> Iterator[RunSummary]:
    """Write and print the run's time summary when it ends for any reason; call `at_end`."""
    summary = RunSummary(folder, clock)
    try:
        yield summary
    except RunError:
        LEAVING.set()  # writing the report takes longer than the other processes wait for this one
        raise
    finally:
        if summary.step is not None:
            summary.write()
            report.say(f'\n{summary}')
            if at_end is not None and jax.process_index() == 0 and (page := at_end(folder)):
                report.say(f'report     {page}')


def _first_state(
    config: Config, checkpoints: Checkpoints, start: Path | None, report: Report, clock: Clock
) -> TrainState:
    clock.begin('restore')
    step = checkpoints.newest_verified()
    if step is None:
        if config.run.resume == 'must':
            raise ConfigError(
                f'run.resume=must, but {checkpoints.folder} holds no checkpoint: '
                'set run.dir, or run.resume=auto'
            )
        params = _restore_start(config, checkpoints, start, report) if start else None
        clock.begin('setup')
        return init_state(config, params, optimizer=checkpoints.optimizer)
    if config.run.resume == 'never':
        raise ConfigError(
            f'run.resume=never, but {checkpoints.folder} holds step {step}: '
            'choose another run.dir, or run.resume=auto'
        )
    report.say(f'resume     {checkpoints.folder}, step {step}')
    state = checkpoints.restore(step)
    clock.begin('setup')
    return state


def _restore_start(
    config: Config, checkpoints: Checkpoints, start: Path, report: Report
) -> nnx.State:
    check_tokenizer(start, checkpoints.tokenizer)
    checkpoints.origin = origin_of(start)
    report.say(f'start      {start} (weights only, with a fresh optimizer)')
    return restore_params(start, config)


def _carry_along(checkpoints: Checkpoints, companions: Companions) -> Companions:
    """Store and return the companions of the model; generated samples end at their tokens, too."""
    checkpoints.companions = companions
    if checkpoints.tokenizer is not None:
        checkpoints.tokenizer.also_ends(companions.ends)
    return companions
