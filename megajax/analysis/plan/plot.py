"""Plot a plan: the roofline of a step, and its MFU by the number of GPUs. Needs matplotlib."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megajax.analysis.plan.describe import group_name
from megajax.analysis.plan.experts import of_busiest
from megajax.analysis.plan.kernel_time import peak_flops, product_seconds
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX, Software
from megajax.analysis.plan.search import Choice, search
from megajax.core.config import Config, ConfigError
from megajax.core.config.extras import install
from megajax.core.counts.parameters import BYTES
from megajax.core.counts.product import DENSE
from megajax.core.counts.products import products

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = ('.png', '.svg', '.pdf')


def check_plot(path: Path) -> None:
    """Raise ConfigError unless a plot can be drawn in the format of `path`."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f'{path}: a plot must end in {", ".join(_FORMATS)}')
    new_figure()


def roofline(config: Config, cluster: Cluster) -> 'Figure':
    """Plot each weight's matmuls by their FLOPs per byte and predicted FLOP/s.

    The lines above them are the GPU's peak, the rates of large matmuls standalone and in training,
    and the memory bandwidth.
    """
    figure = new_figure()
    from matplotlib.ticker import LogLocator

    axes = figure.subplots()
    points = _points(config, cluster)
    ridge = peak_flops(config, cluster) / cluster.hardware.memory_bandwidth
    left, right = (
        min(ridge, *(point.intensity for point in points)) / 4,
        4 * max(ridge, *(point.intensity for point in points)),
    )
    _draw_ceilings(axes, config, cluster, left, right)
    for point in points:
        label = f'{point.name}: {point.share:.0%}'
        axes.scatter(
            point.intensity, point.rate / 1e12, s=40 + 800 * point.share, alpha=0.6, label=label
        )
    for handle in axes.legend(loc='lower right').legend_handles:
        handle.set_sizes([50])  # type: ignore[union-attr]
    axes.set(
        xscale='log',
        yscale='log',
        xlabel='FLOPs per byte of operands and result',
        ylabel='TFLOP/s of one GPU',
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter('{x:g}')
        axis.set_minor_formatter('')
    axes.set_title(
        f'{cluster.hardware.name}, {config.train.dtype}: '
        'matmuls by weight, with their share of the time',
        fontsize=10,
    )
    axes.grid(visible=True, which='both', alpha=0.2)
    return figure


def _draw_ceilings(
    axes: 'Axes', config: Config, cluster: Cluster, left: float, right: float
) -> None:
    """Plot the highest rates from `left` to `right` FLOPs per byte, and the memory bandwidth."""
    hardware, peak = cluster.hardware, peak_flops(config, cluster)
    ridge = peak / hardware.memory_bandwidth
    ceilings = (
        (1.0, 'solid', 'peak'),
        (hardware.reference.matmul, 'dashed', 'large matmuls standalone'),
        (hardware.efficiency.matmul, 'dotted', 'large matmuls in training'),
    )
    for share, style, what in ceilings:
        axes.plot(
            [left, share * ridge, right],
            [left * hardware.memory_bandwidth / 1e12, *[share * peak / 1e12] * 2],
            color='black',
            ls=style,
        )
        axes.annotate(
            f'{what}: {share * peak / 1e12:,.0f} TFLOP/s',
            (right, share * peak / 1e12),
            ha='right',
            va='bottom',
        )
    slope = left * hardware.memory_bandwidth / 1e12
    axes.annotate(
        f'memory: {hardware.memory_bandwidth / 1e12:.2f} TB/s',
        (left, slope),
        xytext=(12, 0),
        textcoords='offset points',
    )


class _Point(NamedTuple):
    name: str
    intensity: float  # FLOPs per byte
    rate: float  # FLOP/s
    share: float  # share of the time of all matmuls


def _points(config: Config, cluster: Cluster) -> list[_Point]:
    """Return a point for each weight; weights with the same coordinates share a point."""
    sums = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])
    for counted in products(config, flash=True):
        product = of_busiest(counted, config, 1.0)
        if product.name != 'attention':
            dense = DENSE * product.name.startswith(DENSE)
            name = dense + product.name.removeprefix(DENSE).split()[0]
            parts = (
                product.times * product.flops,
                product.times * product.elements * BYTES[config.train.dtype],
                product_seconds(product, config, cluster),
            )
            sums[name] = [a + b for a, b in zip(sums[name], parts, strict=True)]
    total = sum(seconds for _, _, seconds in sums.values())
    places = defaultdict[tuple[float, float], list[str]](list)
    for name, (work, moved, seconds) in sums.items():
        places[round(work / moved, 3), round(work / seconds)].append(name)
    return [
        _Point(', '.join(names), intensity, rate, sum(sums[name][2] for name in names) / total)
        for (intensity, rate), names in places.items()
    ]


def scaling(config: Config, cluster: Cluster, program: Software = MEGAJAX) -> 'Figure':
    """Plot the MFU of the fastest layout on 1 to 512 GPUs, and on the whole cluster.

    The batch size is the config's for any number of GPUs.
    """
    figure = new_figure()
    axes = figure.subplots()
    counts = sorted({*cluster.counts(max(512, cluster.num_devices)), cluster.num_devices})
    choices = fastest(config, cluster, counts, program)
    gpus, shares = list(choices), [100 * choice.timed.mfu for choice in choices.values()]
    axes.plot(gpus, shares, marker='o', color='black')
    for count, share in zip(gpus, shares, strict=True):
        mesh = choices[count].mesh
        axes.annotate(
            f'{mesh.data}x{group_name(mesh)}',
            (count, share),
            textcoords='offset points',
            xytext=(0, 8),
            ha='center',
            fontsize=8,
        )
    axes.set_xscale('log', base=2)
    axes.set_xticks(gpus, [str(count) for count in gpus])
    axes.set(xlabel='GPUs', ylabel='MFU, %', ylim=(0, 1.2 * max(shares)))
    axes.set_title(
        f'{cluster.hardware.name}, batch {config.train.batch_size}: '
        'the fastest mesh (data x model) on each number of GPUs',
        fontsize=10,
    )
    axes.grid(visible=True, alpha=0.2)
    return figure


def fastest(
    config: Config, cluster: Cluster, counts: Sequence[int], program: Software = MEGAJAX
) -> dict[int, Choice]:
    """Return the fastest layout on each number of GPUs on which any layout fits."""
    choices = {}
    for count in counts:
        try:
            choices[count] = search(config, cluster.resized(count), program).best
        except ConfigError:
            continue
    return choices


def new_figure() -> 'Figure':
    """Return an empty figure; raise ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(f'plots need matplotlib: {install("plot")}') from None
    return Figure(figsize=(8, 5), layout='constrained', dpi=120)
