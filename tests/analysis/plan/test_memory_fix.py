"""The one key that makes a step fit: it fits, nothing that fits is faster, and none is no key."""

import dataclasses
import re

import pytest

import megajax
from megajax.analysis.inspect.child import compile_in_child
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.memory_fix import one_key, remedy
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.search import usable_memory
from megajax.analysis.plan.time import step_time
from megajax.core.config import Config
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.memory import USABLE
from megajax.core.hardware.records import hardware
from megajax.core.hardware.targets import has_compiler

H100 = hardware('h100')
LARGE = 'megatron_1.2b', ['train.dtype=bfloat16', 'train.recompute=none', 'mesh.data=8']


def load(*overrides: str) -> Config:
    name, given = LARGE
    return megajax.load(name, [*given, *overrides])


def cluster(config: Config) -> Cluster:
    return Cluster.of(H100, config.mesh.num_devices, 8)


def needed(config: Config) -> int:
    return memory(
        resolved(config, on_gpu=True), capacity_bytes=usable_memory(cluster(config))
    ).total


@pytest.mark.parametrize(
    'overrides', [('train.batch_size=64',), ('train.batch_size=128', 'mesh.data=16')]
)
def test_the_key_makes_it_fit_and_no_other_that_does_is_faster(overrides) -> None:
    config = load(*overrides)
    gpus = cluster(config)
    assert needed(config) > usable_memory(gpus)
    found = one_key(config, gpus)
    with_key = load(*overrides, found.text)
    assert needed(with_key) == found.bytes <= usable_memory(gpus)

    def seconds(config: Config) -> float:
        return step_time(resolved(config, on_gpu=True), gpus).total

    assert seconds(with_key) / seconds(config) - 1 == pytest.approx(found.slower)
    for key in ('recompute=selective', 'recompute=full', 'microbatches=2', 'microbatches=4'):
        other = load(*overrides, f'train.{key}')
        assert needed(other) > usable_memory(gpus) or seconds(other) >= seconds(with_key)


def test_it_names_the_bytes_that_were_compiled_and_says_that_it_predicts() -> None:
    config = load('train.batch_size=64')
    usable = int(USABLE * H100.memory)
    assert remedy(config, usable, gpu='h100', gpus_per_host=8) == ''
    text = remedy(config, usable + 10**9, gpu='h100', gpus_per_host=8)
    assert f'needs {(usable + 10**9) / 1e9:.1f} GB per GPU ({usable / 1e9:.1f} GB usable)' in text
    assert re.search(
        r'; use \S+=\S+, predicted to need \S+ GB and to be \S+% (slower|faster)', text
    )


def test_a_key_that_saves_less_than_is_missing_is_not_named() -> None:
    config = load('train.batch_size=32')  # which fits by the plan's count
    before = needed(config)
    saved = [before - one_key(config, cluster(config), excess=e).bytes for e in (1, before // 3)]
    assert saved[0] >= 1
    assert saved[1] >= before // 3
    assert one_key(config, cluster(config), excess=before) is None


def test_where_no_key_is_enough_it_says_so() -> None:
    mesh = 'mesh.data=1', 'mesh.model=8', 'train.batch_size=8', 'train.microbatches=8'
    config = megajax.load('llama3_70b', [*mesh, 'train.recompute=full'])
    text = remedy(config, 10**12, gpu='h100', gpus_per_host=8)
    assert text.endswith('no single key makes it fit; run megajax plan to search all layouts')


def test_rounding_the_moments_is_named_only_where_nothing_else_fits() -> None:
    alone = 'mesh.data=1', 'train.batch_size=8', 'train.recompute=full'
    for count, named in ((4, 'train.microbatches=8'), (8, 'optim.moments_dtype=bfloat16')):
        config = load(*alone, f'train.microbatches={count}')
        least = needed(load(*alone, f'train.microbatches={count}', named))
        gpu = H100.model_copy(update={'memory': int(1.06 * least / USABLE)})
        found = one_key(config, dataclasses.replace(cluster(config), hardware=gpu))
        assert found.text == named


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
def test_the_step_compiled_with_the_key_fits() -> None:
    given = 'train.batch_size=64', 'train.unroll=false'
    key = one_key(load(*given), cluster(load(*given)))
    step = compile_in_child(resolved(load(*given, key.text), on_gpu=True), 'h100', 1)
    assert step.arguments + step.temporaries + step.outputs <= USABLE * H100.memory
