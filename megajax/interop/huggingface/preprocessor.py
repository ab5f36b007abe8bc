"""Read and write the settings by which images become patches. Imports no jax.

They are the object `image_processor` of processor_config.json, which transformers 5 writes and
prefers, or the whole of preprocessor_config.json, which megajax writes.
"""

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
MIN_PATCHES = 256  # per image, if the file does not set it


def read_preprocessor(folder: Path, vision: Mapping[str, Any]) -> Keys:
    """Read how a directory's images are prepared: keys of the config's section `vision`.

    `vision` has the section's other keys. Returns no keys for a directory without the settings.
    Raises ConfigError with every key and value that megajax handles differently.
    """
    if (read := _reader(folder)) is None:
        return {}
    read.only('image_processor_type', *CLASSES, default=CLASS)
    for key in ('image_mean', 'image_std'):
        read.only(key, MIDDLE, default=MIDDLE)
    for key in ('do_resize', 'do_rescale', 'do_normalize', 'do_convert_rgb'):
        read.only(key, True, None, default=True)
    read.only('resample', BICUBIC, None, default=BICUBIC)
    own = {'patch_size': 'patch_size', 'temporal_patch_size': 'frames', 'merge_size': 'merge_size'}
    for key, name in own.items():
        read.only(key, vision[name], default=vision[name])
    min_patches = _min_patches(read, vision['patch_size'] ** 2)
    if read.problems:
        raise ConfigError(*read.problems)
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
    least = read.get('min_pixels', None)  # the older name, which takes precedence in transformers
    key = 'min_pixels' if least is not None else 'size.shortest_edge'
    if least is None:
        least = size.get('shortest_edge', MIN_PATCHES * area) if isinstance(size, dict) else None
    if least is None:
        return MIN_PATCHES
    if not isinstance(least, int) or least < 0 or least % area:
        read.refuse(key, least, f'only multiples of a patch, {area} pixels, are supported')
        return MIN_PATCHES
    return read.checked(key, least // area, 'vision.min_patches') or 0


def write_preprocessor(vision: VisionConfig) -> Keys:
    """Return the keys of preprocessor_config.json; sizes are areas in pixels."""
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
            'shortest_edge': vision.min_patches * area,
            'longest_edge': vision.max_patches * area,
        },
    }
