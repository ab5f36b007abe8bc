"""The files of the traced steps of a run: its traces, the program and the config."""

import re
from pathlib import Path
from typing import NamedTuple

from megajax.analysis.profile.graphs import is_graph
from megajax.analysis.profile.trace import Trace, read_trace
from megajax.base.errors import reason
from megajax.core.config import Config, ConfigError, load
from megajax.core.config.load import CONFIG
from megajax.core.counts.expert_rows import LATER_ROUNDS
from megajax.runtime.checkpoint.digests import find_steps
from megajax.runtime.run.profile import FOLDER, PROCESS, how_to_trace
from megajax.runtime.run.saved_step import PROGRAM, decompressed
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Program

_TRACES = 'plugins/profile/*/*.xplane.pb'  # a trace's folder is named after the time


class Traced(NamedTuple):
    """The traced steps of a run: a trace for each process, and the program that they ran."""

    config: Config
    module: str  # the program's name
    program: Program
    traces: list[Trace]
    steps: list[int]
    left_out: list[str]  # traced steps that do not count, and why


def read_traced(run: Path) -> Traced:
    """Read the newest trace in a run directory.

    Raises ConfigError if there is none, or if its files do not belong together.
    """
    if not (run / CONFIG).is_file():
        raise ConfigError(
            f'{run} is not a run directory: give the folder that megajax train printed after `run`'
        )
    folder = run / FOLDER
    files = _newest(folder)
    if not files:
        config = load(run / CONFIG, is_recorded=True)
        done = max(find_steps(run / 'checkpoints'), default=0)
        raise ConfigError(
            f'{run} holds no trace of a step; to record one: {how_to_trace(run, config, done=done)}'
        )
    config, module, program = _read_program(folder)
    traces = list[Trace]()
    for file in files:
        # The other traces are of an older, larger mesh.
        if _num_devices(traces) < program.num_devices:
            traces.append(read_trace(file))
    steps = sorted(set.intersection(*(set(trace.steps) for trace in traces)))
    if not steps:
        raise ConfigError(f'the traces in {folder} have no step in common: trace some steps again')
    _check_devices(folder, program, traces)
    _check_program(folder, program, module, traces)
    repeated = {step: why for step in steps if (why := _repetition(config, step))}
    left_out = [f'step {step} does not count: {why}' for step, why in repeated.items()]
    if len(left_out) == len(steps):
        raise ConfigError(
            f'{folder}: {"; ".join(left_out)}; trace other steps, '
            + (
                'with train.replay_every=0'
                if config.train.replay_every == 1
                else f"as with 'train.profile={{start: {steps[-1]}, steps: 2}}'"
            )
        )
    steps = [step for step in steps if step not in repeated]
    return Traced(config, module, program, traces, steps, left_out)


def _repetition(config: Config, step: int) -> str:
    """Return why a run executes the program of a step more than once; empty if it does not."""
    train = config.train
    if train.replay_every and step % train.replay_every == 0:
        return f'train.replay_every={train.replay_every} repeats it'
    if step == 1 and train.dtype == 'float16' and train.loss_scale == 'auto':
        return 'it may run several times to find the loss scale (train.loss_scale=auto)'
    return ''


def _newest(folder: Path) -> list[Path]:
    """Return the files of the newest trace, one for each process; empty if there is no trace."""
    alone = max(folder.glob(_TRACES), default=None, key=_time)
    files = list[Path]()
    while file := max((folder / PROCESS.format(len(files))).glob(_TRACES), default=None, key=_time):
        files.append(file)
    if alone and (not files or _time(alone) > _time(files[0])):
        return [alone]
    return files


def _time(file: Path) -> str:
    return file.parent.name


def _read_program(folder: Path) -> tuple[Config, str, Program]:
    try:
        text = decompressed((folder / PROGRAM).read_bytes())
        program = Program(text, skipped=LATER_ROUNDS)
    except (OSError, ValueError, HloError) as error:
        raise ConfigError(
            f'{folder / PROGRAM}, the program of the traced steps, cannot be read '
            f'({reason(error)}): trace some steps again (train.profile)'
        ) from error
    name = re.match(r'HloModule ([^,\s]+)', text)
    return load(folder / CONFIG, is_recorded=True), name[1] if name else '', program


def _num_devices(traces: list[Trace]) -> int:
    return sum(len(trace.devices) for trace in traces)


def _check_devices(folder: Path, program: Program, traces: list[Trace]) -> None:
    found = _num_devices(traces)
    if found != program.num_devices:
        raise ConfigError(
            f'the traces in {folder} are of {found} devices, the program is for '
            f'{program.num_devices}: copy the traces of all processes there, '
            'or trace some steps again (train.profile)'
        )


def _check_program(folder: Path, program: Program, module: str, traces: list[Trace]) -> None:
    """Raise ConfigError if the traces are of a different program."""
    own = {
        event.name
        for trace in traces
        for events in trace.devices.values()
        for event in events
        if event.module == module
    }
    if not own:
        raise ConfigError(
            f'the traces in {folder} are not of the program stored with them: they have no event '
            f'of {module}; trace some steps again'
        )
    names = {name for name in own if not is_graph(name)}
    known = {name for each in program.computations.values() for name in each.by_name}
    if len(names & known) < len(names) / 2:
        raise ConfigError(
            f'the traces in {folder} are not of the program stored with them: {PROGRAM} has '
            f'{len(names & known)} of their {len(names)} instructions; trace some steps again'
        )
