"""What a step needs of a GPU's memory, counted: the papers' formulas, and what follows from a
choice.
"""

import dataclasses
from typing import Any

import pytest

import megajax
from megajax.config import presets
from megajax.counts.parameters import num_parameters
from megajax.plan.memory import StepMemory, kept_by_layer, largest_microbatch, memory

GPU = 85 * 10**9


def config(
    name: str, *overrides: str, data: int = 1, model: int = 8, rows: int = 1, **choices: Any
) -> megajax.Config:
    settings = {'recompute': 'none', 'dtype': 'bfloat16', 'microbatches': 1} | choices
    train = [f'train.{key}={value}' for key, value in settings.items()]
    batch = rows * data * settings['microbatches']
    mesh = [
        f'mesh.data={data}',
        f'mesh.model={model}',
        f'train.batch_size={batch}',
        'mesh.sequence_parallel=false',
        'model.dropout=0.0',
    ]
    return megajax.load(name, [*mesh, *train, *overrides])


@pytest.mark.parametrize('shards', [1, 2, 8])
def test_a_layer_keeps_what_korthikanti_et_al_count(shards: int) -> None:
    sbh = 2 * 2048 * 12288
    dropout = config('gpt3_175b', 'model.dropout=0.1', model=shards, rows=2, recompute='selective')
    assert kept_by_layer(dropout) == sbh * (10 + 24 / shards)
    assert kept_by_layer(config('gpt3_175b', model=shards, rows=2)) == sbh * (8 + 24 / shards)


def test_sequence_parallelism_keeps_whole_only_the_inputs_of_products() -> None:
    sbh = 2 * 2048 * 12288
    scattered = config(
        'gpt3_175b',
        'model.dropout=0.1',
        'mesh.sequence_parallel=true',
        rows=2,
        recompute='selective',
    )
    assert kept_by_layer(scattered) == sbh * (4 + 30 / 8)


@pytest.mark.parametrize(
    ('dropout', 'dtype', 'each'), [('0.1', 'bfloat16', 7), ('0.0', 'float32', 8)]
)
def test_without_flash_attention_a_layer_keeps_its_scores(
    dropout: str, dtype: str, each: int
) -> None:
    kept, dropped = (
        kept_by_layer(
            config(
                'gpt2_345m', f'model.dropout={dropout}', model=4, rows=2, dtype=dtype, recompute=how
            )
        )
        for how in ('none', 'selective')
    )
    assert kept - dropped == each * 2 * 16 * 1024**2 / 4


@pytest.mark.parametrize('name', presets())
def test_state_is_twelve_bytes_a_parameter(name: str) -> None:
    loaded = config(name, model=1)
    assert memory(loaded).state == 12 * num_parameters(loaded.model, padded=True)


def test_zero_shares_the_state_and_adds_the_weights_of_a_step() -> None:
    """6 + 12/d bytes a parameter, as Megatron's distributed optimizer: its gradients are in
    fp32.
    """
    plain, sharded = (
        memory(config('llama3_8b', f'optim.shard={on}', data=64, model=1, recompute='full'))
        for on in ('false', 'true')
    )
    parameters = plain.state / 12
    assert sharded.state == pytest.approx(12 / 64 * parameters, rel=0.01)
    assert sharded.weights == pytest.approx(2 * parameters, rel=0.001)
    assert sharded.total < plain.total


def test_175_billion_parameters_do_not_fit_eight_gpus() -> None:
    """Weights in 16 bits would: 350 GB over 8 are 44 GB.

    With fp32 masters, moments and gradients each GPU needs 4 times its memory.
    """
    needed = memory(config('gpt3_175b', 'mesh.sequence_parallel=true', recompute='full'))
    assert 2 * needed.parameters / 4 < GPU
    assert needed.state == pytest.approx(12 * 174.6e9 / 8, rel=0.01)
    assert needed.total > 4 * GPU
    assert largest_microbatch(config('gpt3_175b', recompute='full'), GPU) == 0


def test_several_microbatches_add_a_sum_of_gradients() -> None:
    one, four = memory(config('megatron_1.2b')), memory(config('megatron_1.2b', microbatches=4))
    assert four.gradients - one.gradients == one.parameters


def test_recomputation_needs_less() -> None:
    none, selective, full = (
        memory(config('megatron_2.5b', model=4, rows=4, dtype='float32', recompute=how))
        for how in ('none', 'selective', 'full')
    )
    assert full.total < selective.total < none.total
    assert full.activations == 54 * 4 * 1024 * 1920 * 4  # the input of each layer


@pytest.mark.parametrize(
    'overrides', [[], ['train.overlap=batch_split'], ['mesh.sequence_parallel=true']], ids=str
)
def test_the_largest_microbatch_fits_and_one_more_does_not(overrides: list[str]) -> None:
    def needed(rows: int) -> StepMemory:
        return memory(config('megatron_8.3b', *overrides, rows=rows), capacity_bytes=GPU)

    step = 2 if 'train.overlap=batch_split' in overrides else 1
    rows = largest_microbatch(config('megatron_8.3b', *overrides, rows=2), GPU)
    assert rows >= step
    assert rows % step == 0
    assert needed(rows).total <= GPU < needed(rows + step).total


def test_gradients_that_would_not_fit_early_come_late() -> None:
    stacked = config('megatron_8.3b', 'mesh.sequence_parallel=true', rows=32)
    early, late = memory(stacked), memory(stacked, capacity_bytes=GPU)
    assert late.total < GPU < early.total
    assert memory(stacked, capacity_bytes=2 * GPU) == early


def test_lines_add_up() -> None:
    found = memory(config('llama3_8b', microbatches=2, rows=2))
    lines = [size for name, size in dataclasses.asdict(found).items() if name != 'moment']
    assert found.total == sum(lines)
