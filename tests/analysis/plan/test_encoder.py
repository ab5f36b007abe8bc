"""The memory of images on a GPU: of an encoder, and of the layers that attend to images."""

import pytest
from vlm import relevant, vlm

from megajax.analysis.plan.encoder import cross_bytes, encoder_bytes
from megajax.analysis.plan.launches import OF_ENCODER, OF_FROZEN, num_launches
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.memory_traffic import Traffic, traffic_of_images
from megajax.analysis.plan.sizes import Sizes
from megajax.core.config import Config
from megajax.core.counts.flash import HOPPER

EXPERTS = {'count': 8, 'active': 2, 'ffn_size': 4096}


def test_the_encoder_and_the_experts_of_a_model_are_in_memory_together() -> None:
    with_images = memory(vlm(model={'experts': EXPERTS}))
    assert with_images.moment == 'experts'
    fewer = memory(vlm(model={'experts': EXPERTS}, vision={'num_layers': 1, 'deepstack': ()}))
    assert fewer.moment == 'experts'
    assert fewer.activations < with_images.activations


def test_a_layer_that_attends_to_images_has_an_mlp_beside_experts() -> None:
    for recompute in ('none', 'full'):
        each = (
            cross_bytes(Sizes(vlm(crossed=True, model=model, train={'recompute': recompute})))
            for model in ({}, {'experts': EXPERTS})
        )
        assert next(each) == next(each)


ENCODER, BOTH = {'freeze': ('encoder',)}, {'freeze': ('encoder', 'merger')}
WITHOUT_BACKWARD = [vlm(vision=ENCODER), vlm(vision=BOTH), vlm(lora={'rank': 4})]
WITH_BACKWARD = [vlm(), vlm(vision={'freeze': ('merger',)})]


@pytest.mark.parametrize(('config', 'mergers'), [*zip(WITHOUT_BACKWARD, (2, 0, 0), strict=True)])
def test_a_frozen_encoder_saves_only_what_its_mergers_learn_from(
    config: Config, mergers: int
) -> None:
    needed, learned = (encoder_bytes(Sizes(each)) for each in (config, vlm()))
    of_patches = 4 * 32 * 16 * 2 * 16  # fp32, the width, the patches of two images in 16 sequences
    assert needed.kept == 4 * mergers * of_patches
    assert needed.buffers == 0 < learned.buffers


@pytest.mark.parametrize('config', WITH_BACKWARD)
def test_an_encoder_with_a_backward_pass_saves_its_layers(config: Config) -> None:
    assert encoder_bytes(Sizes(config)).kept == encoder_bytes(Sizes(vlm())).kept


def test_relevance_has_a_backward_pass_of_a_frozen_encoder() -> None:
    frozen, learned = (encoder_bytes(Sizes(relevant(vision=vision))) for vision in (BOTH, {}))
    assert (frozen.kept, frozen.buffers) == (learned.kept, learned.buffers)


@pytest.mark.parametrize('config', WITHOUT_BACKWARD[:2])
def test_a_frozen_encoder_has_fewer_kernels(config: Config) -> None:
    assert num_launches(vlm()) - num_launches(config) == 2 * (OF_ENCODER - OF_FROZEN)


def bytes_moved(config: Config) -> dict[str, float]:
    rows: list[Traffic] = [*traffic_of_images(config, flash=False, capability=HOPPER)]
    return {row.name: row.bytes * row.times for row in rows}


@pytest.mark.parametrize('config', WITHOUT_BACKWARD)
@pytest.mark.parametrize('recompute', ['none', 'full'])
def test_a_frozen_encoder_moves_bytes_only_in_the_forward_pass(
    config: Config, recompute: str
) -> None:
    train = config.train.model_copy(update={'recompute': recompute})
    moved, of_patches = bytes_moved(config.model_copy(update={'train': train})), 4 * 32 * 16 * 32
    layers = 2
    assert moved['norms'] == layers * 2 * 2 * of_patches
    assert moved['residual'] == layers * 2 * 3 * of_patches
    assert bytes_moved(vlm())['norms'] == layers * 2 * 5 * of_patches
    assert bytes_moved(vlm())['residual'] == layers * 2 * 5 * of_patches


@pytest.mark.parametrize('experts', [None, EXPERTS])
def test_layers_that_attend_to_images_move_their_own_bytes(experts: dict[str, int] | None) -> None:
    """Two of them beside the two of the encoder, in fp32: 16 sequences of 24 tokens."""
    config = vlm(crossed=True, model={'experts': experts}, train={'recompute': 'full'})
    rows = [*traffic_of_images(config, flash=True, capability=HOPPER)]
    moved = {x.name: x.bytes for x in rows[-5:]}
    model, tokens = config.model, 4 * 16 * 24
    assert {x.times for x in rows[-5:]} == {2}
    assert moved['norms'] == 2 * (2 * 2 + 3) * tokens * model.hidden_size
    assert moved['residual'] == 2 * (2 * 3 + 2) * tokens * model.hidden_size
    assert moved['heads'] == 2 * 3 * tokens * model.num_heads * model.head_dim
    assert moved['activation'] == (2 * 3 + 5) * tokens * model.ffn_size
    of_images = 2 * 4  # each has 16 patches, merged by four
    assert moved['softmax'] == (2 * 2 + 3) * tokens * model.num_heads * of_images
