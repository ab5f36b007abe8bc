"""The pictures: they are drawn, and say what their axes are."""

import pytest

import megajax
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.plot import fastest, roofline, scaling
from megajax.core.hardware.records import hardware

# A prime number of layers has no pipelines, and so fewer layouts.
KEYS = 'mesh.data=8', 'train.batch_size=8', 'train.microbatches=1', 'model.num_layers=23'
CONFIG = megajax.load('gpt2_345m', KEYS)
CLUSTER = Cluster.of(hardware('h100'), 8)


@pytest.mark.parametrize(
    ('draw', 'x', 'y', 'name'),
    [
        (roofline, 'FLOPs per byte', 'TFLOP/s', 'picture.png'),
        (scaling, 'GPUs', 'MFU, %', 'picture.svg'),
    ],
)
def test_a_picture_is_drawn_with_units(draw, x, y, name, tmp_path):
    figure = draw(CONFIG, CLUSTER)
    (axes,) = figure.axes
    assert x in axes.get_xlabel()
    assert y in axes.get_ylabel()
    figure.savefig(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 10_000


def test_no_product_is_above_the_roof():
    axes = roofline(CONFIG, CLUSTER).axes[0]
    gpu = hardware('h100')
    for points in axes.collections:
        intensity, tflops = points.get_offsets()[0]
        assert 1e12 * tflops <= min(gpu.peak_flops['bfloat16'], intensity * gpu.memory_bandwidth)


def test_what_matmuls_reach_standalone_and_in_training_is_drawn_by_name():
    gpu = hardware('h100')
    said = [text.get_text() for text in roofline(CONFIG, CLUSTER).axes[0].texts]
    for what, share in (
        ('standalone', gpu.reference.matmul),
        ('in training', gpu.efficiency.matmul),
    ):
        assert f'large matmuls {what}: {share * 989.4:,.0f} TFLOP/s' in said


def test_a_larger_model_starts_where_it_fits():
    config = megajax.load(
        'llama3_8b', ['mesh.data=8', 'train.batch_size=8', 'train.microbatches=1']
    )
    found = fastest(config, CLUSTER, [1, 8])
    assert 1 not in found
    assert 8 in found


def test_more_gpus_than_part_of_a_host_are_full_hosts():
    config = megajax.load('gpt2_124m', ['mesh.data=2', 'train.batch_size=16'])
    found = fastest(config, Cluster.of(hardware('h100'), 2), [16])
    whole = fastest(config, Cluster.of(hardware('h100'), 16), [16])
    assert found[16].timed.total == whole[16].timed.total
