"""The settings by which transformers prepares images are read, refused by name, and written."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megajax.core.config import ConfigError, load
from megajax.interop.huggingface.preprocessor import (
    DEFAULTS,
    note_limit,
    read_preprocessor,
    write_files,
    write_preprocessor,
)
from megajax.runtime.data.patches import PatchSize


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('image_mean', [0.48, 0.46, 0.41]),
        ('do_normalize', False),
        ('resample', 2),
        ('patch_size', 14),
        ('image_processor_type', 'CLIPImageProcessor'),
        ('min_pixels', 100),
        ('rescale_factor', 1.0),
        ('size', {'height': 224, 'width': 224}),
        ('size', {'longest_edge': 4096}),
        ('size', 224),
        ('max_pixels', 'all'),
        ('max_pixels', 256 * 6),
    ],
)
def test_pictures_that_are_prepared_otherwise_are_refused(key, value, tmp_path: Path) -> None:
    model = load('qwen3_vl_2b').model
    keys = write_preprocessor(model.vision)
    file = tmp_path / 'preprocessor_config.json'
    file.write_text(json.dumps(keys))
    assert read_preprocessor(tmp_path, model.vision.model_dump()) == {'min_patches': 256}
    file.write_text(json.dumps(keys | {key: value}))
    with pytest.raises(ConfigError, match=re.escape(f'{key}: {json.dumps(value)}: only ')):
        read_preprocessor(tmp_path, model.vision.model_dump())


@pytest.mark.parametrize(
    ('keys', 'limits'),
    [
        ({'size': {'shortest_edge': 1024, 'longest_edge': 4096}}, (4, 16)),
        ({'size': {'shortest_edge': 0, 'longest_edge': 4096}}, (0, 16)),
        ({'min_pixels': 512, 'size': {'shortest_edge': 1024}}, (2,)),
        ({'min_pixels': 512, 'size': None, 'rescale_factor': 1 / 255}, (2,)),
        ({'min_pixels': 512, 'max_pixels': 2048, 'size': {'longest_edge': 4096}}, (2, 8)),
    ],
)
def test_the_areas_of_a_picture_are_read_in_patches(keys, limits, tmp_path: Path) -> None:
    vision = load('qwen3_vl_2b').vision
    whole = write_preprocessor(vision) | keys
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps(whole))
    read = read_preprocessor(tmp_path, vision.model_dump())
    assert read == dict(zip(('min_patches', 'max_patches'), limits, strict=False))


def test_a_limit_above_that_of_the_run_is_said_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vision, file = load('qwen3_vl_2b').vision, tmp_path / 'preprocessor_config.json'
    size = {'shortest_edge': 65536, 'longest_edge': 16_777_216}
    file.write_text(json.dumps(write_preprocessor(vision) | {'size': size}))
    assert read_preprocessor(tmp_path, vision.model_dump()) == {'min_patches': 256}
    note_limit(tmp_path, vision)
    assert 'images above vision.max_patches=4,096 are scaled down' in caplog.text
    assert 'the limit of the model is 65,536 patches' in caplog.text
    caplog.clear()
    note_limit(tmp_path, vision.model_copy(update={'max_patches': 65536}))
    assert not caplog.text
    processor = tmp_path / 'processor_config.json'
    processor.write_text(json.dumps({'video_processor': {'fps': 2}}))
    write_files(tmp_path, vision)
    assert json.loads(file.read_text())['size'] == size
    assert json.loads(processor.read_text()) == {'video_processor': {'fps': 2}}
    nested = json.loads(file.read_text()) | {'size': {**size, 'longest_edge': 1 << 20}}
    processor.write_text(json.dumps({'video_processor': {'fps': 2}, 'image_processor': nested}))
    write_files(tmp_path, load('qwen3_vl_2b', ['vision.min_patches=512']).vision)
    written = json.loads(processor.read_text())
    assert written['video_processor'] == {'fps': 2}
    assert written['image_processor'] == json.loads(file.read_text())
    assert written['image_processor']['size'] == {
        'shortest_edge': 512 * 256,
        'longest_edge': 1 << 20,
    }


def test_missing_keys_have_the_defaults_of_the_class(tmp_path: Path) -> None:
    vision, file = load('qwen3_vl_2b').vision, tmp_path / 'preprocessor_config.json'
    file.write_text('{}')
    with pytest.raises(ConfigError) as refused:
        read_preprocessor(tmp_path, vision.model_dump())
    assert [line.partition('config.json: ')[2] for line in str(refused.value).splitlines()] == [
        'image_mean: [0.48145466, 0.4578275, 0.40821073]: only [0.5, 0.5, 0.5] is supported',
        'image_std: [0.26862954, 0.26130258, 0.27577711]: only [0.5, 0.5, 0.5] is supported',
        'patch_size: 14: only 16 is supported',
        'size.shortest_edge: 3136: only multiples of a patch, 256 pixels, are supported',
    ]
    file.write_text(json.dumps({'image_mean': [0.5] * 3, 'image_std': [0.5] * 3}))
    small = vision.model_dump() | {'patch_size': 14}
    assert read_preprocessor(tmp_path, small) == {'min_patches': 16}


def test_an_area_of_0_which_transformers_rejects_is_not_written(tmp_path: Path) -> None:
    vision = load('qwen3_vl_2b', ['vision.min_patches=0']).vision
    keys = write_preprocessor(vision)
    assert keys['size']['shortest_edge'] == 4 * 16**2  # the four patches of one vector
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps(keys))
    assert read_preprocessor(tmp_path, vision.model_dump()) == {'min_patches': 4}


def test_unused_settings_of_pictures_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vision = load('qwen3_vl_2b').vision
    keys = write_preprocessor(vision) | {'do_center_crop': None, 'max_pixels': None, 'do_flip': 1}
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps(keys))
    read_preprocessor(tmp_path, vision.model_dump())
    assert caplog.text.rstrip().endswith('preprocessor_config.json: unused keys: do_flip')


@pytest.fixture(name='processor')
def make_processor() -> Any:
    name = 'transformers.models.qwen2_vl.image_processing_pil_qwen2_vl'
    module = pytest.importorskip(name, reason="transformers is in the extra 'test-hf'")
    return module.Qwen2VLImageProcessorPil


def test_the_defaults_of_the_class_are_those_of_transformers(processor: Any) -> None:
    for key, value in DEFAULTS.items():
        assert getattr(processor, key) == value


@pytest.mark.parametrize('size', [(40, 70), (12, 290), (300, 7)])
@pytest.mark.parametrize('patches', [0, 2, 256])
def test_transformers_prepares_pictures_with_what_is_written(
    processor: Any, patches: int, size: tuple[int, int]
) -> None:
    vision = load('qwen3_vl_2b', [f'vision.min_patches={patches}']).vision
    sizes = PatchSize(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        max_patches=vision.max_patches,
        min_patches=vision.min_patches,
    )
    found = processor(**write_preprocessor(vision))([np.zeros((*size, 3), np.uint8)])
    assert found['image_grid_thw'].tolist() == [[1, *sizes.fit(*size)]]


def test_the_settings_of_transformers_5_are_preferred(tmp_path: Path) -> None:
    vision = load('qwen3_vl_2b').vision
    keys, processor = write_preprocessor(vision), tmp_path / 'processor_config.json'
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps(keys))
    for whole, patches in (
        ({'image_processor': keys | {'size': {'shortest_edge': 1024, 'longest_edge': 1 << 20}}}, 4),
        ({'image_processor': None}, 256),
        ({'processor_class': 'Qwen3VLProcessor'}, 256),
    ):
        processor.write_text(json.dumps(whole))
        assert read_preprocessor(tmp_path, vision.model_dump()) == {'min_patches': patches}
    processor.write_text(json.dumps({'image_processor': keys | {'do_resize': False}}))
    with pytest.raises(ConfigError, match=r'processor_config.json: image_processor: do_resize: fa'):
        read_preprocessor(tmp_path, vision.model_dump())
    processor.write_text('{"image_processor": [1]}')
    with pytest.raises(ConfigError, match=r'image_processor: \[1\]: only an object is supported'):
        read_preprocessor(tmp_path, vision.model_dump())
