"""The trace of a real GPU: two steps of `tiny` in bf16 on one H100, with jax 0.11.2, on
2026-11-26.
"""

import shutil
from pathlib import Path

import pytest

from megajax.analysis.profile import Profile, profile
from megajax.core.config import load
from megajax.core.counts.flops import step_flops

RECORDED = Path(__file__).parent / 'recorded/h100_tiny.tar.xz'


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('recorded')
    shutil.unpack_archive(RECORDED, folder, filter='data')
    return folder


@pytest.fixture(scope='module')
def result(run: Path) -> Profile:
    return profile(run)


def test_it_is_of_its_gpu_and_its_parts_are_the_step(result: Profile) -> None:
    assert (result.device, result.steps) == ('NVIDIA H100 80GB HBM3', [21, 22])
    assert sum(part.median for part in result.parts) == pytest.approx(result.median.step)


def test_a_gpu_without_a_speed_in_the_dtype_has_no_prediction(run: Path) -> None:
    result = profile(run, gpu='v100')
    assert result.predictions == []
    assert result.not_predicted.startswith('train.dtype=bfloat16: NVIDIA V100')


def test_every_kernel_of_its_cuda_graphs_has_an_instruction(result: Profile) -> None:
    parts = {part.name: part.launches for part in result.parts}
    assert 'CUDA graph' not in parts
    assert sum(parts.values()) == 280
    assert parts['outside the program'] == 3  # copies to and from the host


def test_its_products_are_those_of_the_config(result: Profile, run: Path) -> None:
    """Of attention the half that the mask hides does not count."""
    counted = step_flops(load(run / 'config.yaml'))
    flops = sum(line.flops for line in result.products)
    products = sum(line.flops for line in result.products if line.kind == 'matmul')
    assert products == pytest.approx(3 * (counted.layers + counted.head))
    assert flops - products == pytest.approx(7 / 4 * counted.attention)


def test_each_layer_has_its_attention_forward_and_backward(result: Profile) -> None:
    names = [line.name for line in result.instructions if line.kind.startswith('attention')]
    assert len(names) == len({*names}) == 2 * 4
