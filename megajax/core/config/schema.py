"""The schema of a config file: every key that it may set, with its type, default and limits.

Sizes count elements, `seq_len` counts tokens, `batch_size` counts the sequences of a global batch.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

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
from megajax.core.config.model import ModelConfig, RelevanceConfig, VisionConfig
from megajax.core.config.overlap_rules import Overlap
from megajax.core.config.rules import incompatibilities
from megajax.core.config.section import (
    LONGEST_WAIT,
    Count,
    CountFromZero,
    Fraction,
    Minutes,
    Name,
    Point,
    PointFromZero,
    Section,
    Sequences,
    Steps,
    Tokens,
    Unit,
)


def _check_loss_scale(value: Any) -> Any:
    if value == 'auto' or (
        isinstance(value, (int, float)) and value is not True and 0 < value < math.inf
    ):
        return value
    raise PydanticCustomError('loss_scale', "Input should be 'auto' or a power of two")


# The validator gives one message for both types.
FirstLossScale = Annotated[Literal['auto'] | float, BeforeValidator(_check_loss_scale)]


class Weights(dict[str, float]):
    """A dict that is never modified and is therefore hashable, as a config must be."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class ProfileConfig(Section):
    """The steps to trace: `steps` steps, after step `start`."""

    start: Annotated[CountFromZero, Unit('steps')]
    """The last step before the trace."""
    steps: Steps
    """Number of traced steps."""


class TrainConfig(Section):
    """The training loop; `batch_size` is the number of sequences per step on all devices."""

    steps: Steps = 1000
    """Length of the run."""
    batch_size: Sequences = 8
    """Sequences of a step, on all devices together."""
    microbatches: Count = 1
    """Forward and backward passes per step; gradients accumulate."""
    schedule: Literal['1f1b', 'gpipe'] = '1f1b'
    """Order of passes where mesh.stages is above 1: a backward pass follows as soon as it can
    (1f1b), or all forward passes come first (gpipe), which keeps every microbatch in memory.
    """
    seq_len: Tokens = 1024
    """Tokens of each sequence."""
    dtype: Literal['float32', 'bfloat16', 'float16', 'fp8'] = 'bfloat16'
    """Dtype of the computation; parameters are float32. fp8: of the products of linear layers, the
    rest is in bfloat16.
    """
    loss_scale: FirstLossScale = 'auto'
    """Initial loss scale of fp16: a power of two; auto finds it with the first batch."""
    recompute: Literal['none', 'selective', 'full'] = 'none'
    """Activations that the backward pass recomputes: none, the attention core, or entire layers."""
    overlap: Literal['auto', 'none', 'batch_split', 'sequence_split'] = 'auto'
    """Overlap of collectives and matrix products. Two halves take turns, of the rows of a
    microbatch (batch_split) or of the tokens of each row (sequence_split), see
    `megajax/core/train/overlap.py`; auto: on GPUs without dropout of attention the one that fits,
    otherwise none.
    """
    unroll: Literal['auto'] | bool = 'auto'
    """Whether each layer is compiled on its own, in the overlap schedule, or one loop over all
    layers; auto: on its own where `overlap` would be auto's choice, or where a GPU sends nothing,
    but for a deterministic step.
    """
    eval_every: Steps = 500
    """Interval of evaluations on the validation split."""
    eval_batches: Count = 16
    """Batches of an evaluation."""
    log_every: Steps = 10
    """Interval of log lines."""
    profile: ProfileConfig | None = None
    """Steps to trace for XProf, in the run directory, for example {start: 10, steps: 3}."""
    sample_prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Prompts to continue at every evaluation but the first."""
    nonfinite: Literal['skip', 'rollback', 'stop'] = 'skip'
    """Response to a loss or gradient that is not finite; it never changes a parameter."""
    spike: Literal['off', 'skip', 'rollback'] = 'off'
    """Response to a loss far above the most recent ones, see `megajax/core/train/guard.py`."""
    seed: Annotated[NonNegativeInt, Field(lt=2**32)] = 1234
    """Seed of initial weights, dropout and the order of samples."""
    deterministic: bool = False
    """Whether a GPU runs only operations that return the same bits each time; a CPU always does."""
    replay_every: Annotated[CountFromZero, Unit('steps')] = 0
    """Interval of steps that are computed again on other devices and compared to the bit, to find
    hardware that computes wrongly; 0: never. Needs train.deterministic.
    """

    @property
    def compute_dtype(self) -> Literal['float32', 'bfloat16', 'float16']:
        """The dtype of all that is computed but, in fp8, the products of linear layers."""
        return 'bfloat16' if self.dtype == 'fp8' else self.dtype


def _rung(value: Any) -> Any:
    return {True: 'optimizer', False: 'none'}[value] if isinstance(value, bool) else value


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1.5e-4
    """Largest learning rate, at the end of the warm-up."""
    min_lr: NonNegativeFloat = 1e-5
    """Learning rate at the end of the schedule."""
    warmup_steps: PointFromZero = 0
    """Length of the linear warm-up, which need not be a whole number of steps."""
    warmup_init: NonNegativeFloat | None = None
    """Learning rate of a warm-up's first step, 0 in Megatron-LM; null: lr / (warmup_steps + 1)."""
    decay_steps: Point | None = None
    """Step at which `schedule` has come down to min_lr, where the rate stays; null: the last."""
    schedule: Literal['cosine', 'linear', 'constant', 'wsd', 'inverse_sqrt'] = 'cosine'
    """Way from lr to min_lr, after the warm-up. inverse_sqrt: lr * sqrt(warmup_steps / step)."""
    wsd_steps: Point | None = None
    """Length of the decay of `schedule: wsd`; null: a fifth of the steps after the warm-up."""
    wsd_decay: Literal['linear', 'cosine', 'exponential', 'minus_sqrt'] = 'linear'
    """Form of the decay of `schedule: wsd`."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, of all parameters but biases and norms."""
    beta1: Fraction = 0.9
    """Decay of AdamW's first moment."""
    beta2: Fraction = 0.999
    """Decay of AdamW's second moment."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW's denominator."""
    grad_clip: PositiveFloat = 1.0
    """Maximum global norm of the gradients."""
    shard: Annotated[
        Literal['none', 'optimizer', 'gradients', 'weights'], BeforeValidator(_rung)
    ] = 'none'
    """State that is sharded over `data` too, see `megajax/core/train/zero.py`: nothing; fp32
    weights and moments (ZeRO-1); gradients as well (ZeRO-2); the weights of the computation as well
    (ZeRO-3, FSDP).
    """
    reduce_dtype: Literal['float32', 'bfloat16'] = 'float32'
    """Dtype in which gradients are summed over `data`."""
    moments_dtype: Literal['float32', 'bfloat16'] = 'float32'
    """Dtype of AdamW's moments between steps."""


class LossConfig(Section):
    """Loss terms in addition to the cross entropy."""

    label_smoothing: Fraction = 0.0
    """Share of the target that is spread evenly over the vocabulary."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(sum(exp(logits)))^2."""


class DataConfig(Section):
    """The corpus, its tokenizer, and the split of documents into training, validation and test."""

    corpus: Name = 'stdlib'
    """stdlib (the sources of Python's standard library); a file of text, JSON lines (.jsonl, .json,
    .ndjson) or Parquet; a folder of these; or the prefix of .bin and .idx files.
    """
    blend: Annotated[dict[Name, PositiveFloat], AfterValidator(Weights)] = Weights()
    """Prefixes of .bin and .idx files, each with its weight, instead of a corpus."""
    tokenizer: Name = 'auto'
    """A tokenizer.json, bytes, bpe (trained on the text), or none (for ids); auto: the one next to
    .bin and .idx, otherwise that of the weights in `run.start_from`, otherwise bpe.
    """
    split: str = '95,5,0'
    """Weights of training, validation and test."""
    order: Literal['stateless', 'megatron'] = 'stateless'
    """Order of samples: computed on the fly, or Megatron-LM's own."""
    chat_template: Name | None = None
    """A chat template of Hugging Face, a file, for JSON lines with messages; if null, that of the
    model in `run.start_from`, and without one turns are written as ChatML or as `role: text`.
    """
    ignored_keys: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Keys of JSON lines with messages, and of messages, that the chat template need not read, such
    as `id`.
    """
    document_mask: bool = False
    """Whether documents of a sequence do not attend to each other; positions restart in each."""


class CheckpointConfig(Section):
    """When checkpoints are written, and their retention: any of the `keep` keys retains one."""

    every: Steps = 1000
    """Interval of checkpoints."""
    minutes: Minutes | None = None
    """Time since the last checkpoint after which another is written as well."""
    keep: Count = 2
    """Number of newest checkpoints to retain."""
    keep_every: Steps | None = None
    """Retain checkpoints whose step is a multiple of this."""
    keep_best: Count | None = None
    """Number of checkpoints with the lowest validation loss to retain."""


def _check_patience(value: Any) -> Any:
    if value is None or value == 'auto':
        return value
    if type(value) in (int, float) and 0 < value <= LONGEST_WAIT:
        return value
    raise PydanticCustomError('patience', 'a number above 0 and up to 600000000, auto or null')


class RunConfig(Section):
    """The directory of a run, its start and its end; without `dir` a run gets a new directory."""

    dir: Name | None = None
    """Directory of the run; a run that is there resumes. Without it, a new one below runs/."""
    start_from: Name | None = None
    """RUN or RUN/STEP: start from that checkpoint's weights, at step 0 with a new optimizer."""
    resume: Literal['auto', 'must', 'never'] = 'auto'
    """Whether to resume from the newest checkpoint in `dir`: if there is one, always, never."""
    allow_changed_data: bool = False
    """Resume even if a corpus of the same name has other contents than at the checkpoint."""
    max_minutes: Minutes | None = None
    """Time after which to save and exit, before a queue's time limit."""
    compile_cache: Name = 'auto'
    """Where compiled programs are kept for the next start: auto (the run's folder), a folder, none.
    """
    wandb: Name | None = None
    """The Weights & Biases project to log metrics to, for example megajax."""
    watchdog_seconds: Annotated[
        float | Literal['auto'] | None, BeforeValidator(_check_patience), Unit('seconds')
    ] = 'auto'
    """Time without a finished step after which all stacks are written and the process exits with
    124. auto: ten minutes, or ten times the longest step so far.
    """


class Config(Section):
    """The config of a run.

    Raises ValueError with every pair of keys that cannot work together.
    """

    # A section that is a part of another comes before it.
    relevance: RelevanceConfig | None = None
    """Relevance of image regions; None: an image has all tokens that it fills."""
    vision: VisionConfig | None = None
    """The vision encoder; None: a model of text alone."""
    lora: LoraConfig | None = None
    """Low-rank adapters, which alone are trained; None: the model's own weights are."""
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
        """Number of sequences of a microbatch on a data shard."""
        return self.train.batch_size // (self.mesh.data * self.train.microbatches)

    @property
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
        """Return a copy with these sections; those that are parts of others are so in the copy."""
        sections = {**dict(self), **(update or {})}
        for name in ('vision', 'model'):
            sections[name] = sections[name] and sections[name].with_parts(sections)
        return super().model_copy(update=sections, deep=deep)

    @model_validator(mode='after')
    def _check_conflicts(self) -> Self:
        if problems := incompatibilities(self):
            raise ValueError('\n'.join(str(problem) for problem in problems))
        return self


SECTIONS: dict[str, type[Section]] = {
    name: (*get_args(kind), kind)[0]
    for name in dict.fromkeys(('model', 'vision', *Config.model_fields))  # first in files and pages
    for kind in [Config.model_fields[name].annotation]
}


def keys_of(section: str) -> list[str]:
    """Return the keys of a section that a config file may set."""
    fields = SECTIONS[section].model_fields
    return [key for key, field in fields.items() if not field.exclude]
