"""The results of an inspection, as pydantic models for the terminal, the notebook and JSON."""

from typing import Any, Literal

from pydantic import Field, model_validator

from megajax.analysis.inspect.memory_result import Memory
from megajax.base.result import Result
from megajax.core.counts.product import Phase
from megajax.xla.hlo.kernels import Kind

Verdict = Literal['equal', 'less', 'expected', 'MORE']


_SINCE_VERSION_1 = {
    ('verdict', 'stated'): 'expected',
    ('kind', 'product'): 'matmul',
    ('use', 'weights'): 'weight copies',
    ('use', 'not in use'): 'unused',
}


def _renamed(value: Any, key: str = '') -> Any:
    """Return a value from a file of schema version 1 under today's names; `key` is its key."""
    if isinstance(value, dict):
        return {name.replace('stated', 'expected'): _renamed(x, name) for name, x in value.items()}
    if isinstance(value, list):
        return [_renamed(x, key) for x in value]
    return _SINCE_VERSION_1.get((key, value), value)


class Transfer(Result):
    """One kind of array that crosses the wire, at one site in one phase."""

    kind: str = Field(
        description='all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute, ...'
    )
    array: str = Field(
        description='dtype and per-device shape of the gathered, reduced or scattered array'
    )
    times: int = Field(description='number per step, multiplied by the trip counts of loops')
    wire_bytes: float = Field(description='bytes sent per step and device, by the ring algorithm')
    at_most: bool = Field(
        default=False, description='whether part of it is in a branch that might not run'
    )


class CollectiveInstruction(Result):
    """One collective instruction of the compiled text, even if no step executes it."""

    instruction: str
    computation: str
    kind: str = Field(
        description=(
            'kind as in a transfer; several kinds if XLA for CPUs joined arrays that are '
            'interpreted differently'
        )
    )
    axis: str = Field(
        description='mesh axes joined by +; empty if no device sends to a different one'
    )
    groups: str = Field(
        description='groups of devices, or pairs of source and target, as spelled in the text'
    )
    arrays: list[str] = Field(description='dtypes and per-device shapes')
    times: int = Field(description='number per step, multiplied by the trip counts of loops')
    at_most: bool = Field(description='whether it is in a branch that might not run')
    wire_bytes: float = Field(description='bytes sent per step and device, by the ring algorithm')
    op_name: str
    source: str = Field(description='Python frames, innermost first')
    site: str


class Row(Result):
    """One site in one phase along one mesh axis: the collectives of XLA and of Megatron."""

    site: str
    phase: Phase
    axis: str
    placed: list[Transfer]
    megatron: list[Transfer]
    sources: list[str] = Field(
        default=[], description='files and functions of Megatron-Core, or a paper, that issue these'
    )
    expected: list[Transfer] = Field(
        default=[],
        description=(
            "documented transfers that are more than Megatron's: pipeline stages in lock step, and "
            'fp32 sums of context parallelism'
        ),
    )
    expected_sources: list[str] = Field(default=[], description='the reasons for these')
    wire_bytes: float = Field(description="bytes of XLA's transfers, per step and device")
    megatron_wire_bytes: float
    expected_wire_bytes: float = 0
    verdict: Verdict


class Pipeline(Result):
    """The lock-step schedule of a pipeline's stages."""

    ticks: int = Field(description='ticks in which the stages run a forward pass')
    idle_ticks: int = Field(description='ticks in which a stage has no microbatch')
    bubble: float = Field(description='ratio of idle ticks to the others')


class Overlap(Result):
    """The schedule of one collective on a GPU."""

    site: str
    phase: Phase
    axis: str
    transfer: Transfer
    synchronous: bool
    overlapped_gflops: float = Field(
        description=('GFLOP of matmuls between its start and its end, on one device, per execution')
    )
    seconds: float = Field(description='transfer time per step, at the rates of the inspection')
    hidden_seconds: float = Field(
        description=(
            'the part of the seconds that overlaps matmuls; a matmul hides one transfer per link '
            'at a time'
        ),
    )
    crosses_hosts: bool
    source: str = Field(description='Python frames, innermost first')


class Kernel(Result):
    """One kernel of a GPU program, with the totals of all its runs in a step."""

    instruction: str
    computation: str
    kind: Kind
    site: str = Field(description='the part of the step that its path names')
    phase: Phase
    times: int = Field(description='executions per step')
    bytes: int = Field(description='bytes read and written, per step and device')
    flops: int = Field(description='FLOPs of matmuls, per step and device')
    seconds: float = Field(description='roofline time: the longer of matmul time and memory time')
    source: str = Field(description='Python frames, innermost first')


class Rates(Result):
    """The rates of one GPU from which seconds are computed; latencies are not counted."""

    hardware: str
    dtype: str
    products: float = Field(
        description=(
            'FLOP/s of matmuls in `dtype`; in a different dtype, matmuls reach the same share of '
            'its peak'
        ),
    )
    attention: float = Field(
        description=(
            'FLOP/s of attention kernels; for causal kernels only FLOPs that the mask does not hide'
        ),
    )
    memory: float = Field(description='bytes per second that kernels read and write')
    inside_host: float | None = Field(
        description='bytes per second that a GPU sends; None: unknown, and not used'
    )
    between_hosts: float | None = Field(
        description=(
            'bytes per second that a GPU sends; multiplied by the GPUs of its group on a host; '
            'None: unknown, and not used'
        ),
    )


class Products(Result):
    """The FLOPs of all matmuls of a step on one device."""

    compiled: float = Field(
        description='FLOPs of the compiled program, multiplied by the trip counts of loops'
    )
    expected: float = Field(description='FLOPs that the config requires, recomputation included')
    rematerialized: float = Field(
        default=0, description='part of the compiled FLOPs, which XLA repeats to save memory'
    )

    @property
    def ratio(self) -> float:
        """The FLOPs of the compiled program over those that the config requires."""
        return self.compiled / self.expected


class Finding(Result):
    """One lint finding: an error makes the exit status 1, a note does not."""

    level: Literal['error', 'note']
    rule: str
    message: str


class Compared(Result):
    """One result of an executed step, compared with one device."""

    name: str
    error: float = Field(
        description=(
            'the largest difference over the largest element of the expected result or, if that is '
            'nearer to its limit, the norm of the difference from fp32 over the norm of the result'
        )
    )
    limit: float
    note: str = Field(default='', description='which of its numbers were not compared, and why')

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.limit


class StepRun(Result):
    """An execution of a compiled step on simulated CPU devices, compared with one device."""

    config: str = Field(description='the config that was executed, as YAML')
    shrunk: list[str] = Field(
        description='each key that was reduced so that a CPU can execute the step'
    )
    exact: bool = Field(description='whether fp32 was used instead of 16-bit types')
    seconds: float
    results: list[Compared] = Field(
        description='loss, gradients and updated parameters, the closest to its limit first'
    )
    culprit: str = Field(
        default='',
        description='with --bisect, the compiler pass after which the program is wrong',
    )
    smallest: str = Field(
        default='',
        description=(
            'with --minimize, the smallest config of the family whose step is wrong, as YAML'
        ),
    )

    @property
    def ok(self) -> bool:
        """Whether every result is within its limit."""
        return all(result.ok for result in self.results)

    @property
    def mode(self) -> str:
        """The types that were executed, in words."""
        return 'with fp32 instead of 16-bit types' if self.exact else 'as compiled'


class Inspection(Result):
    """The collectives, schedule, memory and lint of one compiled training step."""

    schema_version: Literal[2] = 2
    config: str = Field(description='the resolved config, as YAML')
    target: str
    mesh: dict[str, int]
    devices_per_host: int
    jax_version: str
    overlap: str = Field(description='`train.overlap`, with auto resolved')
    unrolled: bool = Field(description='whether the layers are compiled separately')
    scan: bool = Field(
        default=False,
        description='whether the layers are in a loop although a run compiles them separately',
    )
    compile_seconds: float
    rows: list[Row]
    collectives: list[CollectiveInstruction]
    pipeline: Pipeline | None = Field(default=None, description='None without stages')
    ratios: dict[str, float | None] = Field(
        description=('per axis, bytes sent relative to Megatron; None if Megatron sends none')
    )
    schedule: list[Overlap]
    overlapped_share: dict[str, float] = Field(
        description='per axis, the share of bytes whose transfer overlaps matmuls'
    )
    rates: Rates | None = Field(
        description='rates from which the seconds are computed; None for a CPU'
    )
    compute_seconds: float | None = Field(
        description='seconds of all kernels of a step, one after the other; None for a CPU'
    )
    exposed_seconds: float | None = Field(
        description=(
            'exposed communication: seconds of a step in which a kernel waits for a transfer, '
            'estimated from the schedule; None for a CPU'
        )
    )
    wire_seconds: dict[str, float] = Field(
        description='per axis, seconds of the transfers in `schedule`, per step',
    )
    hidden_seconds: dict[str, float] = Field(
        description='per axis, the part of `wire_seconds` that overlaps matmuls',
    )
    estimated_cycles: int | None = Field(
        default=None,
        description=(
            "XLA's estimate of the cycles of a step on a TPU, without its collectives; None for "
            'other devices'
        ),
    )
    products: Products
    kernels: list[Kernel] = Field(description='every kernel, longest first; empty for a CPU')
    memory: Memory
    findings: list[Finding]
    runs: list[StepRun] = Field(default=[], description='with --run, the executions of the program')

    @model_validator(mode='before')
    @classmethod
    def _from_version_1(cls, values: Any) -> Any:
        """Read a file of schema version 1."""
        if not isinstance(values, dict) or values.get('schema_version') != 1:
            return values
        return _renamed(values) | {'schema_version': 2}

    @property
    def reference(self) -> str:
        """The source of the expected collectives: Megatron has no 2-D tensor parallelism."""
        return 'Megatron and Pope et al.' if self.mesh.get('row', 1) > 1 else 'Megatron'

    def sent_over(self, axis: str) -> float:
        """Return the bytes that a device sends over a mesh axis, alone or with other axes."""
        return sum(row.wire_bytes for row in self.rows if axis in row.axis.split('+'))

    @property
    def ok(self) -> bool:
        """Whether no row sends more than Megatron, no finding is an error, and runs are correct."""
        no_more = all(row.verdict != 'MORE' for row in self.rows)
        return (
            no_more
            and all(finding.level != 'error' for finding in self.findings)
            and all(run.ok for run in self.runs)
        )

    def __repr__(self) -> str:
        mesh = ' x '.join(f'{axis}={size}' for axis, size in self.mesh.items()) or 'one device'
        verdict = 'ok' if self.ok else 'not ok'
        return f'<Inspection: {verdict}, {mesh}, target {self.target}>'

    def _repr_html_(self) -> str:
        from megajax.analysis.inspect.report import to_html

        return to_html(self)

    def __str__(self) -> str:
        from megajax.analysis.inspect.report import to_text

        return to_text(self)
