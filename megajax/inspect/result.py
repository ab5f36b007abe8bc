"""What an inspection found: the one model behind the terminal, the notebook and the JSON."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from megajax.counts.products import Phase

Verdict = Literal['equal', 'less', 'MORE']


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra='forbid')


class Transfer(_Result):
    """One kind of array that crosses the wire, at one site in one phase."""

    kind: str = Field(
        description='all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute, ...'
    )
    array: str = Field(
        description='what is gathered, reduced or scattered: dtype and shape on a device'
    )
    times: int = Field(description='per step, trip counts of loops multiplied in')
    wire_bytes: float = Field(description='per step and device, by the ring algorithm')
    at_most: bool = Field(
        default=False, description='whether some of it is in a branch that may not be taken'
    )


class CollectiveInstruction(_Result):
    """One collective instruction of the compiled text, also one that no device or no step runs."""

    instruction: str
    computation: str
    kind: str = Field(
        description='as in a transfer; several where an XLA for CPUs joined what it means differently'
    )
    axis: str = Field(description='mesh axes joined by +; empty where no device sends to another')
    groups: str = Field(
        description='groups of devices, or pairs of source and target, as the text spells them'
    )
    arrays: list[str] = Field(description='dtypes and shapes on a device')
    times: int = Field(description='per step, trip counts of loops multiplied in')
    at_most: bool = Field(description='whether it is in a branch that may not be taken')
    wire_bytes: float = Field(description='per step and device, by the ring algorithm')
    op_name: str
    source: str = Field(description='Python frames, innermost first')
    site: str


class Row(_Result):
    """One site in one phase along one mesh axis: what XLA placed and what Megatron places."""

    site: str
    phase: Phase
    axis: str
    placed: list[Transfer]
    megatron: list[Transfer]
    wire_bytes: float = Field(description='of what XLA placed, per step and device')
    megatron_wire_bytes: float
    verdict: Verdict


class Overlap(_Result):
    """How one collective is scheduled on a GPU."""

    site: str
    phase: Phase
    axis: str
    transfer: Transfer
    synchronous: bool
    overlapped_gflops: float = Field(
        description='of matrix products between its start and its end, on one device, each time'
    )
    seconds: float = Field(description='on the wire, per step, at the rates of the inspection')
    hidden_seconds: float = Field(
        description='of these, beside matrix products, each of which hides one transfer of a link',
    )
    crosses_hosts: bool
    source: str = Field(description='Python frames, innermost first')


class Rates(_Result):
    """The rates of one GPU that seconds are computed at, per second; latencies are not counted."""

    hardware: str
    dtype: str
    products: float = Field(
        description='FLOPs of products in `dtype`; in another, the same share of its peak',
    )
    attention: float = Field(
        description='FLOPs of attention kernels; of causal ones, those that the mask leaves',
    )
    inside_host: float = Field(description='bytes that a GPU sends')
    between_hosts: float = Field(
        description='bytes that a GPU sends, times the GPUs of its group on a host',
    )


class Products(_Result):
    """The FLOPs of all matrix products of a step on one device."""

    compiled: float = Field(description='of the compiled program, trip counts multiplied in')
    expected: float = Field(description='of the config, with what it recomputes')
    rematerialized: float = Field(
        default=0, description='of the compiled ones, what XLA repeats to save memory'
    )

    @property
    def ratio(self) -> float:
        """The compiled program's over the config's."""
        return self.compiled / self.expected


class Memory(_Result):
    """Bytes on one device, as the compiler has planned them."""

    arguments: int
    temporaries: int
    outputs: int = Field(description='beside those that reuse the memory of arguments')
    device: int | None = Field(description='what the device has; None for a CPU')
    largest_replicated: list[tuple[str, int]] = Field(
        description='parameters that every device of a model axis holds whole'
    )


class Finding(_Result):
    """One lint: an error makes the exit status 1, a note does not."""

    level: Literal['error', 'note']
    rule: str
    message: str


class Compared(_Result):
    """One result of an executed step beside that of one device."""

    name: str
    error: float = Field(
        description='the largest difference over the largest element of what is expected'
    )
    limit: float

    @property
    def ok(self) -> bool:
        """Within the limit; an error that is not a number is not."""
        return self.error <= self.limit


class StepRun(_Result):
    """The compiled program of a step, executed on simulated CPU devices and compared with one device."""

    config: str = Field(description='the config that was executed, YAML')
    shrunk: list[str] = Field(
        description='each key that was made smaller so that a CPU can execute the step'
    )
    exact: bool = Field(description='everything of 16 bits was computed in fp32')
    seconds: float
    results: list[Compared] = Field(
        description='loss, gradients and updated parameters, worst first'
    )
    culprit: str = Field(
        default='',
        description='the pass of the compiler after which the program is wrong, with --bisect',
    )
    smallest: str = Field(
        default='',
        description='the smallest config of the family whose step is wrong, YAML, with --reduce',
    )

    @property
    def ok(self) -> bool:
        """Every result is within its limit."""
        return all(one.ok for one in self.results)


class Inspection(_Result):
    """The collectives, schedule, memory and lint of one compiled training step."""

    schema_version: Literal[1] = 1
    config: str = Field(description='the resolved config, YAML')
    target: str
    mesh: dict[str, int]
    devices_per_host: int
    jax_version: str
    compile_seconds: float
    rows: list[Row]
    collectives: list[CollectiveInstruction]
    ratios: dict[str, float | None] = Field(
        description='bytes on the wire per axis over those of Megatron; None where Megatron sends none'
    )
    schedule: list[Overlap]
    overlapped_share: dict[str, float] = Field(
        description='per axis, the share of bytes whose transfer overlaps with matrix products'
    )
    rates: Rates | None = Field(description='that the seconds are computed at; None for a CPU')
    wire_seconds: dict[str, float] = Field(
        description='per axis, of the transfers of `schedule`, per step',
    )
    hidden_seconds: dict[str, float] = Field(
        description='per axis, those of `wire_seconds` that lie beside matrix products',
    )
    products: Products
    memory: Memory
    findings: list[Finding]
    runs: list[StepRun] = Field(default=[], description='the program, executed, with --run')

    @property
    def ok(self) -> bool:
        """Nothing is MORE than Megatron, no lint is an error and what was executed is right."""
        no_more = all(row.verdict != 'MORE' for row in self.rows)
        return (
            no_more
            and all(finding.level != 'error' for finding in self.findings)
            and all(run.ok for run in self.runs)
        )

    def _repr_html_(self) -> str:
        from megajax.inspect.report import to_html

        return to_html(self)

    def __str__(self) -> str:
        from megajax.inspect.report import to_text

        return to_text(self)
