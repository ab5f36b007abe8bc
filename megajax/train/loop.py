"""A run from config to result: data, state, training, a sample."""

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from megajax.config import Config, ConfigError, StopRequested, dump, num_parameters
from megajax.data import Data, load_data
from megajax.generate import generate
from megajax.parallel.mesh import make_mesh
from megajax.train.checkpoint import Checkpoints
from megajax.train.lock import run_lock
from megajax.train.metrics import MetricsWriter
from megajax.train.placements import placements
from megajax.train.report import Report
from megajax.train.step import TrainState, init_state
from megajax.train.stop import StopWatch
from megajax.train.trainer import Trainer
from megajax.train.watchdog import Watchdog

SAMPLE_TOKENS = 160


def run(config: Config, *, name: str) -> Path:
    """Train `config` on its mesh and return the run directory, a new one named after `name` unless `run.dir` is set.

    Asked to stop, by SIGTERM, SIGINT or `run.max_minutes`, it saves and exits with 75. Raises ConfigError for what the config asks
    and the machine, the data or the run directory cannot give, CheckpointError and NumericError where the run cannot go on.
    """
    with StopWatch(config.run.max_minutes) as stop, _leaving():
        mesh = make_mesh(config.mesh.data, config.mesh.model, cross_hosts=config.mesh.allow_model_across_hosts)
        report = Report()
        report.mesh(mesh)
        folder = _run_folder(config, name)
        with run_lock(folder), Watchdog(folder, config.run.watchdog_seconds) as watchdog, jax.set_mesh(mesh):
            watchdog.beat('reading the corpus', patient=True)
            with report.waiting('reading the corpus'):
                data = load_data(config)
            report.say(f'data       {data.summary}')
            stop.check()
            _train(config, data, folder, report, stop, watchdog)
    report.say(f'\nrun        {folder}\nmetrics    {folder}/metrics.jsonl, tensorboard --logdir {folder}/tensorboard')
    report.say(f'checkpoint {folder}/checkpoints/{config.train.steps}')
    return folder


def _train(config: Config, data: Data, folder: Path, report: Report, stop: StopWatch, watchdog: Watchdog) -> None:
    watchdog.beat('restoring', patient=True)
    with Checkpoints(folder / 'checkpoints', config, tokenizer=data.tokenizer, data=data.fingerprints) as checkpoints:
        state = _first_state(config, checkpoints, report)
        _write_inputs(folder, config, data)
        report.placements(placements(state.params), num_parameters(config.model))
        report.say(f'run        {folder}')
        with MetricsWriter(folder, int(state.step)) as metrics:
            trainer = Trainer(config, data, state, report=report, metrics=metrics, checkpoints=checkpoints, stop=stop, watchdog=watchdog)
            try:
                trainer.train()
            except StopRequested:
                watchdog.beat('saving', patient=True)
                trainer.save_now()
                checkpoints.close(final=True)
                raise
    stop.check()
    watchdog.beat('sampling', patient=True)
    _sample(config, trainer.state, data, report)
    stop.check()


@contextmanager
def _leaving() -> Iterator[None]:
    """A run that was asked to stop says so, and exits with a code that means: start me again."""
    try:
        yield
    except StopRequested as request:
        Report().say(f'stopped by {request}; the same command with this run.dir goes on')
        raise SystemExit(StopRequested.exit_code) from None


def _run_folder(config: Config, name: str) -> Path:
    if config.run.dir is not None:
        return Path(config.run.dir)
    # by the clock of process 0: all write their parts of a checkpoint into one folder
    now = int(multihost_utils.broadcast_one_to_all(np.int32(time.time())))
    return Path('runs') / f'{name}-{datetime.datetime.fromtimestamp(now):%Y%m%d-%H%M%S}'


def _first_state(config: Config, checkpoints: Checkpoints, report: Report) -> TrainState:
    step = checkpoints.newest_verified()
    if step is None:
        if config.run.resume == 'must':
            raise ConfigError(f'run.resume=must, and {checkpoints.folder} holds no checkpoint: set run.dir, or run.resume=auto')
        return init_state(config)
    if config.run.resume == 'never':
        raise ConfigError(f'run.resume=never, and {checkpoints.folder} holds step {step}: choose another run.dir, or run.resume=auto')
    report.say(f'resume     {checkpoints.folder}, step {step}')
    return checkpoints.restore(step)


def _write_inputs(folder: Path, config: Config, data: Data) -> None:
    if jax.process_index() == 0:
        (folder / 'config.yaml').write_text(dump(config))
        if data.tokenizer is not None:
            data.tokenizer.save(folder / 'tokenizer.json')


def _sample(config: Config, state: TrainState, data: Data, report: Report) -> None:
    prompts = config.train.sample_prompts
    if not prompts or data.tokenizer is None:
        return
    with report.waiting('sampling'):
        texts = generate(config, state.params, data.tokenizer, prompts, max_tokens=SAMPLE_TOKENS)
    for prompt, text in zip(prompts, texts, strict=True):
        report.say(f'\nsample after {prompt!r}:\n{prompt}{text}')
