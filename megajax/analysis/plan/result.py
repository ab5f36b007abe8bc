"""The result of a plan: the one model behind the terminal, the notebook and the JSON.

Bytes are per GPU, seconds per step.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from ruamel.yaml import YAML

from megajax.core.config import Config


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra='forbid')


class MemoryLine(_Result):
    """The bytes of one kind on one GPU."""

    name: str
    bytes: int


class TransferLine(_Result):
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
        description='seconds of these beside matrix products, each of which hides one transfer'
    )
    exposed: float = Field(description='seconds that no matrix product hides')


class CostLine(_Result):
    """The cost of training on the given number of tokens, or on 1e9."""

    tokens: float
    gpu_hours: float
    kilowatt_hours: float = Field(
        description='energy of the GPUs at the power limit of their boards, without hosts and '
        'cooling'
    )
    price: float | None = Field(description='price of a GPU hour, as given')
    cost: float | None = Field(description='cost in the unit of the price')
    tokens_per_unit: float | None = Field(description='tokens for one unit of the price')


class FaultsLine(_Result):
    """The cost of checkpoints and failures; all times are in seconds."""

    checkpoint_bytes: int
    hold_up: float = Field(description='seconds for which a save blocks the steps')
    write: float = Field(
        description='seconds until a checkpoint is on disk, during which steps continue'
    )
    between_failures: float = Field(description='seconds between two failures of any GPU')
    interval: float = Field(description='seconds between two checkpoints, by checkpoint.every')
    goodput: float = Field(description='share of the time spent on steps that are not lost')
    best_every: int = Field(description='the checkpoint.every with the highest goodput')
    best_goodput: float


class Candidate(_Result):
    """One layout of the model on the GPUs, whether it fits, and why it lost."""

    name: str
    data: int
    replicas: int = Field(description='groups of data shards, each with a complete state (HSDP)')
    stages: int = 1
    virtual_stages: int = Field(default=1, description='chunks of layers of a stage')
    context: int = Field(default=1, description='shards of a sequence')
    context_exchange: str = Field(default='gather', description='of keys and values')
    bubble: float = Field(
        default=0.0, description='idle ticks of a pipeline over the others; the head has none'
    )
    model_rows: int
    model: int
    sequence_parallel: bool
    recompute: str
    microbatches: int
    microbatch_rows: int
    shard: str = Field(
        description='what ZeRO shards over the data shards of a group: none, optimizer, gradients '
        'or weights'
    )
    overlap: str = Field(description='`train.overlap`, or what auto stands for on GPUs')
    unroll: bool = Field(description='whether each layer is compiled on its own')
    bytes: int
    fits: bool
    seconds: float | None = Field(
        description='None if it does not fit, or cannot be the fastest of its mesh'
    )
    mfu: float | None
    reason: str = Field(description='empty for the fastest')


class Plan(_Result):
    """Memory and time of a config on GPUs that need not be present, and of all other layouts."""

    schema_version: Literal[2] = 2
    config: str = Field(description='the resolved config that the plan is for, YAML')
    program: str = Field(
        description='the software whose step is timed: megajax, or megatron for Megatron-Core; '
        'the memory is always that of megajax'
    )
    hardware: str
    efficiencies: str = Field(
        description='shares of the peaks that training reaches, and the fastest kernels alone'
    )
    band: float | None = Field(
        description='relative error within which nine of ten published rates of the GPU are; '
        'None if none was fitted'
    )
    gpus: int
    gpus_per_host: int
    layout: Candidate
    is_from_search: bool = Field(
        description='whether the plan is for the fastest layout, because the mesh of the config '
        'has another number of GPUs'
    )
    memory: list[MemoryLine]
    memory_moment: str = Field(description='the part of the step that needs the most memory')
    memory_available: int = Field(description='bytes that a program can use')
    largest_microbatch: int = Field(description='rows that fit on each data shard; 0 if none')
    compiled_bytes: int | None = Field(
        default=None, description='bytes that the compiler planned, with --verify'
    )
    best_compiled_bytes: int | None = Field(
        default=None, description='the same for the fastest layout'
    )
    products: float
    idle: float = Field(
        default=0.0, description='seconds of products in the idle ticks of a pipeline'
    )
    memory_bound: float
    launches: float = Field(
        description='seconds that launching short kernels takes beyond their work'
    )
    transfers: list[TransferLine]
    seconds: float
    tokens_per_second: float
    tflops_per_gpu: float = Field(description='of model FLOPs: recomputation does not count')
    paper_tflops_per_gpu: float | None = Field(
        description='by the formula of Narayanan et al. (2021); None if it does not apply'
    )
    mfu: float
    hfu: float
    tokens: float | None
    days: float | None
    cost: CostLine
    faults: FaultsLine
    communication_share: dict[str, float] = Field(
        description='per axis, the share of the step in which a GPU waits for collectives'
    )
    verdict: str = Field(description='whether tensor parallelism is worth it here')
    sharding: str = Field(description='what the fastest layout shards over data shards, and why')
    grids: str | None = Field(
        description='whether a 2-D tensor-parallel grid is worth it; None if none can be'
    )
    pipelines: str | None = Field(
        default=None, description='whether a pipeline is worth it; None if none can be'
    )
    contexts: str | None = Field(
        default=None, description='whether context shards are worth it; None if none can be'
    )
    layouts: list[Candidate] = Field(
        description='all layouts: those that fit, fastest first, then those that fit and cannot be '
        'the fastest of their mesh, then those that do not fit, smallest first'
    )
    best_config: str = Field(description='the config of the fastest layout, YAML')
    impossible: dict[str, str] = Field(
        description='meshes that cannot run the config, with the reason'
    )

    @property
    def best(self) -> Candidate:
        """The fastest layout that fits."""
        return self.layouts[0]

    def planned(self) -> Config:
        """Return the config that the plan is for."""
        return _parsed(self.config)

    def fastest(self) -> Config:
        """Return the config of the fastest layout."""
        return _parsed(self.best_config)

    def __repr__(self) -> str:
        return f'<Plan: {self.layout.name} on {self.gpus} x {self.hardware}>'

    def _repr_html_(self) -> str:
        from megajax.analysis.plan.report import to_html

        return to_html(self)

    def __str__(self) -> str:
        from megajax.analysis.plan.report import to_text

        return to_text(self)


def _parsed(text: str) -> Config:
    return Config.model_validate(YAML(typ='safe', pure=True).load(text))
