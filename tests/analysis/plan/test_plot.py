"""The pictures: they are drawn, and say what their axes are."""

import pytest
from typer.testing import CliRunner

import megajax
from megajax.analysis.plan import Plan, plot
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.plot import fastest, roofline, scaling
from megajax.commands.main import app
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


def test_the_gpus_of_the_plan_are_plotted_whatever_their_number():
    keys = 'mesh.data=24', 'mesh.model=1', 'train.batch_size=24', 'train.microbatches=1'
    config = megajax.load('tiny', keys)
    (axes,) = scaling(config, Cluster.of(hardware('h100'), 24)).axes
    assert {8, 24} <= {*axes.get_xticks()}


def test_the_plot_has_the_mfu_of_the_plan_with_its_imbalance(monkeypatch, tmp_path):
    figures, draw = [], plot.scaling
    monkeypatch.setattr(plot, 'scaling', lambda *given: figures.append(draw(*given)) or figures[0])
    wide = 'model.experts.count=128', 'model.experts.ffn_size=1024', 'model.hidden_size=1024'
    keys = 'train.dtype=bfloat16', 'train.batch_size=8', 'train.microbatches=1', *wide
    files = '--scaling', str(tmp_path / 's.svg'), '--json', str(tmp_path / 'p.json')
    asked = 'plan', 'tiny_moe', *keys, '--gpus', '16', '--imbalance', '3'
    done = CliRunner().invoke(app, [*asked, *files])
    assert done.exit_code == 0, done.output
    found = Plan.model_validate_json((tmp_path / 'p.json').read_text())
    assert found.best.experts > 1
    (line,) = figures[0].axes[0].lines
    assert dict(zip(*line.get_data(), strict=True))[16] == pytest.approx(100 * found.mfu)


def test_more_gpus_than_part_of_a_host_are_full_hosts():
    config = megajax.load('gpt2_124m', ['mesh.data=2', 'train.batch_size=16'])
    found = fastest(config, Cluster.of(hardware('h100'), 2), [16])
    whole = fastest(config, Cluster.of(hardware('h100'), 16), [16])
    assert found[16].timed.total == whole[16].timed.total
