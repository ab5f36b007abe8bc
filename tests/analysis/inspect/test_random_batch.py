"""A batch for an executed step has every array that the step reads, as its data would."""

import numpy as np
import pytest
from support import make_config, on_mesh

from megajax.analysis.inspect.one_device import updated
from megajax.analysis.inspect.random_batch import make_batch
from megajax.analysis.inspect.shrink import shrink
from megajax.core.config import Config, load
from megajax.core.train.feed import abstract_batch


def assert_all_is_there(config: Config, batch: dict[str, np.ndarray]) -> None:
    with on_mesh(config):
        read = abstract_batch(config)
    assert {key: (x.shape, x.dtype) for key, x in batch.items()} == {
        key: (x.shape, x.dtype) for key, x in read.items()
    }


@pytest.mark.parametrize('name', ['gpt', 'llama', 'bert'])
def test_a_batch_has_all_that_a_step_reads_and_no_padding_counts(name):
    config = make_config(name, 2, 4)
    batch = make_batch(config)
    assert_all_is_there(config, batch)
    counted = batch['loss_mask'].sum(-1)
    assert (counted > 0).all()
    assert len(set(counted)) > 1
    if not config.model.causal:
        assert batch['segment_ids'].any()
        assert not batch['loss_mask'][batch['segment_ids'] == 1].any()


@pytest.mark.parametrize('document_mask', [False, True])
def test_text_without_images_has_one_number_per_position(document_mask):
    """Its data has no positions of images, which `mrope` rotates by three numbers."""
    size = make_config('llama').model.head_dim // 2
    mrope = {'position': 'mrope', 'mrope_section': (size - 2 * (size // 3), size // 3, size // 3)}
    config = make_config('llama', 2, 4, model=mrope, data={'document_mask': document_mask})
    assert_all_is_there(config, make_batch(config))


@pytest.mark.parametrize('preset', ['tiny_vlm', 'tiny_arr_coc', 'qwen3_vl_8b', 'arr_coc_32b'])
def test_a_batch_of_a_smaller_config_has_pictures_of_several_sizes_where_sizes_may_differ(preset):
    config, _ = shrink(load(preset, ['mesh.data=1']))
    batch = make_batch(config)
    assert_all_is_there(config, batch)
    patches = batch['image_grid'].prod(-1)
    assert patches.max() <= config.vision.max_patches
    assert (len(set(patches[patches > 0])) > 1) == (config.relevance is None)
    assert ((batch['image_index'] >= 0).any(1) == (patches > 0).any(1)).all()
    assert not batch['loss_mask'][batch['labels'] == config.vision.image_token].any()
    assert _brightness_differs(batch)


@pytest.mark.parametrize('keys', [[], ['vision.images=3', 'train.seq_len=12800']])
def test_the_images_of_a_smaller_config_with_a_budget_leave_room_for_text(keys):
    config, _ = shrink(load('arr_coc_32b', keys))
    batch = make_batch(config)
    assert (batch['image_grid'][0].prod(-1) > 0).sum() == config.vision.images
    assert batch['loss_mask'].any(1).all()


def test_images_that_would_fill_the_sequence_are_left_out():
    config, _ = shrink(load('arr_coc_32b', ['vision.images=3', 'train.seq_len=12800']))
    images = config.vision.images
    train = {'seq_len': images * config.relevance.total_tokens}
    batch = make_batch(updated(config, train=train))
    assert (batch['image_grid'][0].prod(-1) > 0).sum() == images - 1


def _brightness_differs(batch: dict[str, np.ndarray]) -> bool:
    """Whether the first patch of each picture is fainter than its last, as regions differ."""
    pictures = batch['pixels'].reshape(-1, *batch['pixels'].shape[-2:])
    counts = batch['image_grid'].prod(-1).reshape(-1)
    return all(
        x[0].mean() < x[n - 1].mean() / 2 for x, n in zip(pictures, counts, strict=True) if n
    )
