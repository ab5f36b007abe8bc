"""FLOPs of a step: the paper's formula, and what each choice adds.

`tests/analysis/plan/test_compiled.py` has the products of compiled steps.
"""

from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from support import make_config
from vlm import relevant, vlm

from megajax.core.config import Config, ModelConfig, load, presets
from megajax.core.counts.flash import missing_for_flash, uses_flash
from megajax.core.counts.flops import is_gpt, narayanan_flops, step_flops
from megajax.core.counts.products import products

PAPER = [
    'gpt2_124m',
    'gpt2_345m',
    'megatron_1.2b',
    'megatron_2.5b',
    'megatron_4.2b',
    'megatron_8.3b',
    'gpt3_175b',
]


def formula(config: Config, factor: int, vocab: int) -> Fraction:
    """factor B s l h^2 (1 + s/(6h) + V/(vocab l h))"""
    model, B, s = config.model, config.train.batch_size, config.train.seq_len
    l, h, V = model.num_layers, model.hidden_size, model.padded_vocab_size
    return factor * B * s * l * h**2 * (1 + Fraction(s, 6 * h) + Fraction(V, vocab * l * h))


@pytest.mark.parametrize('preset', PAPER)
def test_a_gpt_has_exactly_the_flops_of_the_papers_formula(preset: str) -> None:
    config = load(preset)
    assert is_gpt(config.model)
    found, shape = (
        step_flops(config),
        {'batch_size': config.train.batch_size, 'seq_len': config.train.seq_len},
    )
    assert (
        found.model
        == formula(config, 72, 12)
        == narayanan_flops(config.model, **shape, recompute=False)
    )
    with_every_layer_again = found.model + found.layers + found.attention
    assert (
        with_every_layer_again
        == formula(config, 96, 16)
        == narayanan_flops(config.model, **shape, recompute=True)
    )


@pytest.mark.parametrize(
    'other',
    [
        'model.experts={count: 8, active: 2, ffn_size: 1024}',
        'model.layers=[{window: 128},{}]',
        'lora.rank=8',
    ],
)
def test_the_papers_formula_is_not_of_a_model_with_other_layers(other: str) -> None:
    position = 'model.position=rope'  # which patterns of layers need
    config = load('gpt2_345m', [position, other])
    assert is_gpt(load('gpt2_345m', [position]).model)
    assert not is_gpt(config.model)


@pytest.mark.parametrize(
    'frozen',
    [
        {'vision': {'freeze': ('encoder', 'merger')}},
        {'vision': {'freeze': ('encoder',)}},
        {'lora': {'rank': 4}},
        {'vision': {'freeze': ('decoder',)}},
        {},
    ],
    ids=str,
)
def test_a_step_that_repeats_nothing_executes_the_flops_of_the_model(frozen) -> None:
    flops = step_flops(vlm(train={'recompute': 'none'}, **frozen), flash=False)
    assert flops.recomputed == 0


def test_a_frozen_encoder_has_a_third_of_its_flops() -> None:
    parts = {'freeze': ('encoder', 'merger')}
    learned, frozen = (
        step_flops(vlm(vision={'num_layers': layers, **freeze}), flash=False).model
        - step_flops(vlm(vision={'num_layers': 1, **freeze}), flash=False).model
        for layers, freeze in ((3, {}), (3, parts))
    )
    assert learned == 3 * frozen


@pytest.mark.parametrize('make', [partial(vlm, crossed=True), relevant])
def test_what_learns_beside_a_frozen_decoder_has_gradients(make) -> None:
    frozen = products(make(vision={'freeze': ('decoder',)}), flash=False)
    learned = {x.name for x in products(make(), flash=False) if x.name.endswith(' weight')}
    beside = {name for name in learned if name.split()[0] in ('vision', 'cross', 'relevance')}
    assert {x.name for x in frozen if x.name.endswith(' weight')} == beside < learned


@pytest.mark.parametrize('freeze', [('encoder',), ('encoder', 'merger')])
def test_the_gates_of_relevance_need_a_backward_pass_of_a_frozen_encoder(freeze) -> None:
    """All gradients but those of the frozen weights, of which attention has none."""
    learned, frozen = (
        step_flops(relevant(vision={'freeze': parts}), flash=False) for parts in ((), freeze)
    )
    model, vision = relevant().model, relevant().vision
    D, W, rows = vision.hidden_size, vision.merged_size, 8 * vision.read_patches
    layers = vision.num_layers * (4 * D * D + 2 * D * vision.ffn_size)
    embedding = vision.num_channels * vision.patch_size**2 * D + vision.positions**2 * D
    weights = 2 * rows * (layers + embedding)
    if 'merger' in freeze:
        weights += 2 * rows // vision.unit * W * (W + model.hidden_size)
    assert learned.model - frozen.model == weights
    assert frozen.recomputed == 0


def test_megatrons_largest_model_has_the_flops_that_its_table_implies() -> None:
    """Narayanan et al. (2021), Table 1: 163 TFLOP/s on each of 3072 GPUs, and section 5.1: 450
    billion tokens in 84 days.
    """
    model = ModelConfig(
        num_layers=128, hidden_size=25600, num_heads=160, vocab_size=51200, max_seq_len=2048
    )
    step = narayanan_flops(model, batch_size=3072, seq_len=2048, recompute=True)
    days = 450e9 / (3072 * 2048) * step / (163e12 * 3072) / 86400
    assert days == pytest.approx(84, rel=0.02)


@pytest.mark.parametrize(
    ('change', 'forward'),
    [
        ({}, 4 * 64 * 64 + 2 * 64 * 256),
        ({'num_kv_heads': 2}, (8 + 2 * 2) * 8 * 64 + 64 * 64 + 2 * 64 * 256),
        ({'head_dim': 32}, 4 * 8 * 32 * 64 + 2 * 64 * 256),
        ({'activation': 'swiglu', 'ffn_size': 96}, 4 * 64 * 64 + 3 * 64 * 96),
    ],
    ids=str,
)
def test_each_token_meets_each_weight_of_a_layer_once(change: dict[str, Any], forward: int) -> None:
    found = step_flops(make_config(model={'vocab_size': 1000} | change))
    assert found.layers == 2 * 8 * 32 * 2 * forward
    assert found.head == 2 * 8 * 32 * 64 * 1024  # of the padded vocabulary


def test_berts_square_layer_is_whole_on_each_device_unless_the_sequence_is_sharded() -> None:
    causal, alone = step_flops(make_config()), step_flops(make_config('bert'))
    dense, of_first_token = 2 * 8 * 32 * 64**2, 2 * 8 * 64 * (64 + 2)
    assert alone.head - causal.head == dense + of_first_token
    shared, scattered = (
        step_flops(make_config('bert', 2, 4, sequence_parallel=on)) for on in (False, True)
    )
    assert shared.model == scattered.model == alone.model
    assert shared.hardware - alone.hardware == 3 * 3 * (dense + of_first_token)
    assert scattered.hardware - alone.hardware == 3 * 3 * of_first_token


def test_flops_do_not_depend_on_the_mesh_or_the_microbatches() -> None:
    alone = step_flops(make_config('llama'))
    assert alone == step_flops(
        make_config('llama', 2, 4, sequence_parallel=True, train={'microbatches': 2})
    )


@pytest.mark.parametrize(
    ('flash', 'recompute', 'passes'),
    [
        (False, 'none', 6),
        (False, 'selective', 7),
        (False, 'full', 8),
        (True, 'none', 7),
        (True, 'full', 9),
    ],
)
def test_attention_is_a_number_of_products_of_the_scores_size(
    flash: bool, recompute: str, passes: int
) -> None:
    config = make_config(
        train={'recompute': recompute, 'dtype': 'bfloat16'},
        model={'vocab_size': 1000, 'dropout': 0.0},
    )
    found = step_flops(config, flash=flash)
    down = 2 * 8 * 32 * 2 * 64 * 256
    again = found.layers - down if recompute == 'full' else 0
    assert (found.hardware - again - 3 * (found.layers + found.head)) / (
        found.attention / 2
    ) == passes


@pytest.mark.parametrize(
    ('capability', 'most'), [((7, 0), 0), ((8, 0), 128), ((9, 0), 256), ((10, 0), 128), (None, 128)]
)
def test_flash_attention_takes_wider_heads_on_hopper_alone(capability, most) -> None:
    fits = [dim for dim in range(8, 520, 8) if not missing_for_flash('bfloat16', dim, capability)]
    assert fits == [*range(8, most + 1, 8)]
    assert missing_for_flash('bfloat16', 60, capability)
    assert missing_for_flash('float32', 64, capability)


@pytest.mark.parametrize('preset', presets())
def test_flash_attention_is_used_where_cudnn_has_it(preset: str) -> None:
    config = load(preset)
    fits = config.train.dtype == 'bfloat16' and config.model.dropout == 0
    missing = missing_for_flash('bfloat16', config.model.head_dim, (9, 0))
    assert uses_flash(config) == (fits and not missing)
    assert not uses_flash(load(preset, ['model.dropout=0.1', 'mesh.context=1']))
