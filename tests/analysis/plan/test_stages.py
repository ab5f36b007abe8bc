"""Pipelines and context shards in a plan: memory by the formulas, time by the bubble, and why a
pipeline loses.
"""

import itertools

import numpy as np
import pytest

import megajax
from megajax.analysis.plan.layouts import Mesh, changed, deep_layouts, deep_meshes, layouts
from megajax.analysis.plan.megatron_memory import in_flight as megatron_in_flight
from megajax.analysis.plan.memory import kept_by_layer, memory
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGATRON
from megajax.analysis.plan.published.predictions import predict
from megajax.analysis.plan.schedule_plot import boxes, in_flight, schedule
from megajax.analysis.plan.search import search
from megajax.analysis.plan.sizes import Sizes
from megajax.analysis.plan.stage_memory import kept_in_slots, num_slots
from megajax.analysis.plan.time import step_time
from megajax.core.config import Config, ConfigError, load
from megajax.core.config.rules import incompatibilities
from megajax.core.counts.schedule import IDLE, make_schedule
from megajax.core.hardware.records import hardware

H100 = hardware('h100')


def staged(*overrides: str, stages: int = 4, microbatches: int = 16) -> Config:
    """Llama 3 8B on stages x 2 data shards x 8, with rows of 4096 tokens."""
    mesh = f'mesh.stages={stages} mesh.data=2 mesh.model=8 mesh.sequence_parallel=true'
    train = f'train.microbatches={microbatches} train.batch_size={2 * microbatches}'
    rest = 'train.seq_len=4096 train.recompute=full optim.shard=none'
    return load('llama3_8b', [*f'{mesh} {train} {rest}'.split(), *overrides])


@pytest.mark.parametrize('gpipe', [False, True])
def test_the_slots_are_those_of_the_schedule(gpipe: bool) -> None:
    for stages, chunks, groups in itertools.product((2, 3, 4, 8), (1, 2, 4), (1, 2, 5)):
        count = stages * groups
        found = make_schedule(stages, chunks, count, gpipe=gpipe).num_slots
        config = changed(
            staged(),
            mesh__stages=stages,
            mesh__virtual_stages=chunks,
            train__microbatches=count,
            train__schedule='gpipe' if gpipe else '1f1b',
        )
        assert num_slots(config) == found


def test_the_memory_of_1f1b_does_not_depend_on_the_microbatches_and_that_of_gpipe_does() -> None:
    """Apart from the batch itself, which a step is given."""
    few, many = (
        {
            name: memory(
                staged(f'train.schedule={name}', 'train.recompute=full', microbatches=count)
            )
            for name in ('1f1b', 'gpipe')
        }
        for count in (16, 64)
    )
    assert few['1f1b'].activations == many['1f1b'].activations
    grown = many['gpipe'].activations - few['gpipe'].activations
    assert grown == 2 * 48 * 2 * 4096 * 4096 // 8  # an input and a gradient of each microbatch


def test_inputs_or_residuals_are_kept() -> None:
    residual = 2 * 4096 * 4096 // 8
    full, none = staged('train.recompute=full'), staged('train.recompute=none')
    waiting = 3 * residual  # both inputs of a tick, and the gradient of the last stage's output
    assert kept_in_slots(Sizes(full)) == 7 * residual + waiting
    assert kept_in_slots(Sizes(none)) == 7 * 8 * kept_by_layer(none) + waiting


def test_megatron_holds_fewer_in_plain_1f1b_and_as_many_interleaved() -> None:
    plain, interleaved = staged(), staged('mesh.virtual_stages=2')
    assert megatron_in_flight(plain) == 4 < num_slots(plain) == 7
    assert megatron_in_flight(interleaved) == num_slots(interleaved) == 11


def test_a_context_shard_keeps_its_part() -> None:
    long = ['train.seq_len=8192', 'mesh.data=1', 'mesh.model=8', 'train.microbatches=1']
    one, four = (
        staged(*long, f'mesh.context={count}', 'train.batch_size=1', stages=1) for count in (1, 4)
    )
    assert kept_by_layer(one) == 4 * kept_by_layer(four)
    assert memory(one).batch == 4 * memory(four).batch


def test_a_layer_with_a_window_keeps_the_keys_and_values_of_two_halos() -> None:
    long = ['train.seq_len=8192', 'mesh.data=1', 'mesh.model=8', 'train.microbatches=1']
    long += ['train.batch_size=1', 'mesh.context=4', 'train.recompute=none']
    full, windows = (
        kept_by_layer(staged(*long, *more, stages=1)) for more in ([], ['model.window=1024'])
    )
    assert windows - full == 2 * 2 * 1024 * 128 * 2  # one head of 128 in bf16


def test_windows_need_chunks_of_their_length_in_a_layout() -> None:
    long = ['train.seq_len=8192', 'mesh.data=1', 'train.microbatches=1', 'train.batch_size=1']
    config = staged(*long, 'model.window=1024', stages=1)
    assert not incompatibilities(changed(config, mesh__context=4))
    assert incompatibilities(changed(config, mesh__context=8))


def test_sequences_of_documents_are_sharded_too_with_a_mask_of_a_shards_tokens() -> None:
    long = ['train.seq_len=131072', 'model.max_seq_len=131072', 'train.batch_size=8']
    packed = ['data.document_mask=true', 'mesh.data=1', 'train.microbatches=1']
    config = load('llama3_8b', [*long, *packed])
    assert any(mesh.context == 8 for mesh in deep_meshes(config, 64, 8))
    masks = [Sizes(changed(config, mesh__context=count)).mask for count in (1, 8)]
    assert masks == [8 * 2 * 131072**2, 8 * 2 * (131072 // 8) ** 2]


def test_heads_are_exchanged_where_each_device_gets_whole_ones_and_masks_stay_whole() -> None:
    long = ['train.seq_len=131072', 'model.max_seq_len=131072', 'train.batch_size=8']
    config = load('llama3_8b', [*long, 'data.document_mask=true', 'mesh.data=1'])
    for model, stages, exchanges in (
        (1, 1, {'gather', 'ring', 'all_to_all'}),
        (1, 2, {'gather', 'all_to_all'}),
        (4, 1, {'gather', 'ring'}),
    ):
        found = [*deep_layouts(config, Mesh(1, 1, model, stages, 4), 8)]
        assert {layout.mesh.context_exchange for layout in found} == exchanges
    by_heads = changed(config, mesh__context=8, mesh__context_exchange='all_to_all')
    assert Sizes(by_heads).mask == Sizes(config).mask


def test_of_two_exchanges_that_nothing_hides_the_one_with_fewer_bytes_is_compared() -> None:
    long = ['train.seq_len=131072', 'model.max_seq_len=131072', 'train.batch_size=8']
    for keys, shards, least in (
        ([], 2, 'gather'),  # four query heads per key/value head: 1.25x the bytes by heads
        ([], 4, 'all_to_all'),
        (['model.window=1024'], 4, 'gather'),  # its halos are smaller
    ):
        config = load('llama3_8b', [*long, *keys, 'mesh.data=1'])
        found = [*deep_layouts(config, Mesh(1, 1, 1, 1, shards), 8)]
        assert {layout.mesh.context_exchange for layout in found} == {least, 'ring'}


def test_the_layers_of_a_pattern_of_windows_are_counted_in_an_exchange() -> None:
    config = load('olmo3_7b', ['train.seq_len=65536', 'train.batch_size=8', 'mesh.data=1'])
    found = [*deep_layouts(config, Mesh(1, 1, 1, 1, 8), 8)]
    assert {layout.mesh.context_exchange for layout in found} == {'all_to_all', 'ring'}


@pytest.mark.parametrize('masks', ['data.document_mask=true', 'data.document_mask=false'])
def test_a_window_longer_than_half_of_a_shard_leaves_the_exchange_of_heads(masks: str) -> None:
    long = ['train.seq_len=65536', 'train.batch_size=8', 'mesh.data=1']
    config = load('olmo3_7b', [*long, masks])
    found = [*deep_layouts(config, Mesh(1, 1, 1, 1, 16), 8)]
    assert {layout.mesh.context_exchange for layout in found} == {'all_to_all'}
    assert not [*filter(incompatibilities, found)]


def test_a_layout_without_stages_has_no_schedule_of_stages() -> None:
    keys = 'mesh.stages=2', 'train.microbatches=4', 'train.schedule=gpipe', 'optim.shard=none'
    config = load('llama3_8b', keys)
    assert not [*filter(incompatibilities, layouts(config, Mesh(8, 1, 1), 8))]


def test_a_step_takes_the_time_of_its_ticks() -> None:
    """(m + (p - 1) / v) (t_f + t_b) + m t_head / p."""
    cluster = Cluster.of(H100, 64)
    few, many = (step_time(staged(microbatches=count), cluster) for count in (16, 64))
    assert few.idle / (few.products - few.idle) == pytest.approx(3 / 16, rel=0.12)
    assert many.idle == pytest.approx(few.idle)
    virtual = step_time(staged('mesh.virtual_stages=4'), cluster)
    assert virtual.idle == pytest.approx(few.idle / 4)
    assert virtual.mfu > few.mfu


def test_sends_of_steady_ticks_hide_and_those_of_gpipe_do_not() -> None:
    cluster = Cluster.of(H100, 64)

    def waits(name: str) -> tuple[float, float]:
        sent = [
            transfer
            for transfer in step_time(staged(f'train.schedule={name}'), cluster).transfers
            if transfer.site == 'stage'
        ]
        return sum(x.seconds for x in sent), sum(x.exposed for x in sent)

    needed, exposed = waits('1f1b')
    assert exposed == pytest.approx(3 / 19 * needed)
    assert waits('gpipe') == (needed, needed)


def test_the_head_of_megatron_is_on_the_last_stage() -> None:
    cluster, config = Cluster.of(H100, 64), staged('train.recompute=none')
    shared, alone = step_time(config, cluster), step_time(config, cluster, MEGATRON)
    flops = 6 * 16 * 4096 * 4096 * 129024 / 8  # of the head on one of 8 GPUs
    least = 0.75 * flops / H100.peak_flops['bfloat16']
    assert alone.products - shared.products > least


def test_where_the_model_fits_without_a_pipeline_it_loses_and_the_plan_says_why() -> None:
    keys = 'mesh.data=16', 'train.batch_size=32', 'train.microbatches=1'
    plan = megajax.plan(load('llama3_8b', keys), gpu='h100', gpus=16)
    assert plan.best.stages == 1
    assert plan.pipelines.startswith('not worth it: the best pipeline (stages=')
    for said in ('; bubble ', ' to its neighbors (inter-host)', ' GB with 1f1b, '):
        assert said in plan.pipelines
    assert 'pipeline parallelism    not worth it: ' in str(plan)


def test_a_pipeline_wins_where_groups_inside_a_host_are_too_small() -> None:
    config = changed(load('gpt3_175b'), train__batch_size=64)
    found = search(config, Cluster.of(H100, 512))
    best, flat = found.best, next(x for x in found.fitting if x.mesh.is_flat)
    assert best.mesh.stages > 1
    assert best.timed.total < flat.timed.total


def test_a_sequence_of_128k_tokens_needs_context_shards() -> None:
    long = ['train.seq_len=131072', 'model.max_seq_len=131072', 'train.batch_size=2']
    config = load('llama3_8b', [*long, 'mesh.data=1', 'train.microbatches=1'])
    found = search(config, Cluster.of(H100, 16))
    assert found.best.mesh.context > 1
    assert any(x.config.mesh.context_exchange == 'ring' for x in found.fitting)


def test_a_deep_layout_is_valid_or_says_why() -> None:
    config = changed(load('llama3_8b'), train__batch_size=64)
    chosen = [*deep_layouts(config, Mesh(2, 1, 8, 4, 1), 8)]
    assert {x.mesh.virtual_stages for x in chosen} == {1, 2, 4, 8}
    assert {x.optim.shard for x in chosen} == {'none', 'optimizer'}
    assert all(x.train.microbatches >= 4 for x in chosen)


def test_published_pipelines_are_predicted() -> None:
    """No efficiency is fitted on any of these."""
    rows = [
        prediction
        for table in ('narayanan', 'narayanan-pipeline', 'korthikanti', 'core')
        for prediction in predict(table)
    ]
    piped = [x for x in rows if x.row.config.mesh.stages > 1]
    assert len(piped) == 6 + 4 + 3
    assert all(x.row.held_out for x in piped)
    longer = [abs(1 / (1 + x.error) - 1) for x in piped]  # of the time
    assert np.mean(longer) < 0.10
    assert max(longer) < 0.20


@pytest.mark.parametrize(('chunks', 'name'), [(1, '1f1b'), (2, '1f1b'), (1, 'gpipe')])
def test_the_picture_has_each_pass_once_and_the_slots(chunks: int, name: str) -> None:
    plan = make_schedule(4, chunks, 8, gpipe=name == 'gpipe')
    lengths = [(1.0, 2.0)] * len(plan.forward)
    drawn = [box for box in boxes(plan, lengths) if box.microbatch != IDLE]
    passes = {(box.stage, box.microbatch, box.chunk, box.is_forward) for box in drawn}
    assert len(drawn) == len(passes) == 2 * 4 * chunks * 8
    assert in_flight(plan).max() == plan.num_slots
    config = changed(staged(microbatches=8), mesh__virtual_stages=chunks, train__schedule=name)
    above, below = schedule(config).axes
    numbers = [text.get_text() for text in above.texts]
    assert sorted(numbers) == sorted(str(box.microbatch) for box in drawn)
    assert f'at most {plan.num_slots} chunks in flight' in above.get_title()
    assert f'a bubble of {3 / (8 * chunks):.1%}' in above.get_title()
    assert below.get_xlabel() == 'time, in forward passes of a chunk'


def test_without_a_pipeline_there_is_nothing_to_draw() -> None:
    with pytest.raises(ConfigError, match='has no schedule to draw'):
        schedule(load('gpt2_124m'))
