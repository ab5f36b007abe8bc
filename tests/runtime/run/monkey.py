"""Kill one training run again and again, at seeded random moments, and compare its end with that of
an undisturbed one.

PYTHONPATH=tests python tests/runtime/run/monkey.py [--kills 200] [--seed 0] [--processes 2] \
[--meshes changing | fixed] [--out FILE.json]

Signals go to the launcher or to one process. Each resume has another mesh, other stages and another
rung of ZeRO, and at the end the losses of all steps and all arrays of the state are within the
tolerance of the tests on layouts (`test_faults_rungs.py`, `test_faults_stages.py`), or no further
apart than those of a run on another layout that nobody disturbs: rounding grows with the steps.
With `--meshes fixed` they are equal to the bit. The disk of the checkpoints also fills up, which
needs root, for a file system of its own; without, that is left out.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from proofs import circumstances, write_record
from runs import fill, flip_a_bit, gone, largest_file, losses, steps

STEPS_PER_KILL = 20
# Of the kills; the others come in the training that follows, within a quarter of the time that the
# start takes.
IN_THE_START = 0.3
DISK = 16  # MiB, of which three checkpoints take less than three
SECONDS = 300.0  # to end, on a busy machine
# On changing meshes, relative to the loss and to the largest weight.
MAX_APART = {'loss': 1e-5, 'weight': 1e-4}

# Without the biases of keys, whose gradients are nothing but rounding, which Adam makes as large as
# any.
CONFIG = """
model: {{num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32, \
bias: false, dropout: 0}}
train: {{steps: {steps}, batch_size: 8, microbatches: 2, seq_len: 32, dtype: float32, \
eval_every: 1000, eval_batches: 2, log_every: 1}}
checkpoint: {{every: 10}}
optim: {{lr: 1e-3, schedule: constant}}
data: {{corpus: {folder}/corpus.txt, tokenizer: bytes}}
"""
FIXED = ('mesh.data=2', 'mesh.model=2', 'optim.shard=optimizer')
LAYOUTS = (
    FIXED,
    ('mesh.data=2', 'optim.shard=weights'),
    ('mesh.model=2', 'mesh.sequence_parallel=true'),
    ('mesh.stages=2',),
    ('mesh.data=2', 'optim.shard=gradients'),
    ('mesh.stages=2', 'mesh.data=2', 'optim.shard=optimizer'),
)
KINDS = ('SIGKILL', 'SIGKILL', 'SIGTERM', 'SIGINT', 'SIGHUP', 'SIGSTOP', 'full disk')


class Kill(NamedTuple):
    """One of them: what was done to which process, and what came of it."""

    kind: str
    victim: str
    phase: str
    step: int  # the last one that was written down
    layout: str
    code: int  # of the launcher
    checkpoints: list[int]
    seconds: float  # from the start of the run to its end


class Monkey:
    """A run on any layout, disturbed and resumed in a folder beside an undisturbed one."""

    def __init__(self, folder: Path, processes: int, chance: random.Random, disk: Path | None):
        self.folder, self.processes, self.chance, self.disk = folder, processes, chance, disk
        self.metrics = folder / 'disturbed/metrics.jsonl'
        self.usual = 0.0  # seconds to the first step where everything is compiled

    def start(
        self, name: str, layout: tuple[str, ...], *, processes: int | None = None
    ) -> subprocess.Popen[bytes]:
        count = processes or self.processes
        launch = ['launch', '--processes', str(count), '--'] if count > 1 else []
        command = [sys.executable, '-m', 'megajax', *launch, 'train', 'small.yaml']
        compiled = os.environ.get('JAX_COMPILATION_CACHE_DIR', f'{self.folder}/compiled')
        environ = os.environ | {
            'JAX_PLATFORMS': 'cpu',
            'JAX_COMPILATION_CACHE_DIR': compiled,
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',  # it compiles in half the time
        }
        with (self.folder / f'{name}.log').open('ab') as log:
            return subprocess.Popen(
                [*command, f'run.dir={name}', *layout],
                cwd=self.folder,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, name: str, layout: tuple[str, ...], *, processes: int | None = None) -> None:
        code = self.start(name, layout, processes=processes).wait()
        assert code == 0, self.said(name)

    def said(self, name: str) -> str:
        return (self.folder / f'{name}.log').read_text(errors='replace')[-20_000:]

    def measure(self, layouts: tuple[tuple[str, ...], ...]) -> None:
        """Compile the step of every layout but the first one, which is compiled, and take the time
        of a start without that.
        """
        for layout in (*layouts[1:], layouts[0]):
            begin, metrics = time.monotonic(), self.folder / 'timed/metrics.jsonl'
            process = self.start('timed', layout)
            while process.poll() is None and not num_steps(metrics):
                time.sleep(0.02)
            assert process.poll() is None, self.said('timed')
            self.usual = time.monotonic() - begin
            process.terminate()
            process.wait()
            subprocess.run(['rm', '-r', self.folder / 'timed'], check=True)

    def kill(self, layout: tuple[str, ...]) -> Kill:
        """Start the run, or resume it, and end it."""
        begin, kind = time.monotonic(), self.chance.choice(KINDS[: None if self.disk else -1])
        process = self.start('disturbed', layout)
        phase = self._wait(process)
        pids = processes_of(process)
        victims = {'launcher': process.pid, **{f'process {n}': pid for n, pid in enumerate(pids)}}
        victim = self.chance.choice([*victims])
        step = num_steps(self.metrics)
        code = self._end(process, kind, victims[victim])
        assert all(gone(pid) for pid in pids), f'{kind} to {victim} left processes behind'
        found = steps(self.folder / 'disturbed')
        if code == 0:  # it is at its end: the next ones disturb one that goes further back
            flip_a_bit(largest_file(self.folder / 'disturbed', found[-1]))
        seconds = round(time.monotonic() - begin, 1)
        return Kill(kind, victim, phase, step, ' '.join(layout), code, found, seconds)

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Until a random moment of the start, or of the training that follows."""
        if self.chance.random() < IN_THE_START:
            time.sleep(self.usual * self.chance.uniform(0.05, 1))
            return 'start'
        count = last = num_steps(self.metrics)
        while process.poll() is None and count <= last:  # at first it may lose some
            time.sleep(0.02)
            last, count = count, num_steps(self.metrics)
        time.sleep(self.chance.uniform(0, self.usual / 4))
        return 'training'

    def _end(self, process: subprocess.Popen[bytes], kind: str, victim: int) -> int:
        """Disturb the run and end it; return the exit code."""
        numbers = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
        allowed = {0, 75, *(-number for number in numbers)}  # as such before Python runs
        seconds = self.chance.uniform(0, self.usual / 4)
        if kind == 'full disk':
            assert self.disk
            fill(self.disk / 'ballast')
            time.sleep(seconds)
            kind, allowed = 'SIGTERM', allowed | {4}  # what it was to save last is not saved
        if kind == 'SIGSTOP':
            send(victim, signal.SIGSTOP)
            time.sleep(seconds)
            send(victim, signal.SIGCONT)
            time.sleep(self.chance.uniform(0, 1))
            assert process.poll() in (None, 0), self.said('disturbed')  # it goes on
            kind = self.chance.choice(('SIGKILL', 'SIGTERM'))
        send(victim, signal.Signals[kind])
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            place = f'does not end within {SECONDS:g} s of {kind}'
            raise AssertionError(f'{place}: {self.said("disturbed")}') from None
        finally:
            process.kill()
            if self.disk:
                (self.disk / 'ballast').unlink(missing_ok=True)
        if kind == 'SIGINT' and 'init_import_site' in self.said('disturbed'):
            allowed.add(1)  # Python itself was still starting
        assert code in allowed, f'exit code {code} after {kind}: {self.said("disturbed")}'
        return code


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--kills', type=int, default=200)
    parser.add_argument('--seconds', type=float, default=1e9, help='after which it is not killed')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--processes', type=int, default=2)
    parser.add_argument('--meshes', choices=('changing', 'fixed'), default='changing')
    parser.add_argument('--no-disk', action='store_true', help='never fill the disk')
    parser.add_argument('--out', type=Path)
    arguments = parser.parse_args()
    about = circumstances(['tests/runtime/run/monkey.py', *sys.argv[1:]])
    with (
        tempfile.TemporaryDirectory() as name,
        small_disk(Path(name) / 'disturbed/checkpoints', wanted=not arguments.no_disk) as disk,
    ):
        monkey = Monkey(Path(name), arguments.processes, random.Random(arguments.seed), disk)
        layouts = LAYOUTS if arguments.meshes == 'changing' else (FIXED,)
        kills = disturb(monkey, arguments.kills, arguments.seconds, layouts)
        found = differences(Path(name) / 'straight', Path(name) / 'disturbed')
        allowed = apart_undisturbed(monkey, layouts)
    equal = all(found[what] <= allowed[what] for what in found)
    print(
        f'the losses of all steps: {"equal" if equal else "NOT equal"}, and the last state: '
        f'{found}, allowed {allowed}'
    )
    if arguments.out:
        rows = [kill._asdict() for kill in kills]
        write_record(
            arguments.out,
            about,
            equal=equal,
            found=found,
            allowed=allowed,
            kills=len(rows),
            rows=rows,
        )
    sys.exit(not equal)


def disturb(
    monkey: Monkey, kills: int, seconds: float, layouts: tuple[tuple[str, ...], ...]
) -> list[Kill]:
    """Train once in peace, in `straight`, and once with kills, in `disturbed`."""
    folder = monkey.folder
    lines = random.Random(0)  # a text that is not learned by heart: its loss does not vanish
    text = '\n'.join(f'def f{lines.random()}(x): return {lines.random()}' for _ in range(2000))
    (folder / 'corpus.txt').write_text(text)
    settings = CONFIG.format(steps=STEPS_PER_KILL * kills, folder=folder)
    (folder / 'small.yaml').write_text(settings)
    monkey.finish('straight', layouts[0])
    monkey.measure(layouts)
    done: list[Kill] = []
    layout, deadline = layouts[0], time.monotonic() + seconds
    while len(done) < kills and time.monotonic() < deadline:
        others = [other for other in layouts if other != layout] or [layout]
        layout = monkey.chance.choice(others)
        done.append(monkey.kill(layout))
        print(f'{len(done)} of {kills}:', *(f'{k} {v},' for k, v in done[-1]._asdict().items()))
        sys.stdout.flush()
    monkey.finish('disturbed', layouts[0])
    return done


def apart_undisturbed(monkey: Monkey, layouts: tuple[tuple[str, ...], ...]) -> dict[str, float]:
    """How far apart two runs may be: not at all on one layout; otherwise as far as two undisturbed
    runs on different layouts are, the second of them in one process.
    """
    if len(layouts) == 1:
        return dict.fromkeys(MAX_APART, 0.0)
    monkey.finish('other', layouts[1], processes=1)
    found = differences(monkey.folder / 'straight', monkey.folder / 'other')
    return {what: max(limit, found[what]) for what, limit in MAX_APART.items()}


@contextmanager
def small_disk(folder: Path, *, wanted: bool) -> Iterator[Path | None]:
    """A file system of its own at `folder`; None where it is not wanted or cannot be had."""
    folder.mkdir(parents=True)
    command = ['mount', '-t', 'tmpfs', '-o', f'size={DISK}m', 'tmpfs', str(folder)]
    mounted = (
        wanted
        and os.geteuid() == 0
        and not subprocess.run(command, check=False, capture_output=True).returncode
    )
    print(
        'full disks: '
        + ('yes' if mounted else 'no' + ', as none can be mounted here' * bool(wanted))
    )
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(['umount', '--lazy', folder], check=True)


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def processes_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """What a launcher has started; none for a run without, or one that has not begun or is over."""
    try:
        command = Path(f'/proc/{launcher.pid}/cmdline').read_bytes()
        children = Path(f'/proc/{launcher.pid}/task/{launcher.pid}/children').read_text()
    except FileNotFoundError:
        return []
    return [int(pid) for pid in children.split()] if b'\0launch\0' in command else []


def num_steps(metrics: Path) -> int:
    """Of those that are written down."""
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


def differences(straight: Path, disturbed: Path) -> dict[str, float]:
    """The largest difference of a loss, over the loss, and of arrays in the last checkpoints."""
    expected, found = losses(straight), losses(disturbed)
    assert expected.keys() == found.keys(), 'a step is missing'
    of_losses = max(abs(found[step] - loss) / abs(loss) for step, loss in expected.items())
    a, b = (dict(arrays(run)) for run in (straight, disturbed))
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return {'loss': of_losses, 'weight': max(difference(a[name], b[name]) for name in a)}


def arrays(run: Path) -> Iterator[tuple[str, Any]]:
    """Each array of the last checkpoint, by name."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    state = (run / f'checkpoints/{steps(run)[-1]}/state').absolute()
    handler = ocp.PyTreeCheckpointHandler()
    as_numpy = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(state).tree
    )
    with ocp.Checkpointer(handler) as checkpointer:
        restored = checkpointer.restore(state, ocp.args.PyTreeRestore(restore_args=as_numpy))
    for name, x in ocp.tree.to_flat_dict(restored, sep='/').items():
        yield name, np.asarray(x, np.float64)


def difference(a: Any, b: Any) -> float:
    """The largest |a - b|, over the largest |b|; 0 only if all are equal."""
    if a.shape != b.shape or not a.size:
        return 0.0 if a.shape == b.shape else float('inf')
    apart, size = abs(a - b).max(), abs(b).max()
    return float(apart / size) if size else float(apart and float('inf'))


if __name__ == '__main__':
    main()
