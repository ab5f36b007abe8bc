"""Check where the weights and gradients of a mixture of experts are sent."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from megajax.analysis.inspect.result import Finding
from megajax.core.config import Config
from megajax.core.counts.collective import axes_text
from megajax.core.counts.data_parallel import SHARDS, SHARDS_OF_EXPERTS, with_padding
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.experts import NUM_STATISTICS
from megajax.core.counts.layers import num_with_experts
from megajax.core.counts.parameters import dim_sizes, elements, parameters, shape_of
from megajax.core.parallel.layout import EXPERT, Layout
from megajax.xla.hlo.collectives import Collective

Dims = tuple[int, ...]


def of_experts(config: Config, placed: Sequence[Collective]) -> Iterator[Finding]:
    """Yield an error for experts that are sent over `expert`, and for gradients not summed."""
    if config.model.experts is None:
        return
    if config.mesh.experts > 1:
        yield from _over_expert(config, placed)
    yield from _without_sum(config, placed)


def _over_expert(config: Config, placed: Sequence[Collective]) -> Iterator[Finding]:
    """Yield an error for weights and gradients that leave the device that holds their experts."""
    names = _of_experts_alone(config)
    for collective in placed:
        name = names.get(_sorted(collective.whole.dims))
        if name is None or EXPERT not in collective.axes or collective.operand.dtype == 's32':
            continue
        where = f'{collective.whole} over {collective.axis} at {collective.place}'
        if collective.kind == 'all-gather':
            message = f'{name} is all-gathered, {where}: send the tokens to the experts instead'
            yield Finding(level='error', rule='gathered experts', message=message)
        elif collective.kind in ('all-reduce', 'reduce-scatter'):
            message = (
                f'the gradient of {name} is summed, {where}: devices along `expert` have '
                'different experts, and each has all tokens of its own'
            )
            yield Finding(level='error', rule='experts summed over expert', message=message)


def _of_experts_alone(config: Config) -> Mapping[Dims, str]:
    """Return the names of experts' parameters by their sorted dims on a device.

    The dims include all experts or a device's own, and one layer or all layers. Dims that a
    parameter outside the experts also has are omitted.
    """
    sizes, layout = dict(dim_sizes(config.model)), Layout.of(config)
    names, others = dict[Dims, str](), set[Dims]()

    def on_device(dims: str, shards: Mapping[str, int]) -> set[Dims]:
        shape = shape_of(dims, sizes, shards)
        # A matmul may merge the gate and up dim with the hidden dim.
        joined = [(*shape[:cut], prod(shape[cut:])) for cut in range(1, len(shape))]
        return {_sorted(each) for each in (shape, *joined)}

    for name, declared in parameters(config.model):
        at_rest = layout.shards_at_rest(declared.dims) if declared.is_matrix else layout.shards
        for shards in (dict(layout.shards), dict(at_rest)):
            for dims in (declared.dims, declared.dims_of_layer):
                shapes = on_device(dims, shards)
                if not declared.is_of_experts:
                    others |= shapes
                    continue
                shapes |= on_device(dims, shards | {'X': 1})
                names |= dict.fromkeys(shapes, name)
    return {dims: name for dims, name in names.items() if dims not in others}


def _without_sum(config: Config, placed: Sequence[Collective]) -> Iterator[Finding]:
    """Yield an error for each parameter whose gradient no collective sums over all tokens.

    Gradients are recognized by their number of elements, so a missing sum is not found if a
    different array of the same size is summed over the same axes.
    """
    sums = [each for each in placed if each.kind in ('all-reduce', 'reduce-scatter')]
    for name, axes, counts in _summed(config):
        wanted = {*axes_text(config, 'replica', *axes).split('+')} - {''}
        alike = (each for each in sums if {prod(each.whole.dims), prod(each.operand.dims)} & counts)
        if missing := wanted - {axis for each in alike for axis in each.axes}:
            message = (
                f'no collective sums {name} over {"+".join(sorted(missing))}: each device would '
                'learn only from its own tokens'
            )
            yield Finding(level='error', rule='sum left out', message=message)


def _summed(config: Config) -> Iterator[tuple[str, tuple[str, ...], set[int]]]:
    """Yield each quantity that is summed over tokens, the axes, and its possible sizes."""
    model, layout = config.model, Layout.of(config)
    sizes, shards = dim_sizes(model), layout.shards
    for name, declared in parameters(model):
        if '.experts.' not in f'.{name}' or declared.is_frozen or declared.is_adapter:
            continue
        if not (declared.is_of_experts or '.router.' in name):
            continue
        counts = {elements(dims, sizes, shards) for dims in (declared.dims, declared.dims_of_layer)}
        axes = SHARDS_OF_EXPERTS if declared.is_of_experts else SHARDS
        yield f'the gradient of {name}', axes, counts | {*_padded(config, declared, axes, counts)}
    assert model.experts is not None
    layers = num_with_experts(model) // config.mesh.stages
    count = NUM_STATISTICS * model.experts.count
    yield 'the load of the experts', SHARDS, {count, count * layers}


def _padded(
    config: Config, declared: Parameter, axes: tuple[str, ...], counts: set[int]
) -> Iterator[int]:
    """Yield the size of a matrix with ZeRO's padding, and the size of its shard, in elements."""
    size = prod(config.mesh.sizes.get(axis, 1) for axis in axes)
    for count in counts if declared.is_matrix else ():
        padded = with_padding(config, count, size)
        yield from (padded, padded // size)


def _sorted(dims: Dims) -> Dims:
    return tuple(sorted(size for size in dims if size > 1))
