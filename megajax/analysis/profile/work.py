"""Describe the work of each instruction of a program: kernels, library calls, collectives."""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from megajax.analysis.inspect.kernels import kernel_phase, kernel_site
from megajax.analysis.inspect.overlap import dtype_of, kernel_seconds, sent_by
from megajax.analysis.inspect.sites import site_of
from megajax.analysis.profile.graphs import Schedule, is_graph
from megajax.core.config import Config, ConfigError
from megajax.core.hardware.records import Hardware
from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.groups import Groups, device_groups
from megajax.xla.hlo.kernels import Kernel, kernels
from megajax.xla.hlo.products import Product
from megajax.xla.hlo.program import Computation, Instruction, Program
from megajax.xla.hlo.schedule import Place, Sent
from megajax.xla.hlo.timeline import Timeline, timeline
from megajax.xla.hlo.transfers import arrays_of, kind_of, ring_bytes, whole_of, widest

OUTSIDE, OTHER, GRAPH = 'outside the program', 'other', 'CUDA graph'
PRODUCTS = 'matmul', 'attention', 'attention gradient'


class Work(NamedTuple):
    """The work of one run of an instruction on one device.

    `kind` is the kind of kernel or collective. `site` and `phase` are empty if XLA recorded no
    path. `what` gives the sizes of matmuls or the arrays that are sent. `flops` omits the FLOPs
    that a causal mask skips. `predicted` is the seconds by a roofline; None if there is no record
    of the GPU, or of the link of a collective.
    """

    kind: str
    site: str = ''
    phase: str = ''
    what: str = ''
    dtype: str = ''  # HLO's name of the dtype
    axis: str = ''  # the mesh axes of a collective
    is_transfer: bool = False
    times: int = 1  # runs in a step; 0 if only the data decides whether it runs
    flops: float = 0
    wire_bytes: float = 0
    groups: Groups = ()  # the devices that wait for each other, as indices in the flattened mesh
    source: str = ''
    predicted: float | None = None


class ProgramWork:
    """The work of a program's instructions, by name, on a mesh and, if given, on a known GPU.

    `calls` maps each instruction that calls computations to the names of the instructions inside.
    """

    def __init__(
        self,
        program: Program,
        config: Config,
        mesh: Mapping[str, int],
        gpu: Hardware | None,
        devices_per_host: int,
    ):
        self.program, self.config, self.gpu = program, config, gpu
        self._devices_per_host = devices_per_host
        # The trace may also have instructions that count as never run, but no forecast has them.
        launched, placed = [*kernels(program, also_unused=True)], collectives(program, mesh)
        self._kernels = [kernel for kernel in launched if kernel.times]
        self._placed = [each for each in placed if each.times]
        self._sent: dict[Place, Sent] = {}
        if gpu:
            with suppress(ConfigError):  # a link of the record may be null
                self._sent = sent_by(placed, gpu, devices_per_host)
        self._by_name = {
            kernel.instruction.name: _of_kernel(program, kernel, gpu) for kernel in launched
        }
        self._add_collectives(placed)
        self.calls = self._calls()
        self.schedule = Schedule(program)
        self.names = {name for each in program.computations.values() for name in each.by_name}

    def of(self, name: str) -> Work:
        """Return the work of an event by its name."""
        if name in self._by_name:
            return self._by_name[name]
        if is_graph(name):
            return Work(kind=GRAPH)
        return Work(kind=OTHER if name in self.names else OUTSIDE)

    def predicted(self, belongs: Callable[[Work], bool]) -> float:
        """Return the seconds of all runs of some kernels in a step, by a roofline."""
        each = (self._by_name[kernel.instruction.name] for kernel in self._kernels)
        return sum(work.times * (work.predicted or 0.0) for work in each if belongs(work))

    def timeline(self) -> Timeline | None:
        """Return the timeline of a step by a roofline; None if there is no record of the GPU.

        Raises ConfigError if a link that the step uses is null in the record.
        """
        if self.gpu is None:
            return None
        seconds = {
            (kernel.computation.name, kernel.instruction.name): kernel_seconds(kernel, self.gpu)
            for kernel in self._kernels
        }
        sent = sent_by(self._placed, self.gpu, self._devices_per_host)
        return timeline(self.program, sent, seconds)

    def _calls(self) -> dict[str, set[str]]:
        return {
            instruction.name: {
                each.name
                for name in instruction.called
                for each in self.program.computations[name].instructions
            }
            for computation in self.program.computations.values()
            for instruction in computation.instructions
            if instruction.opcode in ('while', 'conditional', 'call')
        }

    def _add_collectives(self, placed: Sequence[Collective]) -> None:
        by_place = defaultdict[tuple[str, str], list[Collective]](list)
        for collective in placed:
            by_place[collective.computation, collective.instruction].append(collective)
        for place, arrays in by_place.items():
            computation = self.program.computations[place[0]]
            instruction = computation.by_name[place[1]]
            work = _of_collective(self.program, self.config, computation, instruction, arrays)
            if place in self._sent:
                work = work._replace(predicted=self._sent[place].seconds)
            self._by_name[instruction.name] = work
            for _, caller in self.program.callers.get(computation.name, ()):
                if caller.opcode == 'async-start':
                    self._by_name[caller.name] = work


def _of_kernel(program: Program, kernel: Kernel, gpu: Hardware | None) -> Work:
    path = kernel.instruction.op_name
    return Work(
        kind=kernel.kind,
        site=kernel_site(path) if path else '',
        phase=kernel_phase(path) if path else '',
        what=' and '.join(dict.fromkeys(map(_sizes, kernel.products))),
        dtype=kernel.products[0].dtype if kernel.products else '',
        times=kernel.times,
        flops=sum(product.flops / (2 if product.is_causal else 1) for product in kernel.products),
        source=program.source(kernel.instruction),
        predicted=kernel_seconds(kernel, gpu) if gpu else None,
    )


def _sizes(product: Product) -> str:
    if product.is_attention:
        return f'attention of [{", ".join(map(str, product.sizes))}]'
    batch, m, n, k = product.sizes
    return f'{f"{batch} x " if batch > 1 else ""}[{m}, {k}] [{k}, {n}]'


def _of_collective(
    program: Program,
    config: Config,
    computation: Computation,
    instruction: Instruction,
    arrays: list[Collective],
) -> Work:
    """Return the work of a collective as compiled (on CPUs, `inspect` reinterprets some).

    A collective of several arrays has the site of the largest.
    """
    kind = kind_of(instruction)
    assert kind is not None
    groups = device_groups(instruction, program.num_devices)
    sent = [
        whole_of(kind, each.operand, each.result) for each in arrays_of(computation, instruction)
    ]
    largest = max(arrays, key=lambda array: array.wire_bytes)
    site = site_of(largest, config)
    return Work(
        kind=kind,
        site=site.name,
        phase=site.phase,
        what=' and '.join(dict.fromkeys(map(str, sent))),
        axis=largest.axis,
        is_transfer=True,
        times=largest.times,
        wire_bytes=sum(ring_bytes(kind, array, widest(groups)) for array in sent),
        groups=_joined(groups) if kind == 'collective-permute' else groups,
        source=largest.source,
    )


@functools.cache
def _joined(pairs: Groups) -> Groups:
    """Join the pairs of a permute that share a device: each device waits for both its neighbors."""
    groups = list[set[int]]()
    for pair in pairs:
        touching = [group for group in groups if not group.isdisjoint(pair)]
        groups = [group for group in groups if group not in touching]
        groups.append({*pair}.union(*touching))
    return tuple(tuple(sorted(group)) for group in groups)


def peak_of(gpu: Hardware, dtype: str) -> float | None:
    """Return the peak FLOP/s of matmuls in an HLO dtype; None if it is not known."""
    peaks = {str(name): peak for name, peak in gpu.peak_flops.items()}
    return peaks.get(dtype_of(dtype))
