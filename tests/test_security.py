"""What others wrote is read as data and never run, a run listens to nobody else, and keeps the
secrets of its environment.
"""

import ast
import json
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import CONFIG, children, end_here, finish, read_until, start, steps, train_here
from support import megajax, write_run

from megajax.runtime.checkpoint.digests import write_sums

pytestmark = pytest.mark.faults

PACKAGE = Path(__file__).parents[1] / 'megajax'
UNSAFE = {
    'pickle',
    'cloudpickle',
    'dill',
    'joblib',
    'marshal',
    'shelve',
    'torch',
    'yaml',
}  # which run what a file says, if only by default
# The first has an Unpickler of its own, without the instructions that run code; its subclasses know
# some harmless names and refuse all others. The second executes a model whose tensors are read from
# safetensors.
RESTRICTED = {
    PACKAGE / 'interop/megatron/pickles.py': {'pickle'},
    PACKAGE / 'analysis/compare/in_transformers.py': {'torch'},
}
SECRETS = {
    'HF_TOKEN': 'hf_canary0a1b2c3d',
    'AWS_SECRET_ACCESS_KEY': 'aws/canary4e5f6a7b',
    'WANDB_API_KEY': 'canary8c9d0e1f2a3b',
    'DATABASE_PASSWORD': 'canary-correct-horse',
    'MEGAJAX_TOKEN': 'canary-of-the-rendezvous',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, CONFIG.replace('steps: 40', 'steps: 2'), split='1,0,0')


class Evil:
    """What makes a folder when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def test_the_canary_sings(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / 'canary')))
    assert (tmp_path / 'canary').exists()


def test_no_line_of_the_package_reads_code_as_data() -> None:
    paths = sorted(PACKAGE.rglob('*.py'))
    assert len(paths) > 500
    for path in paths:
        check_reads_no_code(path)


def check_reads_no_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or '']
            )
            unsafe = UNSAFE.intersection(name.partition('.')[0] for name in names)
            assert unsafe <= RESTRICTED.get(path, set()), ast.unparse(node)
        if isinstance(node, ast.ClassDef) and any(
            'Unpickler' in ast.unparse(base) for base in node.bases
        ):
            assert 'find_class' in {
                part.name for part in node.body if isinstance(part, ast.FunctionDef)
            }, node.name
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.endswith('.from_pretrained'):
                assert 'use_safetensors=True' in map(ast.unparse, node.keywords), called
            assert called not in (
                'eval',
                'exec',
                'compile',
                'os.system',
                'pickle.load',
                'pickle.loads',
                'pickle.Unpickler',
            ), ast.unparse(node)
            for keyword in node.keywords:
                unsafe = keyword.arg in ('allow_pickle', 'trust_remote_code', 'shell') or (
                    keyword.arg == 'typ' and 'YAML' in called
                )
                assert not unsafe or ast.unparse(keyword.value) in ('False', "'safe'"), ast.unparse(
                    node
                )


@pytest.mark.parametrize('where', ['file', 'override'])
@pytest.mark.parametrize(
    'tag',
    [
        '!!python/object/apply:os.mkdir [{}]',
        '!!python/object/new:os.mkdir [{}]',
        '!!python/name:os.mkdir',
    ],
)
def test_a_config_makes_no_objects(folder: Path, where: str, tag: str) -> None:
    value = tag.format(folder / 'canary')
    if where == 'file':
        (folder / 'small.yaml').write_text(f'train: {{steps: 1}}\noptim:\n  lr: {value}\n')
    code, said = end_here(folder, *([f'optim.lr={value}'] if where == 'override' else []))
    assert (code, 'not valid YAML' in said) == (2, True), said
    assert not (folder / 'canary').exists()


@pytest.mark.parametrize('suffix', ['.npy', '.pkl', '.bin', '.idx', '.json', '.jsonl'])
def test_a_corpus_of_objects_is_refused(folder: Path, suffix: str) -> None:
    evil = np.array([Evil(folder / 'canary')])
    for name in (
        {f'evil{suffix}', 'evil.bin', 'evil.idx'}
        if suffix in ('.bin', '.idx')
        else {f'evil{suffix}'}
    ):
        with (folder / name).open('wb') as file:
            np.save(file, evil, allow_pickle=True) if suffix == '.npy' else pickle.dump(evil, file)
    corpus = 'evil' if suffix in ('.bin', '.idx') else f'evil{suffix}'
    tokenizer = 'data.tokenizer=none' if corpus == 'evil' else 'data.tokenizer=bytes'
    code, said = end_here(folder, f'data.corpus={corpus}', tokenizer)
    assert code == 2, said
    assert not (folder / 'canary').exists()


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('record.json', 'checkpoints/2/record.json cannot be read'),
        ('state/_METADATA', 'the list of arrays in'),
        ('state/manifest.ocdbt', '.zarray" in OCDBT database'),
        ('all', 'checkpoints/2/record.json cannot be read'),
    ],
)
def test_a_checkpoint_of_objects_with_digests_that_are_right_runs_nothing(
    folder: Path, checkpoint: Path, name: str, reason: str
) -> None:
    shutil.copytree(checkpoint, folder / 'run')
    step = folder / 'run/checkpoints/2'
    files = [path for path in step.rglob('*') if path.is_file()] if name == 'all' else [step / name]
    for path in files:
        if path.name not in ('SHA256SUMS', 'commit_success.txt'):
            path.write_bytes(pickle.dumps(Evil(folder / 'canary')))
    write_sums(step)
    code, said = end_here(folder, 'train.steps=3', 'optim.schedule=constant')
    assert (code, reason in said) == (4, True), said
    assert not (folder / 'canary').exists()
    assert megajax('checkpoint', 'ls', 'run', folder=folder).returncode == 0
    assert not (folder / 'canary').exists()


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps."""
    folder = write_run(
        tmp_path_factory.mktemp('checkpoint'),
        CONFIG.replace('steps: 40', 'steps: 2'),
        split='1,0,0',
    )
    train_here(folder)
    return folder / 'run'


def test_a_path_in_a_manifest_stays_in_its_folder(folder: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, folder / 'run')
    (folder / 'secret').write_text('{}')
    sums = folder / 'run/checkpoints/2/SHA256SUMS'
    sums.write_text(sums.read_text().replace('  record.json', '  ../../../secret'))
    code, said = end_here(folder)
    assert (code, 'is rejected: ../../../secret is missing' in said) == (4, True), said


@pytest.mark.parametrize('processes', [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_no_secret_of_the_environment_is_written_or_said(folder: Path, processes: int) -> None:
    fails = (
        'from megajax.runtime.run import trainer\n'
        'def fails(loop, take=trainer.Trainer._take_step, **options):\n'
        '    if loop.step == 3: raise RuntimeError("of the step")\n'
        '    return take(loop, **options)\n'
        'trainer.Trainer._take_step = fails'
    )
    process = start(folder, 'train.steps=4', processes=processes, fault=fails, **SECRETS)
    code, said = finish(process)
    assert (code, 'RuntimeError: of the step' in said) == (1, True), said
    assert len(steps(folder / 'run')) == 1
    files = [path for path in folder.rglob('*') if path.is_file()]
    assert {'metrics.jsonl', 'config.yaml', 'record.json', '_METADATA', 'report.html'} <= {
        path.name for path in files
    }
    contents = {str(path): path.read_bytes() for path in files} | {'said': said.encode()}
    for name, secret in SECRETS.items():
        assert not [path for path, content in contents.items() if secret.encode() in content], name
        assert not [
            path
            for path, content in contents.items()
            if json.dumps(secret).encode()[1:-1] in content
        ], name


def listeners(pid: int) -> set[str]:
    """The addresses, in the kernel's hexadecimal, on which a process listens."""
    own = {os.readlink(path) for path in Path(f'/proc/{pid}/fd').iterdir() if path.is_symlink()}
    found = set()
    for table in ('tcp', 'tcp6', 'udp', 'udp6'):
        for line in Path(f'/proc/{pid}/net/{table}').read_text().splitlines()[1:]:
            address, state, inode = (line.split()[column] for column in (1, 3, 9))
            if f'socket:[{inode}]' in own and state == ('0A' if 'tcp' in table else '07'):
                found.add(address.partition(':')[0])
    return found


@pytest.mark.skipif(sys.platform != 'linux', reason='/proc is of Linux')
@pytest.mark.parametrize('processes', [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_local_run_listens_on_loopback_alone(folder: Path, processes: int) -> None:
    process = start(
        folder,
        'train.steps=100000',
        'optim.schedule=constant',
        'run.watchdog_seconds=100',
        processes=processes,
    )
    read_until(process, r'step 3/')
    pids = [
        process.pid,
        *children(process),
        *(pid for child in children(process) for pid in _children(child)),
    ]
    found = set().union(*(listeners(pid) for pid in pids))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    loopback = {
        '0100007F',
        '0' * 24 + '01000000',
        '0' * 16 + 'FFFF00000100007F',
    }  # 127.0.0.1, ::1, and the first written as the second
    assert found <= loopback
    assert bool(found) == (processes > 1)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]
