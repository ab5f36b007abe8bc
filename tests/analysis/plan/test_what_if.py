"""What changes that save memory would do to a plan."""

import pytest

import megajax
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.planning import plan
from megajax.analysis.plan.result import WhatIf
from megajax.analysis.plan.sizes import NO_SAVINGS, Savings, Sizes
from megajax.core.config import Config


def config(*overrides: str) -> Config:
    settings = [
        'mesh.data=8',
        'mesh.model=1',
        'optim.shard=weights',
        'train.batch_size=16',
        'train.microbatches=1',
        'train.recompute=none',
        'train.seq_len=2048',
        'model.num_layers=31',  # a prime number, which has no pipelines: fewer layouts
    ]
    return megajax.load('llama3_8b', [*settings, *overrides])


def variants(asked: Config, gpu: str = 'h100') -> dict[str, WhatIf]:
    found = plan(asked, gpu=gpu, gpus_per_host=4, savings=True).what_if
    return {line.name: line for line in found}


def test_moments_of_matrices_take_a_byte_and_a_scale_for_each_256_elements() -> None:
    asked = config()
    plain, small = (
        Sizes(asked, savings=savings) for savings in (NO_SAVINGS, Savings(moments_in_8_bits=True))
    )
    matrices = plain.at_rest.learned_matrices
    assert 0.999 * plain.at_rest.learned < matrices < plain.at_rest.learned
    assert plain.moments - small.moments == pytest.approx(2 * (3 - 4 / 256) * matrices, rel=1e-9)


def test_activations_on_the_host_leave_those_of_two_layers() -> None:
    asked, on_host = config(), Savings(activations_on_host=True)
    plain, left = memory(asked).activations, memory(asked, savings=on_host).activations
    assert left == pytest.approx(plain * 2 / 31, abs=1)


def test_each_change_saves_memory_and_only_bf16_moments_are_supported() -> None:
    found = variants(config())
    names = 'optim.moments_dtype=bfloat16', '8-bit moments', 'activations in host memory'
    assert [*found] == ['as planned', *names]
    planned, bf16, in_8_bits, on_host = found.values()
    assert planned.bytes > bf16.bytes > in_8_bits.bytes > on_host.bytes
    assert planned.seconds > bf16.seconds > in_8_bits.seconds
    assert planned.largest_microbatch < on_host.largest_microbatch
    assert [line.is_supported for line in found.values()] == [True, True, False, False]
    # The activations of 29 of 31 layers, from each of four GPUs.
    assert on_host.host_bytes == pytest.approx(4 * 29 / 31 * memory(config()).activations, rel=1e-6)


def test_a_link_to_the_host_that_is_fast_enough_hides_the_activations() -> None:
    over_pcie, over_c2c = (variants(config(), gpu) for gpu in ('b200', 'gb200'))
    exposed = [
        found['activations in host memory'].seconds - found['as planned'].seconds
        for found in (over_pcie, over_c2c)
    ]
    assert exposed[0] > 0.1 * over_pcie['as planned'].seconds
    assert exposed[1] < exposed[0] / 4


def test_a_pipeline_with_muon_has_neither_change_of_other_software() -> None:
    stages = ['model.num_layers=2', 'mesh.stages=2', 'mesh.data=4', 'train.microbatches=2']
    found = variants(config(*stages, 'optim.shard=optimizer', 'optim.kind=muon'))
    assert [*found] == ['as planned', 'optim.moments_dtype=bfloat16']
