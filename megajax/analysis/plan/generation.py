"""Predict memory and latency of text generation for each degree of tensor parallelism.

Each token reads all weights, except for experts that no sequence uses, and the KV cache once from
GPU memory, and waits for two all-reduces per layer and one for the embedding. These send one vector
per sequence, so they are latency-bound (Pope et al., 2022). The prompt is compute-bound. All
numbers are computed; nothing is timed.
"""

from fractions import Fraction

from pydantic import Field

from megajax.analysis.plan.experts import of_busiest
from megajax.analysis.plan.kernel_time import peak_flops, product_seconds
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.search import usable_memory
from megajax.analysis.plan.sizes import FLOAT32, Sizes
from megajax.base.result import Result
from megajax.core.config import Config, ConfigError, MeshConfig, ModelConfig
from megajax.core.config.divisors import divisors
from megajax.core.config.lora import without_adapters
from megajax.core.config.rules import incompatibilities
from megajax.core.counts.collective import HLO_DTYPES, REDUCE
from megajax.core.counts.loading import loading_bytes
from megajax.core.counts.parameters import BYTES, dim_sizes, elements, own_counts
from megajax.core.counts.products import products
from megajax.core.counts.prompts import padded_length, slots_of_cache
from megajax.core.counts.runs import Runs
from megajax.core.counts.windows import windows
from megajax.core.hardware.records import LinkName, hardware
from megajax.xla.hlo.program import Array
from megajax.xla.hlo.transfers import ring_bytes

PROMPT, TOKENS = 1024, 256  # tokens of the prompt and after it, if the model supports as many


class GenerationLine(Result):
    """Generation with one degree of tensor parallelism; bytes are per GPU."""

    model: int = Field(description='GPUs that share each matrix')
    weights: int = Field(description='bytes of the weights, in train.dtype')
    cache: int = Field(description='bytes of the KV cache of all sequences, at the last token')
    prefill: int = Field(
        default=0, description='bytes of a layer that reads the prompts, with their mask'
    )
    loading: int = Field(description='peak bytes while the weights are loaded')
    fits: bool
    first_token: float = Field(description='seconds to the first token: the prompts')
    token: float = Field(description='seconds per later token of each sequence, on average')
    sending: float = Field(description='part of the seconds that all-reduces take')
    tokens_per_second: float = Field(description='tokens of all sequences, after the first token')


class Generation(Result):
    """Generation of `tokens` tokens after prompts of `prompt` tokens, `batch` at once."""

    hardware: str
    prompt: int
    tokens: int
    batch: int
    reads_images: bool = Field(
        default=False, description='whether the model has an encoder; the times are without images'
    )
    lines: list[GenerationLine]


def plan_generation(
    config: Config,
    *,
    gpu: str,
    gpus: int | None,
    prompt: int | None = None,
    tokens: int | None = None,
    batch: int = 1,
    link: LinkName | None = None,
) -> Generation:
    """Plan text generation for every degree of tensor parallelism up to `gpus` (default: a host).

    By default, there are 256 tokens after a prompt of 1024, or as many as the model supports.
    Raises ConfigError for a model that does not generate text, or for more tokens than the model
    supports.
    """
    model, record = config.model, hardware(gpu, link)
    if model.is_bert:
        raise ConfigError(f'model.objective={model.objective}: the model does not generate text')
    prompt, tokens = _lengths(model.max_seq_len, prompt, tokens)
    if prompt + tokens > model.max_seq_len:
        raise ConfigError(
            f'--prompt {prompt} and --tokens {tokens} add up to {prompt + tokens} tokens, more '
            f'than model.max_seq_len={model.max_seq_len}: ask for fewer'
        )
    per_host = record.devices_per_host
    counts = [
        count
        for count in divisors(model.num_heads)
        if count <= (gpus or per_host) and (count <= per_host or count % per_host == 0)
    ]
    length = padded_length(prompt, model.max_seq_len)
    steps = [_step(config, count, length, batch) for count in counts]
    if problems := incompatibilities(steps[0]):
        raise ConfigError(*problems)
    parts = {'vision': config.vision, 'relevance': config.relevance}
    lines = [
        _line(step, step.model_copy(update=parts), Cluster.of(record, step.mesh.model), tokens)
        for step in steps
        if not incompatibilities(step)
    ]
    return Generation(
        hardware=record.name,
        prompt=prompt,
        tokens=tokens,
        batch=batch,
        reads_images=config.vision is not None,
        lines=lines,
    )


def _lengths(most: int, prompt: int | None, tokens: int | None) -> tuple[int, int]:
    """Return the tokens of the prompt and those after it, by default at most `most` together."""
    if tokens is None:
        tokens = min(TOKENS, most // 2 if prompt is None else most - prompt)
    if prompt is None:
        prompt = min(PROMPT, most - tokens)
    return max(1, prompt), max(1, tokens)


def _step(config: Config, count: int, prompt: int, batch: int) -> Config:
    """Return the config of a pass over the prompts, on `count` tensor-parallel GPUs."""
    model, experts = config.model, config.model.experts
    if experts is not None:  # which drop no tokens outside training
        without = experts.model_copy(update={'capacity': None, 'capacity_group': None})
        model = model.model_copy(update={'experts': without})
    others = {'mesh': MeshConfig(), 'model': model, 'vision': None, 'relevance': None}
    return changed(
        without_adapters(config).model_copy(update=others),
        mesh__model=count,
        train__batch_size=batch,
        train__microbatches=1,
        train__seq_len=prompt,
        train__recompute='none',
        train__schedule='1f1b',
        train__dtype=config.train.compute_dtype,
        train__fp8_scaling='delayed',
        train__overlap='none',
        train__unroll=False,
        optim__shard='none',
    )


def _line(step: Config, loaded: Config, cluster: Cluster, tokens: int) -> GenerationLine:
    """Return the line of a pass over prompts without images, with all weights of `loaded`."""
    model, rows, shards = step.model, step.train.batch_size, step.mesh.model
    size = BYTES[step.train.dtype]
    counts = own_counts(step)
    # A shard has keys and values of at least one complete head.
    own_heads = max(1, model.num_kv_heads // shards)
    of_token = size * rows * own_heads * elements('LUH', dim_sizes(model))
    sending = _sending(step, cluster, rows)
    cached, cached_at_end = _tokens_cached(step, tokens)
    # An embedding that is not tied to the head is looked up, not read as a whole.
    table = 0 if model.tie_embeddings else model.padded_vocab_size * model.hidden_size // shards
    of_experts = own_counts(step, of_experts=True).matrices
    active, used = _shares_of_experts(model, rows)
    read = _bytes(step) - size * (table + of_experts * (1 - used)) + of_token * cached
    multiplied = rows * (counts.matrices - table - of_experts * (1 - active))
    gpu = cluster.hardware
    reading = read / (gpu.memory_bandwidth * gpu.efficiency.memory)
    computing = 2 * multiplied / (peak_flops(step, cluster) * gpu.efficiency.matmul)
    token = max(reading, computing) + sending
    weights, cache = _bytes(loaded), int(of_token * cached_at_end)
    loading, prefill = loading_bytes(loaded, cast=True), _prefill_bytes(step, cluster)
    return GenerationLine(
        model=shards,
        weights=weights,
        cache=cache,
        prefill=prefill,
        loading=loading,
        fits=max(loading, weights + cache + prefill) <= usable_memory(cluster),
        first_token=_prompt(step, cluster),
        token=token,
        sending=sending,
        tokens_per_second=rows / token,
    )


def _bytes(config: Config) -> int:
    """Return the bytes of a model's weights per GPU: matrices in `train.dtype`, others in fp32."""
    counts = own_counts(config)
    return BYTES[config.train.dtype] * counts.matrices + 4 * (counts.all - counts.matrices)


def _prefill_bytes(step: Config, cluster: Cluster) -> int:
    """Return the bytes per GPU of a layer's arrays in the pass over the prompts.

    Padding is masked as a separate document. All layers read the same mask, and have one after the
    other what their attention or their MLP needs.
    """
    masked = changed(step, data__document_mask=True, model__attention_dropout=0.0)
    sizes = Sizes(masked, cluster.hardware.compute_capability)
    scores = (FLOAT32 + sizes.itemsize) * sizes.most_scores
    attention = sizes.queries + 2 * sizes.keys + sizes.heads + scores
    networks = [kind.up + kind.hidden for kind in sizes.kinds]
    if sizes.experts is not None:
        networks.append(networks.pop() + sizes.experts.rows + sizes.experts.results)
    # XLA adds the results of up to three sublayers to the residual stream at once, and a sublayer
    # reads the sum through a norm.
    return sizes.mask + 5 * sizes.whole + max(attention, *networks)


def _shares_of_experts(model: ModelConfig, rows: int) -> tuple[float, float]:
    """Return the share of a layer's experts that one token uses, and that `rows` tokens use.

    The choices of the tokens are taken to be independent, with equal loads.
    """
    if model.experts is None:
        return 1.0, 1.0
    active = model.experts.active / model.experts.count
    return active, 1 - (1 - active) ** rows


def _tokens_cached(step: Config, tokens: int) -> tuple[Fraction, Fraction]:
    """Return, per sequence and layer, the cached tokens on average over `tokens`, and the slots.

    A layer with a window caches only the tokens in the window.
    """
    prompt, average, last = step.train.seq_len, Fraction(), Fraction()
    slots = slots_of_cache(prompt + tokens)
    for window, share in windows(step.model).items():
        most = prompt + tokens if window is None else window
        start = min(prompt, most)
        grown = min(tokens, most - start)
        average += share * (start + grown * (1 - Fraction(grown, 2 * tokens)))
        last += share * (slots if window is None else min(slots, window))
    return average, last


def _prompt(step: Config, cluster: Cluster) -> float:
    """Return the seconds of a pass over the prompts; the head computes only the last tokens.

    The load of experts is taken to be balanced.
    """
    layers = (x for x in products(step, flash=True) if x.where != 'head' and x.phase == 'forward')
    computing = sum(product_seconds(of_busiest(x, step, 1.0), step, cluster) for x in layers)
    return computing + _sending(step, cluster, step.train.batch_size * step.train.seq_len)


def _sending(step: Config, cluster: Cluster, vectors: int) -> float:
    """Return the seconds of two all-reduces per layer and one for the embedding."""
    shards = step.mesh.model
    if shards == 1:
        return 0.0
    array = Array(HLO_DTYPES[step.train.dtype], (vectors, step.model.hidden_size))
    seconds = cluster.ring(step, 'model').seconds(REDUCE, ring_bytes(REDUCE, array, shards))
    return (2 * Runs.of_stages(step).layers + 1) * seconds
