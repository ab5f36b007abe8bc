"""Count the bytes that the memory-bound operations of a step read and write on a GPU.

t is the number of GPUs of a tensor-parallel group.
"""

import dataclasses
from collections.abc import Iterator
from math import prod

from megajax.analysis.plan.encoder import as_model
from megajax.analysis.plan.expert_memory import ExpertArrays
from megajax.core.config import Config
from megajax.core.counts.flash import HOPPER, uses_flash
from megajax.core.counts.layers import Sublayer, cross_layer, num_in_stack, stacks
from megajax.core.counts.muon import pools_of
from megajax.core.counts.parameters import BYTES, dim_sizes, elements, megatron_counts
from megajax.core.counts.runs import Runs, ticks
from megajax.core.counts.vision import runs_backward
from megajax.core.counts.windows import scored_keys
from megajax.core.hardware.records import Capability
from megajax.core.parallel.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """A memory-bound operation."""

    name: str
    bytes: float  # bytes that one run reads and writes
    times: float  # runs in a step


def traffic_of_layers(
    config: Config,
    capability: Capability | None = HOPPER,
    *,
    flash: bool,
    in_buffers: bool = True,
    at_experts: Config | None = None,
    is_frozen: bool = False,
) -> Iterator[Traffic]:
    """Yield the operations of the layers; a fused one reads and writes each array once.

    `in_buffers` is whether tokens are sent to experts in buffers that have room for more than a
    balanced load. `at_experts` has the layout of the experts, if it differs from the other layers'.
    `capability` is the GPU's. Layers with `is_frozen` have no backward pass.
    """
    times = Runs.of_stages(config).layers
    attention = stacks(config.model)[0].sublayer
    yield from _around_matmuls(config, attention, times, is_frozen=is_frozen)
    for sublayer, dim in stacks(config.model)[1:]:
        runs = num_in_stack(config.model, dim, times)
        if sublayer.name == 'mlp':
            yield _activation(config, sublayer, runs, is_frozen=is_frozen)
        else:
            there = at_experts or config
            yield from _of_experts(config, there, runs, capability, in_buffers=in_buffers)
    if not flash:
        keys, _ = scored_keys(config.model, config.train.seq_len)
        yield _softmax(config, float(keys), times, is_frozen=is_frozen)


def traffic_of_images(
    config: Config, *, flash: bool, capability: Capability | None
) -> Iterator[Traffic]:
    """Yield the operations of a vision encoder's layers, and of cross-attention layers, if any.

    `flash` is whether layers have a flash kernel where it supports their heads; cross-attention has
    none.
    """
    vision = config.vision
    if vision is None:
        return
    encoder, is_frozen = as_model(config), not runs_backward(config)
    flash = flash and uses_flash(encoder, capability)
    yield from traffic_of_layers(encoder, flash=flash, is_frozen=is_frozen)
    if times := Runs.of_stages(config).cross:
        attention, mlp = cross_layer(config.model)
        yield from _around_matmuls(config, attention, times)
        yield _activation(config, mlp, times)
        yield _softmax(config, vision.images * vision.vectors, times)


def _around_matmuls(
    config: Config, attention: Sublayer, times: int, *, is_frozen: bool = False
) -> Iterator[Traffic]:
    """Yield the operations of layers before and after their matmuls with weights."""
    # Between the two matmuls of a sublayer, 2-D tensor parallelism shards the batch.
    model, t, tokens = config.model, config.mesh.tensor_parallel, _tokens(config)
    size = BYTES[config.train.dtype]
    residual = tokens * model.hidden_size * size / (t if config.mesh.sequence_parallel else 1)
    heads = tokens * elements(attention.first.outputs, dim_sizes(model)) * size / t
    forwards, backwards = _passes(config, is_frozen=is_frozen)
    # Norms read and write one array; adding to the residual reads two and writes one. The backward
    # pass reads one more array.
    of_norms = model.norms_of_layer * (2 * forwards + 3 * backwards) * residual
    yield Traffic(name='norms', bytes=of_norms, times=times)
    yield Traffic(name='residual', bytes=2 * (3 * forwards + 2 * backwards) * residual, times=times)
    yield Traffic(name='heads', bytes=2 * (forwards + backwards) * heads, times=times)


def _softmax(config: Config, keys: float, times: int, *, is_frozen: bool = False) -> Traffic:
    """Return the softmax of layers whose queries have this many keys, without a flash kernel."""
    model, size = config.model, BYTES[config.train.dtype]
    scores = _tokens(config) * model.num_heads / config.mesh.tensor_parallel * keys * size
    forwards, backwards = _passes(config, is_frozen=is_frozen)
    if config.train.recompute == 'selective' and backwards:
        forwards = 2
    dropout = 2 if model.attention_dropout else 0
    moved = (2 + dropout) * forwards + (3 + dropout) * backwards
    return Traffic(name='softmax', bytes=moved * scores, times=times)


def _activation(config: Config, mlp: Sublayer, times: int, *, is_frozen: bool = False) -> Traffic:
    """Return the activation of layers with this MLP."""
    size, t = BYTES[config.train.dtype], config.mesh.tensor_parallel
    hidden = _tokens(config) * elements(mlp.second.inputs, dim_sizes(config.model)) * size / t
    moved = _moved_in_activation(config, is_frozen=is_frozen)
    return Traffic(name='activation', bytes=moved * hidden, times=times)


def _moved_in_activation(config: Config, *, is_frozen: bool) -> int:
    """Return how many arrays of the size of its result an activation reads and writes."""
    forwards, backwards = _passes(config, is_frozen=is_frozen)
    is_gated = config.model.is_gated
    return (3 if is_gated else 2) * forwards + (5 if is_gated else 3) * backwards


def _passes(config: Config, *, is_frozen: bool) -> tuple[int, int]:
    """Return how often a microbatch runs a layer forward, with recomputation, and backward."""
    return (1, 0) if is_frozen else (2 if config.train.recompute == 'full' else 1, 1)


def _tokens(config: Config) -> int:
    """Return the tokens of a microbatch on a device, before sequence parallelism."""
    return config.microbatch_rows * config.train.seq_len // config.mesh.context


def _of_experts(
    config: Config,
    at_experts: Config,
    times: int,
    capability: Capability | None,
    *,
    in_buffers: bool,
) -> Iterator[Traffic]:
    """Yield the operations of this many runs of layers of experts."""
    layout, tokens, size = Layout.of(at_experts), _tokens(at_experts), BYTES[config.train.dtype]
    experts = ExpertArrays.of(at_experts, layout, tokens, size, capability, in_buffers=in_buffers)
    assert experts is not None
    moved = _moved_in_activation(config, is_frozen=False)
    yield Traffic(name='activation', bytes=moved * experts.hidden, times=times)
    sent = _moved_in_buffers(experts) if in_buffers else _moved_exactly(config, experts)
    passes = sum(_passes(config, is_frozen=False))
    yield Traffic(name='dispatch', bytes=passes * (sent + 4 * experts.routing), times=times)


def _moved_in_buffers(experts: ExpertArrays) -> float:
    """Return the bytes in which a pass moves rows to the experts and back, over full buffers."""
    return 4 * (experts.rows + experts.sent) + 2 * experts.results


def _moved_exactly(config: Config, experts: ExpertArrays) -> float:
    """Return the bytes in which Megatron-Core moves rows to the experts and back in a pass.

    A permutation reads each token once and writes a row for each of its experts. With expert
    parallelism, the received rows are sorted by expert. In FP8, another copy pads the rows of each
    expert to the sizes of FP8 matmuls (`TEGroupedMLP`). All of this is undone after the matmuls.
    """
    assert config.model.experts is not None
    of_tokens = experts.results / config.model.experts.active
    copies = (experts.sent > 0) + (config.train.dtype == 'fp8')
    return 2 * (experts.results + of_tokens) + 4 * copies * experts.rows


def traffic_of_loss(config: Config) -> Iterator[Traffic]:
    """Yield the operations of the loss."""
    mesh = config.mesh
    tokens = config.microbatch_rows * config.train.seq_len / mesh.context / mesh.stages
    logits = 4 * tokens * config.model.padded_vocab_size / mesh.tensor_parallel
    # The maximum and the sum read the logits; the gradient is read and written.
    yield Traffic(name='loss', bytes=4 * logits, times=config.train.microbatches)


def traffic_of_weights(
    config: Config, *, adds_shards: bool = False, accumulated_bytes: int = 12
) -> Iterator[Traffic]:
    """Yield the operations on weights, gradients and moments.

    Gradients of microbatches are accumulated at `accumulated_bytes` per element: in full, or from
    ZeRO-2 on and with `adds_shards`, only each data shard's part.
    """
    mesh, optim = config.mesh, config.optim
    every, learned, of_replica = (
        megatron_counts(config.model, mesh.model, mesh.stages, learned=only, experts=experts)
        for only, experts in ((False, mesh.experts), (True, mesh.experts), (True, 1))
    )
    count = learned.all / mesh.model_rows
    # ZeRO shards experts over the devices that have the same experts.
    shards = mesh.data_shards * mesh.context
    own = of_replica.all / mesh.model_rows / shards if optim.shard != 'none' else count
    microbatches = config.train.microbatches
    if BYTES[config.train.dtype] == 2:
        # Frozen matrices under adapters are stored in the compute dtype.
        as_stored = every.matrices - learned.matrices if config.lora else 0
        cast = (every.all - as_stored) / mesh.model_rows
        yield Traffic(name='cast of weights', bytes=6 * cast, times=1)
    if microbatches > 1:
        adds_shards = adds_shards or optim.shard in ('gradients', 'weights')
        yield Traffic(
            name='gradient accumulation',
            bytes=accumulated_bytes * (own if adds_shards else count),
            times=ticks(config) / mesh.virtual_stages,
        )
    yield Traffic(name='gradient norm', bytes=4 * own, times=1)
    # The parameter and its moments are read and written; the gradient is read.
    pools = pools_of(config)
    of_muon = sum(pool.matrices * pool.piece for pool in pools)
    moments = 2 * BYTES[optim.moments_dtype]
    yield Traffic(name=optim.kind, bytes=(12 + 2 * moments) * own - moments * of_muon, times=1)
    if of_muon:
        # The 16-bit matrices change their layout before and after each exchange. Between its
        # matmuls, an iteration reads and writes the matrices and their squares.
        whole = sum(pool.whole * prod(pool.form.shape) for pool in pools)
        squares = sum(pool.whole * pool.form.shape[0] ** 2 for pool in pools)
        in_iterations = optim.ns_steps * (3 * whole + 3 * squares)
        moved = 8 * sum(prod(pool.gathered) for pool in pools)
        size = 4 if config.train.dtype == 'float32' else 2
        yield Traffic(name='Muon', bytes=size * (moved + in_iterations), times=1)
