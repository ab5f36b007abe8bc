"""Define the result of a plan, which the terminal, the notebook and the JSON all show.

Bytes are per GPU, and seconds are per step.
"""

from typing import Any, Literal

from pydantic import Field, model_validator
from ruamel.yaml import YAML

from megajax.base.result import Result
from megajax.core.config import Config
from megajax.core.config.schema import Checked

# New names of fields and lines of schema version 2.
_NEW = {
    'products': 'matmul',
    'microbatch_rows': 'microbatch_sequences',
    'weights': 'gathered_weights',
    'buffers': 'workspace',
    'fragments': 'fragmentation',
}


class MemoryLine(Result):
    """The bytes of one kind of memory on one GPU."""

    name: str
    bytes: int


class TransferLine(Result):
    """The collectives of one site, phase, axis and kind."""

    site: str
    phase: str
    axis: str
    kind: str
    times: int
    wire_bytes: float = Field(description='bytes that a GPU sends')
    crosses_hosts: bool
    seconds: float = Field(description='seconds on the wire, with latencies')
    hidden: float = Field(
        description='seconds that overlap matmuls; a matmul hides one transfer at a time'
    )
    exposed: float = Field(description='seconds that no matmul hides')


class CostLine(Result):
    """The cost of training on the given number of tokens, or on 1e9."""

    tokens: float
    gpu_hours: float
    kilowatt_hours: float | None = Field(
        description='energy of the GPUs at their power limit, without hosts and cooling; None if '
        'the limit is not known'
    )
    price: float | None = Field(description='price of a GPU-hour, as given')
    cost: float | None = Field(description='cost in the currency of the price')
    tokens_per_unit: float | None = Field(description='tokens per unit of currency')


class FaultsLine(Result):
    """The cost of checkpoints and failures; all times are in seconds."""

    checkpoint_bytes: int
    hold_up: float = Field(description='seconds for which a checkpoint blocks training')
    write: float = Field(
        description='seconds until a checkpoint is on disk; training continues meanwhile'
    )
    between_failures: float = Field(description='seconds between failures of any GPU')
    interval: float = Field(
        description='seconds between checkpoints, from checkpoint.every and checkpoint.minutes'
    )
    goodput: float = Field(
        description='share of the time spent on steps that are not lost to failures'
    )
    best_every: int = Field(description='the checkpoint.every with the highest goodput')
    best_minutes: int | None = Field(
        default=None,
        description='the least checkpoint.minutes for best_every; null if the config allows it',
    )
    best_goodput: float


class WhatIf(Result):
    """A layout with a change that saves memory."""

    name: str
    is_supported: bool = Field(description='whether megajax can train with the change')
    bytes: int
    seconds: float
    largest_microbatch: int = Field(description='sequences per data shard that fit; 0 if none')
    fewest_gpus: int | None = Field(
        description='the fewest GPUs that a layout fits on: a power of two, that many full hosts, '
        'or `gpus`'
    )
    host_bytes: int = Field(default=0, description='bytes of activations in the memory of a host')


class Candidate(Result):
    """A layout of the model on the GPUs: its memory, its time, and why it is not the fastest."""

    name: str
    data: int
    replicas: int = Field(
        description='groups of data shards, each with a complete copy of the state (HSDP)'
    )
    stages: int = 1
    virtual_stages: int = Field(default=1, description='chunks of layers per stage')
    experts: int = Field(default=1, description='expert-parallel degree')
    context: int = Field(default=1, description='context-parallel shards of a sequence')
    context_exchange: str = Field(
        default='gather',
        description='how keys and values are exchanged: gather, ring or all_to_all',
    )
    bubble: float = Field(
        default=0.0, description='ratio of idle to busy pipeline ticks, without the head'
    )
    model_rows: int
    model: int
    sequence_parallel: bool
    recompute: str
    microbatches: int
    microbatch_sequences: int
    shard: str = Field(
        description='ZeRO stage as in `optim.shard`: none, optimizer, gradients or weights'
    )
    overlap: str = Field(description='`train.overlap`, with auto resolved for GPUs')
    unroll: bool = Field(description='whether each layer is compiled separately')
    bytes: int
    fits: bool
    seconds: float | None = Field(
        description='None if it does not fit, or was not timed because it cannot be the fastest'
    )
    mfu: float | None
    reason: str = Field(description='empty for the fastest')


class Plan(Result):
    """Memory and time of a config and of every other layout, on GPUs that you need not have."""

    schema_version: Literal[3] = 3
    config: str = Field(description='the planned config with all defaults resolved, YAML')
    program: str = Field(
        description='the software whose step is timed: megajax, megatron (Megatron-Core), '
        'torchtitan or maxtext; '
        "the memory is always megajax's"
    )
    hardware: str
    efficiencies: str = Field(
        description='shares of peak reached in training, and by the fastest standalone kernels'
    )
    band: float | None = Field(
        description='relative error that 90% of predicted times should not exceed; None without '
        'calibration'
    )
    band_reasons: list[str] = Field(
        default_factory=list, description='what the band is based on, and what widens it'
    )
    gpus: int
    gpus_per_host: int
    layout: Candidate
    is_from_search: bool = Field(
        description='whether the planned layout is the fastest, because the mesh of the config has '
        'a different number of GPUs'
    )
    train_error: str | None = Field(
        default=None,
        description='the error of `train` with the planned layout on these hosts; None if it '
        'trains, and for another program',
    )
    memory: list[MemoryLine]
    memory_moment: str = Field(description='the part of the step that needs the most memory')
    memory_available: int = Field(description='usable bytes per GPU')
    largest_microbatch: int = Field(description='sequences per data shard that fit; 0 if none')
    compiled_bytes: int | None = Field(
        default=None, description='bytes that XLA planned, with --verify'
    )
    best_compiled_bytes: int | None = Field(
        default=None, description='bytes that XLA planned for the fastest layout, with --verify'
    )
    matmul: float = Field(description='seconds of matmuls, with the idle ticks of a pipeline')
    idle: float = Field(default=0.0, description='seconds of idle ticks of a pipeline')
    memory_bound: float
    launches: float = Field(description='launch overhead: seconds beyond the work of short kernels')
    transfers: list[TransferLine]
    seconds: float
    tokens_per_second: float
    tflops_per_gpu: float = Field(description='model FLOPs, without recomputation')
    paper_tflops_per_gpu: float | None = Field(
        description="by Narayanan et al.'s formula (2021); None if it does not apply"
    )
    mfu: float
    hfu: float
    tokens: float | None
    days: float | None
    cost: CostLine
    faults: FaultsLine
    communication_share: dict[str, float] = Field(
        description='exposed communication per axis, as a share of the step'
    )
    verdict: str = Field(description='whether tensor parallelism is worth it here')
    sharding: str = Field(
        description='ZeRO stage of the fastest layout, and what other stages would cost'
    )
    grids: str | None = Field(
        description='whether 2-D tensor parallelism is worth it; None if not possible'
    )
    pipelines: str | None = Field(
        default=None, description='whether pipeline parallelism is worth it; None if not possible'
    )
    contexts: str | None = Field(
        default=None, description='whether context parallelism is worth it; None if not possible'
    )
    experts: str | None = Field(
        default=None, description='whether expert parallelism is worth it; None if not possible'
    )
    imbalance: float | None = Field(
        default=None,
        description='ratio of the expert tokens on the busiest device to the mean, as given; 1 is '
        'balanced; None without experts',
    )
    windows: str | None = Field(
        default=None, description='how much sliding windows save; None without windows'
    )
    what_if: list[WhatIf] = Field(
        default_factory=list, description='the layout with changes that save memory, with --what-if'
    )
    layouts: list[Candidate] = Field(
        description='all layouts: those timed, fastest first; then those that fit but were not '
        'timed; then those that do not fit, smallest first'
    )
    best_config: str = Field(description='the config of the fastest layout, YAML')
    impossible: dict[str, str] = Field(
        description='meshes on which the config cannot run, with the reason'
    )

    @model_validator(mode='before')
    @classmethod
    def _upgraded(cls, data: Any) -> Any:
        """Accept a plan that was written with schema version 2."""
        if not isinstance(data, dict) or data.get('schema_version') != 2:
            return data
        memory = [{**line, 'name': _NEW.get(line['name'], line['name'])} for line in data['memory']]
        renamed = {'schema_version': 3, 'memory': memory, 'layout': _renamed(data['layout'])}
        return _renamed(data) | renamed | {'layouts': [*map(_renamed, data['layouts'])]}

    @property
    def best(self) -> Candidate:
        """The fastest layout that fits."""
        return self.layouts[0]

    def planned(self) -> Config:
        """Return the config that the plan is for."""
        return self._parsed(self.config)

    def fastest(self) -> Config:
        """Return the config of the fastest layout."""
        return self._parsed(self.best_config)

    def _parsed(self, text: str) -> Config:
        return Config.model_validate(
            YAML(typ='safe', pure=True).load(text),
            context=Checked(own=self.program == 'megajax'),
        )

    def __repr__(self) -> str:
        return f'<Plan: {self.layout.name} on {self.gpus} x {self.hardware}>'

    def _repr_html_(self) -> str:
        from megajax.analysis.plan.report import to_html

        return to_html(self)

    def __str__(self) -> str:
        from megajax.analysis.plan.report import to_text

        return to_text(self)


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    return {_NEW.get(name, name): value for name, value in fields.items()}
