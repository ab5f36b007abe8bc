"""Compare a measured step with the roofline of `inspect` and the prediction of `plan`."""

from collections.abc import Callable

from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.time import step_time
from megajax.analysis.profile.measure import Measured
from megajax.analysis.profile.result import Prediction, StepPart
from megajax.analysis.profile.work import PRODUCTS, ProgramWork, Work
from megajax.core.config import Config
from megajax.core.hardware.records import Hardware


def predictions(
    config: Config,
    work: ProgramWork,
    gpu: Hardware,
    measured: Measured,
    num_devices: int,
    devices_per_host: int,
) -> list[Prediction]:
    """Return the parts of a device's step, measured and as predicted for GPUs of this record.

    A roofline has no idle time; in `plan`, idle time is the idle ticks of a pipeline.
    """

    def spent(belongs: Callable[[Work], bool]) -> float:
        return sum(measured.share(name) for name in measured.runs if belongs(work.of(name)))

    plan = step_time(config, Cluster.of(gpu, num_devices, devices_per_host))
    roofline = work.timeline()
    assert roofline is not None
    products = work.predicted(_is_product)
    others = spent(lambda each: not each.is_transfer and not _is_product(each))
    lines: list[tuple[StepPart, float, float, float]] = [
        ('products', spent(_is_product), products, plan.products - plan.idle),
        ('other kernels', others, roofline.compute - products, plan.memory_bound + plan.launches),
        ('exposed transfers', spent(lambda each: each.is_transfer), roofline.exposed, plan.waits()),
        ('idle', sum(measured.idle), 0.0, plan.idle),
        ('step', measured.step, roofline.compute + roofline.exposed, plan.total),
    ]
    return [
        Prediction(part=part, measured=seconds, roofline=by_roofline, plan=by_plan)
        for part, seconds, by_roofline, by_plan in lines
    ]


def _is_product(work: Work) -> bool:
    return work.kind in PRODUCTS
