"""Apply the register: set workarounds, and reject affected configs and steps."""

import functools
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from megajax.base.errors import Problem, mistake
from megajax.core.config import Config, ConfigError, MiscompileError
from megajax.core.hardware.records import Capability, Hardware, hardware
from megajax.core.hardware.targets import GPUS, capability_of, is_nvidia
from megajax.xla.miscompiles.entry import Miscompile, Option, Options, Sighting
from megajax.xla.miscompiles.probe import DEFAULT_TARGET, ask, confirmed
from megajax.xla.miscompiles.register import REGISTER, detect

logger = logging.getLogger(__name__)
_PIPELINED = ('xla_gpu_enable_pipelined_p2p', 'xla_gpu_experimental_pipeline_parallelism_opt_level')
_OFF = 'false', '0', 'disable'
_LISTS = ('xla_disable_hlo_passes',)  # options with comma-separated values


def target_of(device: Any) -> str:
    """Return the target for a device: `cpu`, `tpu`, or the GPU that the device's kind names.

    A GPU that is no target has the first target of its generation, which is its major compute
    capability, if there is one. An RTX 4090 (8.9) has the target of an A100 (8.0).
    """
    if device.platform in ('cpu', 'tpu'):
        return device.platform
    kind = device.device_kind.lower()
    named = [target for target in GPUS if target in kind]
    capability = capability_of(device) if is_nvidia(device) else None
    alike = [target for target in GPUS if _is_alike(hardware(target), capability)]
    return [*named, *alike, DEFAULT_TARGET][0]


def _is_alike(gpu: Hardware, capability: Capability | None) -> bool:
    own = gpu.compute_capability
    return own is not None and capability is not None and own[0] == capability[0]


def mesh_target() -> str:
    """Return the target of the current mesh; `cpu` if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return 'cpu' if mesh.empty else target_of(mesh.abstract_device)


def compiled_target(compiled: jax.stages.Compiled) -> str:
    """Return the target of the devices that a program was compiled for; `cpu` without an array."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = [device for sharding in shardings for device in sharding.device_set]
    return target_of(devices[0]) if devices else 'cpu'


def workarounds(target: str) -> dict[str, Option]:
    """Return the workarounds that the compiler for `target` needs; only GPU compilers need any.

    A workaround for a bug that the compiler may have is also returned, and logged as a warning.
    """
    if target not in GPUS:
        return {}
    entries = [entry for entry in REGISTER if entry.platform == 'gpu' and entry.workaround]
    answers = [(entry, ask(entry, target)) for entry in entries]
    for entry, answer in answers:
        if answer.is_faulty is None and answer.workaround:
            _warn(entry.name, answer.why)
    return merged(answer.workaround for _, answer in answers if answer.workaround)


@functools.cache  # once in a process
def _warn(name: str, why: str) -> None:
    logger.warning(
        'unknown whether this compiler has the bug %s: %s; programs are compiled with its '
        'workaround',
        name,
        why,
    )


def merged(several: Iterable[Options]) -> dict[str, Option]:
    """Return all options in one mapping.

    A list option gets all values, including the values in XLA_FLAGS, which it would otherwise
    override.
    """
    options: dict[str, Option] = {}
    for mapping in several:
        for name, value in mapping.items():
            before = options.get(name, _flag(name)) if name in _LISTS else ''
            options[name] = f'{before},{value}' if before else value
    return options


def _flag(name: str) -> str:
    flags = [flag.partition('=') for flag in os.environ.get('XLA_FLAGS', '').split()]
    return next((value for key, _, value in flags if key == f'--{name}'), '')


def reject_affected(config: Config, target: str, register: Sequence[Miscompile] = REGISTER) -> None:
    """Raise ConfigError for a config that is affected by a bug without a workaround."""
    affecting = [entry for entry in register if target in GPUS and entry.affects(config)]
    if problems := [
        _problem(config, entry, target) for entry in affecting if _has_no_workaround(entry, target)
    ]:
        raise ConfigError(*problems)


def _has_no_workaround(entry: Miscompile, target: str) -> bool:
    answer = ask(entry, target)
    return bool(answer.is_faulty) and answer.workaround is None


def _problem(config: Config, entry: Miscompile, target: str) -> Problem:
    path, *others = entry.affected_keys
    values = ', '.join(f'{key}={_value(config, key)}' for key in entry.affected_keys)
    message = (
        f'XLA compiles {values} wrongly for {target} ({entry.source}: {entry.what}), '
        f'and {ask(entry, target).why}; use a different jaxlib, or change one of these keys'
    )
    return Problem(path, message, others=tuple(others))


def _value(config: Config, key: str) -> str:
    section, name = key.split('.')
    return str(getattr(getattr(config, section), name)).lower()


def reject_pipelined_sends(config: Config, target: str) -> None:
    """Raise ConfigError if XLA_FLAGS pipelines permutes that have several rings.

    XLA splits such a permute and loses data (`split_cycles.py`), or turns it into sends that
    `inspect` cannot count. On a mesh with several axes, there is one ring of stages, or of context
    shards, for each position along the other axes.
    """
    mesh = config.mesh
    rings = {'mesh.stages': mesh.stages}
    if mesh.context_exchange == 'ring' or (config.model.has_windows and not mesh.exchanges_heads):
        rings['mesh.context'] = mesh.context
    several = [key for key, size in rings.items() if 1 < size < mesh.num_devices]
    flags = _pipelined_flags()
    if target not in GPUS or not several or not flags:
        return
    size = rings[several[0]]
    message = (
        f'XLA_FLAGS has {" ".join(flags)}, which loses data if a permute has several cycles '
        f'(openxla/xla#45222), here {mesh.num_devices // size} of {size} devices; remove it'
    )
    raise mistake(several[0], message, *several[1:])


def _pipelined_flags() -> list[str]:
    """Return the flags of XLA_FLAGS that pipeline sends."""
    flags = os.environ.get('XLA_FLAGS', '').split()
    parts = [(flag, *flag.removeprefix('--').partition('=')) for flag in flags]
    return [
        flag
        for flag, name, _, value in parts
        if name in _PIPELINED and not value.lower().endswith(_OFF)
    ]


def check_compiled(text: str, target: str) -> list[Sighting]:
    """Raise MiscompileError for a program with wrong results; return the other findings.

    A correct program can have a finding if it is not known whether the compiler has the bug, so
    such a finding is returned.
    """
    findings = confirmed(detect(text), target)
    wrong = [
        finding for finding in findings if finding.entry.effect == 'wrong' and not finding.doubt
    ]
    if wrong:
        raise MiscompileError('\n'.join(f'XLA miscompiled {finding}' for finding in wrong))
    return findings
