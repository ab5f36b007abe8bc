"""Read and write the settings by which images become patches. Imports no jax.

They are the object `image_processor` of processor_config.json, which transformers 5 writes and
prefers, or the whole of preprocessor_config.json, which megajax writes.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.base.files.json_file import read_json
from megajax.core.config import ConfigError, VisionConfig
from megajax.interop.huggingface.reader import Keys, Reader

FILE, PROCESSOR, NESTED = 'preprocessor_config.json', 'processor_config.json', 'image_processor'
FILES = PROCESSOR, FILE
CLASS = 'Qwen2VLImageProcessorFast'
CLASSES = (CLASS, 'Qwen2VLImageProcessor', 'Qwen2VLImageProcessorPil')
MIDDLE = [0.5, 0.5, 0.5]  # the mean and the standard deviation that map bytes to the range -1 to 1
BICUBIC = 3
# What these classes use for a missing key: the values of Qwen2-VL, and of CLIP.
DEFAULTS: Mapping[str, Any] = {
    'image_mean': [0.48145466, 0.4578275, 0.40821073],
    'image_std': [0.26862954, 0.26130258, 0.27577711],
    'patch_size': 14,
    'temporal_patch_size': 2,
    'merge_size': 2,
    'size': {'shortest_edge': 56 * 56, 'longest_edge': 28 * 28 * 1280},
}
# The limit above, which is the run's vision.max_patches, and keys that these classes do not use.
UNUSED = """
    max_pixels processor_class data_format input_data_format device return_tensors disable_grouping
    default_to_square do_center_crop crop_size do_pad pad_size
"""

logger = logging.getLogger(__name__)


def read_preprocessor(folder: Path, vision: Mapping[str, Any]) -> Keys:
    """Read how a directory's images are prepared: keys of the config's section `vision`.

    `vision` has the section's other keys. Returns no keys for a directory without the settings.
    Raises ConfigError with every key and value that megajax handles differently.
    """
    if (read := _reader(folder)) is None:
        return {}
    read.only('image_processor_type', *CLASSES, default=CLASS)
    supported = {
        **dict.fromkeys(('image_mean', 'image_std'), MIDDLE),
        'patch_size': vision['patch_size'],
        'temporal_patch_size': vision['frames'],
        'merge_size': vision['merge_size'],
    }
    for key, value in supported.items():
        read.only(key, value, default=DEFAULTS[key])
    for key in ('do_resize', 'do_rescale', 'do_normalize', 'do_convert_rgb'):
        read.only(key, True, None, default=True)
    read.only('resample', BICUBIC, None, default=BICUBIC)
    read.only('rescale_factor', 1 / 255, None, default=1 / 255)
    min_patches = _min_patches(read, vision['patch_size'] ** 2)
    if read.problems:
        raise ConfigError(*read.problems)
    for key in UNUSED.split():
        read.get(key, None)
    if read.left:
        logger.warning('%s: unused keys: %s', read.file, ', '.join(read.left))
    return {'min_patches': min_patches}


def _reader(folder: Path) -> Reader | None:
    """Return a reader of a directory's settings; None if there are none."""
    processor = folder / PROCESSOR
    if processor.is_file():
        whole = Reader(read_json(processor), str(processor))
        if whole.get(NESTED, None) is not None:
            return whole.section(NESTED)
    file = folder / FILE
    return Reader(read_json(file), str(file)) if file.is_file() else None


def _min_patches(read: Reader, area: int) -> int:
    """Return the minimum number of patches of an image, whose `area` is in pixels."""
    size = read.get('size', None)
    size = DEFAULTS['size'] if size is None else size
    # The older name takes precedence in transformers.
    key, least = 'min_pixels', read.get('min_pixels', None)
    if least is None:
        if not isinstance(size, Mapping) or size.get('shortest_edge') is None:
            read.refuse('size', size, 'only an object with shortest_edge, an area, is supported')
            return 0
        key, least = 'size.shortest_edge', size['shortest_edge']
    if not isinstance(least, int) or least < 0 or least % area:
        read.refuse(key, least, f'only multiples of a patch, {area} pixels, are supported')
        return 0
    return read.checked(key, least // area, 'vision.min_patches') or 0


def write_preprocessor(vision: VisionConfig) -> Keys:
    """Return the keys of preprocessor_config.json; sizes are areas in pixels.

    Without a minimum, the smallest area is one vector's: transformers rejects an area of 0.
    """
    area = vision.patch_size**2
    return {
        'image_processor_type': CLASS,
        'processor_class': 'Qwen3VLProcessor',
        'image_mean': MIDDLE,
        'image_std': MIDDLE,
        'patch_size': vision.patch_size,
        'temporal_patch_size': vision.frames,
        'merge_size': vision.merge_size,
        'size': {
            'shortest_edge': (vision.min_patches or vision.unit) * area,
            'longest_edge': vision.max_patches * area,
        },
    }
