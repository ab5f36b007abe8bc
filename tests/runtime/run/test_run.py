"""Runs as a user starts them: `megajax train` in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import megajax, write_run

CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {data: 2, model: 2}
train: {steps: 6, batch_size: 4, seq_len: 32, dtype: float32, eval_every: 3, log_every: 1, \
sample_prompts: ['def ']}
optim: {lr: 1e-2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, CONFIG)


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, '-m', 'megajax', 'train', 'small.yaml', *overrides]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    return {line['step']: line['loss'] for line in lines if 'loss' in line}


@pytest.mark.slow
def test_a_bert_trains_and_makes_no_text(folder: Path) -> None:
    result = train(
        folder,
        'run.dir=run',
        'model.objective=masked_lm',
        'train.sample_prompts=[]',
        'train.steps=12',
    )
    assert result.returncode == 0, result.stderr
    assert 'nats per masked token' in result.stdout
    of_steps = losses(folder / 'run')
    assert of_steps[12] < of_steps[1] - 1
    refused = megajax('generate', 'run', folder=folder)
    assert refused.returncode == 2
    assert 'not the next token of a text' in refused.stderr


@pytest.mark.faults
@pytest.mark.exhaustive
def test_a_resumed_run_equals_one_that_was_never_interrupted(folder: Path) -> None:
    straight = train(folder, 'run.dir=straight', 'optim.schedule=constant')
    assert straight.returncode == 0, straight.stderr
    assert train(folder, 'run.dir=run', 'optim.schedule=constant', 'train.steps=3').returncode == 0
    resumed = train(folder, 'run.dir=run', 'optim.schedule=constant', 'run.resume=must')
    assert resumed.returncode == 0, resumed.stderr
    assert losses(folder / 'run') == losses(folder / 'straight')


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_in_fp8_resumes_to_the_bit(folder: Path) -> None:
    fp8 = 'train.dtype=fp8', 'train.sample_prompts=[]', 'optim.schedule=constant'
    assert train(folder, *fp8, 'run.dir=straight').returncode == 0
    assert train(folder, *fp8, 'run.dir=run', 'train.steps=3').returncode == 0
    resumed = train(folder, *fp8, 'run.dir=run', 'run.resume=must')
    assert resumed.returncode == 0, resumed.stderr
    assert losses(folder / 'run') == losses(folder / 'straight')


@pytest.mark.faults
@pytest.mark.exhaustive
def test_a_run_resumes_on_another_mesh(folder: Path) -> None:
    assert train(folder, 'run.dir=run', 'train.steps=3').returncode == 0
    resumed = train(folder, 'run.dir=run', 'mesh.data=1', 'mesh.sequence_parallel=true')
    assert resumed.returncode == 0, resumed.stderr
    assert 'resume' in resumed.stdout
    assert sorted(losses(folder / 'run')) == [1, 2, 3, 4, 5, 6]


@pytest.mark.faults
def test_resume_is_a_policy(folder: Path) -> None:
    def train(*overrides: str) -> subprocess.CompletedProcess[str]:
        return megajax('train', 'small.yaml', 'run.dir=run', *overrides, folder=folder)

    missing = train('run.resume=must')
    assert missing.returncode == 2
    assert 'holds no checkpoint' in missing.stderr
    assert train('train.steps=1').returncode == 0
    never = train('run.resume=never')
    assert never.returncode == 2
    assert 'run.resume=never' in never.stderr
    other = train('model.hidden_size=64')
    assert other.returncode == 2
    assert 'model.hidden_size 32 there, 64 here' in other.stderr


def test_a_corpus_that_does_not_fill_a_batch_is_refused(folder: Path) -> None:
    result = megajax('train', 'small.yaml', 'train.batch_size=4000', folder=folder)
    assert result.returncode == 2
    assert 'train.batch_size' in result.stderr
    assert [*(folder / 'runs').iterdir()] == []
