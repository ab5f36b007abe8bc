"""The memory and the memory-bound operations of a step with adapters beside frozen weights."""

import pytest

from megajax.analysis.plan.memory_traffic import traffic_of_weights
from megajax.analysis.plan.sizes import Sizes
from megajax.core.config import load

ON_ONE_GPU = ['mesh.data=1', 'mesh.model=1', 'train.batch_size=1', 'train.microbatches=1']


@pytest.mark.parametrize(
    ('targets', 'outputs'),
    [
        ('qkv,out', 4096 + 2 * 1024),
        ('out', 4096),
        ('down', 4096),
        ('qkv,out,up,down', 2 * 14336),
    ],
)
def test_the_largest_output_is_one_of_an_adapter(targets: str, outputs: int) -> None:
    settings = ['lora.rank=16', f'lora.targets=[{targets}]', 'train.seq_len=8192']
    config = load('llama3_8b', [*ON_ONE_GPU, *settings])
    assert Sizes(config).of_adapters == 2 * 8192 * outputs


@pytest.mark.parametrize('shard', ['none', 'gradients', 'weights'])
def test_frozen_experts_have_no_gradients(shard: str) -> None:
    mesh = ['mesh.data=8', 'mesh.experts=1', 'mesh.model=1', f'optim.shard={shard}']
    adapters = ['lora.rank=16', 'lora.targets=[qkv,out]', 'train.batch_size=8']
    config = load('qwen3_30b_a3b', [*mesh, *adapters])
    experts = Sizes(config).experts
    assert experts is not None
    assert (experts.gradients, experts.first_gradient) == (0, 0)
    trained = Sizes(config.model_copy(update={'lora': None})).experts
    assert trained is not None
    assert trained.gradients == 4 * 128 * 3 * 768 * 2048
    assert trained.first_gradient == trained.gradients * 2 // 3


def test_only_weights_in_fp32_are_cast() -> None:
    config = load('llama3_8b', [*ON_ONE_GPU, 'lora.rank=16'])
    (cast,) = (x for x in traffic_of_weights(config) if x.name == 'cast of weights')
    layers, width, hidden, keys = 32, 4096, 14336, 1024
    # The inputs and the outputs of qkv, out, up and down.
    adapters = 16 * (3 * width + hidden + 3 * width + 2 * keys + 2 * hidden)
    assert cast.bytes == 6 * (layers * (adapters + 2 * width) + width)
