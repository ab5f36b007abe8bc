"""Draw images of words, from which a model learns to read, without files or downloads.

The words are identifiers of the standard library. An example depends only on the seed and its
number, so it is the same on every mesh and after a resume. H and W are height and width in pixels.
"""

import random as stdlib_random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from megajax.runtime.data.text.corpus import read_documents

WORD = re.compile(r'(?<![A-Za-z0-9_])[A-Za-z_]{3,9}(?![A-Za-z0-9_])')
LONGEST_WORD = 9
IMAGE = '<image>'
NUM_HELD_OUT = 256

LETTER_HEIGHT, LETTER_WIDTH = 11, 6  # size of a letter of pillow's bitmap font in pixels
# size of an image of a word in pixels: it leaves room for 12 letters, and a jitter of one row
WORD_SIZE = 12, 72
LINES = 4
NUM_SINGLE = 4800
MARKS = {
    'red': (220, 40, 40),
    'green': (30, 160, 60),
    'blue': (40, 80, 220),
    'yellow': (240, 200, 30),
    'purple': (150, 60, 190),
}
# smallest and largest size of the scalable font in pixels: its words fit into WORD_SIZE
FONT_SIZES = 10, 13

Font = Literal['bitmap', 'scalable']
Part = Literal['train', 'held_out']


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """An image with a question and its answer."""

    image_HWC: np.ndarray  # uint8 [H, W, 3]
    question: str  # with IMAGE in place of the image
    answer: str
    line: int = 0  # number of the line that holds the answer


@cache
def words() -> dict[Part, tuple[str, ...]]:
    """Return the words to train on and `NUM_HELD_OUT` others, which differ in more than case.

    They are the identifiers of 3 to 9 letters in the running interpreter's standard library.
    """
    identifiers = sorted(
        {word for document in read_documents('stdlib') for word in WORD.findall(document.text)}
    )
    random = stdlib_random.Random(0)
    held_out: dict[str, str] = {}
    for word in random.sample(identifiers, len(identifiers)):
        if len(held_out) == NUM_HELD_OUT:
            break
        held_out.setdefault(word.lower(), word)
    train = [word for word in identifiers if word.lower() not in held_out]
    return {'train': tuple(train), 'held_out': tuple(held_out.values())}


def word_picture(part: Part, seed: int, index: int, *, font: Font = 'bitmap') -> Picture:
    """Draw image `index` of a word, with random contrast, noise and position.

    Held-out words are drawn in turn, training words at random.
    """
    random = np.random.default_rng([seed, index])
    word = _choose(part, random, index)
    return Picture(image_HWC=draw_word(word, random, font=font), question=f'{IMAGE}?', answer=word)


def lines_picture(
    part: Part, seed: int, index: int, *, line_size: tuple[int, int] = WORD_SIZE
) -> Picture:
    """Draw image `index` of four words, each with a mark of its own color; one is asked for.

    The first `NUM_SINGLE` training images have a single word, from which a model learns letters;
    later ones have one to four words. A line has `line_size` pixel rows and columns, so that
    regions 4 x 1 contain one line each.
    """
    random = np.random.default_rng([seed, index])
    colors = [str(name) for name in random.choice(list(MARKS), LINES, replace=False)]
    chosen: list[str] = []
    while len(chosen) < LINES:
        word = _choose(part, random, index * LINES + len(chosen))
        chosen += [word] if word not in chosen else []
    line = int(random.integers(LINES))
    if part == 'train':
        added = 0 if index < NUM_SINGLE else int(random.integers(LINES))
        kept = random.permutation(LINES)[:added]
        chosen = [word if i in (line, *kept) else '' for i, word in enumerate(chosen)]
    return Picture(
        image_HWC=draw_lines(chosen, colors, random, line_size=line_size),
        question=f'the line at {colors[line]:>6}? {IMAGE}:',
        answer=chosen[line],
        line=line,
    )


def draw_word(
    word: str,
    random: np.random.Generator,
    *,
    font: Font = 'bitmap',
) -> np.ndarray:
    """Return a gray image of a word, uint8 [H, W, 3].

    The bitmap font begins at column 0, and at row 0 or 1. The scalable font has a random size and a
    random position at which the word fits.
    """
    height, width = WORD_SIZE
    image = Image.new('L', (width, height), int(random.integers(190, 256)))
    ink = int(random.integers(0, 100))
    draw = ImageDraw.Draw(image)
    if font == 'bitmap':
        draw.text((0, int(random.integers(0, 2))), word, fill=ink, font=_bitmap_font())
    else:
        scalable = _scalable_font(int(random.integers(FONT_SIZES[0], FONT_SIZES[1] + 1)))
        left, top, right, bottom = scalable.getbbox(word)
        x = int(random.integers(0, max(width - int(right - left), 0) + 1))
        y = int(random.integers(0, max(height - int(bottom - top), 0) + 1))
        draw.text((x - left, y - top), word, fill=ink, font=scalable)
    return _with_noise(np.asarray(image.convert('RGB')), random)


def draw_lines(
    lines: Sequence[str],
    colors: Sequence[str],
    random: np.random.Generator,
    *,
    line_size: tuple[int, int] = WORD_SIZE,
) -> np.ndarray:
    """Return an image of words below each other, each after a bar of its color.

    The result is uint8 [lines H, W, 3] for lines of `line_size`. Letters are enlarged to fill a
    line, and are centered or one row lower.
    """
    height, width = line_size
    scale = min(height // LETTER_HEIGHT, width // ((LONGEST_WORD + 2) * LETTER_WIDTH))
    assert scale, f'a line of {height} x {width} pixels holds no mark and {LONGEST_WORD} letters'
    # size of the image before it is enlarged
    inner_height, inner_width = height // scale, width // scale
    ground, ink = int(random.integers(190, 256)), int(random.integers(0, 100))
    image = Image.new('RGB', (width, height * len(lines)), (ground,) * 3)
    for number, (line, color) in enumerate(zip(lines, colors, strict=True)):
        part = Image.new('RGB', (inner_width, inner_height), (ground,) * 3)
        draw = ImageDraw.Draw(part)
        y = (inner_height - LETTER_HEIGHT) // 2 + int(random.integers(0, 2))
        y = min(y, inner_height - LETTER_HEIGHT)
        if line:
            draw.rectangle((1, 1, 2 * LETTER_WIDTH - 4, inner_height - 2), fill=MARKS[color])
        draw.text((2 * LETTER_WIDTH, y), line, fill=(ink,) * 3, font=_bitmap_font())
        large = part.resize((inner_width * scale, inner_height * scale), Image.Resampling.NEAREST)
        image.paste(large, (0, number * height))
    return _with_noise(np.asarray(image), random)


def _choose(part: Part, random: np.random.Generator, index: int) -> str:
    chosen = words()[part]
    return chosen[index % len(chosen) if part == 'held_out' else int(random.integers(len(chosen)))]


def _with_noise(image_HWC: np.ndarray, random: np.random.Generator) -> np.ndarray:
    noise_HW1 = random.normal(0, 8, (*image_HWC.shape[:2], 1))
    return np.clip(image_HWC + noise_HW1, 0, 255).astype(np.uint8)


@cache
def _bitmap_font() -> ImageFont.ImageFont:
    return ImageFont.load_default_imagefont()


@cache
def _scalable_font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), 'pillow lacks FreeType'
    return font
