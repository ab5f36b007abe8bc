"""Read and write the settings by which images become patches. Imports no jax.

They are the object `image_processor` of processor_config.json, which transformers 5 writes and
prefers, or the whole of preprocessor_config.json, which megajax writes.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.base.files.json_file import read_json
from megajax.core.config import ConfigError, VisionConfig
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.runtime.checkpoint.hf_files import IMAGES as FILE
from megajax.runtime.checkpoint.hf_files import PROCESSOR

NESTED = 'image_processor'
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
MAX_PATCHES: int = VisionConfig.model_fields['max_patches'].default
# Keys that these classes do not use.
UNUSED = """
    processor_class data_format input_data_format device return_tensors disable_grouping
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
    keys = _limits(read, vision['patch_size'] ** 2, vision['merge_size'] ** 2)
    if read.problems:
        raise ConfigError(*read.problems)
    for key in UNUSED.split():
        read.get(key, None)
    if read.left:
        logger.warning('%s: unused keys: %s', read.file, ', '.join(read.left))
    return keys


def note_limit(folder: Path, vision: VisionConfig) -> None:
    """Log if `vision` scales images down that the processor of a directory leaves as they are."""
    limit = _largest_area(folder) // vision.patch_size**2
    if limit > vision.max_patches:
        logger.warning(
            '%s: images above vision.max_patches=%s are scaled down; the limit of the model is %s '
            'patches: raise vision.max_patches for larger images, which takes more memory',
            folder,
            f'{vision.max_patches:,}',
            f'{limit:,}',
        )


def _reader(folder: Path) -> Reader | None:
    """Return a reader of a directory's settings; None if there are none."""
    processor = folder / PROCESSOR
    if processor.is_file():
        whole = Reader(read_json(processor), str(processor))
        if whole.get(NESTED, None) is not None:
            return whole.section(NESTED)
    file = folder / FILE
    return Reader(read_json(file), str(file)) if file.is_file() else None


def _limits(read: Reader, area: int, unit: int) -> Keys:
    """Return the limits on the patches of an image; `area` is the pixels of a patch.

    A limit above vision's default is left out, because memory is reserved for the largest image.
    """
    if (found := _areas(read)) is None:
        return {}
    (least_key, least), (most_key, most) = found
    keys: Keys = {'min_patches': 0}
    if not isinstance(least, int) or least < 0 or least % area:
        read.refuse(least_key, least, f'only multiples of a patch, {area} pixels, are supported')
    else:
        keys['min_patches'] = read.checked(least_key, least // area, 'vision.min_patches') or 0
    if not isinstance(most, int) or most <= 0:
        read.refuse(most_key, most, 'only an area in pixels is supported')
    elif most < MAX_PATCHES * area:
        if most % (area * unit):
            whole = most // (area * unit) * area * unit
            why = (
                f'only multiples of a vector, {area * unit} pixels, are supported; write {whole} '
                'into the file'
            )
            read.refuse(most_key, most, why)
        keys['max_patches'] = most // area
    return keys


def _areas(read: Reader) -> tuple[tuple[str, Any], tuple[str, Any]] | None:
    """Return the smallest and the largest area of an image, each with the key that sets it."""
    size = read.get('size', None)
    size = DEFAULTS['size'] if size is None else size
    # The older names take precedence in transformers.
    least, most = read.get('min_pixels', None), read.get('max_pixels', None)
    known = size if isinstance(size, Mapping) else {}
    if least is None and known.get('shortest_edge') is None:
        read.refuse('size', size, 'only an object with shortest_edge, an area, is supported')
        return None
    return (
        ('size.shortest_edge', known['shortest_edge']) if least is None else ('min_pixels', least),
        ('size.longest_edge', known.get('longest_edge', DEFAULTS['size']['longest_edge']))
        if most is None
        else ('max_pixels', most),
    )


def _largest_area(folder: Path) -> int:
    """Return the largest area of an image in pixels, or 0 for a directory without the settings."""
    found = None if (read := _reader(folder)) is None else _areas(read)
    return found[1][1] if found else 0


def write_preprocessor(vision: VisionConfig, kept: Path | None = None) -> Keys:
    """Return the keys of preprocessor_config.json; sizes are areas in pixels.

    Without a minimum, the smallest area is one vector's: transformers rejects an area of 0. The
    largest area comes from the files of the import, in `kept`, if it is larger there.
    """
    area = vision.patch_size**2
    limit = 0 if kept is None else _largest_area(kept)
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
            'longest_edge': max(vision.max_patches * area, limit),
        },
    }


def write_files(folder: Path, vision: VisionConfig) -> None:
    """Write how images are prepared to an exported directory with the files of its import."""
    keys = write_preprocessor(vision, folder)
    processor = folder / PROCESSOR
    if processor.is_file() and (whole := read_json(processor)).get(NESTED) is not None:
        _write(processor, {**whole, NESTED: keys})
    _write(folder / FILE, keys)


def _write(path: Path, keys: Keys) -> None:
    path.write_text(json.dumps(keys, indent=2) + '\n')
