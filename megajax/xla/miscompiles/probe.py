"""Ask the installed compiler whether it has a bug: compile the repro once, and cache the answer."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled, Lowered

from megajax.core.hardware.targets import GPUS, WITHOUT_GPU, gpu_devices, has_compiler
from megajax.xla.hlo.program import Program
from megajax.xla.miscompiles import answers
from megajax.xla.miscompiles.entry import Miscompile, Options, Sighting, find

DEFAULT_TARGET = 'h100'  # for a GPU whose generation no target has
_FAILURES = RuntimeError, ValueError, TypeError  # XLA's errors are RuntimeErrors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Whether the installed compiler has a bug, and the workaround, or why there is none.

    `is_faulty` is None if the compiler cannot be asked: the repro does not compile, or no GPU
    compiler is installed. `workaround` is None if no option avoids the bug. If the repro does not
    compile, it has the options that would avoid the bug and that the compiler accepts.
    """

    is_faulty: bool | None
    workaround: Options | None
    why: str = ''


@functools.cache
def ask(entry: Miscompile, target: str) -> Answer:
    """Return the answer of the compiler for `target`, from the cache after the first time."""
    if entry.platform == 'gpu' and (target not in GPUS or not has_compiler()):
        return Answer(is_faulty=None, workaround=None, why='no GPU compiler to ask')
    with ThreadPoolExecutor(1) as fresh:  # a thread has neither its caller's mesh nor its options
        return fresh.submit(_asked, entry, target).result()


def _asked(entry: Miscompile, target: str) -> Answer:
    identity = answers.identity(entry, target)
    kept = answers.read(identity)
    if kept is not None:
        return Answer(**kept)
    answer = probe(entry, target)
    if answer.is_faulty is not None:
        answers.write(identity, dataclasses.asdict(answer))
    return answer


def probe(entry: Miscompile, target: str) -> Answer:
    """Compile the repro, and again with the workaround if the compiler has the bug."""
    try:
        is_faulty = shows_fault(entry, target, {})
    except _FAILURES as error:
        why = f'its repro does not compile: {_reason(error)}'
        workaround = entry.workaround if _is_accepted(entry, target) else None
        return Answer(is_faulty=None, workaround=workaround, why=why)
    if not is_faulty:
        return Answer(is_faulty=False, workaround=None)
    if entry.workaround is None:
        return Answer(is_faulty=True, workaround=None, why='no option avoids it')
    given = ' '.join(f'{name}={value}' for name, value in entry.workaround.items())
    try:
        is_avoided = not shows_fault(entry, target, entry.workaround)
    except _FAILURES as error:
        why = f'the compiler rejects {given}: {_reason(error)}'
        return Answer(is_faulty=True, workaround=None, why=why)
    if is_avoided:
        return Answer(is_faulty=True, workaround=dict(entry.workaround))
    return Answer(is_faulty=True, workaround=None, why=f'{given} does not avoid it')


def shows_fault(entry: Miscompile, target: str, options: Options) -> bool:
    """Return whether the repro, compiled for `target` with these options, shows the bug."""
    lowered = entry.repro.lower(_devices(entry, target))
    compiled = _compiled(lowered, entry, {**entry.repro.options, **options})
    if entry.repro.is_wrong is not None:
        return entry.repro.is_wrong(compiled)
    return bool(find(entry, Program(compiled.as_text() or '')))


def _is_accepted(entry: Miscompile, target: str) -> bool:
    """Return whether the compiler for `target` accepts the options of the workaround."""
    if entry.workaround is None:
        return False
    try:
        (device,) = _devices(entry, target)[:1]
        x = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
        _compiled(jax.jit(jnp.negative).lower(x), entry, entry.workaround)
    except _FAILURES:
        return False
    return True


def _compiled(lowered: Lowered, entry: Miscompile, options: Options) -> Compiled:
    common: Options = {} if entry.platform == 'cpu' else WITHOUT_GPU
    with warnings.catch_warnings():
        # Programs for absent GPUs cannot be read back from jax's compilation cache.
        warnings.filterwarnings('ignore', '.*persistent compilation cache')
        return lowered.compile({**common, **options})


def confirmed(findings: Sequence[Sighting], target: str) -> list[Sighting]:
    """Return the findings that count for `target`; with cpu, GPU programs are DEFAULT_TARGET's.

    If a correct program can show a finding too, the finding is dropped if the compiler does not
    have the bug. If that is not known, the finding says why in its `doubt`.
    """
    target = DEFAULT_TARGET if target == 'cpu' else target
    return [kept for finding in findings if (kept := _confirmed(finding, target)) is not None]


def _confirmed(finding: Sighting, target: str) -> Sighting | None:
    if finding.entry.is_certain:
        return finding
    answer = ask(finding.entry, target)
    if answer.is_faulty is None:
        return dataclasses.replace(finding, doubt=answer.why)
    return finding if answer.is_faulty else None


def _devices(entry: Miscompile, target: str) -> list[Any]:
    if entry.platform == 'cpu':
        return jax.devices('cpu')[: entry.repro.num_devices]
    return gpu_devices(target, hosts=1, per_host=entry.repro.num_devices)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
