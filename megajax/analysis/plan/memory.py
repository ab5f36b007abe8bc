"""Count the memory that a training step needs on each GPU, without compiling it.

Arrays that live between steps are counted exactly. Activations saved for the backward pass are
counted array by array, as in Korthikanti et al. (2022), "Reducing Activation
Recomputation in Large Transformer Models": `kept_by_layer` is their s b h (10 + 24/t) and more.
Temporary arrays are counted at the moments of a step that may need the most (`_moments`), and the
result is the largest of these. The moments and their arrays were read from the buffers of programs
that XLA compiled for H100s; `benchmarks/plan_memory.py` compares the sums with
`compiled.memory_analysis()`.

t is the number of devices of the `model` axis.
"""

import dataclasses
from math import prod

from megajax.analysis.plan.early_memory import copied_weights, embedding_gradient, of_last_layer
from megajax.analysis.plan.encoder import with_encoder
from megajax.analysis.plan.live_memory import Held
from megajax.analysis.plan.period_memory import of_period
from megajax.analysis.plan.sizes import FLOAT32, NO_SAVINGS, Savings, Sizes
from megajax.analysis.plan.stage_memory import moments_of_stage
from megajax.core.config import Config
from megajax.core.counts.flash import HOPPER
from megajax.core.counts.muon import pools_of
from megajax.core.hardware.records import Capability

# The share of the temporary bytes that is lost between the arrays in XLA's heap: 0 to 4% in
# programs for H100s.
FRAGMENTATION = 0.02
# The largest share by which the count was too low for an H100 program of more than 40 GB, as
# tests/analysis/plan/test_compiled.py finds in the results.
UNDERCOUNT = 0.029


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on each GPU at the moment of a step that needs the most memory."""

    parameters: int  # fp32 master weights, and frozen weights next to adapters
    optimizer: int  # the moments of AdamW or Muon
    gathered_weights: int
    gradients: int
    activations: int
    logits: int
    workspace: int
    fragmentation: int  # see FRAGMENTATION
    batch: int
    repetition: int  # copies of state and batch in a step of `train.replay_every`
    moment: str  # the name of that moment, such as loss or backward: see `_moments`

    @property
    def state(self) -> int:
        """Return the bytes that live between steps."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """Return the total bytes."""
        *sizes, _ = vars(self).values()  # `moment` is last
        return sum(sizes)


def memory(
    config: Config,
    *,
    capacity_bytes: int | None = None,
    capability: Capability | None = HOPPER,
    savings: Savings = NO_SAVINGS,
) -> StepMemory:
    """Return the bytes that a step of `config` needs on each of its GPUs of this capability.

    XLA allocates all gradient buffers up front if they fit in `capacity_bytes`, otherwise late.
    """
    sizes = Sizes(config, capability, savings)
    early = _memory(sizes, early=True)
    return (
        early
        if capacity_bytes is None or early.total <= capacity_bytes
        else _memory(sizes, early=False)
    )


def largest_microbatch(
    config: Config,
    capacity_bytes: int,
    capability: Capability | None = HOPPER,
    savings: Savings = NO_SAVINGS,
) -> int:
    """Return the most sequences per data shard that fit in a microbatch; 0 if none does."""
    # Overlap splits the batch into halves, and 2-D tensor parallelism shards it.
    halves = config.overlap.num_parts if config.train.overlap == 'batch_split' else 1
    step = halves * config.mesh.model_rows

    def fits(rows: int) -> bool:
        batch_size = rows * step * config.mesh.data * config.train.microbatches
        train = config.train.model_copy(update={'batch_size': batch_size})
        larger = config.model_copy(update={'train': train})
        needed = memory(
            larger, capacity_bytes=capacity_bytes, capability=capability, savings=savings
        )
        return needed.total <= capacity_bytes

    too_many = 1
    while fits(too_many):
        too_many *= 2
    least = too_many // 2
    while too_many - least > 1:
        middle = (least + too_many) // 2
        least, too_many = (middle, too_many) if fits(middle) else (least, middle)
    return least * step


def kept_by_layer(config: Config) -> int:
    """Return the bytes that a layer's forward pass saves on each GPU without recomputation.

    For a GPT in 16 bits with dropout, and without attention scores, they are s b h (10 + 24/t), as
    in Korthikanti et al. (2022), table 2. With sequence parallelism the paper has s b h 34/t,
    because Megatron gathers the inputs of matmuls again; XLA saves these inputs: s b h (4 + 30/t).
    Without flash attention, the scores take a s^2 b (4 + 2 + 1) bytes instead of 5 a s^2 b, because
    the softmax stays in fp32.
    """
    return Sizes(config).kept_by_layer


def num_logit_chunks(config: Config) -> int:
    """Return the number of chunks that the loss splits a microbatch into (`core/model/loss.py`)."""
    return Sizes(config).logits[0]


def _memory(sizes: Sizes, *, early: bool) -> StepMemory:
    is_staged = sizes.config.mesh.stages > 1
    moments = moments_of_stage(sizes, early=early) if is_staged else _moments(sizes, early=early)
    if sizes.config.vision is not None:
        moments = with_encoder(sizes, moments, early=early)
    moments['optimizer'] = (
        _in_muon(sizes) if sizes.config.optim.kind == 'muon' else _in_adamw(sizes)
    )
    moment = max(moments, key=lambda name: moments[name].total)
    copied = sizes.parameters_at_rest + sizes.moments + sizes.batch
    return StepMemory(
        parameters=sizes.parameters_at_rest,
        optimizer=sizes.moments,
        fragmentation=int(FRAGMENTATION * moments[moment].total),
        batch=sizes.batch,
        repetition=copied if sizes.config.train.replay_every else 0,
        moment=moment,
        **vars(moments[moment]),
    )


def _in_adamw(sizes: Sizes) -> Held:
    """Return the memory of a step during the update of AdamW: the gradients.

    The head's gradient is copied to the layout of the stored head if the forward pass reads the
    head in a different layout.
    """
    is_read_as_stored = sizes.is_scattered or sizes.model.tie_embeddings
    is_copied = sizes.config.optim.shard == 'none' and not is_read_as_stored
    return Held(
        gradients=FLOAT32 * sizes.at_rest.learned,
        workspace=FLOAT32 * sizes.table if is_copied and sizes.learned_tables else 0,
    )


def _in_muon(sizes: Sizes) -> Held:
    """Return the memory of a step during Muon's update, as in programs for H100s.

    The iterations of the largest pool need its matrices twice, and their Gram matrices. XLA frees
    the gradients of the other parameters before.
    """
    pools = pools_of(sizes.config)
    needed = [pool.whole * (2 * prod(pool.form.shape) + pool.form.shape[0] ** 2) for pool in pools]
    received = [prod(pool.gathered) for pool in pools if pool.num_devices > 1]
    return Held(
        gradients=FLOAT32 * sizes.at_rest.learned_layers,
        workspace=sizes.itemsize * (max(needed, default=0) + sum(received)),
    )


def _moments(sizes: Sizes, *, early: bool) -> dict[str, Held]:
    """Return the memory of a step at the moments that may need the most.

    - loss: when the head's gradient and the arrays that it is computed from are in memory.
    - layout: between the passes, when XLA copies the arrays stacked by the loop over layers to a
      different layout, and may already have allocated the layers' gradients (`early`).
    - backward: in the backward pass of a layer.
    - experts: in the gradients of the weights of a layer's experts (`_of_experts`).
    - embedding: at the end, in the gradient of the embedding.

    From ZeRO-2 on, only shards of gradients are stored, but the head's gradient is reduced over
    `data` only after the backward pass of the layers has begun.
    """
    table = FLOAT32 * sizes.table if sizes.learned_tables else 0
    all_of_them, of_layers = sizes.learned, sizes.learned - sizes.learned_tables * sizes.table
    if sizes.sums_early:
        all_of_them, of_layers = sizes.at_rest.learned, sizes.at_rest.learned_layers
    summed = FLOAT32 * all_of_them if sizes.config.train.microbatches > 1 else 0
    in_layers = FLOAT32 * of_layers
    gradients = summed + table + in_layers
    chunks, logits, dlogits = sizes.logits
    copies, in_passes = copied_weights(sizes), _gathered_in_layers(sizes)
    head, embedding = _head_in_loss(sizes), embedding_gradient(sizes)
    # The gathered tokens of a chunk, and their gradient before it is reduce-scattered.
    gathered = 2 * sizes.whole * sizes.layout.num_shards('D') // chunks if sizes.is_scattered else 0
    in_loss = 2 * sizes.residual + gathered + of_last_layer(sizes)
    weights, buffers = _in_backward(sizes)
    # The backward pass of an image encoder, which comes last, reads its weights.
    is_gathered = sizes.config.train.microbatches > 1 or sizes.config.vision is not None
    return {
        'loss': Held(
            gathered_weights=in_passes,
            gradients=summed + (table if chunks > 1 else 0),
            activations=sizes.kept,
            # With several chunks, each adds to the head's gradient; otherwise, the logits are freed
            # before this gradient is computed.
            logits=(logits if chunks > 1 else max(logits, table)) + dlogits,
            workspace=embedding + head + copies + in_loss,
        ),
        'layout': Held(
            gathered_weights=in_passes,
            gradients=gradients if early and not sizes.is_ordered else gradients - in_layers,
            activations=sizes.kept,
            workspace=(0 if sizes.is_ordered else sizes.copied) + copies,
        ),
        'backward': Held(
            gathered_weights=in_passes + weights,
            gradients=summed + table + _of_layers(sizes, in_layers),
            activations=sizes.kept,
            workspace=buffers + of_period(sizes) + embedding + copies + sizes.of_adapters,
        ),
        'embedding': Held(
            gathered_weights=in_passes if is_gathered else 0,
            gradients=gradients + table,
            workspace=_embedded(sizes) + _stacks(sizes, in_layers),
        ),
    } | _of_experts(sizes, in_passes, summed + table + in_layers, embedding + copies)


def _head_in_loss(sizes: Sizes) -> int:
    """Return the bytes of the copy of the head that the loss reads.

    The frozen head of LoRA is stored in `train.dtype`: a loss in one chunk reads it where it is
    stored, unless ZeRO gathers it.
    """
    (chunks, _, _), config = sizes.logits, sizes.config
    if chunks == 1 and config.lora is not None and config.optim.shard == 'none':
        return 0
    return sizes.itemsize * sizes.table


def _of_experts(sizes: Sizes, gathered: int, gradients: int, copies: int) -> dict[str, Held]:
    """Return the memory of a step in the gradients of the weights of a layer's experts.

    The gradient of the first matmuls' weights exists twice while ZeRO-2 and ZeRO-3 reduce it. Its
    operands are rows of tokens.
    """
    experts = sizes.experts
    if experts is None:
        return {}
    twice = experts.first_gradient if sizes.sums_early else 0
    return {
        'experts': Held(
            gathered_weights=gathered,
            gradients=gradients + experts.gradients + twice,
            activations=sizes.kept,
            workspace=experts.rows + experts.up + 2 * sizes.whole + copies,
        )
    }


def _of_layers(sizes: Sizes, in_layers: int) -> int:
    """Return the bytes of the layers' gradients at the beginning of their backward pass.

    A loop over layers has already allocated all of them. In the overlap schedule, gradients replace
    activations one by one, so that only one or two layers' gradients exist, unless reduced
    gradients are accumulated over several microbatches.
    """
    adds_sums = sizes.sums_early and sizes.config.train.microbatches > 1
    if not sizes.is_ordered or adds_sums or sizes.config.lora is not None:
        return in_layers
    return FLOAT32 * sizes.kinds[0].matrices * (1 if sizes.sums_early else 2)


def _stacks(sizes: Sizes, in_layers: int) -> int:
    """Return the bytes of the stacks that the overlap schedule makes of per-layer gradients.

    XLA makes the stacks one by one and then frees the per-layer arrays; the largest stack has more
    than half of all bytes.
    """
    return 3 * in_layers // 5 if sizes.is_ordered and sizes.sums_early else 0


def _gathered_in_layers(sizes: Sizes) -> int:
    """Return the bytes of gathered weights during the passes of the layers.

    If there is only one microbatch, ZeRO-1 and ZeRO-2 need the tables only before and after the
    layers' passes.
    """
    shard, microbatches = sizes.config.optim.shard, sizes.config.train.microbatches
    is_apart = shard in ('optimizer', 'gradients') and microbatches == 1
    return sizes.gathered - (sizes.itemsize * sizes.tables if is_apart else 0)


def _embedded(sizes: Sizes) -> int:
    """Return the bytes of the embedding's output gradient in fp32, with all of D on each GPU.

    2-D tensor parallelism gathers the gradient over `row`, in `train.dtype`.
    """
    rows = sizes.layout.num_shards('D')
    in_fp32 = FLOAT32 * rows * sizes.whole // sizes.itemsize
    return in_fp32 + (rows * sizes.whole if rows > 1 else 0)


def _in_backward(sizes: Sizes) -> tuple[int, int]:
    """Return the bytes that the backward pass of a layer needs: of the kind that needs the most.

    They are the weights that ZeRO-3 has gathered, and the temporary arrays.
    """
    size = sizes.itemsize if sizes.config.optim.shard == 'weights' else 0
    is_full = sizes.config.train.recompute == 'full'
    each = [(size * kind.matrices, kind.in_backward + is_full * kind.kept) for kind in sizes.kinds]
    return max(each, key=sum)
