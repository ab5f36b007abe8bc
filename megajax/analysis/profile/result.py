"""Define the result of a profile, which the terminal and the JSON both show.

Seconds, launches and bytes are per step and device. They are means over the traced steps, for the
median and for the slowest device. Shares of the step are also in seconds; all shares and the idle
time add up to the step.
"""

from typing import Literal

from pydantic import Field

from megajax.base.result import Result

StepPart = Literal['products', 'other kernels', 'exposed transfers', 'idle', 'step']


class Part(Result):
    """A part of the step; all parts of a device add up to its step."""

    kind: Literal['kernels', 'exposed', 'idle']
    name: str = Field(description='kind of kernel, or kind and axis of collectives, or when idle')
    launches: float
    median: float
    slowest: float


class MeasuredLine(Result):
    """One instruction, or several of the same kind, on the median and on the slowest device."""

    kind: str
    what: str = Field(description='sizes of the matmuls, or the arrays that are sent')
    site: str
    phase: str
    launches: float
    seconds: float = Field(description='full duration on the median device')
    slowest_seconds: float = Field(description='full duration on the slowest device')
    share: float = Field(description='share of the step in seconds, on the median device')
    predicted_seconds: float | None = Field(description="by the roofline of the GPU's record")


class ProductLine(MeasuredLine):
    """The matmuls or attention kernels of one shape at one site."""

    dtype: str
    flops: float
    flops_per_second: float | None = Field(description='None if no time was measured')
    peak_share: float | None = Field(description='None if the peak is not known')


class CollectiveLine(MeasuredLine):
    """The collectives of one kind along one axis at one site."""

    axis: str
    wire_bytes: float = Field(description='bytes that a device sends, by the ring algorithm')
    exposed_seconds: float = Field(description='seconds in which no kernel runs')
    hidden_seconds: float = Field(description='seconds that overlap kernels or other transfers')
    transfer_seconds: float = Field(
        description="sum over runs of the shortest duration on any device of the median device's "
        'group, which arrived last and waited for no other'
    )
    bytes_per_second: float | None = Field(description='wire_bytes divided by transfer_seconds')
    slowest_bytes_per_second: float | None = Field(
        description='the same for the group of devices whose transfers take longest'
    )
    slowest_processes: list[int] = Field(description='the processes of that group')


class InstructionLine(MeasuredLine):
    """One instruction of the compiled program."""

    name: str
    axis: str
    source: str = Field(description='Python frames, innermost first')


class DeviceLine(Result):
    """The step of one device; kernels, exposed and idle add up to `step`."""

    process: int
    device: int = Field(description="the process's number for it")
    step: float
    kernels: float
    exposed: float = Field(description='seconds in which only transfers run')
    idle: float

    @property
    def own(self) -> float:
        """Return the seconds outside exposed transfers, for which other devices wait."""
        return self.step - self.exposed


class ProcessLine(Result):
    """The step of one process: the means over its devices."""

    process: int
    host: str
    step: float
    own: float = Field(description='seconds outside exposed transfers')
    behind: float = Field(description='`own` minus `own` of the median process')


class Prediction(Result):
    """The seconds of a part of the step: measured, and predicted by `inspect` and by `plan`."""

    part: StepPart
    measured: float
    roofline: float
    plan: float


class Profile(Result):
    """Where the time of the traced steps went."""

    schema_version: Literal[1] = 1
    run: str
    steps: list[int]
    notes: list[str] = Field(
        default=[], description='traced steps that do not count, and events that were lost'
    )
    mesh: dict[str, int]
    device: str = Field(description="jax's name of the GPUs, or cpu")
    hardware: str | None = Field(description='the record whose peak and links it is compared with')
    parts: list[Part]
    products: list[ProductLine]
    collectives: list[CollectiveLine]
    instructions: list[InstructionLine]
    devices: list[DeviceLine]
    median_device: int = Field(description='index into `devices`')
    slowest_device: int
    processes: list[ProcessLine]
    slowest_process: int
    predictions: list[Prediction] = Field(
        description='empty if there is no record of the GPU, or none of its speed in train.dtype'
    )
    not_predicted: str | None = Field(
        default=None, description='why there is no prediction, although there is a record'
    )

    @property
    def median(self) -> DeviceLine:
        """Return the device with the median of `own`."""
        return self.devices[self.median_device]

    @property
    def slowest(self) -> DeviceLine:
        """Return the device with the largest `own`."""
        return self.devices[self.slowest_device]
