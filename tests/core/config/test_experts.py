"""What is wrong with a mixture of experts is said before anything compiles, with a fix."""

import pytest

from megajax.core.config import ConfigError, load
from megajax.core.config.experts import ExpertsConfig

EXPERTS = 'model.experts={count: 8, active: 2, ffn_size: 64%s}'

OF_OUT = ['lora.rank=4', 'lora.targets=[out]']


@pytest.mark.parametrize(
    ('overrides', 'said'),
    [
        (['model.experts={count: 8, active: 9, ffn_size: 64}'], 'count=8; use at most 8'),
        (['mesh.experts=2'], 'model.experts'),
        ([EXPERTS % '', 'mesh.data=4', 'mesh.experts=3'], 'use 2 or 4'),
        ([EXPERTS % '', 'mesh.data=8', 'mesh.replicas=4', 'mesh.experts=4'], 'use 2'),
        (
            ['model.experts={count: 6, active: 2, ffn_size: 64}', 'mesh.data=4', 'mesh.experts=4'],
            'use 4 or 8, or mesh.experts 3 or 6',
        ),
        ([EXPERTS % ', capacity: 1.0, capacity_group: 48'], 'use 32 or 64'),
        ([EXPERTS % ', capacity: 1.0', 'mesh.context=2'], 'capacity_group'),
        ([EXPERTS % ', capacity_group: 32'], 'set it, or remove'),
        ([EXPERTS % ', groups: 3'], 'groups 2 or 4'),
        ([EXPERTS % ', groups: 4, active_groups: 5'], 'use at most 4'),
        ([EXPERTS % ', groups: 8, active_groups: 1'], 'use at most 1, or'),
        (['model.experts={count: 8, active: 2, ffn_size: 66}', 'mesh.model=4'], 'use 64 or 68'),
        (
            [EXPERTS % ', bias_rate: 0.01'],
            'model.experts.bias_rate: 0.01 has no effect with model.experts.selection_bias=false; '
            'remove it, or set model.experts.selection_bias=true',
        ),
        (
            [EXPERTS % ', selection_bias: true, bias_rate: 0.01', *OF_OUT],
            'model.experts.bias_rate: 0.01 has no effect with lora; remove it',
        ),
        (
            [EXPERTS % ', balance_over: sequence'],
            'model.experts.balance_over: sequence has no effect with model.experts.balance_loss=0; '
            'remove it, or set model.experts.balance_loss=0.01',
        ),
        ([EXPERTS % '', 'lora.rank=4'], 'lora.targets: adapters of experts'),
        ([EXPERTS % '', 'lora.rank=4', 'lora.targets=[out,up]'], '(up); use lora.targets=[out]'),
        ([EXPERTS % '', 'lora.rank=4', 'lora.targets=[down]'], 'use lora.targets=[qkv,out]'),
    ],
)
def test_a_mistake_is_rejected_with_the_key_and_a_fix(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load('tiny', overrides)
    assert said in str(error.value)


def test_the_rate_of_a_frozen_selection_bias_is_rejected() -> None:
    without = EXPERTS % ', selection_bias: true'
    with_rate, freeze = EXPERTS % ', selection_bias: true, bias_rate: 0.01', 'vision.freeze='
    with pytest.raises(ConfigError, match=r'bias_rate: 0.01 .* vision.freeze=\[decoder\]; remove'):
        load('tiny_vlm', [with_rate, freeze + '[decoder]'])
    assert load('tiny_vlm', [with_rate, freeze + '[encoder]']).model.experts
    assert load('tiny_vlm', [without, freeze + '[decoder]']).model.experts
    assert load('tiny', [without, *OF_OUT]).model.experts


def test_the_layers_between_cross_attention_layers_are_alike() -> None:
    crossed = ['vision.fusion=cross_attention', 'vision.cross_every=1', 'vision.deepstack=[]']
    first = ['model.experts={count: 4, active: 2, ffn_size: 32, first_dense: 1}']
    with pytest.raises(ConfigError, match=r'first_dense: 1: .*; use vision.cross_every=3, or'):
        load('tiny_vlm', [*crossed, *first])


def test_the_size_of_an_mlp_is_no_limit_for_experts() -> None:
    assert load('tiny', [EXPERTS % '', 'model.ffn_size=333', 'mesh.model=2']).model.experts


def test_experts_divide_the_data_shards_of_a_replica() -> None:
    mesh = ['mesh.data=8', 'mesh.replicas=2', 'mesh.experts=2', 'optim.shard=weights']
    config = load('tiny', [EXPERTS % '', *mesh])
    assert config.mesh.sizes == {'replica': 2, 'data': 2, 'expert': 2, 'model': 2}
    assert config.mesh.data_shards == 4


@pytest.mark.parametrize(
    ('capacity', 'group', 'slots'),
    [(1.1, 100, 11), (1.25, 100, 13), (2.0, 64, 13), (1e-3, 8, 1), (125.0, 64, 64)],
)
def test_a_capacity_is_an_exact_decimal_rounded_up(capacity: float, group: int, slots: int) -> None:
    """In floats, 1.1 * 100 / 10 is more than 11. No expert gets a token twice."""
    experts = ExpertsConfig(count=10, active=1, ffn_size=64, capacity=capacity)
    assert experts.slots(group) == slots
