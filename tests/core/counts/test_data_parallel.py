"""What each rung of ZeRO sends over data shards and replicas, against closed formulas."""

from collections import defaultdict

import pytest

import megajax
from megajax.core.config import Config
from megajax.core.counts.data_parallel import over_data, with_padding
from megajax.core.counts.parameters import megatron_counts, own_counts


def config(*overrides: str, preset: str = 'llama3_8b') -> Config:
    base = ['mesh.data=8', 'mesh.model=1', 'train.batch_size=64', 'train.microbatches=4']
    base += ['mesh.sequence_parallel=true', 'train.recompute=full', 'optim.shard=none']
    return megajax.load(preset, [*base, 'train.seq_len=512', 'train.dtype=bfloat16', *overrides])


def sent(config: Config) -> dict[tuple[str, str], float]:
    """The bytes that a device sends in a step, by axis and by kind."""
    total = defaultdict[tuple[str, str], float](float)
    for one in over_data(config):
        total[one.site.axis, one.kind] += one.times * one.wire_bytes
    return dict(total)


@pytest.mark.parametrize(
    ('rung', 'gathered', 'summed'),
    [
        ('optimizer', (1, 1), (1, 1)),
        ('gradients', (1, 1), (4, 4)),
        ('weights', (2 * 4, 4), (4, 4)),  # layers forward and backward, tables once
    ],
)
@pytest.mark.parametrize('model', [1, 8])
def test_a_rung_gathers_in_the_compute_dtype_and_sums_in_fp32(rung, gathered, summed, model):
    loaded = config(f'optim.shard={rung}', f'mesh.model={model}')
    counts = megatron_counts(loaded.model, model)
    sizes = counts.layers, counts.tables
    of_data = sent(loaded)
    assert of_data['data', 'all-gather'] == pytest.approx(
        7 / 8 * 2 * sum(times * size for times, size in zip(gathered, sizes, strict=True))
    )
    assert of_data['data', 'reduce-scatter'] == pytest.approx(
        7 / 8 * 4 * sum(times * size for times, size in zip(summed, sizes, strict=True))
    )
    vectors = counts.all - counts.matrices
    assert of_data['data', 'all-reduce'] == pytest.approx(2 * 7 / 8 * 4 * vectors)


def test_fsdp_of_llama_8b_sends_54_gigabytes_a_microbatch():
    loaded = config('optim.shard=weights', 'train.batch_size=8', 'train.microbatches=1')
    assert sum(sent(loaded).values()) == pytest.approx(54.41e9, rel=1e-3)


def test_bytes_in_bf16_on_the_wire_are_half_but_for_vectors():
    wide, narrow = (
        sent(config('optim.shard=gradients', f'optim.reduce_dtype={dtype}'))
        for dtype in ('float32', 'bfloat16')
    )
    assert narrow['data', 'reduce-scatter'] == wide['data', 'reduce-scatter'] / 2
    assert narrow['data', 'all-reduce'] == wide['data', 'all-reduce']


@pytest.mark.parametrize('rung', ['optimizer', 'gradients', 'weights'])
def test_replicas_send_a_shards_gradients_once_a_step(rung):
    loaded = config(f'optim.shard={rung}', 'mesh.replicas=2')
    alone = config(f'optim.shard={rung}', 'mesh.data=4', 'train.batch_size=32')
    counts = own_counts(loaded)
    with_replicas = sent(loaded)
    assert with_replicas['replica', 'all-reduce'] == 2 * 1 / 2 * 4 * counts.matrices / 4
    vectors = counts.all - counts.matrices
    assert with_replicas['replica+data', 'all-reduce'] == pytest.approx(2 * 7 / 8 * 4 * vectors)
    inside = {place: size for place, size in with_replicas.items() if place[0] == 'data'}
    assert inside == {
        place: size for place, size in sent(alone).items() if place[1] != 'all-reduce'
    }


def test_without_zero_replicas_are_data_shards_like_others():
    assert sent(config('optim.shard=none', 'mesh.replicas=2')) == {
        ('replica+data', kind): size for (_, kind), size in sent(config('optim.shard=none')).items()
    }


def test_shards_of_one_device_a_replica_gather_nothing():
    assert {kind for _, kind in sent(config('optim.shard=weights', 'mesh.replicas=8'))} == {
        'all-reduce'
    }


def test_berts_layer_with_copies_is_sent_once_a_step():
    loaded = config('optim.shard=weights', 'mesh.model=2', preset='bert_336m')
    counts = megatron_counts(loaded.model, 2)
    size = loaded.model.hidden_size
    assert counts.matrices - counts.layers - counts.tables == size**2
    once = [one for one in over_data(loaded) if one.times == 1 and one.kind != 'all-reduce']
    assert [one.array.shape for one in once] == [(size**2,)] * 2


def test_what_data_does_not_divide_is_sent_with_its_padding():
    loaded = config('optim.shard=gradients', 'mesh.data=48', 'train.batch_size=192')
    size = loaded.model.hidden_size
    assert size % 48
    assert with_padding(loaded, 10 * size) == 10 * (size + -size % 48)
    assert with_padding(config('optim.shard=gradients'), 10 * size) == 10 * size


def test_each_collective_names_the_code_of_megatron_core_that_places_it():
    for rung in ('none', 'optimizer', 'gradients', 'weights'):
        loaded = config(f'optim.shard={rung}')
        assert all('.py ' in one.source for one in over_data(loaded))
