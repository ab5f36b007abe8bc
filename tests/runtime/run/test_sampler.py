"""Samples of a run: on the terminal, in samples.jsonl and in TensorBoard's files, once for each
step.
"""

import json
from pathlib import Path

import pytest
from checkpoints import laid_out, tiny
from support import exhaustive, make_config, on_mesh, random_params, slow
from vlm import vlm

from megajax.base.render.text import visible
from megajax.core.config import Config, ConfigError
from megajax.runtime.data.text.tokenizer import byte_tokenizer
from megajax.runtime.run import sampler as module
from megajax.runtime.run.log.report import Report
from megajax.runtime.run.sampler import Sampler

PROMPTS = ('one', 'two')


def small(prompts: tuple[str, ...] = PROMPTS) -> Config:
    return make_config(
        'llama', 1, 2, model={'vocab_size': 257, 'num_layers': 1}, train={'sample_prompts': prompts}
    )


def test_each_step_is_there_once_and_lost_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, 'TOKENS', 12)
    config, checks = laid_out('one device', train={'sample_prompts': PROMPTS}), []
    with on_mesh(config):
        params = random_params(config, std=0.3)
        sampler = Sampler(config, byte_tokenizer(), tmp_path, 0, report=Report())
        for step in (3, 6):
            sampler.sample(step, params, lambda: checks.append(1))
        sampler.rewind(3)
        sampler.sample(6, params, lambda: checks.append(1))
        sampler.close()
    lines = [json.loads(line) for line in (tmp_path / 'samples.jsonl').read_text().splitlines()]
    assert [line.pop('step') for line in lines] == [3, 6]
    assert lines[0] == lines[1]  # of the same parameters
    assert set(lines[0]) == set(PROMPTS)
    said = capsys.readouterr().out
    assert f"sample after 'one':\none{visible(lines[0]['one'])}" in said
    (events,) = (tmp_path / 'tensorboard' / 'samples').iterdir()
    assert f'    {lines[0]["two"].splitlines()[0]}'.encode() in events.read_bytes()
    assert len(checks) >= 6


def test_prompts_with_the_place_of_an_image_are_refused_by_key(tmp_path: Path) -> None:
    config = vlm(train={'sample_prompts': ('<image>What is it?',)})
    with pytest.raises(ConfigError, match=r'train\.sample_prompts: samples show no images'):
        Sampler(config, byte_tokenizer(), tmp_path, 0, report=Report())


@pytest.mark.parametrize(
    'layout',
    [
        'data=3 x model=2, weights',
        exhaustive('data=2 x model_rows=2 model=2, optimizer'),
        slow('data=4 replicas=2 x model=2, gradients'),
    ],
)
def test_the_samples_of_every_layout_are_those_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(module, 'TOKENS', 12)
    for name in ('one device', layout):
        config = laid_out(name, train={'sample_prompts': PROMPTS})
        with on_mesh(config):
            sampler = Sampler(config, byte_tokenizer(), tmp_path / name, 0, report=Report())
            sampler.sample(1, random_params(config, std=0.3), lambda: None)
            sampler.close()
    expected, found = (
        (tmp_path / name / 'samples.jsonl').read_text() for name in ('one device', layout)
    )
    assert found == expected


@pytest.mark.slow
def test_a_pipeline_whose_batch_is_small_continues_prompts_as_one_device_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, 'TOKENS', 12)
    mesh = {'stages': 2, 'virtual_stages': 2, 'context': 2}
    train = {'sample_prompts': PROMPTS, 'microbatches': 2, 'batch_size': 2}
    texts = []
    for name, sizes in (('one', {}), ('pipeline', mesh)):
        config = tiny(1, 1, model={'num_layers': 4}, mesh=sizes, train=train)
        with on_mesh(config):
            sampler = Sampler(config, byte_tokenizer(), tmp_path / name, 0, report=Report())
            sampler.sample(1, random_params(config, std=0.3), lambda: None)
            sampler.close()
        texts.append((tmp_path / name / 'samples.jsonl').read_text())
    assert texts[0] == texts[1]


def test_prompts_that_cannot_be_continued_are_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='prompt 1 has 33 tokens'):
        Sampler(small(('x' * 32,)), byte_tokenizer(), tmp_path, 0, report=Report())
    with pytest.raises(ConfigError, match='the model has no tokenizer'):
        Sampler(small(), None, tmp_path, 0, report=Report())


def test_without_prompts_there_are_no_files(tmp_path: Path) -> None:
    Sampler(small(()), None, tmp_path, 0, report=Report()).close()
    assert not list(tmp_path.iterdir())
