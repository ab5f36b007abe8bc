"""Lint pipeline and context parallelism: permutes, `shard_map` boundaries and stacked gradients.

Each permute must have the pairs of devices declared here: to the next stage or the previous one, or
around the ring of context shards. The other two rules catch `shard_map` regions and loops over
microbatches that compute the right numbers but send or store too much.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from megajax.analysis.inspect.result import Finding
from megajax.core.config import Config
from megajax.core.counts.parameters import dim_sizes, parameters, shape_of
from megajax.core.parallel.layout import CONTEXT, STAGE, Layout
from megajax.core.train.pipeline import TO_NEXT, TO_PREVIOUS
from megajax.xla.hlo.collectives import Collective
from megajax.xla.hlo.permutes import SHOWN, Pairs, along
from megajax.xla.hlo.program import Program

REGION = 'shard_map'


def undeclared_permutes(mesh: Mapping[str, int], placed: Sequence[Collective]) -> Iterator[Finding]:
    """Yield an error for each permute along `stage` or `context` whose pairs are not declared.

    The named scope shows whether a stage sends to the next stage or to the previous one; context
    shards send to either neighbor. The last and the first are neighbors too.
    """
    for permute in placed:
        if permute.kind != 'collective-permute' or not {STAGE, CONTEXT} & {*permute.axes}:
            continue
        pairs, where = _declared(mesh, permute)
        if frozenset(permute.groups) not in along(pairs, permute.axes, mesh):
            shown = ', '.join(map(str, permute.groups[:SHOWN]))
            shown += ', ...' * (len(permute.groups) > SHOWN)
            message = (
                f'{permute.times} x of {permute.whole} over {permute.axis} at {permute.place}: '
                f'its pairs of devices are {shown}, and {where}'
            )
            yield Finding(level='error', rule='permute with undeclared pairs', message=message)


def _declared(mesh: Mapping[str, int], permute: Collective) -> tuple[Pairs | str, str]:
    """Return the pairs of positions that a permute must have, and a clause that describes them."""
    words = _words(permute)
    if permute.axes == (CONTEXT,):
        return 'ring', 'here each context shard sends to the next or to the previous one'
    if permute.axes == (STAGE,):
        size = mesh[permute.axis]
        ring = [(place, (place + 1) % size) for place in range(size)]
        if TO_NEXT in words:
            return ring, 'here each stage sends to the next stage'
        if TO_PREVIOUS in words:
            return [
                (after, before) for before, after in ring
            ], 'here each stage sends to the previous stage'
    return [], 'no permute along these axes is declared here'


def gathered_at_edges(
    placed: Sequence[Collective], *, few_kv_heads: bool = False
) -> Iterator[Finding]:
    """Yield an error for each array that is all-gathered to enter or leave a `shard_map`.

    A region that is manual over only some axes loses the sharding over the others. Inside a region,
    only all-gathers along `stage` or `context` are declared; with fewer key/value heads than
    shards, attention also gathers those heads. The region of a mixture of experts gathers tokens,
    counts and weights, which the table of collectives counts.
    """
    scopes = {'experts', 'core'} if few_kv_heads else {'experts'}
    for gather in placed:
        moves = {STAGE, CONTEXT} & {*gather.axes} or scopes & {*_words(gather)}
        if gather.kind == 'all-gather' and not moves and REGION in _words(gather):
            message = (
                f'{gather.whole} is all-gathered over {gather.axis} at {gather.place}, where it '
                'enters or leaves a shard_map: map over all mesh axes, with the specs of the arrays'
            )
            yield Finding(level='error', rule='gathered at a shard_map boundary', message=message)


def kept_gradients(config: Config, program: Program) -> Iterator[Finding]:
    """Yield an error for each buffer that stacks a vocabulary table's gradients by microbatch.

    Automatic differentiation of a loop over microbatches stacks them and sums them after the loop.
    """
    tables, count = _tables(config), config.train.microbatches
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode != 'dynamic-update-slice':
                continue
            dims = instruction.results[0].dims
            if count > 1 and dims[-2:] in tables and prod(dims[:-2]) >= count:
                source = program.source(instruction)
                message = (
                    f'a loop stacks {instruction.results[0]}, a gradient of {tables[dims[-2:]]} '
                    f'per microbatch, at {instruction.op_name} ({source}): accumulate it inside '
                    'the loop'
                )
                yield Finding(level='error', rule='table gradients stacked', message=message)


def _tables(config: Config) -> dict[tuple[int, ...], str]:
    """Return the names of the vocabulary's tables by their per-device dims, in either order.

    Dims that a layer's matrix or a microbatch's tokens also have are omitted.
    """
    sizes, shards = dim_sizes(config.model), Layout.of(config).shards
    tables, others = dict[tuple[int, ...], str](), set[tuple[int, ...]]()
    for name, x in parameters(config.model):
        if 'V' in x.dims and len(x.dims) > 1:
            dims = shape_of(x.dims, sizes, shards)
            tables |= {dims: name, dims[::-1]: name}
        elif x.is_stacked:
            others.add(shape_of(x.dims, sizes, shards)[-2:])
    tokens = config.train.seq_len // config.mesh.context
    return {
        dims: name for dims, name in tables.items() if dims not in others and tokens not in dims
    }


def _words(collective: Collective) -> list[str]:
    return re.findall(r'\w+', collective.op_name)
