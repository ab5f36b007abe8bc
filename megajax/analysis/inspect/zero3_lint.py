"""Check that ZeRO-3 frees the weights that it gathers."""

from collections.abc import Iterator, Sequence
from math import prod

from megajax.analysis.inspect.result import Finding
from megajax.analysis.inspect.sites import site_of
from megajax.core.config import Config
from megajax.core.counts.data_parallel import with_padding
from megajax.core.counts.parameters import dim_sizes, parameters, shape_of
from megajax.core.parallel.layout import Layout
from megajax.xla.hlo.collectives import Collective
from megajax.xla.hlo.loop_residuals import stored_in
from megajax.xla.hlo.program import Program

RULE = 'gathered weights kept'


def kept_weights(
    config: Config, program: Program, placed: Sequence[Collective]
) -> Iterator[Finding]:
    """Yield an error for each gathered weight that is in memory for all layers at once.

    Either one all-gather makes the weights of all layers, or the loop over layers saves each
    layer's gathered weights as residuals for the backward pass.
    """
    if config.optim.shard != 'weights':
        return
    stacked = _stacked(config)
    layers = min(stacked.values(), default=0)
    for collective in placed:
        if site_of(collective, config).name != 'parameters':
            continue
        computation = program.computations[collective.computation]
        instruction = computation.by_name[collective.instruction]
        weight, kept = collective.whole, stored_in(program, computation, instruction)
        at_once = stacked.get(tuple(sorted(weight.dims)), 0)
        if layers and kept is not None and prod(kept.shape) >= layers * prod(weight.shape):
            message = (
                f'the loop over layers saves every gathered {weight} for the backward pass, as '
                f'{kept}, at {collective.place}: gather again in the backward pass'
            )
            yield Finding(level='error', rule=RULE, message=message)
        elif collective.times < at_once * config.train.microbatches:
            message = (
                f'{weight}, the weights of all layers, is gathered at once at {collective.place}: '
                "gather each layer's weights inside the loop over layers"
            )
            yield Finding(level='error', rule=RULE, message=message)


def _stacked(config: Config) -> dict[tuple[int, ...], int]:
    """Return the sorted per-device dims of the stacked matrices, gathered over `data`.

    The values are numbers of layers, all above one. Dims that a single layer's matrix also has are
    omitted.
    """
    sizes, shards = dict(dim_sizes(config.model)), Layout.of(config).shards
    sizes['D'] = with_padding(config, sizes['D'])

    def on_device(dims: str) -> tuple[int, ...]:
        return tuple(sorted(size for size in shape_of(dims, sizes, shards) if size > 1))

    dims = [x.dims for _, x in parameters(config.model) if x.is_stacked and x.is_in_microbatches]
    of_a_layer = {on_device(letters[1:]) for letters in dims}
    stacked = {on_device(letters): sizes[letters[0]] for letters in dims if sizes[letters[0]] > 1}
    return {shape: count for shape, count in stacked.items() if shape not in of_a_layer}
