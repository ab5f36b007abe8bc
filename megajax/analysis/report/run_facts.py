"""Derive the audit of a run's step and the prediction of `plan` from the run's files."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.result import Inspection
from megajax.analysis.plan.band import Band, band
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX
from megajax.analysis.plan.search import memory_on, usable_memory
from megajax.analysis.plan.time import StepTime, step_time
from megajax.analysis.report.chart import Line
from megajax.analysis.report.downsample import thin
from megajax.analysis.report.read import RunData
from megajax.base.errors import reason
from megajax.base.render.text import typed
from megajax.core.config import Config, ConfigError
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.records import Hardware, hardware_of
from megajax.core.hardware.targets import GPUS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The step on the GPUs of a run, as `megajax plan` predicts it."""

    hardware: Hardware
    time: StepTime
    bytes: int  # memory of one GPU
    available: int  # bytes of that memory that a program can use
    error: Band | None

    @property
    def band(self) -> str:
        """Return the error band of predicted times."""
        return f'± {self.error.error:.0%}' if self.error else 'unverified'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """A run of a report; a fact that is not available is a string that says why."""

    run: RunData
    color: int  # index of the run, which determines the color of its curves
    # The record to predict with, instead of the record of the run's devices.
    gpu: Hardware | None = None
    max_program: int | None = None  # most characters of a compiled step that are read

    @cached_property
    def inspection(self) -> Inspection | str:
        """Return the audit of the compiled step stored in the run."""
        kept = self.run.kept
        if kept is None:
            return 'the run has no step.hlo.gz: it has not compiled a step, or an older megajax did'
        if self.max_program is not None and len(kept.compiled.text) > self.max_program:
            return (
                f'the text of the compiled step is {len(kept.compiled.text) / 1e6:.0f} MB and is '
                f'slow to read; to include it, run megajax report {typed(self.run.folder)}'
            )
        gpu = self.gpu or hardware_of(kept.device_kind)
        try:
            inspect = partial(audit, self.run.compiled_config, kept.compiled, kept.target)
            try:
                return inspect(gpu)
            except ConfigError:  # a file may lack a link that the step uses
                return inspect(None)
        except Exception as error:  # the text is from a different version of megajax or XLA
            return f'the compiled step cannot be inspected: {reason(error)}'

    @cached_property
    def prediction(self) -> Prediction | str:
        """Return the prediction of `plan` for the devices of the run."""
        kept = self.run.kept
        if kept is None:
            return 'the run has no compiled step, which would name its devices'
        gpu = self.gpu or hardware_of(kept.device_kind)
        if gpu is None:
            device = 'this CPU' if kept.device_kind == 'cpu' else kept.device_kind
            return (
                f'there is no hardware record for {device}; measure it with megajax plan '
                'calibrate FILE.yaml, then run megajax report --gpu FILE.yaml'
            )
        try:
            config = resolved(self.run.compiled_config, on_gpu=kept.target in GPUS)
            return _predict(config, gpu, kept.compiled.devices_per_host)
        except ConfigError as error:
            return f'plan has no prediction: {reason(error)}'


def _predict(config: Config, gpu: Hardware, devices_per_host: int) -> Prediction:
    cluster = Cluster.of(gpu, config.mesh.num_devices, devices_per_host)
    time = step_time(config, cluster)
    return Prediction(
        hardware=gpu,
        time=time,
        error=band(config, time, cluster, MEGAJAX),
        bytes=memory_on(config, cluster).total,
        available=usable_memory(cluster),
    )


def lines_of(runs: Sequence[Facts], column: str, points: int) -> list[Line]:
    """Return a chart line per run: a column of its metrics, downsampled to `points`."""
    return [
        Line(
            name=facts.run.name,
            curve=thin(facts.run.steps.number, facts.run.steps[column], points),
            color=facts.color,
        )
        for facts in runs
    ]
