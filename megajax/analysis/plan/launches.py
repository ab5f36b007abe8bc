"""Count launch overhead: the time of kernels that are too short to hide their launch.

A GPU starts kernels no faster than one per LAUNCH, whatever their work. The numbers of kernels were
counted in programs that jax 0.10.2 compiled for H100s (`benchmarks/plan_memory.py`).
"""

from collections.abc import Sequence

from megajax.analysis.plan.memory import num_logit_chunks
from megajax.core.config import Config
from megajax.core.counts.context import blocks_of_others
from megajax.core.counts.layers import num_with_experts
from megajax.core.counts.muon import pools_of
from megajax.core.counts.runs import Runs, layers_of_chunk, ticks
from megajax.core.counts.vision import runs_backward

# Seconds from one kernel to the next, launched back to back: Gray (2019), Getting Started with CUDA
# Graphs, measured 3.8 us per kernel on a V100, and 3.4 us in a graph, for kernels of 2.9 us.
LAUNCH = 3.8e-6
# Numbers of kernels: outside the layers, in each chunk of the loss, in each tick of a pipeline.
OF_STEP, OF_CHUNK, OF_TICK = 100, 27, 65
# Kernels of a tick that a chunk of one layer does not have, because it has no loop over layers.
OF_LOOP, OF_FULL_LOOP = 55, 79  # the second with full recomputation
# Kernels in a layer of a vision encoder, in a frozen encoder layer, in a cross-attention layer.
OF_ENCODER, OF_FROZEN, OF_CROSS = 135, 65, 140
# Additional kernels of a layer of experts compared with an MLP, if a grouped matmul is one kernel.
OF_EXPERTS = 72
OF_POOL = 35  # kernels of Muon's exchanges and iterations, in each pool
OF_ROUNDS = 90  # further kernels, if tokens may be sent in several rounds


def num_launches(config: Config) -> int:
    """Return the number of kernels of a step on each GPU.

    It is off by 5% on average and 15% at worst from compiled programs that fit in GPU memory
    (pipelines: 18% at worst).
    """
    model, mesh, train = config.model, config.mesh, config.train
    runs, is_full = Runs.of_stages(config), train.recompute == 'full'
    of_step = OF_STEP + OF_POOL * len(pools_of(config))
    of_chunks = OF_CHUNK * num_logit_chunks(config) * runs.head
    if config.overlap.in_order and config.overlap.unroll:
        return of_step + runs.layers * _of_layer_in_order(config) + of_chunks
    of_layer = 65 if is_full else 72  # the second also saves the statistics of norms
    is_one_row = mesh.sequence_parallel and config.microbatch_rows == 1
    if mesh.model > 1 and is_one_row and train.recompute == 'none':
        of_layer -= 8  # gathered arrays are not transposed
    of_layer += 6 if model.norm == 'layernorm' else 0
    of_layer += 8 if train.dtype == 'float32' else 0  # attention is several kernels
    of_layer += 15 if model.bias else 0
    of_layer += 15 if model.qk_norm else 0
    of_layer += 25 if model.has_dropout else 0
    of_layer += 15 if mesh.model > 1 else 0
    of_layer += 10 if mesh.model > 1 and mesh.sequence_parallel else 0
    of_layer += 20 if model.num_kv_heads < mesh.model else 0
    of_layer += 35 if config.overlap.is_split else 0
    of_layer += _of_sharding(config) + _of_adapters(config)
    if mesh.is_grid:
        of_layer += 40 if is_full else 25
    if mesh.stages > 1:
        of_layer += 22 if is_full else -2
    of_block = (18 if is_full else 13) + (4 if mesh.context_exchange == 'ring' else 0)
    of_layer += int(of_block * blocks_of_others(config))
    of_layer += 25 if mesh.exchanges_heads else 0
    of_ticks = _of_tick(config) * ticks(config) if mesh.stages > 1 else 0
    of_encoder = OF_ENCODER if config.vision and runs_backward(config) else OF_FROZEN
    of_images = runs.encoder * of_encoder + runs.cross * OF_CROSS
    of_experts = num_with_experts(model, runs.layers) * _of_experts(config)
    return of_step + of_ticks + runs.layers * of_layer + of_experts + of_images + of_chunks


def _of_tick(config: Config) -> int:
    """Return the kernels of a tick of a pipeline in addition to its layers' kernels."""
    if layers_of_chunk(config) > 1:
        return OF_TICK
    return OF_TICK - (OF_FULL_LOOP if config.train.recompute == 'full' else OF_LOOP)


def _of_experts(config: Config) -> int:
    """Return the kernels of a layer of experts in addition to a layer with an MLP."""
    experts = config.model.experts
    if experts is None:
        return 0
    has_rounds = experts.capacity is None and config.mesh.experts > 1
    return OF_EXPERTS + (OF_ROUNDS if has_rounds else 0)


def _of_layer_in_order(config: Config) -> int:
    """Return the kernels of all parts of a layer that is compiled separately."""
    model, train = config.model, config.train
    is_full = train.recompute == 'full'
    of_part = 44 if model.norm == 'layernorm' else 42
    of_part += 4 if model.bias else 0
    of_part += 15 if model.qk_norm else 0
    of_part += 25 if model.has_dropout else 0
    of_part += 10 if config.mesh.model > 1 else 0
    of_part += (10 if is_full else 0) + _of_adapters(config)
    of_part += 4 if is_full and config.optim.shard == 'weights' else 0
    is_summed = config.optim.shard in ('gradients', 'weights') and train.microbatches > 1
    added = 8 if model.bias and is_summed else 0  # kernels that add gradients of vectors
    # The halves of split tokens share attention's kernels.
    overlap = config.overlap
    shared = 15 if overlap.splits_tokens and overlap.num_parts > 1 else 0
    return overlap.num_parts * of_part - shared + added


def _of_adapters(config: Config) -> int:
    """Return the kernels of a layer's adapters (LoRA)."""
    if config.lora is None:
        return 0
    return (15 if config.train.recompute == 'full' else 12) * len(config.lora.targets)


def _of_sharding(config: Config) -> int:
    """Return the kernels of a layer that gather weights and sum gradients over `data`."""
    mesh, train = config.mesh, config.train
    if config.optim.shard != 'weights':
        return 3 if config.optim.shard == 'gradients' else 0
    kernels = 18 if mesh.tensor_parallel == 1 else 0
    kernels = 15 if train.recompute == 'full' else kernels
    kernels += 20 if config.overlap.is_split else 0
    return kernels + (20 if config.model.hidden_size % mesh.data_shards else 0)


def launch_seconds(work: Sequence[tuple[float, float]], count: int) -> float:
    """Return the launch overhead: the seconds that kernels take beyond their work.

    `work` lists for each part how often it runs, and its seconds over all runs. `count` kernels do
    the work, equally many in each run of a part (at least one), and no kernel takes less than
    LAUNCH.
    """
    each = LAUNCH * max(1.0, count / sum(times for times, _ in work))
    return sum(max(0.0, each * times - seconds) for times, seconds in work)
