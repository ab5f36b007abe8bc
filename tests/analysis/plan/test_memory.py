"""What a step needs of a GPU's memory, counted: the papers' formulas, and what follows from a
choice.
"""

import dataclasses
from typing import Any

import pytest

import megajax
from megajax.analysis.plan.memory import StepMemory, kept_by_layer, largest_microbatch, memory
from megajax.analysis.plan.memory_traffic import traffic_of_weights
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.sizes import Sizes
from megajax.analysis.plan.time import step_time
from megajax.core.config import presets
from megajax.core.counts.parameters import num_parameters, own_counts
from megajax.core.hardware.records import hardware

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
        'optim.shard=none',
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


@pytest.mark.parametrize(('gpu', 'keeps_scores'), [('h100', False), ('a100', True)])
def test_only_a_gpu_without_flash_attention_for_wide_heads_keeps_their_scores(
    gpu: str, keeps_scores: bool
) -> None:
    wide = config('llama3_8b', 'model.head_dim=256', model=1)
    sizes = Sizes(wide, hardware(gpu).compute_capability)
    scores = 8 * wide.model.num_heads * wide.train.seq_len**2
    assert (sizes.kept_by_layer > scores / 2) == keeps_scores
    if not keeps_scores:
        assert sizes.scores == sizes.most_scores == 0


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


def test_full_recomputation_in_order_also_keeps_the_outputs_that_norms_read() -> None:
    def kept(*overrides: str) -> int:
        return Sizes(config('llama3_8b', *overrides, recompute='full')).kept

    after, in_order = 'model.norm_position=after', 'train.unroll=true'
    assert kept(after, in_order) == 2 * kept(in_order) == 2 * kept(after)


@pytest.mark.parametrize('name', presets())
def test_state_is_four_bytes_a_parameter_and_eight_more_if_it_is_learned(name: str) -> None:
    loaded = config(name, 'mesh.replicas=1', 'mesh.context=1', 'mesh.experts=1', model=1)
    learned = own_counts(loaded, learned=True).all
    assert memory(loaded).state == 4 * num_parameters(loaded.model, padded=True) + 8 * learned


def rung(shard: str, *overrides: str, **choices: Any) -> StepMemory:
    choices = {'data': 64, 'model': 1, 'recompute': 'full'} | choices
    return memory(config('llama3_8b', f'optim.shard={shard}', *overrides, **choices))


def test_zero_shares_the_state_and_adds_the_weights_of_a_step() -> None:
    """6 + 12/d bytes a parameter, as Megatron's distributed optimizer: its gradients are in
    fp32.
    """
    plain, sharded = (rung(shard, microbatches=2) for shard in ('none', 'optimizer'))
    parameters = plain.state / 12
    assert sharded.state == pytest.approx(12 / 64 * parameters, rel=0.01)
    assert sharded.gathered_weights == pytest.approx(2 * parameters, rel=0.001)
    assert sharded.total < plain.total


def test_each_rung_of_zero_needs_less_than_the_one_before() -> None:
    none, optimizer, gradients, weights = (
        rung(shard, data=8) for shard in ('none', 'optimizer', 'gradients', 'weights')
    )
    assert optimizer.state == gradients.state == weights.state < none.state / 7.9
    assert none.total > optimizer.total > gradients.total > weights.total
    # Shards of the layers' gradients beside the gradient of the head, in full.
    layers, head = 4 * 6.979e9, 4 * 4096 * 129024
    assert optimizer.gradients == pytest.approx(layers + head, rel=0.001)
    assert gradients.gradients == pytest.approx(layers / 8 + head, rel=0.001)
    # In one microbatch the tables are gathered only where they are used.
    assert (
        optimizer.gathered_weights
        == gradients.gathered_weights
        == pytest.approx(2 * 6.979e9, rel=0.001)
    )
    assert weights.gathered_weights == pytest.approx(2 * 6.979e9 / 32, rel=0.001)  # of a layer


def test_each_replica_has_the_complete_state() -> None:
    one, four = (rung('weights', f'mesh.replicas={count}') for count in (1, 4))
    assert four.state == pytest.approx(4 * one.state, rel=0.01)
    assert four.gradients > one.gradients
    assert four.state == rung('weights', data=16).state


def test_shards_of_a_dim_that_does_not_divide_are_padded() -> None:
    matrices = 2 * 4096 * 129024 + 6.979e9
    padded = rung('weights', data=48).parameters
    assert padded == pytest.approx(4 * matrices * 4128 / 4096 / 48, rel=0.002)
    assert padded > 4 * matrices / 48 * 1.007


def test_moments_in_16_bits_take_half() -> None:
    plain, rounded = rung('none'), rung('none', 'optim.moments_dtype=bfloat16')
    assert rounded.optimizer == plain.optimizer / 2
    assert plain.total - rounded.total == plain.optimizer / 2


def test_a_step_that_is_repeated_has_its_state_and_its_batch_twice() -> None:
    once = rung('weights')
    twice = rung('weights', 'train.replay_every=10', 'train.deterministic=true')
    assert (once.repetition, twice.repetition) == (0, once.state + once.batch)
    assert twice.total - once.total == twice.repetition


def test_a_grid_keeps_less_than_one_dimension() -> None:
    """Weights are 1/t either way, but the inputs of column-parallel products are D/x wide."""
    sp = 'mesh.sequence_parallel=true'
    flat = config('gpt3_175b', sp, model=16, rows=8)
    grid = config('gpt3_175b', sp, 'mesh.model_rows=4', model=4, rows=8)
    assert memory(grid).parameters == pytest.approx(memory(flat).parameters, rel=0.003)
    tokens, hidden = 8 * 2048, 12288
    saved = 2 * 2 * tokens * hidden * (1 - 1 / 4)  # two of them, in 16 bits
    # Attention's output is kept as it is, and gathered over the rows of the grid.
    attention = 2 * tokens * hidden / 4
    mlp = 2 * tokens * 4 * hidden * (1 / 4 - 1 / 16)  # the input of `down`
    assert kept_by_layer(flat) - kept_by_layer(grid) == saved - attention - mlp


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
    ('overrides', 'step'),
    [
        ([], 1),
        (['train.overlap=batch_split'], 2),
        (['mesh.sequence_parallel=true'], 1),
        (['mesh.sequence_parallel=true', 'mesh.model_rows=2'], 2),
        (['mesh.sequence_parallel=true', 'mesh.model_rows=2', 'train.overlap=batch_split'], 4),
    ],
    ids=str,
)
def test_the_largest_microbatch_fits_and_one_more_does_not(overrides: list[str], step: int) -> None:
    def needed(rows: int) -> StepMemory:
        return memory(config('megatron_8.3b', *overrides, rows=rows), capacity_bytes=GPU)

    rows = largest_microbatch(config('megatron_8.3b', *overrides, rows=4), GPU)
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


def test_muon_needs_the_matrices_of_its_largest_pool_twice_and_their_gram_matrices() -> None:
    alone = config('megatron_1.2b', 'optim.kind=muon', model=1, rows=2, recompute='full')
    needed, matrices = memory(alone), 2 * 40  # up and the transposed down have one form
    assert needed.moment == 'optimizer'
    assert needed.workspace == 2 * matrices * (2 * 1536 * 6144 + 1536**2)
    # In a mesh, a device iterates on a share, and receives its pieces of all matrices.
    shared = memory(config('megatron_1.2b', 'optim.kind=muon', data=8, model=1, recompute='full'))
    assert shared.workspace == needed.workspace // 8 + 2 * 40 * 12 * 1536**2


def test_zeros_that_pad_a_pool_of_muon_are_neither_received_nor_moments() -> None:
    sizes = 'model.num_layers=5', 'model.vocab_size=1024'
    adamw, muon = (
        config('megatron_1.2b', f'optim.kind={kind}', *sizes, data=8, model=1, recompute='full')
        for kind in ('adamw', 'muon')
    )
    d, needed = 1536, memory(muon)  # 20 square matrices are padded to 24, and 10 others to 16
    assert needed.moment == 'optimizer'
    assert needed.workspace == 2 * (2 * (2 * 4 * d**2 + d**2) + 5 * 12 * d**2)
    of_kind = {x.name: x.bytes for one in (adamw, muon) for x in traffic_of_weights(one)}
    assert of_kind['adamw'] - of_kind['muon'] == 2 * 4 * 5 * 12 * d**2


def test_muon_stores_one_moment_of_the_matrices_of_layers_and_takes_longer() -> None:
    adamw, muon = (
        megajax.load(
            'megatron_1.2b', ['mesh.data=8', 'optim.shard=optimizer', f'optim.kind={kind}']
        )
        for kind in ('adamw', 'muon')
    )
    held, matrices = [memory(config).optimizer for config in (adamw, muon)], 40 * 12 * 1536**2
    assert held[0] - held[1] == 4 * matrices / 8
    before, after = (step_time(config, Cluster.of(hardware('h100'), 8)) for config in (adamw, muon))
    assert 0 < after.products - before.products < 0.02 * before.products
    assert {sent.site for sent in after.transfers} - {sent.site for sent in before.transfers} == {
        'optimizer'
    }
