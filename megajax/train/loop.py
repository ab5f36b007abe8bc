"""A run from config to result: data, state, steps, evaluation, checkpoints, a sample."""

import datetime
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from megajax.config import Config, ConfigError, dump, num_parameters
from megajax.data import Data, load_data
from megajax.generate import generate
from megajax.parallel.mesh import make_mesh
from megajax.train.checkpoint import Checkpoints
from megajax.train.feed import Batch, abstract_batch, local_rows, place_batch, placed_batches
from megajax.train.metrics import MetricsWriter
from megajax.train.placements import placements
from megajax.train.report import Report, StepReport
from megajax.train.step import Metrics, TrainState, init_state, make_eval_step, make_train_step

SAMPLE_TOKENS = 160


def run(config: Config, *, name: str) -> Path:
    """Train `config` on its mesh and return the run directory, a new one named after `name` unless `run.dir` is set.

    Raises ConfigError for what the config asks and the machine, the data or the run directory cannot give.
    """
    mesh = make_mesh(config.mesh.data, config.mesh.model)
    report = Report()
    report.mesh(mesh)
    folder = _run_folder(config, name)
    with report.waiting('reading and tokenizing the corpus'):
        data = load_data(config)
    report.say(f'data       {data.summary}')
    with jax.set_mesh(mesh):
        checkpoints = Checkpoints(folder / 'checkpoints', config)
        state = _first_state(config, checkpoints, report)
        _write_inputs(folder, config, data)
        report.placements(placements(state.params), num_parameters(config.model))
        report.say(f'run        {folder}')
        with MetricsWriter(folder) as metrics:
            state = _Run(config, data, report, metrics, checkpoints).train(state)
        checkpoints.close()
        _sample(config, state, data, report)
    report.say(f'\nrun        {folder}\nmetrics    {folder}/metrics.jsonl, tensorboard --logdir {folder}/tensorboard')
    report.say(f'checkpoint {folder}/checkpoints/{int(state.step)}')
    return folder


class _Run:
    """The training loop and what it needs at every step."""

    def __init__(self, config: Config, data: Data, report: Report, metrics: MetricsWriter, checkpoints: Checkpoints):
        self.config, self.data, self.report, self.metrics, self.checkpoints = config, data, report, metrics, checkpoints
        self.train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]] = make_train_step(config)
        self.eval_step = make_eval_step(config)

    def train(self, state: TrainState) -> TrainState:
        train, first = self.config.train, int(state.step)
        self.evaluate(first, state)
        if first >= train.steps:
            self.report.say(f'nothing to do: the checkpoint is of step {first} and train.steps is {train.steps}')
            return state
        with self.report.waiting('compiling the training step'):
            self.train_step = make_train_step(self.config).lower(state, abstract_batch(self.config)).compile()
        self.batches = placed_batches(self.data.train, first, train.steps)
        with self.report.progress(start=first, steps=train.steps, log_every=train.log_every) as progress:
            for step in range(first, train.steps):
                state = self.step(step, state, progress)
                done = step + 1
                if done % self.config.checkpoint.every == 0 or done == train.steps:
                    self.checkpoints.save(state)
                if done % train.eval_every == 0 and done < train.steps:
                    self.evaluate(done, state)
        self.evaluate(train.steps, state)
        return state

    def step(self, step: int, state: TrainState, progress: StepReport) -> TrainState:
        """One step, timed from its batch to its metrics."""
        start = time.perf_counter()
        batch = next(self.batches)
        waited = time.perf_counter() - start
        state, metrics = self.train_step(state, batch)
        values = _as_floats(metrics)
        seconds = time.perf_counter() - start
        tokens_per_second = self.config.train.batch_size * self.config.train.seq_len / seconds
        self.metrics.write(step + 1, **values, tokens_per_s=tokens_per_second, step_ms=1e3 * seconds, data_wait_ms=1e3 * waited)
        progress.step(step + 1, loss=values['loss'], tokens_per_second=tokens_per_second)
        return state

    def evaluate(self, step: int, state: TrainState) -> None:
        """Validation loss in bits per byte of text, which no tokenizer can flatter."""
        if not len(self.data.validation):
            return
        sums: Counter[str] = Counter()
        for batch in self.validation_batches():
            sums.update({name: float(value) for name, value in self.eval_step(state.params, batch).items()})
        losses = {'validation_loss': sums['nll'] / sums['tokens']}
        text = f'{losses["validation_loss"]:.3f} nats per token'
        if self.data.tokenizer is not None:
            losses['validation_bits_per_byte'] = sums['nll'] / sums['bytes'] / math.log(2)
            text = f'{losses["validation_bits_per_byte"]:.3f} bits per byte ({text})'
        self.metrics.write(step, **losses)
        self.report.say(f'step {step}  validation {text}')

    def validation_batches(self) -> Iterator[Batch]:
        """The first `train.eval_batches` batches, with the bytes that each label stands for."""
        validation, tokenizer = self.data.validation, self.data.tokenizer
        rows = local_rows(validation.batch_size)
        for batch in validation.read_ahead(0, min(self.config.train.eval_batches, len(validation)), rows):
            if tokenizer is not None:
                batch = {**batch, 'label_bytes': tokenizer.token_bytes[batch['labels']] * (batch['loss_mask'] > 0)}
            yield place_batch(batch, batch_size=validation.batch_size)


def _run_folder(config: Config, name: str) -> Path:
    if config.run.dir is not None:
        return Path(config.run.dir)
    return Path('runs') / f'{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}'


def _first_state(config: Config, checkpoints: Checkpoints, report: Report) -> TrainState:
    step = checkpoints.latest_step()
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
    if jax.process_index() == 0 and data.tokenizer is not None:
        data.tokenizer.save(folder / 'tokenizer.json')


def _sample(config: Config, state: TrainState, data: Data, report: Report) -> None:
    prompts = config.train.sample_prompts
    if not prompts or data.tokenizer is None:
        return
    with report.waiting('sampling'):
        texts = generate(config, state.params, data.tokenizer, prompts, max_tokens=SAMPLE_TOKENS)
    for prompt, text in zip(prompts, texts, strict=True):
        report.say(f'\nsample after {prompt!r}:\n{prompt}{text}')


def _as_floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in metrics.items()}
