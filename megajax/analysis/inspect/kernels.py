"""The kernels of a GPU program: a record of each, and sums by what they do and where."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from megajax.analysis.inspect.overlap import kernel_seconds
from megajax.analysis.inspect.result import Kernel
from megajax.analysis.inspect.sites import SCOPES, phase_of
from megajax.core.counts.product import Phase
from megajax.core.hardware.records import Hardware
from megajax.xla.hlo.kernels import Kernel as Launched
from megajax.xla.hlo.program import Program

# Scopes of the step that have no site of their own in SCOPES, which come first.
_MORE_SCOPES = {
    'parameters': 'parameters',
    'data_parallel': 'gradients',
    'layers': 'layers',
    'slots': 'stage',
}


class Total(NamedTuple):
    """The sums over some kernels of a step, on one device."""

    launches: int
    bytes: int
    flops: int
    seconds: float


def records(program: Program, launched: Sequence[Launched], gpu: Hardware) -> list[Kernel]:
    """Return a record of each kernel, at the rates of a GPU, longest first."""
    found = [
        Kernel(
            instruction=kernel.instruction.name,
            computation=kernel.computation.name,
            kind=kernel.kind,
            site=kernel_site(kernel.instruction.op_name),
            phase=kernel_phase(kernel.instruction.op_name),
            times=kernel.times,
            bytes=kernel.times * kernel.bytes,
            flops=kernel.times * kernel.flops,
            seconds=kernel.times * kernel_seconds(kernel, gpu),
            source=program.source(kernel.instruction),
        )
        for kernel in launched
    ]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def totals(
    kernels: Iterable[Kernel], key: Callable[[Kernel], tuple[str, ...]]
) -> dict[tuple[str, ...], Total]:
    """Return the sums over kernels with the same key, longest first."""
    groups = defaultdict[tuple[str, ...], list[Kernel]](list)
    for kernel in kernels:
        groups[key(kernel)].append(kernel)
    sums = {key: total(group) for key, group in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].seconds))


def total(kernels: Sequence[Kernel]) -> Total:
    """Return the sum over kernels."""
    return Total(
        sum(kernel.times for kernel in kernels),
        sum(kernel.bytes for kernel in kernels),
        sum(kernel.flops for kernel in kernels),
        sum(kernel.seconds for kernel in kernels),
    )


def kernel_site(op_name: str) -> str:
    """Return the part of the step that a kernel belongs to, from the path that jax recorded."""
    words = set(re.findall(r'\w+', op_name))
    sites = {scope: scope for scope in SCOPES} | _MORE_SCOPES
    return next((site for scope, site in sites.items() if scope in words), 'other')


def kernel_phase(op_name: str) -> Phase:
    """Return the phase of a kernel, which is `step` outside the layers."""
    return (
        'step' if kernel_site(op_name) in ('optimizer', 'gradients', 'other') else phase_of(op_name)
    )
