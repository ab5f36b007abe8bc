"""The memory of images on a GPU: of an encoder, and of the layers that attend to images."""

from vlm import vlm

from megajax.analysis.plan.encoder import cross_bytes
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.sizes import Sizes

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
