"""Ask the compiler at hand whether it has a fault: compile the entry's repro once, and keep the answer."""

import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from megajax.hardware.gpu import GPUS, gpu_devices, has_compiler
from megajax.hlo.program import Program
from megajax.miscompiles import answers
from megajax.miscompiles.entry import Finding, Miscompile, Options, find

_FAILURES = jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Whether the compiler at hand has a fault, what cures it, and why nothing does or why it is not known.

    `is_faulty` is None where the repro does not compile or no GPU compiler is installed; `cure` is None where nothing cures it.
    """

    is_faulty: bool | None
    cure: Options | None
    why: str = ''


@functools.cache
def ask(entry: Miscompile, target: str) -> Answer:
    """The answer of the compiler for `target`, from the cache of this process or of the user where it is there."""
    if entry.platform == 'gpu' and (target not in GPUS or not has_compiler()):
        return Answer(is_faulty=None, cure=None, why='no GPU compiler is asked')
    identity = answers.identity(entry, target)
    kept = answers.read(identity)
    if kept is not None:
        return Answer(**kept)
    with ThreadPoolExecutor(1) as fresh:  # without the mesh of the caller, which a repro does not share
        answer = fresh.submit(probe, entry, target).result()
    answers.write(identity, dataclasses.asdict(answer))
    return answer


def probe(entry: Miscompile, target: str) -> Answer:
    """Compile the repro, and once more with the workaround if it shows the fault. Reads and writes no cache."""
    try:
        is_faulty = shows_fault(entry, target, {})
    except _FAILURES as error:
        return Answer(is_faulty=None, cure=None, why=f'its repro does not compile: {_reason(error)}')
    if not is_faulty:
        return Answer(is_faulty=False, cure=None)
    if entry.workaround is None:
        return Answer(is_faulty=True, cure=None, why='no option cures it')
    given = ' '.join(f'{name}={value}' for name, value in entry.workaround.items())
    try:
        is_cured = not shows_fault(entry, target, entry.workaround)
    except _FAILURES as error:
        return Answer(is_faulty=True, cure=None, why=f'the compiler rejects {given}: {_reason(error)}')
    if is_cured:
        return Answer(is_faulty=True, cure=dict(entry.workaround))
    return Answer(is_faulty=True, cure=None, why=f'{given} does not cure it')


def shows_fault(entry: Miscompile, target: str, options: Options) -> bool:
    """Whether the repro, compiled for `target` with more options, shows the fault."""
    lowered = entry.repro.lower(_devices(entry, target))
    autotuning: Options = {} if entry.platform == 'cpu' else {'xla_gpu_autotune_level': '0'}  # which needs a GPU
    compiled = lowered.compile({**autotuning, **entry.repro.options, **options})
    if entry.repro.is_wrong is not None:
        return entry.repro.is_wrong(compiled)
    return bool(find(entry, Program(compiled.as_text() or '')))


def confirmed(findings: Sequence[Finding], target: str) -> list[Finding]:
    """The findings without those that a right program may show too, where the compiler for `target` has no such fault."""
    return [finding for finding in findings if finding.entry.is_certain or ask(finding.entry, target).is_faulty]


def _devices(entry: Miscompile, target: str) -> list[Any]:
    if entry.platform == 'cpu':
        return jax.devices('cpu')[: entry.repro.num_devices]
    return gpu_devices(target, hosts=1, per_host=entry.repro.num_devices)


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
