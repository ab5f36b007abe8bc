"""The loss of a model on the sequences of one shard, and its parts: embedding, layers and head."""

import dataclasses
from functools import cached_property
from typing import Any, Self

import jax
from flax import nnx

from megajax.core.config import Config
from megajax.core.counts.declaration import Parameter
from megajax.core.model.computation import Computation
from megajax.core.model.fp32_gradients import pair
from megajax.core.model.loss import Loss
from megajax.core.model.parameters import map_parameters, with_frozen
from megajax.core.model.transformer import Bert, LanguageModel, abstract_model
from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import Batch
from megajax.core.train.microbatches import images_of, rows_of

Sums = tuple[jax.Array, jax.Array]  # the objective and the negative log-likelihood in nats


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a shard's sequences as a function of parameters.

    All methods take `params`, the tree to differentiate with respect to, and `weights`, the tree to
    compute with or None (`zero.StepWeights`). `layout` is a shard's layout.
    """

    config: Config
    layout: Layout
    computation: Computation
    in_fp8: bool = False  # whether the parameters have scales
    is_routed: bool = False  # whether the parameters have the load of experts

    @classmethod
    def of(cls, config: Config, layout: Layout, *, is_training: bool = True) -> Self:
        """Return the objective of a run's training steps, or of its evaluations.

        An evaluation of an fp8 model computes in bf16, and an evaluation of a mixture of experts
        drops no token.
        """
        in_fp8 = is_training and config.train.dtype == 'fp8'
        is_routed = is_training and config.model.experts is not None
        return cls(config, layout.per_shard, Computation.of(config), in_fp8, is_routed)

    def __call__(
        self, params: nnx.State, weights: nnx.State | None, shard: Batch, key: jax.Array
    ) -> Sums:
        """Compute the sums of a shard; `key` is for dropout."""
        tokens, of_rows = self.parts(params, weights, shard, key)
        objective, nll = tokens
        return objective if of_rows is None else objective + of_rows, nll

    def parts(
        self,
        params: nnx.State,
        weights: nnx.State | None,
        shard: Batch,
        key: jax.Array | None = None,
    ) -> tuple[Sums, jax.Array | None]:
        """Compute the sums of tokens, and the loss of sentence-order prediction, if any."""
        model, used = self.model(params, weights)
        images = images_of(shard, key) if 'pixels' in shard else None
        x_BTD, head_Vd = model.hidden(
            shard['tokens'], self.computation, rows_of(shard, key), images=images, weights=used
        )
        return self._of_tokens(model, x_BTD, head_Vd, shard), self._of_rows(model, x_BTD, shard)

    def embed(
        self, params: nnx.State, weights: nnx.State | None, shard: Batch, key: jax.Array | None
    ) -> jax.Array:
        """Return the residual stream x_BTD before the first layer."""
        model, _ = self.model(params, weights)
        return model.embed(shard['tokens'], self.computation.dtype, rows_of(shard, key))

    def layers(
        self,
        params: nnx.State,
        weights: nnx.State | None,
        x_BTD: jax.Array,
        shard: Batch,
        first: jax.Array,
        key: jax.Array | None,
    ) -> jax.Array:
        """Return the residual stream after the layers in `params`.

        `first` is the index of the first of these layers in the model.
        """
        model, used = self.model(params, weights)
        rows = rows_of(shard, key)
        return model.blocks(x_BTD, self.computation, rows, weights=used, first=first)[0]

    def head(
        self, params: nnx.State, weights: nnx.State | None, x_BTD: jax.Array, shard: Batch
    ) -> Sums:
        """Compute the sums of tokens from the residual stream after the last layer.

        `shard` has the labels and weights of the tokens.
        """
        model, _ = self.model(params, weights)
        return self._of_tokens(model, model.finish(x_BTD), model.head_Vd, shard)

    def row_head(
        self, params: nnx.State, weights: nnx.State | None, x_BTD: jax.Array, shard: Batch
    ) -> jax.Array | None:
        """Compute the loss of sentence-order prediction from the same hidden states as `head`."""
        model, _ = self.model(params, weights)
        return self._of_rows(model, model.finish(x_BTD), shard)

    def _of_tokens(
        self, model: LanguageModel, x_BTD: jax.Array, head_Vd: jax.Array, shard: Batch
    ) -> Sums:
        x_BTD = model.before_head(x_BTD)
        with jax.named_scope('loss'):
            return self._loss(x_BTD, head_Vd, shard['labels'], shard['weights'], model.head_bias_V)

    def _of_rows(self, model: LanguageModel, x_BTD: jax.Array, shard: Batch) -> jax.Array | None:
        if not isinstance(model, Bert):
            return None
        with jax.named_scope('head'):
            return model.order_head.loss(x_BTD, shard['swapped'], shard['row_weights'])

    @property
    def without_recomputation(self) -> Self:
        """Return the same objective, but without recomputation in its backward pass."""
        computation = self.computation._replace(recompute='none')
        return dataclasses.replace(self, computation=computation)

    @cached_property
    def _abstract(self) -> LanguageModel:
        of_step = {'in_fp8': self.in_fp8, 'is_routed': self.is_routed}
        return abstract_model(self.config.model, self.layout, **of_step)

    @cached_property
    def abstract_layers(self) -> Any:
        """The layers without arrays, for a model whose layers are not used."""
        return nnx.state(self._abstract).raw_mapping['layers']

    @cached_property
    def _loss(self) -> Loss:
        return Loss.of(self.config, self.layout)

    @cached_property
    def _graph(self) -> nnx.GraphDef[LanguageModel]:
        return nnx.graphdef(self._abstract)

    def model(
        self, params: nnx.State, weights: nnx.State | None
    ) -> tuple[LanguageModel, LanguageModel | None]:
        """Return the model and, if they differ, a model with the weights to compute with.

        Each layer reads its weights inside the loop over layers; outside, all of them would be in
        memory in fp32.
        """
        if weights is None:
            return nnx.merge(self._graph, params), None
        computation, layout = self.computation, self.layout
        params = with_frozen(params, weights)

        def outside_layers(declared: Parameter, x: jax.Array, weight: jax.Array) -> Any:
            if declared.owner == 'encoder':
                return pair(declared, weight, x)
            return x if declared.is_stacked else computation.value(weight, x, declared, layout)

        ready = map_parameters(outside_layers, params, weights)
        if computation.overlap.has_head:
            ready['head'] = params['head']  # ZeRO-sharded until the layers gather it
        return nnx.merge(self._graph, ready), nnx.merge(self._graph, weights)
