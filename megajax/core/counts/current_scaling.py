"""The max-reductions of FP8 current scaling: Transformer Engine's, and megajax's.

Transformer Engine reduces the amax of a tensor over its shards only if they are gathered in FP8 and
therefore need one scale: weights that ZeRO gathers and, with sequence parallelism, the inputs of
column-parallel matmuls and the gradients of row-parallel ones. All other shards have their own
scales. In megajax, all tensor-parallel shards of a tensor have one scale. In both, each data shard
has its own scales of activations.
"""

from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.counts.collective import HLO_DTYPES, REDUCE, Expected, Site, axes_text, passes
from megajax.core.counts.data_parallel import SHARDS
from megajax.core.counts.layers import layer
from megajax.core.counts.parameters import dim_sizes, dtype_at_rest, parameters
from megajax.core.counts.runs import Runs
from megajax.xla.hlo.program import Array

AMAX = 'amax'  # the site, and the scope in a step
# Files and classes of Transformer Engine, below transformer_engine/pytorch.
OPERANDS = 'module/linear.py Linear._customize_quantizers_float8_current_scaling'
WEIGHTS = 'tensor/utils.py cast_master_weights_to_fp8'
ONE_SCALE = 'the tensor-parallel shards of a tensor have one scale'


def of_transformer_engine(config: Config) -> Iterator[Expected]:
    """Yield the max-reductions of Megatron-LM with `--fp8-recipe tensorwise`."""
    if not config.train.has_current_scales:
        return
    if config.mesh.sequence_parallel and not config.mesh.is_grid:
        times = len(layer(config.model)) * Runs.of_megatron(config).layers
        yield from _of_operands(config, Array('f32', ()), times, 'model', OPERANDS)
    if config.optim.shard != 'none':
        yield from _of_weights(config, axes_text(config, *SHARDS), WEIGHTS)


def of_step(config: Config) -> Iterator[Expected]:
    """Yield the max-reductions that a step of megajax runs at most."""
    if not config.train.has_current_scales:
        return
    # Only sequence parallelism shards the residual stream, the operand at one end of each sublayer.
    sharded = 2 if config.mesh.sequence_parallel else 1
    times = sharded * len(layer(config.model)) * Runs.of_stages(config).layers
    array = Array(HLO_DTYPES[config.train.dtype], ())
    axis = axes_text(config, 'row', 'model')
    yield from _of_operands(config, array, times, axis, ONE_SCALE)
    at_rest = () if config.optim.shard == 'none' else SHARDS
    yield from _of_weights(config, axes_text(config, *at_rest, 'row', 'model'), ONE_SCALE)


def _of_operands(
    config: Config, array: Array, times: int, axis: str, source: str
) -> Iterator[Expected]:
    """Yield the reductions of a single number each, `times` in each pass."""
    for phase in passes(config) if axis else ():
        yield Expected.over(config, Site(AMAX, phase, axis), REDUCE, array, times, source)


def _of_weights(config: Config, axis: str, source: str) -> Iterator[Expected]:
    """Yield the reduction of one number per matrix of a stage's layers."""
    layers = dim_sizes(config.model)['L'] // config.mesh.stages
    matrices = [x for _, x in parameters(config.model) if x.dims[0] == 'L' and x.is_matrix]
    if axis:
        dtype = HLO_DTYPES[dtype_at_rest(matrices[0], config)]
        array = Array(dtype, (layers * len(matrices),))
        yield Expected.over(config, Site(AMAX, 'step', axis), REDUCE, array, 1, source)
