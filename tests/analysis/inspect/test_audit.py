"""The train step as built sends no more than Megatron, and a step that is built worse is caught by
the row or the lint that is for it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from support import AS_SHIPPED, exhaustive, make_config, slow

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_step
from megajax.analysis.inspect.result import Inspection
from megajax.core.config import Config
from megajax.core.model import computation as computation_module
from megajax.core.model import linear as linear_module
from megajax.core.model import norm as norm_module
from megajax.core.model import product as product_module
from megajax.core.model import zero_sharding
from megajax.core.model.computation import Computation
from megajax.core.model.embedding import VocabParallelEmbedding
from megajax.core.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.core.model.loss import Loss
from megajax.core.model.parameters import cast_matrices
from megajax.core.model.product import product
from megajax.core.model.shard_copies import along_last
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import mesh_for
from megajax.core.train import step as step_module
from megajax.core.train import zero

DATA, MODEL, LAYERS = 2, 4, 3


def small(name: str = 'gpt', *, sequence_parallel: bool = False, **sections: dict) -> Config:
    model = {'num_layers': LAYERS, 'dropout': 0.0} | sections.pop('model', {})
    return make_config(
        name, DATA, MODEL, sequence_parallel=sequence_parallel, model=model, **sections
    )


def inspect_here(config: Config, **compiler_options: object) -> Inspection:
    return audit(
        config,
        compile_step(config, mesh_for(config), config.mesh.num_devices, compiler_options),
        'cpu',
    )


as_built = functools.cache(inspect_here)


def rows(found: Inspection) -> dict[tuple[str, str, str], dict[str, int]]:
    """How many collectives of each kind a step has, by site, phase and axis."""
    counts = {}
    for row in found.rows:
        for one in row.placed:
            kinds = counts.setdefault((row.site, row.phase, row.axis), {})
            kinds[one.kind] = kinds.get(one.kind, 0) + one.times
    return counts


def caught(found: Inspection) -> set[str]:
    """Rows with MORE, and rules of lint errors."""
    more = {f'{row.site} {row.phase} {row.axis}' for row in found.rows if row.verdict == 'MORE'}
    return more | {one.rule for one in found.findings if one.level == 'error'}


@pytest.mark.parametrize(
    ('name', 'recompute', 'sequence_parallel'),
    [
        exhaustive('gpt', 'none', True),
        exhaustive('gpt', 'full', False),
        exhaustive('llama', 'none', False),
        exhaustive('llama', 'full', True),
        exhaustive('bert', 'none', False),
        slow('bert', 'full', True),
    ],
)
def test_no_row_has_more_than_megatron(name, recompute, sequence_parallel):
    config = small(
        name, sequence_parallel=sequence_parallel, train={'microbatches': 4, 'recompute': recompute}
    )
    found = inspect_here(config, **AS_SHIPPED)
    for row in found.rows:
        assert sum(one.wire_bytes for one in row.placed) == pytest.approx(row.wire_bytes)
        assert sum(one.wire_bytes for one in row.megatron) == pytest.approx(row.megatron_wire_bytes)
    assert not caught(found)
    assert found.ok
    assert found.ratios['data'] <= 1
    assert found.ratios['model'] < 0.9 if sequence_parallel else found.ratios['model'] <= 1


def test_a_layer_makes_two_all_reduces_each_way():
    counts = rows(as_built(small()))
    for site in ('attention', 'mlp'):
        for phase in ('forward', 'backward'):
            assert counts[site, phase, 'model'] == {'all-reduce': LAYERS}
    assert counts['embedding', 'forward', 'model'] == {'all-reduce': 1}
    assert counts['head', 'backward', 'model'] == {'all-reduce': 1}
    assert counts['gradients', 'step', 'data']['all-reduce'] == 16  # each parameter once


def test_with_sequence_parallelism_two_gathers_and_two_scatters_each_way():
    counts = rows(inspect_here(small(sequence_parallel=True)))
    for site in ('attention', 'mlp'):
        for phase in ('forward', 'backward'):
            assert counts[site, phase, 'model'] == {'all-gather': LAYERS, 'reduce-scatter': LAYERS}
    assert counts['embedding', 'forward', 'model'] == {'reduce-scatter': 1}
    assert counts['embedding', 'backward', 'model'] == {'all-gather': 1}
    assert counts['head', 'forward', 'model'] == {'all-gather': 1}
    assert counts['head', 'backward', 'model'] == {'reduce-scatter': 1}


def place_elsewhere(patch, **specs: jax.P):
    """Arrays of these dims have other places than the letters say."""
    usual = Layout.__call__

    def place(self: Layout, dims: str, **options: bool) -> jax.P:
        return specs[dims] if dims in specs else usual(self, dims, **options)

    patch(Layout, '__call__', place)


def column_parallel_down(patch):
    def down(self: RowParallelLinear, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        if weight.ndim == 3:
            return row_parallel(self, x)
        whole = self.layout('BSD')
        x, weight = jax.reshard(x, whole), jax.reshard(weight, self.layout('DF'))
        return jax.reshard(product('BSD,DF->BSF', x, weight, self.layout, x.dtype), whole)

    row_parallel = RowParallelLinear.reduced
    patch(RowParallelLinear, 'reduced', down)


def unfused(patch):
    fused = ColumnParallelLinear.product

    def apart(self: ColumnParallelLinear, x_BSD: jax.Array) -> jax.Array:
        # of [D, K, C, H] and [D, U, F]
        weight, dim = self.weight[...], {4: 2, 3: 1}.get(self.weight.ndim)
        if dim is None:
            return fused(self, x_BSD)
        parts = (jax.lax.slice_in_dim(weight, i, i + 1, axis=dim) for i in range(weight.shape[dim]))
        made = [product(self.equation, x_BSD, w, self.layout, x_BSD.dtype) for w in parts]
        return jnp.concatenate(made, dim + 1)

    patch(ColumnParallelLinear, 'product', apart)


def replicated_embedding(patch):
    place_elsewhere(patch, Vd=jax.P(None, None), dV=jax.P(None, None))


def gathered_table(patch):
    def lookup(
        self: VocabParallelEmbedding,
        token_BS: jax.Array,
        dtype: jnp.dtype,
        vector_BSD: jax.Array,
        rows: str,
    ) -> jax.Array:
        table_VD = jax.reshard(self.table[...], jax.P(None, None))
        return vector_BSD + table_VD.at[token_BS].get(out_sharding=self.layout('BTD'))

    patch(VocabParallelEmbedding, '__call__', lookup)


def replicated_mlp(patch):
    make = Layout.of

    def make_worse(config: Config) -> Layout:
        layout = make(config)
        axes = tuple((letter, axes) for letter, axes in layout.axes if letter != 'F')
        return dataclasses.replace(layout, axes=axes)

    patch(Layout, 'of', make_worse)


def gathered_logits(patch):
    logits = Loss.logits

    def gathered(self: Loss, x: jax.Array, *head: jax.Array, rows: str) -> jax.Array:
        return jax.reshard(logits(self, x, *head, rows=rows), jax.P(*(None,) * x.ndim))

    patch(Loss, 'logits', gathered)


def sharded_norm(patch):
    def gathered(vector: jax.Array, *others: object) -> jax.Array:
        return along_last(jax.reshard(vector, jax.P(None)), *others)

    place_elsewhere(patch, D=jax.P('model'), LD=jax.P(None, 'model'))
    for module in (norm_module, linear_module):
        patch(module, 'along_last', gathered)


def replicated_optimizer_state(patch):
    make = step_module.make_optimizer

    def make_replicated(config: Config):
        optimizer = make(config)

        def replicated(state):
            return jax.tree.map(lambda x: jax.reshard(x, jax.P(*(None,) * x.ndim)), state)

        def update(gradients, state, params):
            updates, state = optimizer.update(gradients, state, params)
            return updates, replicated(state)

        return optimizer._replace(
            init=lambda params: replicated(optimizer.init(params)), update=update
        )

    patch(step_module, 'make_optimizer', make_replicated)


def reduced_for_each_microbatch(patch):
    make = step_module.make_gradients

    def make_worse(config: Config):
        count = config.train.microbatches
        one = make(
            config.model_copy(update={'train': config.train.model_copy(update={'microbatches': 1})})
        )

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(
                DATA, count, -1, *x.shape[1:], out_sharding=jax.P('data', None, None, None)
            )
            return jnp.moveaxis(x, 1, 0).reshape(
                count, -1, *x.shape[3:], out_sharding=jax.P(None, 'data', None)
            )

        def loss_and_gradients(params, batch, *others):
            def accumulate(total, microbatch):
                *sums, seen = one(params, microbatch, *others)
                return jax.tree.map(jnp.add, total, tuple(sums)), seen

            zero = jnp.zeros((), out_sharding=jax.P())
            total, seen = jax.lax.scan(
                accumulate,
                ((zero, zero), jax.tree.map(jnp.zeros_like, params)),
                jax.tree.map(split, batch),
            )
            return *total, seen

        return loss_and_gradients

    patch(step_module, 'make_gradients', make_worse)


def wide_residual_stream(patch):
    embed = VocabParallelEmbedding.__call__

    def embed_in_fp32(
        self: VocabParallelEmbedding, token_BS: jax.Array, dtype: str, *vectors: object
    ) -> jax.Array:
        return embed(self, token_BS, jnp.float32, *vectors)

    patch(VocabParallelEmbedding, '__call__', embed_in_fp32)


def gathered_before_the_loop(patch):
    """ZeRO-2's step, where ZeRO-3's is expected."""
    of = Computation.of

    def of_zero_2(config: Config) -> Computation:
        computation = of(config)
        overlap = dataclasses.replace(computation.overlap, shard='gradients')
        return computation._replace(overlap=overlap)

    patch(Computation, 'of', of_zero_2)
    patch(zero, 'gather_once', lambda params, config, layout: cast(params, config, layout))


def cast(params, config: Config, layout: Layout):
    return cast_matrices(params, config.train.dtype, layout)


def gathered_for_both_passes(patch):
    """A layer gathers its weights, and automatic differentiation keeps what products save."""
    pair = Computation.pair

    def pair_once(self: Computation, weights, params, layout: Layout):
        return pair(self._replace(recompute='full'), weights, params, layout)

    patch(Computation, 'pair', pair_once)


def gathered_in_fp32(patch):
    gather = zero_sharding.gather

    def gather_wide(x: jax.Array, dims: str, layout: Layout) -> jax.Array:
        return gather(x.astype(jnp.float32) + 1e-9, dims, layout)  # no number of the narrow dtype

    for module in (zero_sharding, product_module, computation_module):
        patch(module, 'gather', gather_wide)


def summed_everywhere(patch):
    """An all-reduce, whose result each data shard reads before it takes its part."""

    def reduce(gradient: jax.Array, dims: str, layout: Layout, dtype: str) -> jax.Array:
        total = jax.lax.reduce_sum(gradient.astype(dtype), (0,), out_sharding=layout(dims))
        return zero_sharding.scatter(total + 0 * total.max(), dims, layout)

    patch(zero_sharding, 'reduce', reduce)


def summed_twice(patch):
    reduce = zero_sharding.reduce

    def reduce_twice(gradient: jax.Array, dims: str, layout: Layout, dtype: str) -> jax.Array:
        again = reduce(2 * gradient + 1, dims, layout, dtype)
        return reduce(gradient, dims, layout, dtype) + again

    patch(zero_sharding, 'reduce', reduce_twice)


HALF = {'train': {'dtype': 'bfloat16'}}


def on_rung(rung: str, data: int = 4, model: int = 1, **train: object) -> Config:
    sizes = {'num_layers': LAYERS, 'dropout': 0.0}
    sections = {'train': {'microbatches': 2, **train}, 'optim': {'shard': rung}}
    return make_config('gpt', data, model, model=sizes, **sections)


@pytest.mark.parametrize(
    ('worsen', 'config', 'expected'),
    [
        exhaustive(column_parallel_down, small(), {'mlp forward model'}),
        slow(unfused, small(), {'attention backward model', 'input gradient reduced again'}),
        exhaustive(
            unfused,
            small('llama', model={'num_kv_heads': 8}),
            {'mlp backward model', 'input gradient reduced again'},
        ),
        slow(replicated_embedding, small(), {'replicated parameter', 'gradients step data'}),
        slow(gathered_table, small(), {'gathered weight'}),
        exhaustive(replicated_mlp, small(), {'gradients step data'}),
        exhaustive(gathered_logits, small(), {'head backward model'}),
        exhaustive(sharded_norm, small(), {'mlp forward model'}),
        (replicated_optimizer_state, small(), {'optimizer state elsewhere'}),
        exhaustive(
            reduced_for_each_microbatch, small(train={'microbatches': 4}), {'gradients step data'}
        ),
        slow(wide_residual_stream, small(**HALF), {'fp32 communication'}),
        slow(
            gathered_before_the_loop,
            on_rung('weights', recompute='full'),
            {'gathered weights kept'},
        ),
        exhaustive(gathered_for_both_passes, on_rung('weights'), {'gathered weights kept'}),
        exhaustive(
            gathered_in_fp32,
            on_rung('weights', dtype='bfloat16', recompute='full'),
            {'parameters forward data', 'parameters backward data'},
        ),
        exhaustive(
            summed_everywhere, on_rung('weights', recompute='full'), {'gradients step data'}
        ),
        exhaustive(summed_everywhere, on_rung('gradients'), {'gradients step data'}),
        exhaustive(summed_everywhere, on_rung('optimizer'), {'gradients step data'}),
        exhaustive(summed_twice, on_rung('optimizer'), {'gradients step data'}),
        exhaustive(summed_twice, on_rung('gradients'), {'gradients backward data'}),
    ],
)
def test_a_worse_step_is_caught(worsen, config, expected, monkeypatch):
    assert not expected & caught(as_built(config))
    worsen(monkeypatch.setattr)
    found = inspect_here(config)
    assert expected <= caught(found)
    assert not found.ok
