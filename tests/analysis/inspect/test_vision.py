"""A vision encoder sends the expected bytes, less than Megatron inside its layers, and no more."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support import exhaustive, slow
from vlm import SP, relevant, vlm

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.analysis.inspect.one_device import on_one_device
from megajax.analysis.inspect.reference import GRADIENT, reference
from megajax.analysis.inspect.report import to_text
from megajax.analysis.inspect.result import Inspection
from megajax.analysis.inspect.shrink import LARGEST, shrink
from megajax.core.config import Config, load
from megajax.core.counts.parameters import num_parameters
from megajax.core.counts.relevance import has_choice
from megajax.core.hardware.targets import has_compiler


def inspect_here(config: Config) -> Inspection:
    return audit(config, compile_for(config, 'cpu', 1), 'cpu')


TWICE: dict[str, Any] = {'train': {'microbatches': 2, 'recompute': 'full'}}
HALF: dict[str, Any] = {'train': {'dtype': 'bfloat16'}}
# As many image vectors as no matrix of the encoder has rows.
ROWS: dict[str, Any] = {'train': {'batch_size': 24}}
cross = functools.partial(vlm, crossed=True)


@pytest.mark.parametrize(
    'config',
    [
        exhaustive(vlm(2, 2, **SP)),
        exhaustive(vlm(2, 2, **TWICE)),
        exhaustive(vlm(1, 4, **SP, **HALF)),
        exhaustive(vlm(4, 2, **SP, optim={'shard': 'optimizer'}, **HALF)),
        exhaustive(vlm(2, 4, optim={'shard': 'weights'}, **TWICE)),
        exhaustive(vlm(4, 2, mesh={'replicas': 2}, optim={'shard': 'gradients'})),
        exhaustive(vlm(3, 2, optim={'shard': 'weights'}, train={'batch_size': 24})),
        exhaustive(vlm(2, 1)),
        exhaustive(vlm(2, 2, **SP, vision={'freeze': ('encoder',)}, train={'recompute': 'full'})),
        exhaustive(vlm(2, 2, vision={'freeze': ('merger',)}, optim={'shard': 'weights'})),
        exhaustive(vlm(2, 2, **SP, vision={'freeze': ('decoder',)}, optim={'shard': 'optimizer'})),
        exhaustive(cross(2, 2)),
        exhaustive(cross(1, 4, **SP, **ROWS)),
        exhaustive(cross(2, 2, **SP, **TWICE)),
        exhaustive(cross(2, 2, **SP, lora={'rank': 4})),
        exhaustive(cross(1, 4, train=ROWS['train'] | HALF['train'])),
        exhaustive(cross(2, 4, optim={'shard': 'weights'}, **TWICE)),
        exhaustive(cross(4, 2, **SP, optim={'shard': 'gradients'}, **HALF)),
        exhaustive(relevant(2, 2, **SP)),
        exhaustive(relevant(1, 4, **HALF, relevance={'scorer_shards': 2})),
        exhaustive(
            relevant(
                2,
                2,
                crossed=True,
                model={'num_layers': 4},
                optim={'shard': 'weights'},
                train={'seq_len': 32},
            )
        ),
    ],
)
def test_no_row_sends_more_than_is_expected(config: Config) -> None:
    found = inspect_here(config)
    assert found.ok, to_text(found)
    rows = {(row.site, row.phase, row.axis): row for row in found.rows}
    assert 'other' not in ''.join(site for site, *_ in rows)
    if config.mesh.model > 1:
        vectors = rows['vision', 'forward', 'model']
        assert vectors.wire_bytes == vectors.expected_wire_bytes or vectors.verdict == 'less'
        assert [transfer.kind for transfer in vectors.placed] == ['all-gather']
        assert rows['vision', 'forward', 'model'].megatron_wire_bytes > vectors.wire_bytes
        is_summed = ('vision', 'backward', 'model') in rows
        assert is_summed
    if config.model.num_cross_layers and config.mesh.model > 1:
        # Once, however many layers read the vectors, and a layer sends what any other does.
        summed = rows['vision', 'backward', 'model'].placed
        runs = config.train.microbatches
        # LoRA freezes the encoder, so nothing needs the vectors' gradient.
        wanted = [] if config.lora else [('reduce-scatter', runs)]
        assert [(x.kind, x.times) for x in summed] == wanted
        kind = 'reduce-scatter' if config.mesh.sequence_parallel else 'all-reduce'
        for phase in ('forward', 'backward'):
            of_layers = rows['cross_attention', phase, 'model'].placed
            times = config.model.num_cross_layers * runs
            assert [x.times for x in of_layers if x.kind == kind] == [times]
    # Each device encodes its part of the images, and of the slots that fill up the last part.
    assert found.products.ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize('shard', [slow('none'), exhaustive('gradients')])
def test_a_frozen_encoder_sends_its_vectors_forward_alone(shard: str) -> None:
    frozen = {'freeze': ('encoder', 'merger')}
    config = vlm(2, 2, **SP, vision=frozen, optim={'shard': shard})
    found = inspect_here(config)
    assert found.ok, to_text(found)
    rows = {(row.site, row.phase, row.axis): row for row in found.rows}
    assert rows['vision', 'forward', 'model'].wire_bytes > 0
    assert not rows['vision', 'backward', 'model'].wire_bytes
    assert found.products.ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize('preset', ['qwen3_vl_2b', 'qwen3_vl_32b', 'arr_coc_32b'])
def test_a_smaller_config_keeps_what_an_encoder_does(preset):
    config = load(preset)
    small, _ = shrink(config)
    assert num_parameters(small.model) < LARGEST
    assert small.vision.freeze == config.vision.freeze
    assert small.vision.channels == config.vision.channels
    assert len(small.vision.deepstack) == min(2, len(config.vision.deepstack))
    assert (small.relevance is None) == (config.relevance is None)
    if small.relevance is not None:
        assert has_choice(small.relevance)


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
@pytest.mark.parametrize(
    ('preset', 'dtype'),
    [
        ('tiny_vlm', 'float32'),
        ('tiny_arr_coc', 'bfloat16'),
        exhaustive('tiny_arr_coc', 'float32'),  # the texture of random pixels is mostly rounding
        ('arr_coc_32b', 'bfloat16'),
    ],
)
def test_the_program_for_gpus_computes_what_one_device_does(preset, dtype):
    config, _ = shrink(load(preset, [f'train.dtype={dtype}']))
    step = EmulatedStep(config, 'h100')
    results = step.results(exact=True)
    assert [one for one in results if not one.ok] == []
    assert {one.name for one in results} >= {'gradient of vision.patch.weight', 'loss'}
    sizes = sizes_of_gradients(step.config)
    of_relevance = [size for name, size in sizes.items() if 'relevance' in name]
    assert len(of_relevance) == 9 * (config.relevance is not None)
    assert min(of_relevance, default=1) > 1e-5 * max(sizes.values())  # no rounding errors


def sizes_of_gradients(config: Config) -> dict[str, float]:
    """The largest element of each gradient on one device, by name."""
    rounded_to = None if config.train.dtype == 'float32' else jnp.bfloat16
    found = reference(on_one_device(config, exact=True), rounded_to).results
    return {name: np.abs(x).max() for name, x in found.items() if name.startswith(GRADIENT)}
