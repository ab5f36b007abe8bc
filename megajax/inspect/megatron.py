"""The collectives that Megatron-LM places by hand, for the training step of a config.

They follow megatron-core's code (layers.py, mappings.py, cross_entropy.py, finalize_model_grads.py), with weights and optimizer state
replicated over `data`, and with this project's padding of the vocabulary. B batch rows of a microbatch on a data shard, S sequence,
D model, V vocabulary (padded), N query heads, K key/value heads, H head dim, F feed-forward, L layers.
"""

import dataclasses
from collections.abc import Iterator

from megajax.config import Config, num_parameters
from megajax.inspect.collectives import ring_bytes
from megajax.inspect.hlo import Array
from megajax.inspect.result import Phase
from megajax.inspect.sites import Site

_DTYPES = {'float32': 'f32', 'bfloat16': 'bf16', 'float16': 'f16'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """One collective of a step: the whole array that is gathered, reduced or scattered over a group of `size` devices."""

    site: Site
    kind: str
    array: Array
    times: int
    size: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends each time."""
        return ring_bytes(self.kind, self.array, self.size)


def expected(config: Config) -> list[Expected]:
    """Every collective of a step of `config`, but for those of single numbers."""
    over_model = [*_embedding(config), *_layers(config), *_head(config), *_loss(config), *_vectors(config)] if config.mesh.model > 1 else []
    return over_model + ([*_gradients(config)] if config.mesh.data > 1 else [])


def _activation(config: Config) -> Array:
    return Array(_DTYPES[config.train.dtype], (config.microbatch_rows, config.train.seq_len, config.model.hidden_size))


def _over_model(config: Config, name: str, phase: Phase, kinds: tuple[str, ...], array: Array, times: int = 1) -> Iterator[Expected]:
    site, times = Site(name, phase, 'model'), times * config.train.microbatches
    for kind in kinds:
        yield Expected(site=site, kind=kind, array=array, times=times, size=config.mesh.model)


GATHER, REDUCE, SCATTER = 'all-gather', 'all-reduce', 'reduce-scatter'


def _embedding(config: Config) -> Iterator[Expected]:
    if config.mesh.sequence_parallel:
        yield from _over_model(config, 'embedding', 'forward', (SCATTER,), _activation(config))
        yield from _over_model(config, 'embedding', 'backward', (GATHER,), _activation(config))
    else:
        yield from _over_model(config, 'embedding', 'forward', (REDUCE,), _activation(config))


def _layers(config: Config) -> Iterator[Expected]:
    sequence_parallel, layers = config.mesh.sequence_parallel, config.model.num_layers
    forward = (GATHER, SCATTER) if sequence_parallel else (REDUCE,)
    # With sequence parallelism Megatron keeps a layer's input sharded and gathers it again for the weight gradient.
    backward = (GATHER, SCATTER, GATHER) if sequence_parallel else (REDUCE,)
    few_kv_heads = config.model.num_kv_heads < config.mesh.model
    rows, length, _ = _activation(config).shape
    columns = (config.model.num_heads + 2 * config.model.num_kv_heads) * config.model.head_dim
    qkv = Array(_DTYPES[config.train.dtype], (rows, length, columns))
    for name in ('attention', 'mlp'):
        passes: list[tuple[Phase, tuple[str, ...]]] = [('forward', forward), ('backward', backward)]
        passes += [('recompute', forward)] if config.train.recompute == 'full' else []
        for phase, kinds in passes:
            yield from _over_model(config, name, phase, kinds, _activation(config), layers)
            if name == 'attention' and few_kv_heads:
                yield from _over_model(config, name, phase, (SCATTER,) if phase == 'backward' else (GATHER,), qkv, layers)


def _head(config: Config) -> Iterator[Expected]:
    if config.mesh.sequence_parallel:
        yield from _over_model(config, 'head', 'forward', (GATHER,), _activation(config))
        yield from _over_model(config, 'head', 'backward', (SCATTER, GATHER), _activation(config))
    else:
        yield from _over_model(config, 'head', 'backward', (REDUCE,), _activation(config))


def _loss(config: Config) -> Iterator[Expected]:
    # Maximum, denominator, label's logit. Megatron's label smoothing is wrong above one device; the mean logit makes it right.
    count = 4 if config.loss.label_smoothing else 3
    yield from _over_model(config, 'loss', 'forward', (REDUCE,) * count, Array('f32', _activation(config).shape[:2]))


def _vectors(config: Config) -> Iterator[Expected]:
    """Gradients of replicated vectors of which each device sees a part: of the sequence, or of the heads."""
    model = config.model
    per_norm = 2 if model.norm == 'layernorm' else 1
    sizes = [model.head_dim] * 2 * per_norm * model.num_layers if model.qk_norm else []
    if config.mesh.sequence_parallel:
        vectors = (2 * model.num_layers + 1) * per_norm + (2 * model.num_layers if model.bias else 0)
        sizes += [model.hidden_size] * vectors
    if sizes:
        array = Array('f32', (sum(sizes),))
        yield Expected(site=Site('gradients', 'step', 'model'), kind=REDUCE, array=array, times=1, size=config.mesh.model)


def _gradients(config: Config) -> Iterator[Expected]:
    yield Expected(
        site=Site('gradients', 'step', 'data'),
        kind=REDUCE,
        array=Array('f32', (num_parameters(config.model, padded=True, shards=config.mesh.model),)),
        times=1,
        size=config.mesh.data,
    )
