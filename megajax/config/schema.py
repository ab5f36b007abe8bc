"""The schema of a config file: every key that it may set, with its type, default and limits.

Sizes count elements, `seq_len` counts tokens, `batch_size` counts the sequences of a global batch.
"""

import math
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megajax.config.model import Fraction, ModelConfig, RelevanceConfig, Section, VisionConfig
from megajax.config.rules import incompatibilities


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


class MeshConfig(Section):
    """The number of devices along each mesh axis, and sequence parallelism.

    `sequence_parallel` shards the sequence outside the matrix products. A tensor-parallel group has
    `model_rows` x `model` devices.
    """

    stages: PositiveInt = 1  # of the pipeline; each has a part of the layers
    # Chunks of layers a stage (Narayanan et al., 2021): they shorten the pipeline's bubble.
    virtual_stages: PositiveInt = 1

    data: PositiveInt = 1  # shards of the batch in all
    # Groups of data shards, each with a complete copy of the state (HSDP): ZeRO shards it over the
    # data / replicas shards of a group, and one all-reduce a step crosses the groups.
    replicas: PositiveInt = 1
    context: PositiveInt = 1  # shards of each sequence; attention exchanges keys and values
    # Of keys and values between context shards: all of them at once, or one shard at a time.
    context_exchange: Literal['gather', 'ring'] = 'gather'
    model_rows: PositiveInt = 1  # rows of a 2-D tensor-parallel grid, which shard hidden_size
    model: PositiveInt = 1
    sequence_parallel: bool = False
    allow_model_across_hosts: bool = False  # then each layer waits for the network between hosts

    @property
    def is_grid(self) -> bool:
        """Whether tensor parallelism is two-dimensional."""
        return self.model_rows > 1

    @property
    def is_one_dimensional(self) -> bool:
        """Whether the mesh shards rows over `data` and a model over `model`, and nothing else."""
        return self.stages == self.context == self.model_rows == 1

    @property
    def tensor_parallel(self) -> int:
        """Number of devices of a tensor-parallel group."""
        return self.model_rows * self.model

    @property
    def data_shards(self) -> int:
        """Number of data shards of a group of `replicas`: the size of the mesh axis `data`."""
        return self.data // self.replicas

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self.stages * self.data * self.context * self.tensor_parallel

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of the mesh and their sizes, outermost first.

        An axis of one device is not in the mesh, `data` and `model` apart.
        """
        sizes = {
            'replica': self.replicas,
            'stage': self.stages,
            'data': self.data_shards,
            'context': self.context,
            'row': self.model_rows,
            'model': self.model,
        }
        return {axis: size for axis, size in sizes.items() if size > 1 or axis in ('data', 'model')}


class ProfileConfig(Section):
    """The steps to trace: `steps` steps, after step `start`."""

    start: NonNegativeInt
    steps: PositiveInt


class TrainConfig(Section):
    """The training loop; `batch_size` is the number of sequences per step on all devices."""

    steps: PositiveInt = 1000
    batch_size: PositiveInt = 8
    microbatches: PositiveInt = 1  # forward and backward passes per step; gradients accumulate
    # The order of passes where mesh.stages is above 1: a backward pass follows as soon as it can
    # (1f1b), or all forward passes come first (gpipe), which keeps every microbatch in memory.
    schedule: Literal['1f1b', 'gpipe'] = '1f1b'
    seq_len: PositiveInt = 1024
    # Of the computation; parameters are float32.
    dtype: Literal['float32', 'bfloat16', 'float16'] = 'bfloat16'
    # Initial loss scale of fp16: a power of two; auto finds it with the first batch.
    loss_scale: FirstLossScale = 'auto'
    # What the backward pass recomputes: nothing, the attention core, or entire layers.
    recompute: Literal['none', 'selective', 'full'] = 'none'
    # Overlap of collectives and matrix products. Two halves take turns, of the rows of a microbatch
    # (batch_split) or of the tokens of each row (sequence_split), see `train/overlap.py`; auto: on
    # GPUs without dropout the one that fits, otherwise none.
    overlap: Literal['auto', 'none', 'batch_split', 'sequence_split'] = 'auto'
    # Whether each layer is compiled on its own, in an order of ours, or one loop over all layers;
    # auto: on its own where `overlap` would be auto's choice, or where a GPU sends nothing.
    unroll: Literal['auto'] | bool = 'auto'
    eval_every: PositiveInt = 500  # steps
    eval_batches: PositiveInt = 16
    log_every: PositiveInt = 10  # steps
    # A trace for XProf in the run directory, for example {start: 10, steps: 3}.
    profile: ProfileConfig | None = None
    # A YAML list of prompts to continue at every evaluation but the first.
    sample_prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    # Response to a loss or gradient that is not finite; it never changes a parameter.
    nonfinite: Literal['skip', 'rollback', 'stop'] = 'skip'
    # Response to a loss far above the most recent ones, see `train/guard.py`.
    spike: Literal['off', 'skip', 'rollback'] = 'off'
    seed: NonNegativeInt = 1234


def _rung(value: Any) -> Any:
    return {True: 'optimizer', False: 'none'}[value] if isinstance(value, bool) else value


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1.5e-4
    min_lr: NonNegativeFloat = 1e-5
    warmup_steps: NonNegativeInt = 0
    # From lr to min_lr, after the warm-up.
    schedule: Literal['cosine', 'linear', 'constant', 'wsd'] = 'cosine'
    weight_decay: NonNegativeFloat = 0.01  # decoupled; not applied to biases and norms
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    grad_clip: PositiveFloat = 1.0  # maximum global norm of the gradients
    # What is sharded over `data` too, see `train/zero.py`: nothing; fp32 weights and moments
    # (ZeRO-1); gradients as well (ZeRO-2); the weights of the computation as well (ZeRO-3, FSDP).
    shard: Annotated[
        Literal['none', 'optimizer', 'gradients', 'weights'], BeforeValidator(_rung)
    ] = 'none'
    reduce_dtype: Literal['float32', 'bfloat16'] = 'float32'  # of gradients summed over `data`
    moments_dtype: Literal['float32', 'bfloat16'] = 'float32'  # of AdamW's moments between steps


class LossConfig(Section):
    """Loss terms in addition to the cross entropy."""

    label_smoothing: Fraction = 0.0
    z_loss: NonNegativeFloat = 0.0  # weight of log(sum(exp(logits)))^2


class DataConfig(Section):
    """The corpus, its tokenizer, and the split of documents into training, validation and test."""

    # stdlib (the sources of Python's standard library), a text file or a folder of text files,
    # .jsonl, or the prefix of .bin and .idx files.
    corpus: str = 'stdlib'
    # Instead of a corpus: prefixes of .bin and .idx files, each with its weight.
    blend: Annotated[dict[str, PositiveFloat], AfterValidator(Weights)] = Weights()
    # A tokenizer.json, bytes, bpe (trained on the text), or none (for ids); auto: the one next to
    # .bin and .idx, or bpe.
    tokenizer: str = 'auto'
    split: str = '95,5,0'  # weights of training, validation and test
    # Order of samples: computed on the fly, or Megatron-LM's own.
    order: Literal['stateless', 'megatron'] = 'stateless'
    # A chat template of Hugging Face, a file, for JSON lines with messages; without one, turns are
    # written as ChatML or as `role: text`.
    chat_template: str | None = None
    # Documents of a sequence do not attend to each other; positions restart in each.
    document_mask: bool = False


class CheckpointConfig(Section):
    """When checkpoints are written, and their retention: any of the `keep` keys retains one."""

    every: PositiveInt = 1000  # steps
    minutes: PositiveFloat | None = None  # also when so long has passed since the last one
    keep: PositiveInt = 2  # number of newest checkpoints to retain
    keep_every: PositiveInt | None = None  # retain those whose step is a multiple of this
    keep_best: PositiveInt | None = None  # number with the lowest validation loss to retain


def _check_patience(value: Any) -> Any:
    if value is None or value == 'auto' or (type(value) in (int, float) and 0 < value < math.inf):
        return value
    raise PydanticCustomError('patience', 'a number above 0, auto or null')


class RunConfig(Section):
    """The directory of a run, its start and its end; without `dir` a run gets a new directory."""

    dir: str | None = None
    # RUN or RUN/STEP: start from the weights of that checkpoint, at step 0 with a new optimizer.
    start_from: str | None = None
    # From the newest checkpoint in `dir`: if there is one, always, never.
    resume: Literal['auto', 'must', 'never'] = 'auto'
    # Resume even if a corpus of the same name has other contents than at the checkpoint.
    allow_changed_data: bool = False
    # Save and exit after this time, before a queue's time limit.
    max_minutes: PositiveFloat | None = None
    # The Weights & Biases project to log metrics to, for example megajax.
    wandb: str | None = None
    # Seconds without a finished step after which all stacks are written and the process exits with
    # 124. auto: ten minutes, or ten times the longest step so far.
    watchdog_seconds: Annotated[
        float | Literal['auto'] | None, BeforeValidator(_check_patience)
    ] = 'auto'


class Config(Section):
    """The config of a run.

    Raises ValueError with every pair of keys that cannot work together.
    """

    model: ModelConfig
    vision: VisionConfig | None = None  # None: a model of text alone
    relevance: RelevanceConfig | None = None  # None: an image has all tokens that it fills
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

    @model_serializer(mode='wrap')
    def _without_absent_sections(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: section for name, section in dump(self).items() if section is not None}

    @model_validator(mode='after')
    def _join_vision(self) -> Self:
        vision = self.vision
        if vision is not None:
            vision = vision.model_copy(update={'relevance': self.relevance})
            object.__setattr__(self, 'vision', vision)
        object.__setattr__(self, 'model', self.model.model_copy(update={'vision': vision}))
        return self

    @model_validator(mode='after')
    def _check_combinations(self) -> Self:
        if problems := incompatibilities(self):
            raise ValueError('\n'.join(str(problem) for problem in problems))
        return self


SECTIONS: dict[str, type[Section]] = {
    name: next(kind for kind in get_args(field.annotation) or (field.annotation,) if kind)
    for name, field in Config.model_fields.items()
}


def keys_of(section: str) -> list[str]:
    """Return the keys of a section that a config file may set."""
    fields = SECTIONS[section].model_fields
    return [key for key, field in fields.items() if not field.exclude]
