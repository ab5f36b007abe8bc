"""The schema of a config file: every key, with its type, default and limits.

Sizes count elements, `seq_len` counts tokens, `batch_size` counts the sequences of a global batch.
"""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megajax.core.config.lora import LoraConfig
from megajax.core.config.mesh import MeshConfig
from megajax.core.config.model import ModelConfig
from megajax.core.config.optim import OptimConfig
from megajax.core.config.overlap_rules import Overlap
from megajax.core.config.rules import incompatibilities
from megajax.core.config.section import (
    LONGEST_WAIT,
    Count,
    CountFromZero,
    Folder,
    Fraction,
    Minutes,
    Name,
    Prompt,
    Section,
    Sequences,
    Steps,
    Tokens,
    Unit,
    one_of,
)
from megajax.core.config.vision import RelevanceConfig, VisionConfig


def _check_loss_scale(value: Any) -> Any:
    if value == 'auto' or (
        isinstance(value, (int, float)) and value is not True and 0 < value < math.inf
    ):
        return value
    raise PydanticCustomError('loss_scale', "Input should be 'auto' or a power of two")


FirstLossScale = Annotated[Literal['auto'] | float, BeforeValidator(_check_loss_scale)]


class Weights(dict[str, float]):
    """A dict that is never modified, so that it can be hashed with its config."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


LARGEST_RATIO = 10**12  # of two weights of a blend; no run reads as many sequences


def _check_weights(weights: dict[str, float]) -> Weights:
    if weights and max(weights.values()) > LARGEST_RATIO * min(weights.values()):
        fault = f'weights of which the largest is at most {LARGEST_RATIO:,} times the smallest'
        raise PydanticCustomError('weights', '{fault}', {'fault': fault})
    return Weights(weights)


class ProfileConfig(Section):
    """The steps to trace."""

    start: Annotated[CountFromZero, Unit('steps')]
    """Last step before the trace."""
    steps: Steps
    """Number of steps to trace."""


class TrainConfig(Section):
    """The training loop."""

    steps: Steps = 1000
    """Number of training steps."""
    batch_size: Sequences = 8
    """Global batch size: sequences per step over all devices and microbatches."""
    microbatches: Count = 1
    """Forward and backward passes per step, over which gradients accumulate."""
    schedule: Literal['1f1b', 'gpipe'] = '1f1b'
    """Pipeline schedule, if mesh.stages is above 1. 1f1b runs each backward pass as early as
    possible; gpipe runs all forward passes first, and keeps every microbatch in memory.
    """
    seq_len: Tokens = 1024
    """Sequence length."""
    dtype: Literal['float32', 'bfloat16', 'float16', 'fp8'] = 'bfloat16'
    """Compute dtype; stored weights stay in float32. fp8: linear layers multiply in FP8, everything
    else computes in bfloat16.
    """
    fp8_scaling: Literal['delayed', 'current'] = 'delayed'
    """Where the scales of fp8 come from: delayed, from the largest values of earlier steps;
    current, from the largest values of the tensors themselves, so that a matmul has to wait for
    them.
    """
    loss_scale: FirstLossScale = 'auto'
    """Initial loss scale of float16, a power of two; auto: found with the first batch."""
    recompute: Literal['none', 'selective', 'full'] = 'none'
    """Activation recomputation (checkpointing): none; selective, the attention core; full, entire
    layers.
    """
    overlap: Literal['auto', 'none', 'batch_split', 'sequence_split'] = 'auto'
    """Overlap communication with computation by splitting each microbatch into two halves that
    alternate: by sequence (batch_split) or by token (sequence_split). auto: on GPUs without
    attention dropout, the first of the two that fits; otherwise none. See
    `megajax/core/train/overlap.py`.
    """
    unroll: Annotated[Literal['auto'] | bool, one_of('auto')] = 'auto'
    """Compile each layer separately (true), or scan over the layers (false). Separate layers
    compile more slowly and overlap more. auto: true on GPUs, where supported, if `overlap` splits
    the microbatch or the layers send nothing; false otherwise, and with `deterministic` or
    attention dropout.
    """
    eval_every: Steps = 500
    """Interval between evaluations on the validation split."""
    eval_batches: Count = 16
    """Number of batches per evaluation."""
    log_every: Steps = 10
    """Interval between log lines."""
    profile: ProfileConfig | None = None
    """Steps to trace for XProf, into the run directory, for example {start: 10, steps: 3}."""
    sample_prompts: Annotated[tuple[Prompt, ...], Field(strict=False)] = ()
    """Prompts that the model continues at every evaluation except the first."""
    nonfinite: Literal['skip', 'rollback', 'stop'] = 'skip'
    """Response to a NaN or infinite loss or gradient: skip the update, roll back to the last
    checkpoint, or stop. The update is never applied.
    """
    spike: Literal['off', 'skip', 'rollback'] = 'off'
    """Response to a loss far above the most recent ones; see `megajax/core/train/guard.py`."""
    seed: Annotated[NonNegativeInt, Field(lt=2**32)] = 1234
    """Seed of the initial weights, dropout and the sample order."""
    deterministic: bool = False
    """Whether GPUs run only operations whose results are bitwise reproducible; CPUs always do."""
    replay_every: Annotated[CountFromZero, Unit('steps')] = 0
    """Every N steps, run the step again on different devices and compare bit for bit, to detect
    silent data corruption; 0: never. Needs train.deterministic.
    """

    @property
    def compute_dtype(self) -> Literal['float32', 'bfloat16', 'float16']:
        """The compute dtype, except for linear layers in fp8, which multiply in FP8."""
        return 'bfloat16' if self.dtype == 'fp8' else self.dtype

    @property
    def has_delayed_scales(self) -> bool:
        """Whether a step needs the FP8 scales of earlier steps."""
        return self.dtype == 'fp8' and self.fp8_scaling == 'delayed'

    @property
    def has_current_scales(self) -> bool:
        """Whether a step in fp8 computes the scale of each tensor from that tensor."""
        return self.dtype == 'fp8' and self.fp8_scaling == 'current'


class LossConfig(Section):
    """Loss terms in addition to the cross entropy."""

    label_smoothing: Fraction = 0.0
    """Fraction of the target probability that is spread evenly over the vocabulary."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(sum(exp(logits)))^2."""


class DataConfig(Section):
    """The corpus, its tokenizer, and its split into training, validation and test."""

    corpus: Name = 'stdlib'
    """Training data: stdlib (the sources of Python's standard library); a file of text, JSON lines
    (.jsonl, .json, .ndjson) or Parquet; a folder of these; or the prefix of .bin and .idx files. A
    file, a glob or a prefix can be a URL (s3://, gs://, hf://, https://).
    """
    blend: Annotated[dict[Name, PositiveFloat], AfterValidator(_check_weights)] = Weights()
    """Prefixes of .bin and .idx files and their sampling weights, instead of `corpus`."""
    tokenizer: Name = 'auto'
    """Tokenizer: a tokenizer.json, bytes, bpe (trained on the text), or none (for token ids). auto:
    the one next to .bin and .idx, otherwise the tokenizer of `run.start_from`, otherwise bpe. A
    resumed run keeps its trained tokenizer.
    """
    split: str = '95,5,0'
    """Relative sizes of the training, validation and test splits."""
    order: Literal['stateless', 'megatron', 'streamed'] = 'stateless'
    """Sample order: shuffled over the whole corpus (stateless), Megatron-LM's own (megatron), or
    streamed: text is read and tokenized during training, in shuffled chunks of files.
    """
    chat_template: Name | None = None
    """File of a Hugging Face chat template, for JSON lines with messages. null: the template of the
    model in `run.start_from`; if it has none, ChatML or `role: text`.
    """
    ignored_keys: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Keys of JSON lines with messages, and of messages, that may be dropped if the chat template
    does not read them, such as `id`.
    """
    document_mask: bool = False
    """Mask attention between documents packed into one sequence; positions restart in each."""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept: those that any `keep` key selects."""

    every: Steps = 1000
    """Interval between checkpoints."""
    minutes: Minutes | None = None
    """Also write a checkpoint when this much time has passed since the last one."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: Steps | None = None
    """Also keep checkpoints that are due at a multiple of this, even if a skipped step or a failed
    save delays them.
    """
    keep_best: Count | None = None
    """Also keep this many checkpoints with the lowest validation loss. Needs a checkpoint.every
    that is a multiple of train.eval_every. Checkpoints at other steps, by minutes or before a
    requested exit, have no validation loss and do not count.
    """


def _check_patience(value: Any) -> Any:
    if value is None or value == 'auto':
        return value
    if type(value) in (int, float) and 0 < value <= LONGEST_WAIT:
        return value
    raise PydanticCustomError('patience', 'a number above 0 and up to 600000000, auto or null')


class RunConfig(Section):
    """The run's directory, and how the run starts and ends.

    `dir`, `resume` and `allow_changed_data` are for one start: the `config.yaml` that the run
    writes to its directory does not keep them.
    """

    dir: Folder | None = None
    """Directory of the run; a run in it resumes. null: a new directory in runs/."""
    start_from: Folder | None = None
    """RUN or RUN/STEP: start from that checkpoint's weights, at step 0 with a new optimizer."""
    resume: Literal['auto', 'must', 'never'] = 'auto'
    """Resume from the newest checkpoint in `dir`: if there is one (auto), always (must), never."""
    allow_changed_data: bool = False
    """Resume once even if the corpus has changed since the checkpoint."""
    max_minutes: Minutes | None = None
    """Time after which to save a checkpoint and exit, for example before a queue's time limit."""
    compile_cache: Folder = 'auto'
    """Cache of compiled programs for the next start: auto, a folder, or none. auto is the run's
    folder. With several CPU devices it is none, because XLA may hang there in a program that it
    reads from a cache."""
    data_cache: Folder = 'auto'
    """Cache of downloaded corpora and tokenized text: auto (in the user's cache), or a folder."""
    data_cache_gb: Annotated[PositiveFloat, Unit('GB')] = 64.0
    """Maximum size of that cache, which all processes of a host share."""
    wandb: Name | None = None
    """Weights & Biases project to log metrics to, for example megajax."""
    watchdog_seconds: Annotated[
        float | Literal['auto'] | None, BeforeValidator(_check_patience), Unit('seconds')
    ] = 'auto'
    """Time without a finished step after which the process writes all stacks and exits with code
    124. auto: ten minutes, or more if 2x the first step or 10x the longest later step is longer."""


class Checked(NamedTuple):
    """The context of `Config.model_validate`: which conflicts to check (`incompatibilities`)."""

    own: bool = True
    chosen: tuple[str, ...] = ()


class Config(Section):
    """The config of a run; raises ValueError with every pair of keys that conflict."""

    # A section must come before the sections that contain it.
    relevance: RelevanceConfig | None = None
    """Relevance of image regions; None: an image gets as many tokens as it fills."""
    vision: VisionConfig | None = None
    """The vision encoder; None: a text-only model."""
    lora: LoraConfig | None = None
    """Low-rank adapters, the only trained parameters; None: the model's own weights are trained."""
    model: ModelConfig
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

    @property
    def microbatch_rows(self) -> int:
        """Number of sequences per microbatch and data shard."""
        return self.train.batch_size // (self.mesh.data * self.train.microbatches)

    @functools.cached_property
    def overlap(self) -> Overlap:
        """How the layers of a step run."""
        return Overlap.of(self)

    @model_serializer(mode='wrap')
    def _without_absent_sections(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        sections = dump(self)
        return {name: sections[name] for name in SECTIONS if sections.get(name) is not None}

    @field_validator('vision', 'model')
    @classmethod
    def _with_parts(cls, section: Section | None, info: ValidationInfo) -> Section | None:
        return section and section.with_parts(info.data)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with these sections, and update the sections that contain them."""
        sections = {**self._values, **(update or {})}
        for name in ('vision', 'model'):
            sections[name] = sections[name] and sections[name].with_parts(sections)
        return super().model_copy(update=sections, deep=deep)

    @model_validator(mode='after')
    def _check_conflicts(self, info: ValidationInfo) -> Self:
        checked: Checked = info.context or Checked()
        if problems := incompatibilities(self, **checked._asdict()):
            raise ValueError('\n'.join(str(problem) for problem in problems))
        return self


SECTIONS: dict[str, type[Section]] = {
    name: (*get_args(kind), kind)[0]
    # these come first in files and pages
    for name in dict.fromkeys(('model', 'vision', *Config.model_fields))
    for kind in [Config.model_fields[name].annotation]
}


def keys_of(section: str) -> list[str]:
    """Return the keys that a config file may set in a section."""
    fields = SECTIONS[section].model_fields
    return [key for key, field in fields.items() if not field.exclude]
