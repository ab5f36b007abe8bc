"""At an evaluation held-out pictures are read, marked and drawn; what is read counts when exact."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import on_mesh, random_params

from megajax.core.config import Config, load
from megajax.runtime.data import load_data
from megajax.runtime.generate import Continuation
from megajax.runtime.run.evaluation import Evaluation
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.ocr_eval import SHOWN, Reader

SMALL = ['model.num_layers=1', 'vision.num_layers=1', 'mesh.data=1', 'mesh.model=1']


BUDGET = (
    *('relevance.regions=[2, 2]', 'relevance.total_tokens=720', 'vision.max_patches=6400'),
    *('train.seq_len=768', 'model.max_seq_len=768'),
)


@pytest.mark.parametrize(
    ('config', 'keys', 'asked'),
    [
        (load('tiny_arr_coc'), ['budget_right_line'], '100.0% of the lines asked for have '),
        (load('tiny_vlm', BUDGET), [], '720 tokens per image are used, '),
    ],
    ids=['lines', 'words'],
)
def test_the_detail_of_the_line_asked_for_is_told_of_images_of_lines_alone(
    config: Config,
    keys: list[str],
    asked: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = load_data(config)
    pictures, rows = data.validation.pictures, []
    for picture in pictures:
        row = Continuation([], data.tokenizer, limit=1)
        row.region_tokens = np.where(np.arange(4) == picture.line, 400, 64)[None]
        row.region_tokens[0, picture.line - 1] += 128
        rows.append(row)
    reader = Reader(config, data.validation, data.tokenizer, tmp_path)
    values = reader._detail(7, rows, Report())
    assert [*values] == ['budget_used', *keys, 'budget_fewest', 'budget_most']
    assert values['budget_used'] == 720
    assert capsys.readouterr().out.startswith(f'step 7  {asked}')


def test_readings_of_steps_that_a_run_has_lost_are_deleted(tmp_path: Path) -> None:
    def left() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    for name in ('readings-100.png', 'readings-600.png', 'readings-mine.png'):
        (tmp_path / name).touch()
    (tmp_path / 'readings-700.png').mkdir()  # cannot be deleted, which does not end the run
    config = load('tiny_vlm', SMALL)
    unused = dict.fromkeys(('report', 'clock', 'stop', 'watchdog'))
    evaluation = Evaluation(config, load_data(config), tmp_path, 300, **unused)
    assert left() == {'readings-100.png', 'readings-700.png', 'readings-mine.png'}
    evaluation.rewind(50)
    assert left() == {'readings-700.png', 'readings-mine.png'}


@pytest.mark.slow
def test_a_model_that_answers_nothing_reads_nothing_and_its_readings_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load('tiny_vlm', SMALL)
    data = load_data(config)
    checks = []
    with on_mesh(config):
        reader = Reader(config, data.validation, data.tokenizer, tmp_path)
        found = reader.read(7, random_params(config, std=0.1), Report(), lambda: checks.append(1))
    assert found == {'validation_read': 0, 'validation_read_unlike': 0}
    assert checks
    said = capsys.readouterr().out.splitlines()
    assert said[0] == 'step 7  0.0% of 256 held-out images read exactly'
    answers = [data.validation.draw(i).answer for i in range(SHOWN)]
    assert [line.split()[0] for line in said[1 : 1 + SHOWN]] == answers
    assert said[1 + SHOWN] == 'step 7  0.0% in a font, at places and in sizes not trained on'
    with Image.open(tmp_path / 'readings-7.png') as sheet:
        assert np.ptp(np.asarray(sheet)) > 100
