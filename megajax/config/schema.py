"""What a run is made of: every key that a config file may set, with its type, default and limits.

Sizes count elements, `seq_len` counts tokens, `batch_size` counts the sequences of one global batch.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megajax.config.rules import incompatibilities

VOCAB_MULTIPLE = 1024  # as in the Megatron paper, 128 x 8; the same on every mesh, so that a checkpoint fits any of them

Fraction = Annotated[float, Field(ge=0, lt=1)]


def _check_loss_scale(value: Any) -> Any:
    if value == 'auto' or (
        isinstance(value, (int, float)) and value is not True and 0 < value < math.inf
    ):
        return value
    raise PydanticCustomError('loss_scale', "Input should be 'auto' or a power of two")


FirstLossScale = Annotated[
    Literal['auto'] | float, BeforeValidator(_check_loss_scale)
]  # one message for both of its types


class Weights(dict[str, float]):
    """A dict that can be hashed, as a config can, because nothing changes it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class Section(BaseModel):
    """A frozen group of keys that refuses the ones it does not know, and values of another type (`8.0` or `'8'` for 8)."""

    model_config = ConfigDict(frozen=True, extra='forbid', strict=True, allow_inf_nan=False)


class RopeScaling(Section):
    """Rotary frequencies for sequences longer than the first training's: all divided by `factor` (linear), or only the low ones (llama3).

    With llama3, wavelengths above `original_max_seq_len / low_freq_factor` tokens are stretched, those below
    `original_max_seq_len / high_freq_factor` stay, and in between the factor grows smoothly. The defaults are Llama 3.1's.
    """

    type: Literal['linear', 'llama3']
    factor: PositiveFloat
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: PositiveInt = 8192


class ModelConfig(Section):
    """The model: GPT-2, Megatron's GPT and BERT, Llama and Qwen3 are this one with different fields."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt = Field(
        default_factory=lambda data: data['num_heads']
    )  # fewer than num_heads: grouped queries
    head_dim: PositiveInt = Field(
        default_factory=lambda data: data['hidden_size'] // data['num_heads']
    )
    ffn_size: PositiveInt = Field(default_factory=lambda data: 4 * data['hidden_size'])
    vocab_size: PositiveInt  # of the tokenizer, before padding
    max_seq_len: PositiveInt  # rows of the learned positions, and the limit of train.seq_len
    objective: Literal['next_token', 'masked_lm'] = (
        'next_token'  # masked_lm: BERT, which has the heads for it
    )
    # Which tokens one sees: those before it, or all; by default as the objective needs it.
    attention: Literal['causal', 'bidirectional'] = Field(
        default_factory=lambda data: (
            'causal' if data['objective'] == 'next_token' else 'bidirectional'
        )
    )
    norm: Literal['layernorm', 'rmsnorm'] = 'layernorm'
    activation: Literal['gelu', 'gelu_tanh', 'swiglu'] = 'gelu_tanh'
    position: Literal['learned', 'rope'] = 'learned'
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None  # for example {type: llama3, factor: 8}
    qk_norm: bool = False  # normalise queries and keys over head_dim, as Qwen3 does
    bias: bool = True  # in every linear layer but the LM head; BERT's heads have theirs always
    qkv_bias: bool = Field(
        default_factory=lambda data: data['bias']
    )  # in that of queries, keys and values; Qwen2 has it there alone
    tie_embeddings: bool = True  # the LM head is the embedding table
    dropout: Fraction = 0.0  # after the embedding, the attention probabilities and each sublayer
    norm_eps: PositiveFloat = 1e-5
    init_std: PositiveFloat = (
        0.02  # the projections into the residual are scaled by 1/sqrt(2 num_layers) besides
    )

    @property
    def causal(self) -> bool:
        """Whether a token sees those before it alone."""
        return self.attention == 'causal'

    @property
    def is_bert(self) -> bool:
        """Whether masked tokens are filled in, and the order of segments is predicted."""
        return self.objective == 'masked_lm'

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of 1024."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


class MeshConfig(Section):
    """How many devices each mesh axis has, and whether the sequence is sharded outside the matrix products."""

    data: PositiveInt = 1
    model: PositiveInt = 1
    sequence_parallel: bool = False
    allow_model_across_hosts: bool = False  # each layer then waits for the network between them


class ProfileConfig(Section):
    """Which steps are traced: `steps` of them, after step `start`."""

    start: NonNegativeInt
    steps: PositiveInt


class TrainConfig(Section):
    """The training loop; `batch_size` is the global number of sequences per step."""

    steps: PositiveInt = 1000
    batch_size: PositiveInt = 8
    microbatches: PositiveInt = (
        1  # forward and backward passes per step, their gradients accumulated
    )
    seq_len: PositiveInt = 1024
    dtype: Literal['float32', 'bfloat16', 'float16'] = (
        'bfloat16'  # of the computation; parameters are float32
    )
    loss_scale: FirstLossScale = (
        'auto'  # of fp16, when a run begins: a power of two, or found with the first batch
    )
    recompute: Literal['none', 'selective', 'full'] = (
        'none'  # in the backward pass: nothing, the attention core, whole layers
    )
    # Of collectives and products. batch_split: two halves of a microbatch take turns, see `train/overlap.py`; auto: none.
    overlap: Literal['auto', 'none', 'batch_split'] = 'auto'
    eval_every: PositiveInt = 500  # steps
    eval_batches: PositiveInt = 16
    log_every: PositiveInt = 10  # steps
    profile: ProfileConfig | None = (
        None  # for example {start: 10, steps: 3}: a trace for XProf in the run directory
    )
    sample_prompts: Annotated[
        tuple[str, ...], Field(strict=False)
    ] = ()  # a YAML list; each is continued at every evaluation but the first
    nonfinite: Literal['skip', 'rollback', 'stop'] = (
        'skip'  # what a loss or gradient that is not finite does; it never changes a parameter
    )
    spike: Literal['off', 'skip', 'rollback'] = (
        'off'  # what a loss far above the last ones does, see `train/guard.py`
    )
    seed: NonNegativeInt = 1234


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1.5e-4
    min_lr: NonNegativeFloat = 1e-5
    warmup_steps: NonNegativeInt = 0
    schedule: Literal['cosine', 'linear', 'constant', 'wsd'] = (
        'cosine'  # after the warm-up, from lr to min_lr
    )
    weight_decay: NonNegativeFloat = 0.01  # decoupled; not for biases and norms
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    grad_clip: PositiveFloat = 1.0  # of the global norm
    shard: bool = False  # ZeRO-1: weights in fp32 and the optimizer's state are sharded over `data` too, see `train/zero1.py`


class LossConfig(Section):
    """Terms beside the cross entropy."""

    label_smoothing: Fraction = 0.0
    z_loss: NonNegativeFloat = 0.0  # weight of log(sum(exp(logits)))^2


class DataConfig(Section):
    """The corpus, how it becomes tokens, and how documents are split into training, validation and test."""

    corpus: str = 'stdlib'  # the interpreter's own sources, a text file or a folder of them, .jsonl, or the prefix of .bin and .idx files
    blend: Annotated[dict[str, PositiveFloat], AfterValidator(Weights)] = (
        Weights()
    )  # instead of a corpus: prefixes of .bin and .idx files, and how much of each
    tokenizer: str = 'auto'  # a tokenizer.json, bytes, bpe (trained on the text), none (for ids); auto: the one beside .bin and .idx, or bpe
    split: str = '95,5,0'  # weights of training, validation and test
    order: Literal['stateless', 'megatron'] = (
        'stateless'  # of samples: computed on the fly, or Megatron-LM's own
    )
    document_mask: bool = (
        False  # documents of a sequence do not see each other; positions begin again in each
    )


class CheckpointConfig(Section):
    """When the state is written, and which checkpoints stay: those that any of the `keep` keys asks for."""

    every: PositiveInt = 1000  # steps
    minutes: PositiveFloat | None = None  # also when so long has passed since the last
    keep: PositiveInt = 2  # the newest
    keep_every: PositiveInt | None = None  # those of a step that is a multiple of it
    keep_best: PositiveInt | None = None  # those of the least validation loss


def _check_patience(value: Any) -> Any:
    if value is None or value == 'auto' or (type(value) in (int, float) and 0 < value < math.inf):
        return value
    raise PydanticCustomError('patience', 'a number above 0, auto or null')


class RunConfig(Section):
    """Where a run lives; without `dir` each run gets a fresh one."""

    dir: str | None = None
    start_from: str | None = (
        None  # RUN or RUN/STEP: begin with the weights of that checkpoint, at step 0 with a fresh optimizer
    )
    resume: Literal['auto', 'must', 'never'] = (
        'auto'  # from the newest checkpoint in `dir`: if there is one, always, never
    )
    allow_changed_data: bool = False  # resume though a corpus of the same name holds something else than when the checkpoint was written
    max_minutes: PositiveFloat | None = None  # save and leave then, before a queue's time limit
    wandb: str | None = (
        None  # the project of Weights & Biases that is told the metrics, for example megajax
    )
    # Without a step that finishes; then write all stacks and exit with 124. auto: ten minutes, or ten of the longest steps so far.
    watchdog_seconds: Annotated[
        float | Literal['auto'] | None, BeforeValidator(_check_patience)
    ] = 'auto'


class Config(Section):
    """A whole run. Raises ValueError with every pair of keys that cannot work together."""

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
        """Sequences that a data shard has in one microbatch."""
        return self.train.batch_size // (self.mesh.data * self.train.microbatches)

    @model_validator(mode='after')
    def _check_combinations(self) -> Self:
        if problems := incompatibilities(self):
            raise ValueError('\n'.join(str(problem) for problem in problems))
        return self
