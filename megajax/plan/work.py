"""The work of one GPU in a training step: every matrix product by its sizes, and what the other operations read and write.

B rows of a microbatch on a data shard, S sequence, D model, N query heads, K key/value heads, H head dim, F feed-forward, V vocabulary
(padded); t GPUs of the model axis.
"""

import dataclasses
from collections.abc import Iterator

from megajax.config import Config
from megajax.counts.parameters import NUM_SEGMENTS, megatron_counts
from megajax.inspect.result import Phase
from megajax.plan.memory import BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """`batch` matrix products [m, k] x [k, n] in one kernel, and how often that runs in a step."""

    name: str
    phase: Phase
    sizes: tuple[int, int, int]
    batch: int = 1
    times: float
    flash: bool = False

    @property
    def flops(self) -> float:
        """Of one run, with those that a causal kernel can skip."""
        m, n, k = self.sizes
        return 2.0 * self.batch * m * n * k

    @property
    def elements(self) -> int:
        """Of operands and result; flash attention keeps what is large of them in the GPU's cores."""
        m, n, k = self.sizes
        return 0 if self.flash else self.batch * (m * n + n * k + m * k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """An operation bound by memory: bytes that one run reads and writes, and how often it runs in a step."""

    name: str
    bytes: float
    times: int


def products(config: Config, *, flash: bool, recomputes_last: bool = False) -> list[Product]:
    """Of a step. The backward pass of a product is two of the same FLOPs: gradients of its input and of its weight."""
    model, t = config.model, config.mesh.model
    D, N, K, H, F, V = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim, model.ffn_size, model.padded_vocab_size
    tokens, runs = config.microbatch_rows * config.train.seq_len, config.train.microbatches
    up = 2 * F if model.activation == 'swiglu' else F
    weights = {'qkv': (D, (N + 2 * K) * H // t), 'out': (N * H // t, D), 'up': (D, up // t), 'down': (F // t, D), 'head': (D, V // t)}
    made = []
    for name, (k, n) in weights.items():
        times = runs * (1 if name == 'head' else model.num_layers)
        made.append(Product(name=name, phase='forward', sizes=(tokens, n, k), times=times))
        made.append(Product(name=f'{name} input', phase='backward', sizes=(tokens, k, n), times=times))
        made.append(Product(name=f'{name} weight', phase='backward', sizes=(k, n, tokens), times=times))
        if config.train.recompute == 'full' and name != 'head' and (name != 'down' or recomputes_last):
            made.append(Product(name=name, phase='recompute', sizes=(tokens, n, k), times=times))
    return [*made, *_attention(config, flash=flash), *_bert_heads(config)]


def _attention(config: Config, *, flash: bool) -> Iterator[Product]:
    """Scores and values, two products of the same FLOPs; backward four, and with a flash kernel the forward pass and the scores again."""
    length, recompute = config.train.seq_len, config.train.recompute
    heads = config.microbatch_rows * config.model.num_heads // config.mesh.model
    counts: dict[Phase, int] = {'forward': 2, 'backward': 7 if flash else 4, 'recompute': 0}
    if recompute == 'full' or (recompute == 'selective' and not flash):
        counts['recompute'] = 2 if recompute == 'full' else 1
    sizes, runs = (length, length, config.model.head_dim), config.model.num_layers * config.train.microbatches
    for phase, count in counts.items():
        yield Product(name='attention', phase=phase, sizes=sizes, batch=heads, times=count * runs, flash=flash)


def _bert_heads(config: Config) -> Iterator[Product]:
    """A dense layer of each token, which sequence parallelism shares out, and two of the first token of each row."""
    if config.model.causal:
        return
    D, rows = config.model.hidden_size, config.microbatch_rows
    tokens = rows * config.train.seq_len // (config.mesh.model if config.mesh.sequence_parallel else 1)
    for name, m, n in (('dense', tokens, D), ('pooler', rows, D), ('order', rows, NUM_SEGMENTS)):
        yield Product(name=name, phase='forward', sizes=(m, n, D), times=config.train.microbatches)
        yield Product(name=name, phase='backward', sizes=(m, n, D), times=2 * config.train.microbatches)


def traffic(config: Config, *, flash: bool, adds_shards: bool = False) -> list[Traffic]:
    """Of a step: each fused operation reads its operands once and writes its result once.

    Gradients of microbatches are added up whole, or, as FSDP does, only the part that a data shard keeps.
    """
    return [*_of_layers(config, flash=flash), *_of_loss(config), *_of_weights(config, adds_shards=adds_shards)]


def _of_layers(config: Config, *, flash: bool) -> Iterator[Traffic]:
    model, t, tokens = config.model, config.mesh.model, config.microbatch_rows * config.train.seq_len
    size = BYTES[config.train.dtype]
    residual = tokens * model.hidden_size * size / (t if config.mesh.sequence_parallel else 1)
    heads = tokens * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * size / t
    ffn = tokens * model.ffn_size * size / t
    gated = model.activation == 'swiglu'
    times = model.num_layers * config.train.microbatches
    forwards = 2 if config.train.recompute == 'full' else 1
    # Norms read and write; adding to the residual reads two and writes one; backward there is one array more to read.
    yield Traffic(name='norms', bytes=2 * (2 * forwards + 3) * residual, times=times)
    yield Traffic(name='residual', bytes=2 * (3 * forwards + 2) * residual, times=times)
    yield Traffic(name='heads', bytes=2 * (forwards + 1) * heads, times=times)
    yield Traffic(name='activation', bytes=((3 if gated else 2) * forwards + (5 if gated else 3)) * ffn, times=times)
    if not flash:
        scores = config.microbatch_rows * model.num_heads / t * config.train.seq_len**2 * size
        again = 1 if config.train.recompute == 'none' else 2
        dropout = 2 if model.dropout else 0
        yield Traffic(name='softmax', bytes=((2 + dropout) * again + 3 + dropout) * scores, times=times)


def _of_loss(config: Config) -> Iterator[Traffic]:
    tokens = config.microbatch_rows * config.train.seq_len
    logits = 4 * tokens * config.model.padded_vocab_size / config.mesh.model
    yield Traffic(name='loss', bytes=4 * logits, times=config.train.microbatches)  # maximum, sum; gradient read and written


def _of_weights(config: Config, *, adds_shards: bool) -> Iterator[Traffic]:
    count = megatron_counts(config.model, config.mesh.model).all
    own = count / (config.mesh.data if config.optim.shard else 1)
    microbatches = config.train.microbatches
    if BYTES[config.train.dtype] == 2:
        yield Traffic(name='cast of weights', bytes=6 * count, times=1)
    if microbatches > 1:
        yield Traffic(name='gradient accumulation', bytes=12 * (own if adds_shards else count), times=microbatches)
    yield Traffic(name='gradient norm', bytes=4 * own, times=1)
    yield Traffic(name='AdamW', bytes=7 * 4 * own, times=1)  # parameter and both moments read and written, gradient read
