"""What a GPU can do and what links it to the others, read from YAML; `hardware/gpus/` has those that are known by name.

Rates are per GPU and second, in FLOPs or bytes; latencies are in seconds. To add one, copy a file and give its path.
"""

import functools
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from megajax.config.errors import ConfigError
from megajax.config.schema import Section

Share = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal['float32', 'bfloat16', 'float16']


class Link(Section):
    """A GPU's way to others: what it sends in a ring of large messages, and what each step of the ring costs besides."""

    bandwidth: PositiveFloat
    latency: NonNegativeFloat


class Reference(Section):
    """What the fastest kernels alone reach of the peaks: a roofline's rates, against which `inspect` holds transfers."""

    matmul: Share
    flash: Share | None = None
    memory: Share


class Fit(Section):
    """How well the efficiencies predict the published rates that they were fitted on: a mean error, and what nine of ten are within."""

    rows: PositiveInt
    mean: Share
    band: Share


class Efficiency(Section):
    """What training reaches of the peaks.

    A matrix product [m, k] x [k, n] reaches `matmul` of the peak rate, times d / (d + half_size) for each d of m, n and k. Attention in
    one kernel reaches `flash` of it if the kernel is cuDNN's and `flash_2` if it is that of Dao (2023), FlashAttention-2, where only
    what the causal mask leaves counts. Operations bound by memory reach `memory` of its bandwidth.
    """

    matmul: Share
    half_size: NonNegativeFloat
    flash: Share | None = None  # null where there is no such kernel
    flash_2: Share | None = None
    memory: Share

    def of_attention(self, kernel: Literal['flash', 'flash_2']) -> float | None:
        """The share of the peak that attention in one kernel reaches; None where the GPU has none."""
        return self.flash if kernel == 'flash' else self.flash_2 or self.flash

    def of_product(self, *sizes: int) -> float:
        """The share of the peak that a product of these sizes reaches."""
        share = self.matmul
        for size in sizes:
            share *= size / (size + self.half_size)
        return share


class Compiler(Section):
    """What XLA's compiler is told of a GPU that is not there: the vendor's figures, and the CUDA
    programming guide's of its architecture.
    """

    name: str
    capability: Annotated[tuple[int, int], Field(strict=False)]
    cores: PositiveInt
    clock_ghz: PositiveFloat
    bandwidth: PositiveInt  # bytes a second
    l2_cache: PositiveInt  # bytes, as the two below
    shared_memory_per_block: PositiveInt
    shared_memory_per_core: PositiveInt


class Hardware(Section):
    """One type of GPU, the hosts it is sold in, and where each figure is from."""

    name: str
    device_kinds: Annotated[
        tuple[str, ...], Field(strict=False)
    ] = ()  # as jax's `device.device_kind` spells them
    peak_flops: dict[Dtype, PositiveFloat]  # of dense matrix products, without sparsity
    memory: PositiveInt  # bytes that a program can have
    memory_bandwidth: PositiveFloat
    power: PositiveFloat  # watts, at the limit of its board
    devices_per_host: PositiveInt
    inside_host: Link
    across_hosts: Link
    efficiency: Efficiency
    fit: Fit | None = None  # null where no rate of training was published: unverified
    reference: Reference
    compiler: Compiler | None = None  # null where the step cannot be compiled for it
    sources: dict[str, str]

    def product_rate(self, dtype: str, *, is_attention: bool = False) -> float:
        """FLOPs a second of the fastest matrix products, or of flash attention, of what a mask leaves.

        A dtype that the record lacks has the highest peak: no product seems longer than it is.
        """
        peaks = {str(name): peak for name, peak in self.peak_flops.items()}
        flash = self.reference.flash if is_attention else None
        return peaks.get(dtype, max(peaks.values())) * (flash or self.reference.matmul)

    def ring_bandwidth(self, *, members: int, hosts: int) -> float:
        """Bytes a second that each GPU sends in a ring over `hosts` with `members` of it on each.

        NCCL makes as many rings as a group has GPUs on a host, which leave it in different places,
        so that the network cards of all of them serve the group; other groups have theirs.
        """
        inside = self.inside_host.bandwidth
        return inside if hosts == 1 else min(inside, self.across_hosts.bandwidth * members)


def hardware_names() -> list[str]:
    """Those that `hardware` knows, in alphabetical order."""
    return sorted(
        path.name.removesuffix('.yaml')
        for path in _folder().iterdir()
        if path.name.endswith('.yaml')
    )


def compiled_for() -> tuple[str, ...]:
    """The names of the GPUs that a step can be compiled for, in alphabetical order."""
    texts = {name: (_folder() / f'{name}.yaml').read_text() for name in hardware_names()}
    return tuple(name for name, text in texts.items() if '\ncompiler:' in text)


def hardware(name: str | Path) -> Hardware:
    """Read a type of GPU by its name, or from a YAML file. Raises ConfigError with every mistake in it."""
    if str(name) in hardware_names():
        return _known(str(name))
    path = Path(name)
    if path.suffix not in ('.yaml', '.yml'):
        raise ConfigError(
            f'GPU {name}: choose among {", ".join(hardware_names())}, or give a YAML file (megajax plan calibrate writes one)'
        )
    return _read(path)


def hardware_of(device_kind: str) -> Hardware | None:
    """The type that jax calls so, for example 'NVIDIA H100 80GB HBM3'; None where it is not known."""
    return next(
        (found for found in map(_known, hardware_names()) if device_kind in found.device_kinds),
        None,
    )


@functools.cache
def _known(name: str) -> Hardware:
    return _read(_folder() / f'{name}.yaml')


def _folder() -> Traversable:
    return resources.files('megajax') / 'hardware' / 'gpus'


def _read(file: Path | Traversable) -> Hardware:
    try:
        values: Any = YAML(typ='safe', pure=True).load(file.read_text(encoding='utf-8'))
        return Hardware.model_validate(values)
    except FileNotFoundError:
        raise ConfigError(
            f'{file}: no such file; known by name: {", ".join(hardware_names())}'
        ) from None
    except OSError as error:
        raise ConfigError(f'{file}: cannot be read: {error.strerror}') from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f'{file}: not valid YAML: {str(error).splitlines()[0]}') from error
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise ConfigError(
            *(
                f'{file}: {".".join(map(str, one["loc"])) or "the file"}: {one["msg"]}'
                for one in details
            )
        ) from error
