"""Rows with a picture a second, made by one thread; prints a table.

python benchmarks/picture_rows.py [--rounds 5]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from megajax.runtime.data import Batches
from megajax.runtime.data.image_rows import RowShape
from megajax.runtime.data.image_text.load import load_image_text
from megajax.runtime.data.patches import PatchSize
from megajax.runtime.data.synthetic_batches import PictureBatches
from megajax.runtime.data.synthetic_images import lines_picture, word_picture
from megajax.runtime.data.text.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(('<image>',))
IMAGE_TOKEN = 257
BATCH_SIZE = 16
SECONDS = 1.0  # of a round


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--rounds', type=int, default=5)
    rounds = parser.parse_args().rounds
    with jpegs(256) as corpus:
        kinds: dict[str, Batches] = {
            'word, bitmap font, 12 x 72': PictureBatches(
                lambda i: word_picture('train', 0, i), shape(24, 6, 24), TOKENIZER,
                batch_size=BATCH_SIZE,
            ),
            'word, scalable font, 12 x 72': PictureBatches(
                lambda i: word_picture('train', 0, i, font='scalable'), shape(24, 6, 24), TOKENIZER,
                batch_size=BATCH_SIZE,
            ),
            'four lines, 320 x 80': PictureBatches(
                lambda i: lines_picture('train', 0, i, line_size=(80, 80)), shape(1700, 2, 6400),
                TOKENIZER, batch_size=BATCH_SIZE,
            ),
            'JPEG, 256 x 256': load_image_text(
                str(corpus), shape(127, 16, 256), TOKENIZER, batch_size=BATCH_SIZE, seed=0,
                split='100,0,0',
            ).train,
        }  # fmt: skip
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(rounds + 1):
            for kind, batches in kinds.items():
                rate = rows_a_second(batches, 1000 * number)
                rates[kind] += [rate] * (number > 0)  # the first round warms up
    print(f'{"rows":30}{"a core-second":>14}  range')
    for kind, found in rates.items():
        median = statistics.median(found)
        print(f'{kind:30}{median:14,.0f}  {min(found):,.0f} to {max(found):,.0f}')


def shape(seq_len: int, patch_size: int, max_patches: int) -> RowShape:
    patches = PatchSize(patch_size=patch_size, merge_size=2, max_patches=max_patches)
    return RowShape(seq_len=seq_len, images=1, patches=patches, image_token=IMAGE_TOKEN, mrope=True)


@contextmanager
def jpegs(side: int) -> Iterator[Path]:
    """JSON lines that name pictures of smooth noise, some 14 kB each."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for i in range(64):
            noise = Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8))
            large = noise.resize((side, side), Image.Resampling.BICUBIC)
            large.save(Path(folder, f'{i}.jpg'), quality=90)
            lines.append(json.dumps({'text': '<image>a caption', 'images': [f'{i}.jpg']}) + '\n')
        corpus = Path(folder, 'corpus.jsonl')
        corpus.write_text(''.join(lines))
        yield corpus


def rows_a_second(batches: Batches, first: int) -> float:
    """Rows in a second of this thread's processor time, from the batch of step `first` on."""
    start, steps = time.thread_time(), 0
    while (spent := time.thread_time() - start) < SECONDS:
        batches[first + steps]
        steps += 1
    return steps * batches.batch_size / spent


if __name__ == '__main__':
    main()
