"""Predictions of published training rates.

A GPU's efficiencies are fitted to the rates that are not held out.
"""

import dataclasses
import functools
from collections.abc import Mapping

from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.published.rates import PublishedRate
from megajax.analysis.plan.published.tables import rows
from megajax.analysis.plan.time import StepTime, step_time
from megajax.core.hardware.records import Hardware, hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row and its predicted time."""

    row: PublishedRate
    time: StepTime
    baseline: 'Prediction | None'

    @property
    def tflops(self) -> float:
        """The predicted TFLOP/s per GPU, as the source counts them."""
        rate = self.row.flops / self.time.total / self.row.num_gpus / 1e12
        return rate * self.baseline.row.published / self.baseline.tflops if self.baseline else rate

    @property
    def error(self) -> float:
        """The relative error of the predicted rate, compared with the published rate."""
        return self.tflops / self.row.published - 1


def predict(table: str, gpus: Mapping[str, Hardware] = {}) -> list[Prediction]:
    """Return the prediction of every row of a table.

    `gpus` maps names to GPU records that replace the stored records.
    """
    if not gpus:
        return [*_by_stored_records(table)]
    return [predicted(row, gpus.get(row.gpu) or hardware(row.gpu)) for row in rows(table)]


@functools.cache
def _by_stored_records(table: str) -> tuple[Prediction, ...]:
    return tuple(predicted(row, hardware(row.gpu)) for row in rows(table))


def predicted(row: PublishedRate, gpu: Hardware) -> Prediction:
    """Return the prediction of a row on GPUs of the record `gpu`."""
    time = step_time(row.config, Cluster.of(gpu, row.num_gpus), row.program)
    return Prediction(
        row=row, time=time, baseline=predicted(row.baseline, gpu) if row.baseline else None
    )
