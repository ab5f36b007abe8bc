"""Transcribe held-out images at every evaluation of a run on synthetic images."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from megajax.core.config import Config
from megajax.core.config.relevance_rules import FEWEST, MOST
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.ocr_sheet import marked, write_sheet
from megajax.runtime.data.synthetic_batches import PictureBatches
from megajax.runtime.data.synthetic_images import Picture
from megajax.runtime.generate import (
    Continuation,
    Generator,
    PromptImages,
    Request,
    Sampling,
    prompt_of,
)
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.readings import readings_file, rewind_readings

SHOWN = 8  # number of images whose transcriptions are printed and drawn
DETAILED = 300  # number of tokens at which a region counts as seen in detail
GREEDY = Sampling(temperature=0.0)

logger = logging.getLogger(__name__)


class Reader:
    """The OCR evaluation of a run's held-out images.

    It prints some transcriptions with wrong letters marked, and draws them in `readings-STEP.png`.
    """

    def __init__(self, config: Config, batches: PictureBatches, tokenizer: Tokenizer, folder: Path):
        self._config, self._batches, self._folder = config, batches, folder
        self._tokenizer = tokenizer
        self._pictures = batches.pictures
        self._unlike = batches.unlike.pictures if batches.unlike else []

    def read(
        self, step: int, params: nnx.State, report: Report, check: Callable[[], None]
    ) -> dict[str, float]:
        """Return the share of images that the parameters after `step` transcribe exactly.

        All processes must call this; `check` is called once every few letters.
        """
        rows = self._read(self._pictures, params, check)
        share, readings = _share_right(self._pictures, rows), [row.text for row in rows[:SHOWN]]
        report.say(f'step {step}  {100 * share:.1f}% of {len(rows)} held-out images read exactly')
        for picture, reading in zip(self._pictures, readings, strict=False):
            report.say(f'  {picture.answer:12} {marked(picture.answer, reading)}')
        if jax.process_index() == 0:
            self._draw(step, readings)
        values = {'validation_read': share} | self._detail(step, rows, report)
        if self._unlike:
            share = _share_right(self._unlike, self._read(self._unlike, params, check))
            report.say(
                f'step {step}  {100 * share:.1f}% in a font, at places and in sizes not trained on'
            )
            values['validation_read_unlike'] = share
        return values

    def rewind(self, step: int) -> None:
        """Delete the drawn transcriptions of steps after `step`."""
        if jax.process_index() == 0:
            rewind_readings(self._folder, step)

    def _detail(self, step: int, rows: Sequence[Continuation], report: Report) -> dict[str, float]:
        """Report how relevance distributes the tokens of images, if the model has relevance."""
        tokens = [row.region_tokens[0] for row in rows if row.region_tokens is not None]
        if not tokens:
            return {}
        values, asked = {'budget_used': float(np.mean(np.sum(tokens, 1)))}, ''
        if self._config.data.corpus == 'lines':  # a region is a line
            given = np.array([x[p.line] for x, p in zip(tokens, self._pictures, strict=True)])
            values['budget_right_line'] = share = float((given >= DETAILED).mean())
            asked = f'{100 * share:.1f}% of the lines asked for have {DETAILED} tokens or more; '
        values |= {
            'budget_fewest': float((np.array(tokens) == FEWEST).mean()),
            'budget_most': float((np.array(tokens) == MOST).mean()),
        }
        report.say(
            f'step {step}  {asked}{values["budget_used"]:.0f} tokens per image are used, '
            f'{100 * values["budget_fewest"]:.0f}% of the regions have {FEWEST}, '
            f'{100 * values["budget_most"]:.0f}% {MOST}'
        )
        return values

    def _prompt(self, picture: Picture) -> tuple[list[int], PromptImages]:
        """Return the tokens before the answer, and the images among them."""
        document = self._batches.document(picture)
        return prompt_of(document, self._batches.shape, int(np.argmax(document.answered)))

    def _read(
        self, pictures: Sequence[Picture], params: nnx.State, check: Callable[[], None]
    ) -> list[Continuation]:
        prompts, images = zip(*map(self._prompt, pictures), strict=True)
        request = Request(max_tokens=self._config.train.seq_len, sampling=GREEDY)
        generator = Generator(self._config, params, self._tokenizer)
        rows: list[Continuation | None] = []
        for grown in generator.stream(prompts, request, images):
            rows = grown
            check()
        return [row for row in rows if row]

    def _draw(self, step: int, readings: Sequence[str]) -> None:
        path = readings_file(self._folder, step)
        try:
            write_sheet(path, self._pictures[: len(readings)], readings)
        except OSError as error:
            logger.warning('%s cannot be written (%s); the run continues', path, error.strerror)


def _share_right(pictures: Sequence[Picture], rows: Sequence[Continuation]) -> float:
    pairs = zip(pictures, rows, strict=True)
    return sum(picture.answer == row.text for picture, row in pairs) / len(rows)
