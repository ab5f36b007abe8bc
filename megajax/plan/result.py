"""What a plan says: the one model behind the terminal, the notebook and the JSON. Bytes are on one GPU; seconds are of one step."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from ruamel.yaml import YAML

from megajax.config import Config


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra='forbid')


class MemoryLine(_Result):
    """Bytes on one GPU of one kind."""

    name: str
    bytes: int


class TransferLine(_Result):
    """The collectives of one site, phase, axis and kind."""

    site: str
    phase: str
    axis: str
    kind: str
    times: int
    wire_bytes: float = Field(description='that a GPU sends')
    crosses_hosts: bool
    seconds: float = Field(description='on the wire, with latencies')
    hidden: float = Field(description='of these, beside products, each of which hides one transfer')
    exposed: float = Field(description='seconds that no matrix product hides')


class CostLine(_Result):
    """Of the tokens that are to be trained on, or of a thousand million."""

    tokens: float
    gpu_hours: float
    kilowatt_hours: float = Field(
        description='of the GPUs at the limit of their boards, without hosts and cooling'
    )
    price: float | None = Field(description='of a GPU hour, as it was given')
    cost: float | None = Field(description='in the unit of the price')
    tokens_per_unit: float | None = Field(description='tokens for one unit of the price')


class FaultsLine(_Result):
    """What checkpoints and failures take; all times in seconds."""

    checkpoint_bytes: int
    hold_up: float = Field(description='of the steps, by a save')
    write: float = Field(description='until a checkpoint is on disk, beside the steps')
    between_failures: float = Field(description='of any GPU')
    interval: float = Field(description='between two checkpoints, by checkpoint.every')
    goodput: float = Field(description='the share of the time in which steps are taken that stay')
    best_every: int = Field(description='the checkpoint.every of the highest goodput')
    best_goodput: float


class Layout(_Result):
    """One way to lay the model over the GPUs, whether it fits, and why it lost."""

    name: str
    data: int
    model: int
    sequence_parallel: bool
    recompute: str
    microbatches: int
    microbatch_rows: int
    shard_optimizer: bool
    overlap: bool = Field(description='the halves of a microbatch take turns')
    bytes: int
    fits: bool
    seconds: float | None
    mfu: float | None
    reason: str = Field(description='empty for the fastest')


class Plan(_Result):
    """A config on GPUs that need not be there: its memory, its time, and how it compares with every other layout."""

    schema_version: Literal[1] = 1
    config: str = Field(description='the resolved config that the figures are of, YAML')
    program: str = Field(
        description='whose step it is: megajax, or megatron for Megatron-Core; the memory is always that of megajax'
    )
    hardware: str
    efficiencies: str = Field(
        description='what training reaches of the peaks, and what the fastest kernels alone do'
    )
    band: float | None = Field(
        description='what nine of ten published rates of the GPU are within; None where none was fitted'
    )
    gpus: int
    gpus_per_host: int
    layout: Layout
    is_from_search: bool = Field(
        description='the fastest layout, because the mesh of the config has another number of GPUs'
    )
    memory: list[MemoryLine]
    memory_moment: str = Field(description='the part of the step that needs the most')
    memory_available: int = Field(description='bytes that a program can count on')
    largest_microbatch: int = Field(description='rows that fit on each data shard; 0 if none')
    compiled_bytes: int | None = Field(
        default=None, description='what the compiler has planned, with --verify'
    )
    best_compiled_bytes: int | None = Field(
        default=None, description='the same for the fastest layout'
    )
    products: float
    memory_bound: float
    launches: float = Field(
        description='seconds of kernels that are too short to matter by their work'
    )
    transfers: list[TransferLine]
    seconds: float
    tokens_per_second: float
    tflops_per_gpu: float = Field(description='model FLOPs: what is computed again does not count')
    paper_tflops_per_gpu: float | None = Field(
        description='by the formula of Narayanan et al. (2021); None where it does not hold'
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
    layouts: list[Layout] = Field(
        description='all of them: those that fit, fastest first, then those that do not, smallest first'
    )
    best_config: str = Field(description='the config of the fastest layout, YAML')
    impossible: dict[str, str] = Field(description='meshes that cannot be, with the reason')

    @property
    def best(self) -> Layout:
        """The fastest layout that fits."""
        return self.layouts[0]

    def planned(self) -> Config:
        """The config that the figures are of."""
        return _parsed(self.config)

    def fastest(self) -> Config:
        """The config of the fastest layout."""
        return _parsed(self.best_config)

    def __repr__(self) -> str:
        return f'<Plan: {self.layout.name} on {self.gpus} x {self.hardware}>'

    def _repr_html_(self) -> str:
        from megajax.plan.report import to_html

        return to_html(self)

    def __str__(self) -> str:
        from megajax.plan.report import to_text

        return to_text(self)


def _parsed(text: str) -> Config:
    return Config.model_validate(YAML(typ='safe', pure=True).load(text))
