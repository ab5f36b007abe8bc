"""What a plan says of a mesh in one line, and the keys that it names."""

import pytest

from megajax.analysis.plan.advice import advice
from megajax.core.config import Config, load
from megajax.core.hardware.records import hardware

H100 = hardware('h100')
SMALL = 'model.num_layers=3', 'train.batch_size=64'


def said(*overrides: str) -> list[str]:
    return [*advice(llama(*overrides), H100)]


def llama(*overrides: str) -> Config:
    return load('llama3_8b', [*SMALL, 'optim.shard=none', *overrides])


def test_a_slow_mesh_is_told_the_keys_of_a_faster_one_which_hold_what_they_promise():
    slow = (
        'mesh.data=1',
        'mesh.model=8',
        'mesh.sequence_parallel=true',
        'train.microbatches=8',
        'train.recompute=full',
    )
    alone, compared = said(*slow)
    assert 'GB per GPU (76.0 GB usable); ' in alone
    before, words = compared.split('x as fast with ')
    ratio, keys = float(before.rpartition(' ')[2]), words.split()
    assert compared.startswith('fits without tensor parallelism (model=8); ')
    assert {'mesh.model=1', 'mesh.data=8', 'train.recompute=none'} <= {*keys}
    assert not any('overlap' in key or 'unroll' in key for key in keys)  # auto chooses them
    assert said(*slow, *keys)[1].endswith('within 3% of the fastest layout')
    seconds = [line.split(' per step')[0].split()[-2:] for line in (alone, said(*slow, *keys)[0])]
    slow_ms, fast_ms = (float(n) * (1 if unit == 'ms' else 1000) for n, unit in seconds)
    assert slow_ms / fast_ms == pytest.approx(ratio, rel=0.02)


def test_a_mesh_that_does_not_fit_is_told_one_that_does():
    large = 'train.batch_size=128', 'train.microbatches=1', 'train.recompute=none'
    alone, compared = said('mesh.data=8', 'mesh.model=1', 'mesh.sequence_parallel=false', *large)
    assert alone.startswith('does not fit: needs ')
    keys = compared.partition('; fits with ')[2].partition(', ')[0].split()
    assert ' per step expected' in said('mesh.data=8', 'mesh.model=1', *large, *keys)[0]


def test_where_nothing_fits_it_says_so():
    (_, compared) = said('mesh.data=1', 'mesh.model=1', 'model.num_layers=32')
    assert compared.endswith('and no other layout fits')
