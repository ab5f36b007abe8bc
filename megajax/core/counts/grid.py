"""The collectives of weight-stationary 2-D tensor parallelism, for the training step of a config.

They follow Pope et al. (2022), Efficiently Scaling Transformer Inference, section 3.2.2, for a grid
of `mesh.model_rows` x `mesh.model` devices: no weight moves, and a sublayer gathers its input over
`model`, scatters the result of its first matmul over `row`, gathers the input of its second matmul
over `row`, and scatters the result over `model`. The backward pass mirrors this. The paper treats
inference; for the embedding, the head, the loss and the norms, the collectives follow Megatron's
sequence parallelism over all devices of the grid.
"""

from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.counts.collective import (
    GATHER,
    HLO_DTYPES,
    REDUCE,
    SCATTER,
    Expected,
    Site,
    activation,
    axes_text,
    passes,
)
from megajax.core.counts.layers import Sublayer, layer
from megajax.core.counts.parameters import dim_sizes, elements, parameters
from megajax.core.counts.product import Phase
from megajax.core.counts.qk_norm import sums_over_heads
from megajax.core.counts.runs import Runs
from megajax.core.parallel.layout import Layout
from megajax.xla.hlo.program import Array

FP8_GATHERED = 'f8e4m3fn', 'f8e5m2'  # inputs of matmuls, and gradients of their results
_SOURCE = 'Pope et al. (2022), section 3.2.2'


def over_grid(config: Config) -> Iterator[Expected]:
    """Yield every collective over `row`, `model`, or both, except collectives of scalars."""
    runs = Runs.of_megatron(config)
    for phase in passes(config):
        for sublayer in layer(config.model):
            yield from _sublayer(config, sublayer, phase, runs.layers)
    yield from _embedding_and_head(config, runs)
    yield from _loss(config, runs)
    yield from _norms(config, runs)
    yield from sums_over_heads(config, runs.layers)
    yield from _vectors_over_row(config, runs)
    yield from _vectors(config)


def _send(
    config: Config, name: str, phase: Phase, axes: str, kind: str, array: Array, times: int
) -> Iterator[Expected]:
    if axis := axes_text(config, *axes.split('+')):
        yield Expected.over(config, Site(name, phase, axis), kind, array, times, _SOURCE)


def _sublayer(config: Config, sublayer: Sublayer, phase: Phase, runs: int) -> Iterator[Expected]:
    """Yield the collectives of a sublayer of all layers in one pass.

    If no norm reads a layer's output, recomputation skips it. The last matmul's input is then
    gathered only for the weight gradient, in the backward pass. With fp8, matmuls' operands are
    gathered in FP8, and their results are reduced in 16 bits.
    """
    name, residual = sublayer.name, _residual(config, over=('row',))
    first, second = _between(config, sublayer)
    steps = {
        'input': ('model', GATHER, residual),
        'first': ('row', SCATTER, first),
        'second': ('row', GATHER, second),
        'output': ('model', SCATTER, residual),
    }
    if phase == 'backward':
        steps = {
            step: (axis, GATHER if kind == SCATTER else SCATTER, array)
            for step, (axis, kind, array) in reversed(steps.items())
        }
    is_narrow, narrow = config.train.dtype == 'fp8', FP8_GATHERED[phase == 'backward']
    for step, (axis, kind, array) in steps.items():
        place = phase
        if is_narrow and kind == GATHER:
            array = array._replace(dtype=narrow)
        if phase == 'recompute' and name == 'mlp' and not config.overlap.repeats_outputs:
            if step == 'output':
                continue
            place = 'backward' if step == 'second' else phase
        yield from _send(config, name, place, axis, kind, array, runs)


def _residual(config: Config, over: tuple[str, ...] = ()) -> Array:
    """Return the residual stream [B, S, D]; `over` has 'row' if D is divided, 'model' if S is."""
    stream, mesh = activation(config), config.mesh
    rows, tokens, size = stream.shape
    tokens //= mesh.model if 'model' in over else 1
    return Array(stream.dtype, (rows, tokens, size // (mesh.model_rows if 'row' in over else 1)))


def _between(config: Config, sublayer: Sublayer) -> tuple[Array, Array]:
    """Return the result of a sublayer's first matmul and the input of its second, per column."""
    dtype, rows = HLO_DTYPES[config.train.dtype], (config.microbatch_rows, config.train.seq_len)
    sizes, columns = dim_sizes(config.model), config.mesh.model
    first, second = (
        Array(dtype, (*rows, elements(dims, sizes) // columns))
        for dims in (sublayer.first.outputs, sublayer.second.inputs)
    )
    return first, second


def _embedding_and_head(config: Config, runs: Runs) -> Iterator[Expected]:
    """Yield the collectives of the vocabularies, which are sharded over the entire grid."""
    full, in_row, in_column = (_residual(config, over) for over in ((), ('model',), ('row',)))
    yield from _send(config, 'embedding', 'forward', 'row+model', SCATTER, full, runs.embedding)
    # Two gathers (or scatters), one per axis, send as many bytes as one over the whole grid.
    sent: tuple[tuple[str, Phase, str, str, Array], ...] = (
        ('embedding', 'backward', 'model', GATHER, in_column),
        ('embedding', 'backward', 'row', GATHER, full),
        ('head', 'forward', 'row', GATHER, in_row),
        ('head', 'forward', 'model', GATHER, full),
        ('head', 'backward', 'model', SCATTER, full),
        ('head', 'backward', 'row', SCATTER, in_row),
    )
    for each in sent:
        yield from _send(config, *each, runs.head)


def _loss(config: Config, runs: Runs) -> Iterator[Expected]:
    """Yield all-reduces like Megatron's, for the maximum, the denominator and the label's logit.

    With label smoothing, a fourth one is for the mean logit.
    """
    tokens = Array('f32', activation(config).shape[:2])
    for _ in range(4 if config.loss.label_smoothing else 3):
        yield from _send(config, 'loss', 'forward', 'row+model', REDUCE, tokens, runs.head)


def _norms(config: Config, runs: Runs) -> Iterator[Expected]:
    """Yield the all-reduces of norms in all passes; each device has a part of every token.

    RMSNorm sums the squares; LayerNorm sums the tokens themselves as well. These statistics are
    saved, and the backward pass computes as many sums of the gradient.
    """
    model = config.model
    sums = 1 if model.norm == 'rmsnorm' else 2
    rows, tokens, _ = _residual(config, over=('model',)).shape
    in_layers = model.norms_of_layer * len(passes(config)) * runs.layers
    times = sums * (in_layers + 2 * runs.embedding)
    yield from _send(config, 'norm', 'forward', 'row', REDUCE, Array('f32', (rows, tokens)), times)


def _vectors(config: Config) -> Iterator[Expected]:
    """Yield the reduction over `model` of the partial gradients of norms and biases, once a step.

    Each device has the entries of its row of the grid.
    """
    shards = Layout.of(config).shards
    sizes = dim_sizes(config.model)
    count = sum(elements(x.dims, sizes, shards) for _, x in parameters(config.model) if x.summed)
    yield from _send(config, 'gradients', 'step', 'model', REDUCE, Array('f32', (count,)), 1)


def _vectors_over_row(config: Config, runs: Runs) -> Iterator[Expected]:
    """Yield the reduction over `row` of vectors between the two matmuls of a sublayer.

    Between the matmuls, each row of the grid has different sequences. The vectors are the biases of
    column-parallel matmuls and the norms of queries and keys; XLA sums the gradients of these norms
    over a device's heads last.
    """
    sizes, shards = dim_sizes(config.model), Layout.of(config).shards
    heads = {'query_norm': sizes['N'], 'key_norm': sizes['K']}
    for name, x in parameters(config.model):
        if x.is_stacked and not x.is_matrix and 'D' not in x.dims:
            count = elements(x.dims_of_layer, sizes, shards)
            if x.summed == 'N':
                count *= heads[name.split('.')[-2]] // config.mesh.model
            # Batch-split overlap computes each half of the batch separately.
            parts = 2 if config.train.overlap == 'batch_split' else 1
            array, times = Array('f32', (count,)), runs.layers * parts
            yield from _send(config, 'gradients', 'backward', 'row', REDUCE, array, times)
