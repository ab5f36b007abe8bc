"""What the register does for a program of megajax: options that cure a fault, configs that are refused, steps that are."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from megajax.config import Config, ConfigError, MiscompileError
from megajax.config.errors import Problem
from megajax.hardware.gpu import GPUS
from megajax.miscompiles.entry import Finding, Miscompile, Option, Options
from megajax.miscompiles.probe import ask, confirmed
from megajax.miscompiles.register import REGISTER, detect

DEFAULT_TARGET = 'h100'  # asked for a GPU that has no record
_LISTS = ('xla_disable_hlo_passes',)  # options whose values are joined by commas


def target_of(device: Any) -> str:
    """The target whose compiler makes the programs of a device: `cpu`, its own record, or one of the same architecture."""
    if device.platform == 'cpu':
        return 'cpu'
    named = next((name for name, gpu in GPUS.items() if gpu.name == device.device_kind), None)
    capability = str(getattr(device, 'compute_capability', ''))
    same = (name for name, gpu in GPUS.items() if '.'.join(map(str, gpu.capability)) == capability)
    return named or next(same, DEFAULT_TARGET)


def mesh_target() -> str:
    """The target of the current mesh; `cpu` where there is none."""
    mesh = jax.sharding.get_mesh()
    return 'cpu' if mesh.empty else target_of(mesh.devices.flat[0])


def cures(target: str) -> dict[str, Option]:
    """Compiler options for every program of `target`: those that cure a fault which its compiler has. Nothing for a CPU."""
    if target == 'cpu':
        return {}
    answers = (ask(entry, target) for entry in REGISTER if entry.platform == 'gpu' and entry.workaround is not None)
    return merged(answer.cure for answer in answers if answer.cure)


def merged(several: Iterable[Options]) -> dict[str, Option]:
    """All options as one mapping; an option that is a list gets the values of all, and those of XLA_FLAGS, which it would hide."""
    options: dict[str, Option] = {}
    for one in several:
        for name, value in one.items():
            before = options.get(name, _flag(name)) if name in _LISTS else ''
            options[name] = f'{before},{value}' if before else value
    return options


def _flag(name: str) -> str:
    flags = (flag.partition('=') for flag in os.environ.get('XLA_FLAGS', '').split())
    return next((value for key, _, value in flags if key == f'--{name}'), '')


def refuse_bitten(config: Config, target: str) -> None:
    """Raise ConfigError for a config that has a fault of the compiler for `target` which no option cures."""
    if target == 'cpu':
        return
    problems = [_problem(config, entry, target) for entry in REGISTER if entry.bites(config) and _is_uncured(entry, target)]
    if problems:
        raise ConfigError(*problems)


def _is_uncured(entry: Miscompile, target: str) -> bool:
    answer = ask(entry, target)
    return bool(answer.is_faulty) and answer.cure is None


def _problem(config: Config, entry: Miscompile, target: str) -> Problem:
    path, *others = entry.bitten_keys
    values = ', '.join(f'{key}={str(_value(config, key)).lower()}' for key in entry.bitten_keys)
    fixes = 'use another jaxlib, or change one of these keys'
    message = (
        f'{values}: this jaxlib compiles it wrongly for {target} ({entry.source}: {entry.what}), and {ask(entry, target).why}; {fixes}'
    )
    return Problem(path=path, message=message, others=tuple(others))


def _value(config: Config, key: str) -> object:
    section, name = key.split('.')
    return getattr(getattr(config, section), name)


def check_compiled(text: str, target: str) -> list[Finding]:
    """Raise MiscompileError for a compiled program that computes something else; return what only wastes time."""
    findings = confirmed(detect(text), target)
    wrong = [finding for finding in findings if finding.entry.effect == 'wrong']
    if wrong:
        raise MiscompileError(told(wrong))
    return findings


def told(findings: Sequence[Finding]) -> str:
    """One line for each finding."""
    return '\n'.join(f'XLA has compiled this program wrongly: {finding}' for finding in findings)
