"""Read image files as people see them: upright, in color, on white.

Errors are ConfigErrors with the file, the limit and a fix. The caller adds the line that named the
file.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from megajax.base.errors import ConfigError, mistake, reason

# pixels per image; an image is read into memory as a whole, with at most 4 bytes per pixel
MAX_PIXELS = 1 << 26
# Decoders of pillow that run no other program (as EPS does), know the size of an image before they
# decode it (unlike ICO) and recognize their files (unlike TGA)
FORMATS = ('PNG', 'JPEG', 'WEBP', 'GIF', 'BMP', 'TIFF', 'AVIF', 'JPEG2000', 'PPM')
MAX_NAME_CHARACTERS = 100

_ORIENTATION = 0x0112  # EXIF tag
# TIFF's tag NewSubfileType, and its bits for a smaller copy of another page and for a mask
_KIND, _NO_PAGE = 0x00FE, 0b101
# TIFF's older tag SubfileType, and its value for a smaller copy
_OLD_KIND, _COPY = 0x00FF, 2
_WIDTH = 0x0100  # TIFF tag
_MOST_COPIES = 100  # number of copies and masks after which no further page is looked for
_UPRIGHT = {  # operation that makes the image upright, by the value of the tag
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = 5  # from this value of the tag on, rows and columns are exchanged


def inside(folder: str | Path, name: str, *, place: str = '') -> Path:
    """Return the file that a dataset in `folder` calls `name`; links are followed.

    Raises ConfigError if there is no such file, or if the file is outside the folder.
    """
    try:
        root = Path(folder).resolve()
        path = (root / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL in the name
        raise _problem(name, f'is no path ({reason(error)}); name a file', place) from error
    if not path.is_relative_to(root):
        message = f'is outside {root}, the folder of the dataset; move it there'
        raise _problem(name, message, place)
    return path


def read_size(path: str | Path, *, place: str = '') -> tuple[int, int]:
    """Return the height and width of an upright image, from the header of its file."""
    with _open(path, place, MAX_PIXELS) as image:
        width, height = image.size
        return (width, height) if _orientation(image) >= _SIDEWAYS else (height, width)


def read_image(path: str | Path, *, place: str = '', max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return an image as people see it: RGB, uint8 [H, W, 3].

    It is rotated by its EXIF orientation; transparent parts are white; 16 bits become 8; an
    animation becomes its first frame. Raises ConfigError if the file is not an image, is truncated,
    has several pages or more than `max_pixels` pixels; the header gives the size before anything is
    decoded.
    """
    with _open(path, place, max_pixels) as image:
        # read before decoding, as in `read_size`; pillow rotates TIFF itself
        orientation = _orientation(image)
        image.load()
        upright = _UPRIGHT.get(orientation)
        colors = _rgb(image)
        return np.asarray(colors if upright is None else colors.transpose(upright))


@contextmanager
def _open(path: str | Path, place: str, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image; pillow's errors become ConfigErrors, including those inside the block."""
    name = str(path)
    try:
        is_file = Path(path).is_file()  # a pipe or a device could block
    except OSError:  # a name that is too long
        is_file = False
    if not is_file:
        raise _problem(name, 'is not a file; correct the path', place)
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                message = (
                    f'has {image.width} x {image.height} pixels, more than {max_pixels:,}; '
                    'make it smaller'
                )
                raise _problem(name, message, place)
            if _has_pages(image):
                raise _problem(name, 'has several pages; write each to a file of its own', place)
            yield image
    except ConfigError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        message = f'has more than {max_pixels:,} pixels ({reason(error)}); make it smaller'
        raise _problem(name, message, place) from error
    except UnidentifiedImageError as error:
        message = f'is not an image in one of the formats {", ".join(FORMATS)}; convert it'
        raise _problem(name, message, place) from error
    except Exception as error:  # decoders raise almost anything for a broken file
        message = f'cannot be read ({reason(error)}); replace or convert it'
        raise _problem(name, message, place) from error


def _has_pages(image: Image.Image) -> bool:
    """Whether an image is a TIFF with several pages, other than smaller copies and masks."""
    if not isinstance(image, TiffImageFile):
        return False
    with suppress(EOFError):
        for number in range(1, _MOST_COPIES):
            try:
                image.seek(number)
            except EOFError:
                raise
            except Exception:  # pillow has read the tags, but does not know this kind of pixels
                pass
            if _is_page(image.tag_v2):
                return True
    image.seek(0)
    return False


def _is_page(tags: ImageFileDirectory_v2) -> bool:
    """Whether these are the tags of an image that is neither a smaller copy nor a mask."""
    is_copy = bool(tags.get(_KIND, 0) & _NO_PAGE) or tags.get(_OLD_KIND) == _COPY
    return _WIDTH in tags and not is_copy


def _orientation(image: Image.Image) -> int:
    if image.format == 'TIFF':
        return 1
    try:
        # PngImageFile's own method decodes the image first
        orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception:  # viewers show an image with unreadable EXIF as it is stored
        return 1
    return orientation if orientation in _UPRIGHT else 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith('I'):
        return _from_16_bits(image)
    if image.mode == 'F':
        raise ValueError('its pixels are floating-point numbers without a scale')
    if image.has_transparency_data:
        colors = image.convert('RGBA')
        white = Image.new('RGBA', colors.size, 'white')
        return Image.alpha_composite(white, colors).convert('RGB')
    return image.convert('RGB')


def _from_16_bits(image: Image.Image) -> Image.Image:
    grey_HW = np.asarray(image).astype(np.int64)
    if grey_HW.min() < 0 or grey_HW.max() > 0xFFFF:
        raise ValueError('its pixels do not fit 16 bits')
    grey_HW[grey_HW == image.info.get('transparency', -1)] = 0xFFFF
    return Image.fromarray((grey_HW / 257 + 0.5).astype(np.uint8)).convert('RGB')


def _problem(name: str, message: str, place: str) -> ConfigError:
    if len(name) > MAX_NAME_CHARACTERS:
        name = f'{name[:MAX_NAME_CHARACTERS]}...'
    return mistake(name, message, place=place)
