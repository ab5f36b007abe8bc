"""What stages send, against the closed formulas of a schedule, in Megatron's and in lock step."""

from collections import defaultdict
from collections.abc import Callable

import pytest

import megajax
from megajax.core.config import Config
from megajax.core.counts.collective import Expected
from megajax.core.counts.flops import step_flops
from megajax.core.counts.megatron import expected, stated
from megajax.core.counts.parameters import dim_sizes, elements, num_parameters, parameters
from megajax.core.counts.products import products
from megajax.core.counts.runs import num_passes
from megajax.core.counts.schedule import make_schedule

TOKENS, WIDTH = 4096, 4096


def config(*overrides: str, stages: int = 4, data: int = 2, microbatches: int = 16) -> Config:
    return megajax.load(
        'llama3_8b',
        [
            *('train.seq_len=4096', 'train.dtype=bfloat16', 'train.recompute=none'),
            *(f'mesh.stages={stages}', f'mesh.data={data}', 'mesh.model=8'),
            *('mesh.sequence_parallel=true', 'optim.shard=none'),
            f'train.batch_size={data * microbatches}',
            f'train.microbatches={microbatches}',
            *overrides,
        ],
    )


def sent(found: list[Expected]) -> dict[tuple[str, str, str], dict[str, tuple[int, float]]]:
    """Runs and bytes of each, by site and kind."""
    sites = defaultdict[tuple[str, str, str], dict[str, tuple[int, float]]](dict)
    for one in found:
        times, size = sites[one.site].get(one.kind, (0, 0.0))
        sites[one.site][one.kind] = (
            times + one.times,
            size + one.times * one.wire_bytes,
        )
    return sites


@pytest.mark.parametrize(('stages', 'chunks', 'microbatches'), [(4, 1, 16), (2, 2, 6), (8, 4, 8)])
def test_passes_are_those_of_the_table(stages: int, chunks: int, microbatches: int) -> None:
    table = make_schedule(stages, chunks, microbatches)
    ticks = sum((table.forward[:, :, 0] >= 0).any(axis=1))
    assert num_passes(stages, chunks, microbatches) == ticks == table.passes


@pytest.mark.parametrize('chunks', [1, 2])
@pytest.mark.parametrize('parallel', [True, False])
def test_a_stage_sends_once_a_microbatch_and_chunk_and_here_in_each_tick(
    chunks: int, parallel: bool
) -> None:
    loaded = config(f'mesh.virtual_stages={chunks}', f'mesh.sequence_parallel={parallel}'.lower())
    one = 2 * TOKENS * WIDTH / (8 if parallel else 1)
    theirs, ours = sent(expected(loaded)), sent(stated(loaded))
    runs, ticks = 16 * chunks, 16 * chunks + 3
    for phase in ('forward', 'backward'):
        assert theirs['stage', phase, 'stage'] == {'collective-permute': (runs, runs * one)}
        assert ours['stage', phase, 'stage'] == {'collective-permute': (ticks, ticks * one)}


def test_the_head_is_shared_once_a_microbatch_in_padded_parts() -> None:
    ours = sent(stated(config()))
    part = 2 * (TOKENS // 8 // 4) * WIDTH
    assert ours['head', 'forward', 'stage'] == {'all-to-all': (16, 16 * 3 * part)}
    assert ours['head', 'backward', 'stage'] == {'all-gather': (16, 16 * 3 * part)}
    padded = sent(stated(config('model.num_layers=35', stages=35, microbatches=35)))
    part = 2 * -(-TOKENS // 8 // 35) * WIDTH
    assert padded['head', 'forward', 'stage'] == {'all-to-all': (35, 35 * 34 * part)}


def test_layers_send_over_model_once_a_microbatch_and_here_in_each_tick() -> None:
    alone = sent(expected(config(stages=1)))['attention', 'forward', 'model']
    theirs = sent(expected(config()))['attention', 'forward', 'model']
    ours = sent(stated(config()))['attention', 'forward', 'model']
    for kind, (times, _) in alone.items():
        assert theirs[kind][0] == times / 4
        assert ours[kind][0] == times / 4 * 19 / 16


@pytest.mark.parametrize('count', [expected, stated])
@pytest.mark.parametrize('tied', ['true', 'false'])
def test_of_a_stage_with_adapters_only_their_gradients_are_summed(
    count: Callable[[Config], list[Expected]], tied: str
) -> None:
    loaded = config('lora.rank=16', f'model.tie_embeddings={tied}')
    found = [one for one in count(loaded) if one.site.name == 'gradients']
    assert {one.site.axis for one in found} == {'data', 'model'}
    (of_data,) = (one for one in found if one.site.axis == 'data')
    adapters = [x for _, x in parameters(loaded.model) if x.is_adapter]
    shards = {'L': 4} | dict.fromkeys('FNK', 8)
    sizes = dim_sizes(loaded.model)
    assert of_data.array.shape == (sum(elements(x.dims, sizes, shards) for x in adapters),)


def test_a_tied_table_is_summed_over_its_two_ranks_and_an_untied_one_is_not() -> None:
    tied, untied = (
        [
            one
            for one in expected(config(f'model.tie_embeddings={value}'))
            if one.site == ('gradients', 'step', 'stage+data')
        ]
        for value in ('true', 'false')
    )
    table = tied[0].array.shape[0] - WIDTH  # without the last norm
    assert [(one.array.shape[0], one.size) for one in tied] == [(table + WIDTH, 2), (table, 2)]
    assert [one.size for one in untied] == [2]


@pytest.mark.parametrize('rung', ['none', 'optimizer'])
def test_all_stages_reduce_what_is_outside_the_layers_together(rung: str) -> None:
    loaded = config(f'optim.shard={rung}')
    ours = sent(stated(loaded))
    tables = 2 * loaded.model.padded_vocab_size * WIDTH // 8
    kinds = ours['gradients', 'step', 'stage+data']
    vectors = 2 * 7 / 8 * 4 * WIDTH
    if rung == 'none':
        assert kinds == {'all-reduce': (1, pytest.approx(2 * 7 / 8 * 4 * tables + vectors))}
    else:
        assert kinds['reduce-scatter'] == (1, pytest.approx(7 / 8 * 4 * tables))
        assert kinds['all-reduce'] == (1, pytest.approx(vectors))
        gathered = ours['parameters', 'step', 'stage+data']['all-gather']
        assert gathered == (1, pytest.approx(7 / 8 * 2 * tables))
        of_layers = ours['parameters', 'step', 'data']['all-gather']
        matrices = num_parameters(loaded.model, padded=True) - 8 * tables - (2 * 32 + 1) * WIDTH
        assert of_layers == (1, pytest.approx(1 / 2 * 2 * matrices / 8 / 4))


def test_without_stages_and_context_shards_nothing_else_is_stated() -> None:
    assert stated(config(stages=1)) == []


@pytest.mark.parametrize('recompute', ['none', 'full'])
@pytest.mark.parametrize('chunks', [1, 2])
def test_a_device_computes_in_each_tick_and_its_part_of_each_head(
    chunks: int, recompute: str
) -> None:
    loaded = config(f'mesh.virtual_stages={chunks}', f'train.recompute={recompute}')
    alone = products(config(f'train.recompute={recompute}', stages=1), flash=True)
    again = {one.name for one in products(loaded, flash=True) if one.phase == 'recompute'}
    for before, now in zip(
        alone, [x for x in products(loaded, flash=True) if (x.name, x.phase) != DOWN], strict=True
    ):
        assert (before.name, before.phase) == (now.name, now.phase)
        if before.name.startswith('head'):
            assert now.flops * 4 == before.flops
            assert now.times == before.times
        else:
            assert now.times * 4 * 16 * chunks == before.times * (16 * chunks + 3)
            assert now.sizes == before.sizes
    assert ('down' in again) == (recompute == 'full')  # a stage recomputes several layers at once


DOWN = 'down', 'recompute'


def test_flops_of_a_step_count_no_idle_tick_and_no_padding() -> None:
    alone = step_flops(config(stages=1))
    assert step_flops(config()) == alone
    assert step_flops(config('mesh.virtual_stages=2')) == alone
    assert step_flops(config('model.num_layers=35', stages=35, microbatches=35)) == step_flops(
        config('model.num_layers=35', stages=1, microbatches=35)
    )
