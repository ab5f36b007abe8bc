"""Records of GPUs and of the links between them, read from YAML.

`core/hardware/gpus/` has the records that are known by name. Rates are per GPU and second, in FLOPs
or bytes; latencies are in seconds. To add a GPU, copy a file and give its path.
"""

import functools
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megajax.base.errors import ConfigError
from megajax.core.config.records import read_record
from megajax.core.config.section import Section
from megajax.core.hardware.dies import FP8_SHARE, Efficiency, Fit, Reference, with_die

Capability = tuple[int, int]  # CUDA's compute capability, such as (9, 0)
Dtype = Literal['float32', 'bfloat16', 'float16', 'fp8']
LinkName = Literal['nvlink', 'pcie']
# keys that a record copies from the GPU in its key `like`, unless it has values of its own
SHARED = {
    'peak_flops',
    'devices_per_host',
    'devices_per_domain',
    'inside_host',
    'across_hosts',
    'pcie',
    'host_bandwidth',
}


class Link(Section):
    """A GPU's link to other GPUs."""

    bandwidth: PositiveFloat  # bytes/s that a GPU sends in a ring of large messages
    latency: NonNegativeFloat  # additional seconds for each step of the ring


class Compiler(Section):
    """The description of a GPU for XLA's compiler, which then works without the GPU.

    The figures of the GPU come from the vendor, and those for its architecture from the CUDA
    programming guide.
    """

    name: str
    capability: Annotated[Capability, Field(strict=False)]
    cores: PositiveInt
    clock_ghz: PositiveFloat
    bandwidth: PositiveInt  # bytes/s
    l2_cache: PositiveInt  # bytes, like the next two
    shared_memory_per_block: PositiveInt
    shared_memory_per_core: PositiveInt


class Hardware(Section):
    """The record of a type of GPU, its hosts, and the source of each figure."""

    name: str
    device_kinds: Annotated[tuple[str, ...], Field(strict=False)] = ()  # `device_kind` in jax
    peak_flops: dict[Dtype, PositiveFloat]  # FLOP/s of dense matmuls, without sparsity
    memory: PositiveInt  # bytes of the GPU, of which a program can allocate the share USABLE
    memory_bandwidth: PositiveFloat  # bytes/s
    power: PositiveFloat | None  # power limit of the board in watts; null: unknown
    devices_per_host: PositiveInt
    # number of GPUs that NVLink joins; null: the GPUs of a host
    devices_per_domain: PositiveInt | None = None
    inside_host: Link | None  # null: unknown, so that no plan has several GPUs in a host
    across_hosts: Link | None  # null: unknown, so that no plan has several hosts
    pcie: Link | None = None  # link inside a host whose GPUs have no NVLink; null: unknown
    # bytes/s that a GPU sends to the memory of its host; null: over PCIe
    host_bandwidth: PositiveFloat | None = None
    efficiency: Efficiency
    # null if no training rate was published, so that predictions are unverified
    fit: Fit | None = None
    reference: Reference
    # The die whose efficiencies the GPU has, at the clock that its power limit allows; null: the
    # GPU has efficiencies of its own.
    die: str | None = None
    compiler: Compiler | None = None  # null if the step cannot be compiled for this GPU
    # Only for a GPU without `compiler`, which has a capability as well; null: unknown
    capability: Annotated[Capability | None, Field(strict=False)] = None
    sources: dict[str, str]

    @property
    def compute_capability(self) -> Capability | None:
        """CUDA's compute capability; None if it is unknown, and (0, 0) for a CPU.

        A CPU has none of the kernels that depend on it.
        """
        if not self.is_gpu:
            return 0, 0
        return self.compiler.capability if self.compiler else self.capability

    @property
    def is_gpu(self) -> bool:
        """Whether the record is of a GPU, and not of a CPU, by its name in jax."""
        return 'cpu' not in self.device_kinds

    @property
    def to_host(self) -> float | None:
        """Bytes/s that a GPU sends to the memory of its host; None if no link is known."""
        link = self.pcie or self.across_hosts
        return self.host_bandwidth or (link.bandwidth if link else None)

    def link(self, name: Literal['inside_host', 'across_hosts']) -> Link:
        """Return one of the links; raise ConfigError if it is null."""
        link = self.inside_host if name == 'inside_host' else self.across_hosts
        if link is None:
            where, other, instead = (
                ('between GPUs of a host', self.across_hosts, 'one GPU per host')
                if name == 'inside_host'
                else ('between hosts', self.inside_host, 'the GPUs of one host (--gpus-per-host)')
            )
            raise ConfigError(
                f'{name}: the link {where} of {self.name} was not measured; set {name}: '
                f'{{bandwidth, latency}} in its file'
                + (f', or plan for {instead}' if other else '')
            )
        return link

    def shared(self, devices: int) -> Self:
        """Return the record of each of several simulated devices of a CPU; a GPU's is unchanged.

        The figures of a CPU's record are for each of its `devices_per_host`.
        """
        if self.is_gpu or devices == self.devices_per_host:
            return self
        share, link = self.devices_per_host / devices, self.inside_host
        return self.model_copy(
            update={
                'peak_flops': {dtype: peak * share for dtype, peak in self.peak_flops.items()},
                'memory': int(self.memory * share),
                'memory_bandwidth': self.memory_bandwidth * share,
                'inside_host': link and link.changed(bandwidth=link.bandwidth * share),
                'devices_per_host': devices,
            }
        )

    def product_rate(self, dtype: str, *, is_attention: bool = False) -> float:
        """Return the FLOP/s of the fastest matmuls or of flash attention.

        For attention, only the FLOPs that the mask leaves count. For a dtype that is not in the
        record, it returns the highest peak, so that no matmul seems to take longer than it does.
        """
        peaks = {str(name): peak for name, peak in self.peak_flops.items()}
        flash = self.reference.flash if is_attention else None
        share = (flash or self.reference.matmul) * (FP8_SHARE if dtype == 'fp8' else 1)
        return peaks.get(dtype, max(peaks.values())) * share

    def ring_bandwidth(self, *, members: int, hosts: int) -> float:
        """Return the bytes/s that a GPU sends in a ring over `hosts` with `members` on each host.

        NCCL builds as many rings as a group has GPUs on a host. The rings leave the host at
        different GPUs, so the network cards of all these GPUs serve the group. Other groups use the
        network cards of their own GPUs.
        """
        if hosts == 1:
            return self.link('inside_host').bandwidth
        across = self.link('across_hosts').bandwidth * members
        if members == 1 and self.inside_host is None:
            return across
        return min(self.link('inside_host').bandwidth, across)


def check_dtype(dtype: str, gpu: Hardware) -> None:
    """Raise ConfigError if a GPU does not compute in `train.dtype`."""
    if dtype in gpu.peak_flops:
        return
    dtypes, known = ', '.join(gpu.peak_flops), map(_known, hardware_names())
    raise ConfigError(
        f'train.dtype={dtype}: '
        + (
            f'{gpu.name} computes in {dtypes}; use one of them'
            if any(gpu.peak_flops == each.peak_flops for each in known)
            else f'the file of {gpu.name} has peak_flops of {dtypes}; use one of them, or add '
            f'peak_flops.{dtype} if it computes in {dtype}'
        )
    )


def hardware_names() -> list[str]:
    """Return the names of the GPUs that `hardware` knows, in alphabetical order."""
    return sorted(
        path.name.removesuffix('.yaml')
        for path in _folder().iterdir()
        if path.name.endswith('.yaml')
    )


def compiled_for() -> tuple[str, ...]:
    """Return the names of the GPUs that a step can be compiled for, in alphabetical order."""
    texts = {name: (_folder() / f'{name}.yaml').read_text() for name in hardware_names()}
    return tuple(name for name, text in texts.items() if '\ncompiler:' in text)


def hardware(name: str | Path, link: LinkName | None = None) -> Hardware:
    """Read the record of a GPU by its name, or from a YAML file.

    `link` is the link between the GPUs of a host, if it is not the link that they are sold with.
    Raises ConfigError with every mistake in the file, and for a link that the record does not have.
    """
    return _with_link(_hardware(name), link)


def _with_link(gpu: Hardware, link: LinkName | None) -> Hardware:
    is_pcie = gpu.pcie is not None and gpu.inside_host == gpu.pcie
    if link == 'nvlink' and is_pcie:
        raise ConfigError(
            f'--link nvlink: bridges join two GPUs of {gpu.name}, and a plan has one link for all '
            'GPUs of a host; leave it out'
        )
    if link != 'pcie' or is_pcie:
        return gpu
    if gpu.pcie is None:
        raise ConfigError(
            f'--link pcie: the record of {gpu.name} has no pcie: {{bandwidth, latency}}; add it'
        )
    return gpu.model_copy(
        update={
            'inside_host': gpu.pcie,
            'devices_per_domain': None,  # PCIe joins no hosts
            'name': f'{gpu.name} over PCIe',
        }
    )


def _hardware(name: str | Path) -> Hardware:
    known = record_name(str(name))
    if known in hardware_names():
        return _known(known)
    path = Path(name)
    if path.suffix not in ('.yaml', '.yml'):
        raise ConfigError(
            f'GPU {name}: choose among {", ".join(hardware_names())}; of others there is no '
            'record: write one as docs/extend.md shows, and give its YAML file'
        )
    return _read(path)


def record_name(name: str) -> str:
    """Return a GPU's name as records write it: H100 is h100, and A100-SXM4-40GB is a100_40gb.

    Every word of `name` must be in the GPU's record, where SXM5 is SXM. If two records match, the
    one that has more of the words as written wins, then the shorter name.
    """
    written = _words(name)
    plain = '_'.join(re.findall(r'[a-z0-9]+', name.lower()))
    if plain in (names := hardware_names()):
        return plain
    matching = dict[str, int]()  # to the number of words that the record has only as SXM
    for known in sorted(names, key=len):
        gpu = _known(known)
        own = _words(' '.join([known, gpu.name, *gpu.device_kinds]))
        if known.partition('_')[0] in written and _plain(written) <= _plain(own):
            matching[known] = len(written - own)
    return min(matching, key=matching.__getitem__, default=name)


def _words(name: str) -> set[str]:
    """Return the words of a GPU's name in lower case; 80 GB is 80gb."""
    return set(re.findall(r'[a-z0-9]+', re.sub(r'(\d+)[\W_]+gb', r'\1gb', name.lower())))


def _plain(words: set[str]) -> set[str]:
    """Return the words with SXM of any generation, such as SXM5, as sxm."""
    return {re.sub(r'^sxm\d$', 'sxm', word) for word in words}


def hardware_of(device_kind: str) -> Hardware | None:
    """Return the GPU with jax's name, such as 'NVIDIA H100 80GB HBM3', or None if unknown."""
    records = map(_known, hardware_names())
    return next((record for record in records if device_kind in record.device_kinds), None)


@functools.cache
def _known(name: str) -> Hardware:
    return _read(_folder() / f'{name}.yaml')


def _folder() -> Traversable:
    return resources.files('megajax.core.hardware') / 'gpus'


def _read(file: Path | Traversable) -> Hardware:
    hint = f'; known by name: {", ".join(hardware_names())}'
    return read_record(file, Hardware, hint=hint, complete=_completed)


def _completed(record: Any) -> Any:
    """Return a record with the values from its die and from a known GPU (`like: h100`).

    They are the GPU's compute capability, and the figures in SHARED with their sources. Raises
    ConfigError for an unknown GPU, and for a figure of the record that lacks a source.
    """
    if isinstance(record, dict) and 'like' in record:
        name, own = record['like'], {key: record[key] for key in record if key != 'like'}
        if name not in hardware_names():
            raise ConfigError(f'like: {name}: choose among {", ".join(hardware_names())}')
        other, sources = _known(name), own.get('sources', {})
        shared = other.model_dump(include=SHARED - own.keys(), exclude_none=True)
        if own.keys().isdisjoint({'capability', 'compiler'}):
            if own.get('die', other.die) != other.die:
                message = f'missing, and {name} has a different die; add it, for example [10, 0]'
                raise ConfigError(f'capability: {message}')
            shared['capability'] = other.compute_capability
        if isinstance(sources, dict):
            if missing := own.keys() & other.sources.keys() - sources.keys():
                names = ', '.join(sorted(missing))
                raise ConfigError(f'sources: {names}: missing; add the source of each figure')
            sources = {key: x for key, x in other.sources.items() if key in shared} | sources
        record = shared | own | {'sources': sources}
    return with_die(record)
