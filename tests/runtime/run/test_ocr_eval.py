"""At an evaluation held-out pictures are read, marked and drawn; what is read counts when exact."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import on_mesh, random_params

from megajax.core.config import load
from megajax.runtime.data import load_data
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.ocr_eval import SHOWN, Reader

SMALL = ['model.num_layers=1', 'vision.num_layers=1', 'mesh.data=1', 'mesh.model=1']


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
