"""A smaller model of the same family, mesh, layout and options, for execution on a CPU."""

import functools
import json
import math
import operator
from typing import Any

from megajax.core.config import Config
from megajax.core.config.divisors import divisors
from megajax.core.config.vision import RelevanceConfig, VisionConfig
from megajax.core.counts.expert_kernels import KERNEL_STEP
from megajax.core.counts.parameters import num_parameters
from megajax.core.counts.runs import layers_of_chunk

LARGEST = 10_000_000  # maximum number of parameters of a model that is executed unchanged
MOST_TOKENS = 8192  # maximum number of tokens in its step
MOST_DEVICES = 16  # maximum number of devices in its mesh, which one process simulates
HEAD_DIM = 64  # with smaller heads, Triton cannot tile every matmul
MAX_SEQ_LEN = 64
# With relevance: two regions, of which the budget gives 144 tokens to one and 64 to the other, and
# at most two images in a sequence.
REGIONS, TOTAL_TOKENS, MOST_IMAGES = (2, 1), 208, 2
VOCAB_SIZE = 1000  # padded to 1024 rows, so that the padding is also executed
NUM_EXPERTS = 8  # per layer, or two on each device if that is more


def shrink(config: Config) -> tuple[Config, list[str]]:
    """Return a config that a CPU can execute, and each changed key: `model.num_layers 32 -> 2`.

    The data axis is reduced only if the mesh has more than MOST_DEVICES devices.
    """
    if _is_small(config):
        return config, []
    written = config.model_dump(mode='json')
    if config.model.query_scale == config.model.head_dim**-0.5:
        del written['model']['query_scale']  # so that it follows from the new head dim
    changes = []
    for path, value in _changes(config).items():
        *sections, key = path.split('.')
        section = functools.reduce(operator.getitem, sections, written)
        if section[key] != value:
            before, after = (json.dumps(x).replace('"', '') for x in (section[key], value))
            changes.append(f'{path} {before} -> {after}')
            section[key] = value
    return Config.model_validate(written, strict=False), changes


def _is_small(config: Config) -> bool:
    return (
        num_parameters(config.model) <= LARGEST
        and config.train.batch_size * config.train.seq_len <= MOST_TOKENS
        and config.mesh.num_devices <= MOST_DEVICES
    )


def _changes(config: Config) -> dict[str, Any]:
    mesh = _mesh(config)
    data, rows = mesh['mesh.replicas'] * mesh['mesh.data'], mesh['mesh.model_rows']
    stages, chunks = mesh['mesh.stages'], mesh['mesh.virtual_stages']
    # Twice as many microbatches as stages, so that in some ticks all stages run both passes.
    microbatches = stages * min(config.train.microbatches // config.mesh.stages, 2)
    kv_heads, heads = _heads(config, mesh)
    # Two chunks for each context shard, which sequence parallelism divides.
    divisor = mesh['mesh.context'] * math.lcm(2, mesh['mesh.model'])
    longest = MAX_SEQ_LEN + _image_tokens(config)
    seq_len = min(config.train.seq_len, math.ceil(longest / divisor) * divisor)
    # If the data shards divide the size, they also divide the new one; if not, they do not.
    divisor = rows * (1 if _is_uneven(config) else mesh['mesh.data'])
    batch_rows = min(config.microbatch_rows, 2 * rows)
    changes: dict[str, Any] = mesh | {
        'model.num_layers': stages * chunks * _layers_of_chunk(config),
        'model.hidden_size': min(config.model.hidden_size, math.lcm(HEAD_DIM, divisor) * 2),
        'model.num_heads': heads,
        'model.num_kv_heads': kv_heads,
        'model.head_dim': _head_dim(config),
        'model.ffn_size': min(config.model.ffn_size, 4 * math.lcm(HEAD_DIM, mesh['mesh.model'])),
        'model.vocab_size': min(config.model.vocab_size, VOCAB_SIZE),
        'model.max_seq_len': seq_len,
        'train.seq_len': seq_len,
        'train.batch_size': batch_rows * data * microbatches,
        'train.microbatches': microbatches,
        'mesh.data': data,
    }
    changes |= _of_windows(config, seq_len, 2 * mesh['mesh.context'])
    changes |= _of_experts(config, mesh, seq_len)
    return changes | _of_encoder(config, changes['model.head_dim'], seq_len)


def _image_tokens(config: Config) -> int:
    """Return the tokens of images, if relevance gives each image a fixed number of tokens."""
    if config.relevance is None or config.vision is None:
        return 0
    return min(config.vision.images, MOST_IMAGES) * TOTAL_TOKENS


def _head_dim(config: Config) -> int:
    """Return the head dim.

    It stays if longrope has a divisor for each rotary pair, and if an odd number of the smaller
    head's dims would be rotated.
    """
    scalings = [layer.rope_scaling for layer in config.model.pattern]
    if any(scaling and scaling.type == 'longrope' for scaling in scalings):
        return config.model.head_dim
    small = min(config.model.head_dim, HEAD_DIM)
    rotated = int(small * config.model.rotary_fraction)
    return small if rotated and rotated % 2 == 0 else config.model.head_dim


def _layers_of_chunk(config: Config) -> int:
    """Return the layers of two periods of the pattern without repeats, and one that is left over.

    If the first layers have an MLP instead of experts, one of these is added.
    """
    first, period = config.model.first_dense, len(config.model.pattern)
    periods, left_over = divmod(layers_of_chunk(config) - first, period)
    return min(first, 1) + min(periods, 2) * max(len(config.model.layers), 1) + min(left_over, 1)


def _of_windows(config: Config, seq_len: int, chunks: int) -> dict[str, Any]:
    """Return one layer per entry of the pattern, and windows of a quarter of `seq_len` or more.

    A window that is longer (or shorter) than the sequence stays so. With context parallelism, the
    same holds for one of the sequence's `chunks`.
    """
    model, before, whole = config.model, 2 * config.mesh.context, config.train.seq_len

    def shorter(window: int | None) -> int | None:
        if window is None or window >= whole:
            return window
        size = min(window, max(window * seq_len // whole, seq_len // 4))
        is_in_chunk = before > 2 and window <= whole // before
        return min(size, seq_len // chunks) if is_in_chunk else size

    entries = [entry.model_dump(exclude={'repeat'}, mode='json') for entry in model.layers]
    for entry in entries:
        if 'window' in entry:
            entry['window'] = shorter(entry['window'])
    return {'model.window': shorter(model.window), 'model.layers': entries}


def _of_experts(config: Config, mesh: dict[str, int], seq_len: int) -> dict[str, Any]:
    """Return fewer and smaller experts, equally many on each device.

    A device that has one expert keeps one, and a device with several keeps several; a token still
    uses some or all of them. Sizes stay multiples of KERNEL_STEP features if they were, so that the
    GPU uses the same kernels.
    """
    experts = config.model.experts
    if experts is None:
        return {}
    devices, model = mesh['mesh.experts'], mesh['mesh.model']
    of_device = min(experts.count // config.mesh.experts, max(NUM_EXPERTS // devices, 2))
    least = min(experts.active, 2) + (experts.active < experts.count)
    count = devices * max(of_device, math.ceil(least / devices))
    size = min(experts.count // experts.groups, 2)
    groups = max(x for x in divisors(count) if x <= min(experts.groups, count // size))
    active_groups = min(experts.active_groups, groups)
    if experts.active_groups < experts.groups:
        active_groups = min(active_groups, max(groups // 2, 1))
    active = min(experts.active, 2, active_groups * (count // groups))
    of_shard = experts.ffn_size // config.mesh.model
    changes = {
        'count': count,
        'active': count if experts.active == experts.count else active,
        'groups': groups,
        'active_groups': active_groups,
        'ffn_size': model * min(of_shard, KERNEL_STEP + of_shard % KERNEL_STEP),
        'shared_ffn_size': min(experts.shared_ffn_size, 4 * math.lcm(HEAD_DIM, model)),
        'first_dense': min(experts.first_dense, 1),
        'capacity_group': _capacity_group(config, mesh['mesh.context'], seq_len),
    }
    return {f'model.experts.{key}': value for key, value in changes.items()}


def _capacity_group(config: Config, context: int, seq_len: int) -> int | None:
    """Return the size of a capacity group: one device's part of a sequence, or half of it."""
    experts = config.model.experts
    assert experts is not None
    if experts.capacity_group is None:
        return None
    parts = 2 * context if context > 1 else 1
    whole = config.train.seq_len // (2 * config.mesh.context if config.mesh.context > 1 else 1)
    length = seq_len // parts
    return length if whole == experts.capacity_group or length % 2 else length // 2


def _of_encoder(config: Config, head_dim: int, seq_len: int) -> dict[str, Any]:
    """Return two encoder layers with at most two taps, and images that fit into the sequence."""
    vision = config.vision
    if vision is None:
        return {}
    heads, taps = min(vision.num_heads, 2), min(len(vision.deepstack), 2)
    images = min(vision.images, seq_len // 4)
    patches = min(vision.max_patches, vision.unit * (seq_len // 4 // images))
    changes = {
        'vision.num_layers': min(vision.num_layers, 2),
        'vision.num_heads': heads,
        'vision.hidden_size': min(vision.hidden_size, heads * HEAD_DIM),
        'vision.ffn_size': min(vision.ffn_size, 4 * HEAD_DIM),
        'vision.patch_size': min(vision.patch_size, 8),
        'vision.positions': min(vision.positions, 8),
        'vision.deepstack': list(range(taps)),
        'vision.images': images,
        'vision.max_patches': patches,
        'vision.min_patches': 0,
        'vision.image_token': min(vision.image_token, VOCAB_SIZE - 1),
        # A layer of cross-attention after each period of the pattern.
        'vision.cross_every': max(len(config.model.layers), 1)
        if vision.is_crossed
        else vision.cross_every,
    }
    if config.relevance is not None:
        changes |= _of_relevance(config.relevance, vision, seq_len)
    if config.model.position == 'mrope':
        pairs = head_dim // 2
        others = [
            section * pairs // (config.model.head_dim // 2)
            for section in config.model.mrope_section[1:]
        ]
        changes['model.mrope_section'] = [pairs - sum(others), *others]
    return changes


def _of_relevance(relevance: RelevanceConfig, vision: VisionConfig, seq_len: int) -> dict[str, Any]:
    """Return at most two regions per image, and images whose tokens fit into the sequence."""
    regions = REGIONS if relevance.num_regions > 1 else relevance.regions
    total = min(relevance.total_tokens, TOTAL_TOKENS)
    return {
        'relevance.regions': list(regions),
        'relevance.total_tokens': total,
        'relevance.scorer_size': min(relevance.scorer_size, HEAD_DIM),
        'vision.images': min(vision.images, max(seq_len // total, 1)),
        'vision.max_patches': vision.max_patches // relevance.num_regions * math.prod(regions),
    }


def _mesh(config: Config) -> dict[str, int]:
    """Return the sizes of the mesh axes; `mesh.data` is the number of data shards per replica."""
    mesh = config.mesh
    rows, model, replicas, shards = mesh.model_rows, mesh.model, mesh.replicas, mesh.data_shards
    stages, chunks, context = mesh.stages, min(mesh.virtual_stages, 2), mesh.context
    if stages * context > 1 and mesh.num_devices > MOST_DEVICES:
        model, replicas, shards = min(model, 2), min(replicas, 2), min(shards, 2)
        context = min(context, 2 if stages > 1 else 4)
        stages = min(stages, max(2, MOST_DEVICES // (replicas * shards * context * model)))
    if mesh.is_grid and mesh.tensor_parallel > MOST_DEVICES:
        rows, model = 2, min(model, 4)
    fits = max(2, MOST_DEVICES // (stages * context * rows * model))
    if replicas * shards > fits:
        replicas = min(replicas, 2)
        shards = min(shards, max(2, fits // replicas))
        shards = 3 * min(mesh.experts, 2) if _is_uneven(config) else shards
    return {
        'mesh.stages': stages,
        'mesh.virtual_stages': chunks,
        'mesh.context': context,
        'mesh.replicas': replicas,
        'mesh.data': shards,
        'mesh.experts': _expert_shards(config, shards),
        'mesh.model_rows': rows,
        'mesh.model': model,
    }


def _expert_shards(config: Config, shards: int) -> int:
    """Return the expert-parallel degree; if several data shards share experts, they still do."""
    mesh = config.mesh
    if shards == mesh.data_shards:
        return mesh.experts
    most = max(shards // 2, 2) if mesh.experts < mesh.data_shards else shards
    most = 2 if _is_uneven(config) else most
    return max(x for x in divisors(shards) if x <= min(mesh.experts, most))


def _is_uneven(config: Config) -> bool:
    """Return whether matrices are padded so that the data shards divide them."""
    return config.optim.shard != 'none' and bool(config.model.hidden_size % config.mesh.data_shards)


def _heads(config: Config, mesh: dict[str, int]) -> tuple[int, int]:
    """Return the smallest numbers of key/value and query heads that keep the kind of sharding.

    Each device has complete key/value heads, or a part of one head, as in the original config.
    """
    model, shards = config.model, mesh['mesh.model']
    if config.mesh.exchanges_heads:
        shards *= mesh['mesh.context']
    kv_heads = (
        max(1, model.num_kv_heads * shards // config.mesh.model)
        if model.num_kv_heads < config.mesh.model
        else max(shards, min(model.num_kv_heads, 2))
    )
    per_device = max(kv_heads, shards)
    is_grouped = model.num_kv_heads < model.num_heads and model.num_heads > per_device
    return kv_heads, per_device * 2 if is_grouped else per_device
