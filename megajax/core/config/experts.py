"""The section `model.experts` of a config: a mixture of experts in place of each MLP."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megajax.base.errors import Problem
from megajax.core.config.divisors import divides, divisors, nearest
from megajax.core.config.section import Elements, Section, Tokens, Unit
from megajax.core.config.tensor_rules import sharded
from megajax.core.config.unused_rules import Unused

if TYPE_CHECKING:
    from megajax.core.config.schema import Config

NumExperts = Annotated[PositiveInt, Field(le=2**16)]
# The keys that only training reads; evaluation, for example, drops no tokens.
OF_ROUTING = frozenset(
    {'bias_rate', 'balance_loss', 'balance_over', 'z_loss', 'capacity', 'capacity_group'}
)


class ExpertsConfig(Section):
    """A mixture of experts: each token is sent to a few of many MLPs (Shazeer et al., 2017).

    A router scores the experts of a layer for each token, in fp32, and the outputs of the chosen
    experts are added with their scores as weights.
    """

    count: NumExperts
    """Number of experts of a layer."""
    active: NumExperts
    """Number of experts that each token is sent to."""
    ffn_size: Elements
    """Width of the hidden layer of an expert."""
    shared_ffn_size: Annotated[NonNegativeInt, Field(le=2**24), Unit('elements')] = 0
    """Width of the hidden layer of a shared expert, which every token uses and whose output the
    router does not scale (DeepSeekMoE, Dai et al., 2024); 0: none.
    """
    first_dense: Annotated[NonNegativeInt, Field(le=10_000)] = 0
    """Number of layers at the beginning that have an MLP of model.ffn_size instead, as in
    DeepSeek-V3.
    """
    scores: Literal['softmax', 'sigmoid'] = 'softmax'
    """Function of the router's logits: a softmax over all experts, or a sigmoid of each."""
    normalize: bool = True
    """Whether a token's weights are divided by their sum; with softmax, the weights are then a
    softmax over the chosen experts, as in Mixtral, Qwen3 and gpt-oss.
    """
    scale: PositiveFloat = 1.0
    """Factor by which the weights of a token's experts are multiplied."""
    router_bias: bool = False
    """Whether the router has a bias, as in gpt-oss."""
    selection_bias: bool = False
    """Whether each expert has a bias that affects only whether it is selected. It is updated
    outside the gradient, so that all experts receive equally many tokens (Wang et al., 2024;
    DeepSeek-V3).
    """
    bias_rate: PositiveFloat = 1e-3
    """Amount by which selection_bias changes in a step."""
    groups: NumExperts = 1
    """Groups of consecutive experts; a token's experts are all in the best active_groups groups. A
    group's score is the sum of its two best scores (DeepSeek-V3).
    """
    active_groups: NumExperts = 1
    """Number of groups that a token's experts are chosen from."""
    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of the auxiliary loss, count * sum(share of assignments * mean score) over the
    experts (Fedus et al., 2022). It is added to the gradients, not to the reported loss.
    """
    balance_over: Literal['batch', 'sequence'] = 'batch'
    """Tokens over which balance_loss takes the shares of assignments: the whole batch of the step
    before, or the same sequence. For a sequence, the experts with the best scores count, as in
    DeepSeek-V3, even if selection_bias or the groups select different ones.
    """
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits (Zoph et al., 2022). It is
    added to the gradients, not to the reported loss.
    """
    capacity: PositiveFloat | None = None
    """Tokens that an expert accepts from each capacity_group, relative to equal shares; of the
    others, padding is dropped first, then the last tokens. null: no token is dropped.
    """
    capacity_group: Tokens | None = None
    """Consecutive tokens of a sequence within which capacity is counted; null: the sequence. The
    same tokens are dropped on every mesh.
    """

    def slots(self, group: int) -> int:
        """Return the number of assignments that an expert accepts from a group of tokens."""
        assert self.capacity is not None
        # in floats, 1.1 * 100 / 10 would be rounded up to 12
        share = Fraction(str(self.capacity)) * group * self.active / self.count
        return min(math.ceil(share), group)  # a token chooses an expert at most once


def of_experts(config: 'Config') -> Iterator[Problem]:
    """Check a mixture of experts, by itself and against the mesh."""
    experts, mesh = config.model.experts, config.mesh
    if experts is None:
        if mesh.experts > 1:
            message = f'{mesh.experts} needs model.experts, which is null; use 1'
            yield Problem('mesh.experts', message, others=('model.experts',))
        return
    if experts.active > experts.count:
        message = (
            f'{experts.active} is more than model.experts.count={experts.count}; '
            f'use at most {experts.count}'
        )
        yield Problem('model.experts.active', message, others=('model.experts.count',))
    yield from sharded(config, 'model.experts.ffn_size', experts.ffn_size)
    yield from divides('model.experts.count', experts.count, 'mesh.experts', mesh.experts)
    if mesh.data % mesh.replicas == 0:
        shards = mesh.data // mesh.replicas
        if shards % mesh.experts:
            message = (
                f'{mesh.experts} does not divide the {shards} data shards of a replica '
                f'(mesh.data={mesh.data}, mesh.replicas={mesh.replicas}); '
                f'use {nearest(divisors(shards), mesh.experts)}'
            )
            yield Problem('mesh.experts', message, others=('mesh.data', 'mesh.replicas'))
    shared = experts.shared_ffn_size
    yield from sharded(config, 'model.experts.shared_ffn_size', shared)
    if shared and config.model.bias:
        message = (
            f'{shared}: a shared expert has no biases; use model.bias=false, or '
            'model.experts.shared_ffn_size=0'
        )
        yield Problem('model.experts.shared_ffn_size', message, others=('model.bias',))
    yield from _dense(config, experts)
    yield from _groups(experts)
    yield from _capacity(config, experts)
    lora = config.lora
    if lora is not None and (unsupported := [x for x in lora.targets if x in ('up', 'down')]):
        others = ','.join(x for x in lora.targets if x not in unsupported) or 'qkv,out'
        message = (
            f'adapters of experts are not supported ({", ".join(unsupported)}); '
            f'use lora.targets=[{others}]'
        )
        yield Problem('lora.targets', message, others=('model.experts',))


def _dense(config: 'Config', experts: ExpertsConfig) -> Iterator[Problem]:
    """Check which layers have an MLP instead of experts."""
    model, first, path = config.model, experts.first_dense, 'model.experts.first_dense'
    if first and config.mesh.stages > 1:
        message = (
            f'{first}: all pipeline stages run one program, so the first one has no other layers; '
            'use mesh.stages=1, or model.experts.first_dense=0'
        )
        yield Problem(path, message, others=('mesh.stages',))
    vision = config.vision
    if first and vision is not None and vision.is_crossed and vision.cross_every < model.num_layers:
        message = (
            f'{first}: the layers between cross-attention layers are alike, so the first of them '
            f'have experts as the others do; use vision.cross_every={model.num_layers}, or '
            'model.experts.first_dense=0'
        )
        yield Problem(path, message, others=('vision.fusion', 'vision.cross_every'))
    if all(layer.experts is None for layer in model.layer_configs):
        message = (
            f'no layer has experts, since model.num_layers={model.num_layers}, '
            f'model.experts.first_dense={first} and model.layers leave none; remove model.experts'
        )
        yield Problem('model.experts', message, others=(path, 'model.layers'))


def _groups(experts: ExpertsConfig) -> Iterator[Problem]:
    count, groups, active = experts.count, experts.groups, experts.active_groups
    yield from divides('model.experts.count', count, 'model.experts.groups', groups)
    if active > groups:
        message = f'{active} is more than model.experts.groups={groups}; use at most {groups}'
        yield Problem('model.experts.active_groups', message, others=('model.experts.groups',))
    elif count % groups == 0 and count >= experts.active > count // groups * active:
        size = count // groups
        message = (
            f'{experts.active} experts do not fit in {active} groups of {size}; '
            f'use at most {active * size}, or model.experts.active_groups at least '
            f'{-(-experts.active // size)}'
        )
        yield Problem('model.experts.active', message, others=('model.experts.active_groups',))


def _capacity(config: 'Config', experts: ExpertsConfig) -> Iterator[Problem]:
    length = config.train.seq_len // config.mesh.parts_of_sequence
    if experts.capacity is None:
        if experts.capacity_group is not None:
            message = (
                f'{experts.capacity_group} needs model.experts.capacity, which is null (no token '
                'is dropped); set it, or remove model.experts.capacity_group'
            )
            yield Unused(
                'model.experts.capacity_group', message, others=('model.experts.capacity',)
            )
        return
    group = experts.capacity_group or config.train.seq_len
    if length % group:
        whole = 'half of a context shard' if config.mesh.context > 1 else 'a sequence'
        message = (
            f'{group} tokens do not divide {whole}, {length} tokens; '
            f'use {nearest(divisors(length), group)}'
        )
        yield Problem(
            'model.experts.capacity_group', message, others=('train.seq_len', 'mesh.context')
        )
