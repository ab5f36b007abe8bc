"""The parts of a model on all stages of a pipeline: embedding, a chunk of layers, head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.core.counts.schedule import IDLE, Schedule
from megajax.core.parallel.layout import STAGE, STAGES, Layout
from megajax.core.parallel.pipeline_ops import (
    BOTH,
    OF_STAGE,
    SAME,
    collect_tokens,
    load,
    on_shards,
    over_stages,
    own_tokens,
    pick,
    select,
    share_tokens,
    to_stages,
)
from megajax.core.train.feed import Batch
from megajax.core.train.objective import Objective, Sums
from megajax.core.train.stage_arrays import of_own_experts, split_layers, with_layers

Tree = Any
HEAD = SAME, SAME, BOTH, BOTH
BESIDE = 'positions', 'segment_ids', 'rows', 'real'  # the arrays of a batch that layers read


class StageModel:
    """Parameters and microbatches [microbatch, *shards, ...] of a step, as its ticks use them.

    The dropout key is None in an evaluation.
    """

    def __init__(
        self,
        objective: Objective,
        layout: Layout,
        schedule: Schedule,
        primals: nnx.State,
        weights: nnx.State | None,
        microbatches: Batch,
        key: jax.Array | None = None,
    ):
        self.objective, self.layout, self.schedule = objective, layout, schedule
        self.microbatches, self.key = microbatches, key
        layers, self.outside = split_layers(primals, layout)
        self.layers, self.kinds_of_layers = self._of_shards(layers)
        self.weights: Tree | None = None
        self.outside_weights: Tree | None = None
        kinds_of_weights: Tree = OF_STAGE
        if weights is not None:
            of_layers, self.outside_weights = split_layers(weights, layout)
            self.weights, kinds_of_weights = self._of_shards(of_layers)
        self.given_kinds = kinds_of_weights, BOTH, BOTH  # weights, rows, index of the first layer
        self.stage_Z = jnp.arange(schedule.stages, out_sharding=STAGES('Z'))
        self.is_first_Z, self.is_last_Z = self.stage_Z == 0, self.stage_Z == schedule.stages - 1

    def _of_shards(self, layers: Tree) -> tuple[Tree, Tree]:
        """Return the layers, and the kind of each array: a data shard may have its own experts."""
        layers, are_both = of_own_experts(layers, self.layout)
        return layers, jax.tree.map(lambda is_both: BOTH if is_both else OF_STAGE, are_both)

    def run_layers(self, layers: Tree, given: Tree, x_BTD: jax.Array) -> jax.Array:
        """Run a chunk of layers on the sequences of a shard."""
        weights, shard, first = given
        params = with_layers(self.outside, layers)
        if weights is not None:
            assert self.outside_weights is not None
            weights = with_layers(self.outside_weights, weights)
        return self.objective.layers(params, weights, x_BTD, shard, first, self.key)

    def given(self, pass_Z3: jax.Array) -> Tree:
        """Return weights, rows and the index of the first layer of each stage's pass."""
        microbatch_Z, chunk_Z = pass_Z3[:, 0], pass_Z3[:, 1]
        beside = {name: x for name, x in self.microbatches.items() if name in BESIDE}
        count = jax.tree.leaves(self.layers)[0].shape[2]
        first_Z = (chunk_Z * self.schedule.stages + self.stage_Z) * count
        # Dropout keys are mapped over the shards, and the values that are folded into them must be
        # too.
        first = on_shards(first_Z, self.zeros(''))
        return load(self.weights, chunk_Z), pick(beside, microbatch_Z), first

    def input(self, x: jax.Array, microbatch: jax.Array, pass_Z3: jax.Array) -> jax.Array:
        """Return the input of each stage's pass: x or, in the first chunk, the embedded tokens.

        `microbatch` is the first stage's microbatch. An idle stage also gets embedded tokens: if
        all were equal, a router would send them all to the same experts, and every stage would wait
        for these.
        """
        # Every stage looks up the tokens: XLA would otherwise divide the repeated work among the
        # stages.
        embed = self.over(self._embed, SAME, SAME, BOTH)
        embedded = embed(self.outside, self.outside_weights, self._copied(microbatch))
        begins_Z, is_idle_Z = self.is_first_Z & (pass_Z3[:, 1] == 0), pass_Z3[:, 0] == IDLE
        return select(begins_Z | is_idle_Z, embedded, x)

    def differentiate_head(
        self, y: jax.Array, microbatch: jax.Array
    ) -> tuple[Sums, Tree, jax.Array]:
        """Return the sums, and the gradients of parameters outside the layers, and of y."""
        given = self.outside, self.outside_weights
        parts, labels = share_tokens(y, self.layout), self._own_labels(microbatch)
        function = jax.value_and_grad(self._head_of_tokens, argnums=(0, 2), has_aux=True)
        sums, (gradients, dparts) = self.over(function, *HEAD)(*given, parts, labels)
        dy = collect_tokens(dparts, y.shape, self.layout)
        if self.objective.config.model.is_bert:
            function = jax.value_and_grad(self._head_of_rows, argnums=(0, 2))
            rows = self._own_rows(microbatch)
            order, (of_rows, drows) = self.over(function, *HEAD)(*given, y, rows)
            sums, dy = (sums[0] + order, sums[1]), dy + drows
            gradients = jax.tree.map(jnp.add, gradients, of_rows)
        return sums, gradients, dy

    def sums(self, y: jax.Array, microbatch: jax.Array) -> Sums:
        """Return the two sums of an evaluation, zero if the head is not due."""
        given = self.outside, self.outside_weights
        parts, labels = share_tokens(y, self.layout), self._own_labels(microbatch)
        _, nll = self.over(self._head_of_tokens, *HEAD)(*given, parts, labels)
        order_nll = jnp.zeros_like(nll)
        if self.objective.config.model.is_bert:
            rows = self._own_rows(microbatch)
            order_nll = self.over(self._head_of_rows, *HEAD)(*given, y, rows)
        return nll, order_nll

    def _head_of_tokens(self, outside: Tree, weights: Tree, x_BTD: jax.Array, shard: Batch) -> Sums:
        return self.objective.head(*self._without_layers(outside, weights), x_BTD, shard)

    def _head_of_rows(
        self, outside: Tree, weights: Tree, x_BTD: jax.Array, shard: Batch
    ) -> jax.Array:
        order = self.objective.row_head(*self._without_layers(outside, weights), x_BTD, shard)
        assert order is not None
        return order

    def _embed(self, outside: Tree, weights: Tree, shard: Batch) -> jax.Array:
        return self.objective.embed(*self._without_layers(outside, weights), shard, self.key)

    def _without_layers(self, outside: Tree, weights: Tree) -> tuple[nnx.State, nnx.State | None]:
        """Return parameters and weights of a model whose layers are not used."""
        layers = self.objective.abstract_layers
        return with_layers(outside, layers), weights if weights is None else with_layers(
            weights, layers
        )

    def _own_labels(self, microbatch: jax.Array) -> Batch:
        """Return labels and weights of each stage's tokens; weights are 0 without a microbatch."""
        shard = self._of_all_stages(microbatch)
        weights = jnp.where(microbatch >= 0, shard['weights'], 0)
        own = {'labels': shard['labels'], 'weights': weights}
        return {name: own_tokens(x, self.layout) for name, x in own.items()}

    def _own_rows(self, microbatch: jax.Array) -> Batch:
        """Return BERT's sentence-order labels; their weights are zero before the last stage."""
        rows = self._copied(microbatch)
        weights = rows['row_weights']
        counts = self.is_last_Z & (microbatch >= 0)
        weights = select(counts, weights, jnp.zeros_like(weights))
        return {'swapped': rows['swapped'], 'row_weights': weights}

    def embedding_gradients(self, microbatch: jax.Array, dx: jax.Array) -> Tree:
        """Return the gradients of parameters outside the layers, given the input's gradient."""

        def differentiate(outside: Tree, weights: Tree, shard: Batch, dx: jax.Array) -> Tree:
            return jax.vjp(lambda outside: self._embed(outside, weights, shard), outside)[1](dx)[0]

        of_all = self.over(differentiate, SAME, SAME, BOTH, BOTH)
        return of_all(self.outside, self.outside_weights, self._copied(microbatch), dx)

    def over(self, function: Callable[..., Any], *kinds: Any) -> Callable[..., Any]:
        """Map a function over stages and data shards; see `over_stages`."""
        return over_stages(function, self.layout, *kinds)

    def _of_all_stages(self, microbatch: jax.Array) -> Batch:
        """Return one microbatch [*shards, ...], the first if the index is negative."""
        index = jnp.maximum(microbatch, 0)
        return {
            name: lax.dynamic_index_in_dim(x, index, keepdims=False)
            for name, x in self.microbatches.items()
        }

    def _copied(self, microbatch: jax.Array) -> Batch:
        """Return one microbatch as [stage, *shards, ...]."""
        shard = self._of_all_stages(microbatch)
        return {name: to_stages(x, self.schedule.stages) for name, x in shard.items()}

    def zeros(self, dims: str) -> jax.Array:
        """Return zeros [Z, *shards, *dims], of activations in the compute dtype."""
        config = self.objective.config
        *_, rows, length = self.microbatches['tokens'].shape
        sizes = {'B': rows, 'T': length, 'D': config.model.hidden_size, '-': 1}
        dtype = config.train.compute_dtype if 'D' in dims else jnp.float32
        entries = (STAGE,), *self.layout.mapped
        shape = *self.layout.sizes_of(entries), *(sizes[letter] for letter in dims)
        spec = self.layout.per_shard.stacked(dims, entries)
        return jnp.zeros(shape, dtype, out_sharding=spec)
