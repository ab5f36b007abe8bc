"""Findings on what moves along stages and context shards, and on regions that are mapped over them.

A permute is declared pair by pair: what the stages compute tells one direction from the other, and
so does a ring of context shards. The others are traps of programs with a `shard_map` or a scan over
microbatches, whose numbers are right and whose bytes are not.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from megajax.analysis.inspect.result import Finding
from megajax.core.config import Config
from megajax.core.counts.parameters import dim_sizes, parameters
from megajax.core.parallel.layout import CONTEXT, STAGE, Layout
from megajax.core.train.pipeline import TO_NEXT, TO_PREVIOUS
from megajax.xla.hlo.collectives import Collective
from megajax.xla.hlo.permutes import SHOWN, along
from megajax.xla.hlo.program import Program

REGION = 'shard_map'


def undeclared_permutes(mesh: Mapping[str, int], placed: Sequence[Collective]) -> Iterator[Finding]:
    """Yield an error for each permute along stages or context shards with other pairs than its own.

    Stages send to the next one or to the previous one, by the scope; context shards to the next.
    The last and the first are neighbors too.
    """
    for permute in placed:
        if permute.kind != 'collective-permute' or not {STAGE, CONTEXT} & {*permute.axes}:
            continue
        pairs, where = _declared(mesh, permute)
        if frozenset(permute.groups) not in along(pairs, permute.axes, mesh):
            shown = ', '.join(map(str, permute.groups[:SHOWN]))
            shown += ', ...' * (len(permute.groups) > SHOWN)
            message = (
                f'{permute.times} x of {permute.whole} over {permute.axis} at {_place(permute)}: '
                f'its pairs of devices are {shown}, and {where}'
            )
            yield Finding(level='error', rule='permute with undeclared pairs', message=message)


def _declared(mesh: Mapping[str, int], permute: Collective) -> tuple[list[tuple[int, int]], str]:
    """The pairs of positions that a permute must have, and a clause that says so."""
    words = _words(permute)
    if permute.axes in ((STAGE,), (CONTEXT,)):
        size = mesh[permute.axis]
        ring = [(place, (place + 1) % size) for place in range(size)]
        if permute.axes == (CONTEXT,) or TO_NEXT in words:
            return ring, f'each {permute.axis} sends to the next one here'
        if TO_PREVIOUS in words:
            return [(after, before) for before, after in ring], 'each stage sends to the previous'
    return [], 'nothing is declared to move along these axes here'


def gathered_at_edges(
    placed: Sequence[Collective], *, few_kv_heads: bool = False
) -> Iterator[Finding]:
    """Yield an error for each array that enters or leaves a mapped region through an all-gather.

    A region that is manual over some axes only leaves its arrays no placement over the others.
    What is gathered inside of a region is along `stage` or `context`; with fewer key/value heads
    than shards, attention has all of them on each.
    """
    for gather in placed:
        moves = {STAGE, CONTEXT} & {*gather.axes} or (few_kv_heads and 'core' in _words(gather))
        if gather.kind == 'all-gather' and not moves and REGION in _words(gather):
            message = (
                f'{gather.whole} is gathered over {gather.axis} at {_place(gather)}, where it '
                'enters or leaves a shard_map: map over all mesh axes, with the specs that its '
                'arrays have'
            )
            yield Finding(level='error', rule='gathered at the edge of a region', message=message)


def kept_gradients(config: Config, program: Program) -> Iterator[Finding]:
    """Yield an error for each buffer with a gradient of a table for each microbatch.

    Automatic differentiation of a loop over microbatches stacks them, to be summed after it.
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
                    f'a loop keeps {instruction.results[0]}, a gradient of {tables[dims[-2:]]} for '
                    f'each microbatch, at {instruction.op_name} ({source}): add it to a sum inside '
                    'the loop'
                )
                yield Finding(level='error', rule='gradients of a table kept', message=message)


def _tables(config: Config) -> dict[tuple[int, ...], str]:
    """The names of the tables of a vocabulary, by their dims on a device in either order.

    Without those that also are the dims of a layer's matrix, or of a microbatch's tokens.
    """
    sizes, shards = dict(dim_sizes(config.model)), Layout.of(config).shards

    def on_device(dims: str) -> tuple[int, ...]:
        return tuple(sizes[letter.upper()] // shards.get(letter, 1) for letter in dims)

    tables, others = dict[tuple[int, ...], str](), set[tuple[int, ...]]()
    for name, x in parameters(config.model):
        if 'V' in x.dims and len(x.dims) > 1:
            dims = on_device(x.dims)
            tables |= {dims: name, dims[::-1]: name}
        elif x.is_stacked:
            others.add(on_device(x.dims)[-2:])
    tokens = config.train.seq_len // config.mesh.context
    return {
        dims: name for dims, name in tables.items() if dims not in others and tokens not in dims
    }


def _words(collective: Collective) -> list[str]:
    return re.findall(r'\w+', collective.op_name)


def _place(collective: Collective) -> str:
    return f'{collective.op_name} ({collective.source})'
