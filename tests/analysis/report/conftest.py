"""A run that was interrupted, resumed on another mesh, and reported on as it ended."""

import shutil
from pathlib import Path

import pytest
from support import write_run

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.result import Inspection
from megajax.analysis.report import run_facts, write_at_end
from megajax.core.config import Config, load
from megajax.core.hardware.records import Hardware
from megajax.core.train.compiled_step import CompiledStep
from megajax.runtime.run.run import run

CONFIG = """
model: {num_layers: 1, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {data: 2, model: 2, sequence_parallel: true}
train: {steps: 3, batch_size: 4, seq_len: 32, dtype: float32, eval_every: 3, eval_batches: 1, \
sample_prompts: ['<b>bold</b>']}
checkpoint: {every: 3}
"""


AUDITED: dict[tuple[object, ...], Inspection] = {}


@pytest.fixture(autouse=True)
def _each_program_is_audited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page audits the step of its run, and most pages here have the same step."""

    def once(
        config: Config, compiled: CompiledStep, target: str, gpu: Hardware | None
    ) -> Inspection:
        key = config, repr(compiled), target, gpu and gpu.name
        if key not in AUDITED:
            AUDITED[key] = audit(config, compiled, target, gpu)
        return AUDITED[key]

    monkeypatch.setattr(run_facts, 'audit', once)


@pytest.fixture(scope='session')
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp('report'), CONFIG)
    for overrides in ([], ['train.steps=6', 'mesh.data=1', 'train.sample_prompts=[]']):
        config = load(str(folder / 'small.yaml'), [f'run.dir={folder}/run', *overrides])
        run(config, name='small', at_end=write_at_end)
    return folder / 'run'


@pytest.fixture
def copied_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(finished_run, tmp_path / 'night'))
