"""A plan whose config megajax's step does not support is not compiled."""

import pytest

import megajax
from megajax.analysis.plan.verify import verified
from megajax.core.config import ConfigError, load


def test_a_config_that_only_another_program_supports_is_not_compiled() -> None:
    config = load(
        'qwen3_30b_a3b', ['train.dtype=fp8', 'mesh.data=8', 'train.batch_size=8'], own=False
    )
    plan = megajax.plan(config, gpu='h100', program='megatron')
    with pytest.raises(ConfigError) as caught:
        verified(plan, 'h100')
    *problems, what_to_do = caught.value.problems
    assert any(str(problem).startswith('train.dtype') for problem in problems)
    assert what_to_do.endswith('leave out --verify to plan it for --program megatron')
