"""What a 2-D grid sends, against the formula of Pope et al. (2022)."""

import pytest

import megajax
from megajax.core.config import Config
from megajax.core.counts.flops import step_flops
from megajax.core.counts.grid import over_grid
from megajax.core.counts.megatron import expected


def config(rows: int, model: int, preset: str = 'llama3_8b', *overrides: str) -> Config:
    base = [
        'mesh.data=1',
        f'mesh.model_rows={rows}',
        f'mesh.model={model}',
        'mesh.sequence_parallel=true',
        'train.batch_size=16',
        'train.microbatches=1',
        'train.seq_len=1024',
        'train.dtype=bfloat16',
        'train.recompute=none',
        'optim.shard=none',
        'model.bias=false',
    ]
    return megajax.load(preset, [*base, *overrides])


def layer_bytes(loaded: Config, *phases: str) -> float:
    """The bytes of activations in a layer, by device."""
    found = (one for one in expected(loaded) if one.site.name in ('attention', 'mlp'))
    total = sum(one.times * one.wire_bytes for one in found if one.site.phase in phases)
    return total / loaded.model.num_layers


@pytest.mark.parametrize('preset', ['llama3_8b', 'gpt3_175b'])
@pytest.mark.parametrize(('rows', 'model'), [(2, 2), (2, 8), (4, 8), (4, 2)])
def test_a_layer_sends_what_the_paper_says_forward_and_as_much_backward(preset, rows, model):
    loaded = config(rows, model, preset)
    sizes = loaded.model
    tokens = 16 * 1024
    widths = 2 * sizes.num_heads * sizes.head_dim + 2 * sizes.num_kv_heads * sizes.head_dim
    widths += sizes.ffn_size * (3 if sizes.activation == 'swiglu' else 2)
    elements = 4 * (model - 1) / model * sizes.hidden_size / rows
    elements += (rows - 1) / rows * widths / model
    assert layer_bytes(loaded, 'forward') == pytest.approx(2 * tokens * elements)
    assert layer_bytes(loaded, 'backward') == pytest.approx(2 * tokens * elements)


@pytest.mark.parametrize(('phase', 'form'), [('forward', 'f8e4m3fn'), ('backward', 'f8e5m2')])
def test_with_fp8_a_layer_gathers_a_byte_for_each_two_that_it_reduces(phase, form):
    wide, narrow = config(2, 2), config(2, 2, 'llama3_8b', 'train.dtype=fp8')
    dtypes = {
        one.kind: one.array.dtype
        for one in over_grid(narrow)
        if one.site.name in ('attention', 'mlp') and one.site.phase == phase
    }
    assert dtypes == {'all-gather': form, 'reduce-scatter': 'bf16'}
    forward, backward = (layer_bytes(wide, phase) for phase in ('forward', 'backward'))
    assert forward == backward
    both = layer_bytes(narrow, 'forward', 'backward')
    # What one pass gathers, the other one reduces.
    assert both == pytest.approx(0.75 * (forward + backward))


@pytest.mark.parametrize(
    ('preset', 'rows', 'model', 'ratio'),
    [
        ('llama3_8b', 2, 2, 1.42),
        ('megatron_8.3b', 2, 2, 1.33),
        ('llama3_8b', 2, 4, 0.89),
        ('llama3_8b', 2, 8, 0.68),
        ('gpt3_175b', 4, 16, 0.38),
    ],
)
def test_a_grid_sends_more_than_one_dimension_at_2x2_and_less_from_eight_devices_on(
    preset, rows, model, ratio
):
    grid, devices = config(rows, model, preset), rows * model
    # One dimension, which XLA gathers a layer's input in once.
    tokens, size = 16 * 1024, grid.model.hidden_size
    one_dimension = 2 * tokens * 4 * (devices - 1) / devices * size
    assert layer_bytes(grid, 'forward') / one_dimension == pytest.approx(ratio, abs=0.006)


def test_recomputation_adds_the_forward_pass_without_the_last_collective():
    plain = config(2, 8)
    again = config(2, 8, 'llama3_8b', 'train.recompute=full')
    scattered = 2 * 16 * 1024 * 7 / 8 * plain.model.hidden_size / 2
    assert layer_bytes(again, 'recompute', 'backward') == pytest.approx(
        layer_bytes(plain, 'forward', 'backward') - scattered
    )


def test_embedding_and_head_send_a_reduce_scatter_and_a_gather_over_all_devices():
    loaded = config(2, 8)
    found = [one for one in over_grid(loaded) if one.site.name in ('embedding', 'head')]
    stream = 2 * 16 * 1024 * loaded.model.hidden_size
    assert sum(one.wire_bytes for one in found) == pytest.approx(4 * 15 / 16 * stream)


def test_each_norm_sums_a_number_for_each_token():
    loaded = config(2, 2)
    (norms,) = (one for one in over_grid(loaded) if one.site.name == 'norm')
    assert (norms.site.axis, norms.array.shape) == ('row', (16, 512))
    assert norms.times == 2 * (2 * loaded.model.num_layers + 1)


def test_a_grid_computes_as_much_as_one_device_in_all():
    assert step_flops(config(2, 2)) == step_flops(config(1, 4))
