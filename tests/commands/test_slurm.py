"""`scripts/slurm.sbatch` under a real Slurm of one host: a time limit costs no step, and a job that
is cancelled stays so.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import CONFIG
from support import write_run

PROGRAMS = 'munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'scontrol', 'scancel'
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f'{", ".join(MISSING)} missing: apt-get install slurmctld slurmd munge',
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason='slurmd needs root'),
]
ROOT = Path(__file__).parents[2]
WARNED_SECONDS = 60  # before the limit; Slurm looks every 30 s, and may be early by as much
PATIENCE = 600  # seconds for what takes one of Slurm's rounds; the machine may be busy
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope='module')
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A controller and a node that has this machine's name, without systemd: each daemon in the
    foreground, as our child.
    """
    folder = tmp_path_factory.mktemp('slurm')
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(('127.0.0.1', 0))) for _ in range(2)]
        ports = [one.getsockname()[1] for one in sockets]
    (folder / 'slurm.conf').write_text(
        CONF.format(host=socket.gethostname().partition('.')[0], folder=folder, ports=ports)
    )
    (folder / 'gres.conf').write_text('Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n')
    for name in ('state', 'spool'):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / 'munge.key'
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {
        'key-file': key,
        'socket': 'munge.socket',
        'pid-file': 'munged.pid',
        'log-file': 'munged.log',
        'seed-file': 'seed',
    }
    munged = [
        'munged',
        '--force',
        '--foreground',
        *(f'--{name}={folder / file}' for name, file in files.items()),
    ]
    environ = os.environ | {'SLURM_CONF': f'{folder}/slurm.conf'}
    daemons = [
        subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        for command in (munged, ['slurmctld', '-D'], ['slurmd', '-D'])
        for log in [(folder / f'{command[0]}.out').open('w')]
        if command[0] == 'munged' or not time.sleep(1)
    ]
    try:
        wait_for(lambda: 'idle' in run('sinfo', '-h', '-o', '%T', environ=environ))
        yield environ
    finally:
        run('scancel', '--state=RUNNING', '--signal=KILL', '--full', environ=environ)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def run(*command: str, environ: dict[str, str], cwd: Path | None = None) -> str:
    return subprocess.run(
        command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    ).stdout


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def submit(folder: Path, environ: dict[str, str]) -> tuple[str, Path]:
    """The script, set to this cluster as its head says; the job's number and its log."""
    text = (ROOT / 'scripts/slurm.sbatch').read_text()
    for theirs, ours in {
        '--nodes=4': '--nodes=1',
        '--ntasks-per-node=8': '--ntasks-per-node=2',
        '--gpus-per-node=8': '--gpus-per-node=2',
        '--cpus-per-task=8': '--cpus-per-task=1',
        '--signal=TERM@600': f'--signal=TERM@{WARNED_SECONDS}',
    }.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    (folder / 'job.sbatch').write_text(text)
    program = folder / 'bin/megajax'
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megajax "$@"\n')
    program.chmod(0o755)
    job = environ | {'PATH': f'{program.parent}:{environ["PATH"]}', 'PYTHONPATH': str(ROOT)}
    job |= {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '1', 'RUN_DIR': f'{folder}/run'}
    arguments = (
        'small.yaml',
        'mesh.data=2',
        'mesh.model=1',
        'train.steps=100000',
        'optim.schedule=constant',
        'checkpoint.every=100000',
        'train.eval_every=100000',
    )
    number = run('sbatch', '--parsable', 'job.sbatch', *arguments, environ=job, cwd=folder).strip()
    return number, folder / f'megajax-{number}.log'


def test_at_its_time_limit_a_job_saves_is_requeued_and_goes_on_without_losing_a_step(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    folder = write_run(tmp_path, CONFIG)
    number, log = submit(folder, slurm)

    def said() -> str:
        return log.read_text() if log.exists() else ''

    def limit(minutes: int) -> None:
        run('scontrol', 'update', f'JobId={number}', f'TimeLimit={minutes}', environ=slurm)

    began = time.monotonic()
    wait_for(lambda: 'step 3/' in said())
    limit(
        2 + int((time.monotonic() - began) / 60)
    )  # a limit that does not fall into the start, which a busy machine prolongs
    wait_for(
        lambda: 'Requeuing' in (Path(slurm['SLURM_CONF']).parent / 'slurmctld.out').read_text()
    )
    limit(1000)
    wait_for(lambda: re.search(r'resume .*, step \d+\n(.*\n)*.*step \d+/', said()))
    resumed = int(re.findall(r'resume .*, step (\d+)', said())[0])
    first, _ = said().split('resume ', 1)
    assert 'stopped by' in first
    assert int(re.findall(r'step (\d+)/', first)[-1]) == resumed  # every step that was done
    run('scancel', number, environ=slurm)
    wait_for(lambda: run('squeue', '-h', '-j', number, environ=slurm).strip() == '')
    assert 'JobState=CANCELLED' in run(
        'scontrol', 'show', 'job', number, environ=slurm
    )  # nor does it come back
    done = [
        json.loads(line)['step'] for line in (folder / 'run/metrics.jsonl').read_text().splitlines()
    ]
    assert done == list(range(done[0], done[-1] + 1))
    assert done[-1] > resumed
