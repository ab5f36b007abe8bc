"""A run on a corpus with a URL, killed and resumed by several processes, learns what a run on the
files learns.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from runs import CONFIG, children, end_here, finish, losses, read_until, start, train_here
from runtime.data import stores
from support import write_run

from megajax.runtime.data.tokens.indexed import write_index

pytestmark = pytest.mark.faults

IDS = 'data.tokenizer=none', 'train.sample_prompts=[]', 'data.document_mask=true'
TOKENS = 3 << 20
SECONDS = 600  # for what takes ten; the machine may be busy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with token files of several blocks of the cache."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    folder = write_run(tmp_path, CONFIG)
    tokens = np.random.default_rng(0).integers(0, 300, TOKENS).astype(np.uint16)
    (folder / 'web.bin').write_bytes(tokens.tobytes())
    lengths = np.full(TOKENS // 64, 64, np.int32)
    with (folder / 'web.idx').open('wb') as file:
        write_index(file, tokens.dtype, lengths, np.arange(len(lengths) + 1))
    return folder


def test_killed_and_resumed_by_two_processes_a_remote_run_learns_what_a_local_one_does(
    folder: Path,
) -> None:
    short = *IDS, 'train.steps=14', 'train.eval_every=100', 'checkpoint.every=4'
    train_here(folder, *short, 'data.corpus=web', name='local')
    with stores.web(folder) as server:
        keys = *short, f'data.corpus={server.url}/web'
        kill_two_processes(folder, *keys)
        assert 'resume' in finish_well(start(folder, *keys, processes=2))
        assert losses(folder / 'run') == losses(folder / 'local')
        assert server.asked.count('/web.idx') == 1

        # A changed file is not trained on.
        os.utime(folder / 'web.bin', (0, 0))
        code, said = end_here(folder, *keys, 'train.steps=20')
    assert code == 2, said
    assert 'ETag and size of ' in said
    assert 'run.allow_changed_data=true' in said


def test_killed_streams_go_on_to_the_token_on_another_mesh(folder: Path) -> None:
    lines = (json.dumps({'text': f'{i} ' * 50}) for i in range(20_000))
    (folder / 'web.jsonl').write_text('\n'.join(lines))
    streamed = 'data.order=streamed', 'data.tokenizer=bytes', 'train.sample_prompts=[]'
    short = *streamed, 'train.steps=14', 'train.eval_every=100', 'checkpoint.every=4'
    train_here(folder, *short, 'data.corpus=web.jsonl', name='local')
    with stores.web(folder) as server:
        keys = *short, f'data.corpus={server.url}/web.jsonl'
        kill_two_processes(folder, *keys)
        assert 'resume' in finish_well(start(folder, *keys))
        assert losses(folder / 'run') == losses(folder / 'local')


def kill_two_processes(folder: Path, *keys: str) -> None:
    """Start a run with two processes, and kill them at step 9."""
    killed = start(folder, *keys, processes=2)
    read_until(killed, 'step 9/')
    for pid in children(killed):
        os.kill(pid, signal.SIGKILL)
    assert finish(killed)[0] != 0


def finish_well(process: subprocess.Popen[str]) -> str:
    code, said = finish(process, SECONDS)
    assert code == 0, said
    return said
