"""Compile a run's training step, check it for known miscompiles, and save its text."""

import time
from pathlib import Path

from jax.stages import Compiled
from optax import GradientTransformation

from megajax.core.config import Config
from megajax.core.train.feed import abstract_batch
from megajax.core.train.step import TrainState, make_train_step
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.saved_step import keep_step
from megajax.xla.hlo.text import program_text
from megajax.xla.miscompiles import check_compiled, mesh_target


def compile_step(
    config: Config,
    state: TrainState,
    folder: Path,
    report: Report,
    optimizer: GradientTransformation | None = None,
) -> Compiled:
    """Compile the step of a run with this state, and save its text in the run directory.

    All processes must call this. Raises MiscompileError if XLA compiled the step wrongly for these
    GPUs.
    """
    start = time.perf_counter()
    with report.waiting('compiling the training step'):
        train_step = make_train_step(config, optimizer)
        compiled = train_step.lower(state, abstract_batch(config)).compile()
        check(compiled, report)
    seconds = time.perf_counter() - start
    report.say(f'compiled   the training step in {seconds:.1f} s')
    keep_step(folder, config, compiled, state, seconds=seconds)
    return compiled


def check(compiled: Compiled, report: Report) -> None:
    """Print the known miscompiles of a step for GPUs; raise MiscompileError if one is wrong."""
    target = mesh_target()
    if target != 'cpu':
        for finding in check_compiled(program_text(compiled), target):
            report.say(str(finding))
