"""Compare transcriptions of images with the answers, as marked text and as one PNG."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from megajax.runtime.data.synthetic_images import LETTER_HEIGHT, LETTER_WIDTH, Picture

MISSING = '.'  # stands for one or more letters of the answer that were not read
MAX_READING = 40  # maximum number of letters shown of a transcription

_SCALE = 4  # pixels of the sheet per pixel of an image
_GAP = 8  # pixels
_BLACK, _WRONG = (0, 0, 0), (220, 0, 0)


def compared(answer: str, reading: str) -> list[tuple[str, bool]]:
    """Return the letters of `reading`, each with whether it is right.

    The right letters are a longest common subsequence with `answer`; missing letters between them
    appear as one wrong `MISSING`.
    """
    letters: list[tuple[str, bool]] = []
    matcher = SequenceMatcher(None, answer, reading, autojunk=False)
    for kind, _, _, start, stop in matcher.get_opcodes():
        if kind == 'delete':
            letters.append((MISSING, False))
        letters += [(letter, kind == 'equal') for letter in reading[start:stop]]
    return letters


def marked(answer: str, reading: str) -> str:
    """Return the transcription as text, with wrong letters in brackets."""
    text = ''.join(
        _printable(letter) if right else f'[{_printable(letter)}]'
        for letter, right in compared(answer, reading[:MAX_READING])
    )
    return text.replace('][', '')


def draw_sheet(pictures: Sequence[Picture], readings: Sequence[str]) -> Image.Image:
    """Draw images in a column, each with its question, answer and transcription.

    Wrong letters are red and underlined.
    """
    rows = [_row(picture, reading) for picture, reading in zip(pictures, readings, strict=True)]
    width = max((row.width for row in rows), default=1)
    sheet = Image.new('RGB', (width, sum(row.height for row in rows) or 1), 'white')
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    return sheet


def write_sheet(path: str | Path, pictures: Sequence[Picture], readings: Sequence[str]) -> None:
    """Write the image of `draw_sheet` as a PNG."""
    draw_sheet(pictures, readings).save(path, format='PNG')


def _row(picture: Picture, reading: str) -> Image.Image:
    image = Image.fromarray(picture.image_HWC)
    image = image.resize((image.width * _SCALE, image.height * _SCALE), Image.Resampling.NEAREST)
    letters = compared(picture.answer, reading[:MAX_READING])
    lines = [
        [(letter, True) for letter in f'question  {picture.question}'],
        [(letter, True) for letter in f'answer    {picture.answer}'],
        [(letter, True) for letter in 'read      '] + letters,
    ]
    text = _text(lines)
    size = image.width + text.width + 3 * _GAP, max(image.height, text.height) + 2 * _GAP
    row = Image.new('RGB', size, 'white')
    row.paste(image, (_GAP, _GAP))
    row.paste(text, (image.width + 2 * _GAP, _GAP))
    return row


def _text(lines: Sequence[Sequence[tuple[str, bool]]]) -> Image.Image:
    height, font = LETTER_HEIGHT + 2, ImageFont.load_default_imagefont()
    size = max(map(len, lines)) * LETTER_WIDTH, height * len(lines)
    text = Image.new('RGB', size, 'white')
    draw = ImageDraw.Draw(text)
    for number, line in enumerate(lines):
        y = number * height
        for i, (letter, right) in enumerate(line):
            x, color = i * LETTER_WIDTH, _BLACK if right else _WRONG
            draw.text((x, y), _printable(letter), fill=color, font=font)
            if not right:
                draw.line((x, y + height - 1, x + LETTER_WIDTH - 2, y + height - 1), fill=color)
    return text.resize((text.width * 2, text.height * 2), Image.Resampling.NEAREST)


def _printable(letter: str) -> str:
    return letter if letter.isascii() and letter.isprintable() else '?'
