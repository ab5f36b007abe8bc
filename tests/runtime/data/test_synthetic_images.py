"""Any picture can be drawn anywhere; held-out words are never trained on; misreading is shown."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megajax.core.config import ConfigError, load
from megajax.runtime.data.image_rows import RowShape
from megajax.runtime.data.ocr_sheet import MISSING, compared, marked, write_sheet
from megajax.runtime.data.patches import PatchSize
from megajax.runtime.data.synthetic_batches import PictureBatches
from megajax.runtime.data.synthetic_corpus import draw_pictures
from megajax.runtime.data.synthetic_images import (
    MARKS,
    NUM_HELD_OUT,
    draw_word,
    lines_picture,
    word_picture,
    words,
)
from megajax.runtime.data.text.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(('<image>',))
IMAGE = 257
SHAPE = RowShape(
    seq_len=24,
    images=1,
    patches=PatchSize(patch_size=6, merge_size=2, max_patches=24),
    image_token=IMAGE,
    mrope=True,
)


def make_batches(count: int | None = None, seed: int = 3) -> PictureBatches:
    return PictureBatches(
        lambda i: word_picture('train', seed, i), SHAPE, TOKENIZER, batch_size=4, count=count
    )


def test_held_out_words_differ_from_all_others_by_more_than_case() -> None:
    train, held_out = words()['train'], words()['held_out']
    assert len(held_out) == NUM_HELD_OUT
    assert len(train) > 10_000
    lower = {word.lower() for word in held_out}
    assert len(lower) == NUM_HELD_OUT
    assert lower.isdisjoint(word.lower() for word in train)
    assert all(3 <= len(word) <= 9 and word.replace('_', 'a').isalpha() for word in train)


def test_an_evaluation_of_256_pictures_shows_each_held_out_word_once() -> None:
    answers = [word_picture('held_out', 0, i).answer for i in range(NUM_HELD_OUT)]
    assert sorted(answers) == sorted(words()['held_out'])


@pytest.mark.parametrize('font', ['bitmap', 'scalable'])
def test_a_picture_depends_on_seed_and_number_alone(font: str) -> None:
    first = [word_picture('train', 3, i, font=font) for i in range(8)]
    for i in reversed(range(8)):
        again = word_picture('train', 3, i, font=font)
        assert again.answer == first[i].answer
        np.testing.assert_array_equal(again.image_HWC, first[i].image_HWC)
    assert len({picture.answer for picture in first}) > 4
    assert word_picture('train', 4, 0, font=font).answer != first[0].answer


@pytest.mark.parametrize('font', ['bitmap', 'scalable'])
def test_letters_are_darker_than_the_ground(font: str) -> None:
    for i in range(50):
        image = word_picture('train', 0, i, font=font).image_HWC
        assert image.shape == (12, 72, 3)
        assert (image == image[..., :1]).all()
        assert image.min() < 130 < 150 < np.median(image)


def test_no_letter_of_the_longest_words_is_cut_off() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        image = draw_word('M' * 9, random)[..., 0]
        dark = image < image.max() - 70
        assert dark[:, 48:54].any()
        assert not dark[:, 56:].any()


@pytest.mark.parametrize('line_size', [(12, 72), (20, 80), (80, 160), (120, 120)])
def test_the_answer_is_the_line_beside_the_mark(line_size: tuple[int, int]) -> None:
    height, width = line_size
    for i in range(20):
        picture = lines_picture('held_out', 1, i, line_size=line_size)
        assert picture.image_HWC.shape == (4 * height, width, 3)
        color = picture.question.removeprefix('the line at ').removesuffix('? <image>:').strip()
        assert picture.answer in words()['held_out']
        lines = picture.image_HWC.reshape(4, height, width, 3).astype(int)
        matches = (np.abs(lines - MARKS[color]).max(axis=-1) < 40).sum(axis=(1, 2))
        assert matches.argmax() == picture.line
        assert np.sort(matches)[-2] < matches.max() / 4


def test_a_row_holds_the_picture_the_question_and_the_answer() -> None:
    batches = make_batches()
    batch = batches[5]
    assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
        'tokens': ((4, 24), 'int32'),
        'labels': ((4, 24), 'int32'),
        'loss_mask': ((4, 24), 'float32'),
        'pixels': ((4, 1, 24, 108), 'uint8'),
        'image_grid': ((4, 1, 2), 'int32'),
        'image_index': ((4, 24), 'int32'),
        'positions': ((4, 24, 3), 'int32'),
    }
    for row in range(4):
        picture = word_picture('train', 3, 20 + row)
        tokens, mask = batch['tokens'][row], batch['loss_mask'][row] == 1
        assert tokens[:8].tolist() == [256, *[IMAGE] * 6, ord('?')]
        assert batch['image_index'][row, :8].tolist() == [-1, 0, 1, 2, 3, 4, 5, -1]
        assert batch['image_grid'][row, 0].tolist() == [2, 12]
        assert bytes(batch['labels'][row][mask][:-1].tolist()).decode() == picture.answer
        assert batch['labels'][row][mask][-1] == TOKENIZER.eod
        assert not mask[batch['image_index'][row] >= 0].any()
        np.testing.assert_array_equal(
            batch['pixels'][row, 0], SHAPE.patches.cut(picture.image_HWC, (2, 12))
        )


def test_the_rows_of_processes_make_up_the_batch() -> None:
    batches, resumed = make_batches(), make_batches()
    whole = batches[1000]
    parts = [resumed.rows(1000, start, stop) for start, stop in ((0, 1), (1, 4))]
    (ahead,) = make_batches().read_ahead(1000, 1001, slice(0, 4))
    for name, array in whole.items():
        np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]))
        np.testing.assert_array_equal(array, ahead[name])


def test_the_last_batch_of_an_evaluation_is_padded_with_rows_that_do_not_count() -> None:
    batches = make_batches(count=6)
    assert len(batches) == 2
    assert batches[1]['loss_mask'].any(axis=1).tolist() == [True, True, False, False]
    with pytest.raises(IndexError):
        batches[2]


def test_unreadable_rows_have_no_loss() -> None:
    assert np.isnan(make_batches().unreadable(2)['loss_mask']).all()


@given(st.text('abc_', max_size=9), st.text('abc_', max_size=12))
def test_what_is_right_is_in_the_answer(answer: str, reading: str) -> None:
    letters = compared(answer, reading)
    assert all(right for _, right in letters) == (answer == reading)
    assert ''.join(letter for letter, _ in letters).replace(MISSING, '') == reading
    rest = iter(answer)
    assert all(letter in rest for letter, right in letters if right)


def test_wrong_letters_are_marked() -> None:
    assert marked('week_star', 'week_star') == 'week_star'
    assert marked('getframe', 'betframe') == '[b]etframe'
    assert marked('slave', 'lav') == '[.]lav[.]'
    assert marked('abc', '') == '[.]'
    assert marked('abc', 'abc\n\u00e9') == 'abc[??]'


def test_a_sheet_shows_pictures_and_wrong_letters_in_red(tmp_path: Path) -> None:
    pictures = [word_picture('held_out', 0, i) for i in range(3)]
    right = [picture.answer for picture in pictures]
    red = {}
    for name, readings in {'right': right, 'wrong': [*right[:2], 'x' + right[2][1:]]}.items():
        write_sheet(tmp_path / f'{name}.png', pictures, readings)
        sheet = np.asarray(Image.open(tmp_path / f'{name}.png')).astype(int)
        third = sheet.shape[0] // 3
        is_red = (sheet[..., 0] > 150) & (sheet[..., 1] < 50)
        red[name] = [bool(is_red[i * third : (i + 1) * third].any()) for i in range(3)]
    assert red == {'right': [False] * 3, 'wrong': [False, False, True]}


def test_the_tokenizer_of_drawn_images_is_used_and_another_is_refused(tmp_path: Path) -> None:
    for name, tokenizer in (('own', TOKENIZER), ('other', byte_tokenizer())):
        tokenizer.save(tmp_path / f'{name}.json')
    draw_pictures(load('tiny_vlm', [f'data.tokenizer={tmp_path}/own.json']))
    for spec in ('bpe', 'none', f'{tmp_path}/other.json'):
        with pytest.raises(
            ConfigError, match=f'{spec} is not the tokenizer of data.corpus=words; use bytes'
        ):
            draw_pictures(load('tiny_vlm', [f'data.tokenizer={spec}']))
