"""Compare GPUs for a config: the fastest layout on each, its cost, and the limits of its memory."""

import dataclasses

from pydantic import Field
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megajax.analysis.plan.band import band
from megajax.analysis.plan.describe import describe
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import BY_NAME, ProgramName, Software
from megajax.analysis.plan.search import fewest_gpus, search, that_fits
from megajax.base.render.console import number_columns, open_table, text_columns
from megajax.base.render.folded import Folded
from megajax.base.result import Result
from megajax.core.config import Config, ConfigError
from megajax.core.hardware.records import Hardware, check_dtype, hardware, record_name

LONGEST = 2**22  # tokens of a sequence to look for
LIMITS = 'fewest_gpus', 'longest_sequence'


class Machine(Result):
    """The fastest layout of a config on GPUs of one type."""

    gpu: str
    layout: str | None = Field(description='the fastest layout; None if there is none')
    reason: str = Field(description='why there is no layout; empty if there is one')
    tokens_per_second: float | None
    band: float | None = Field(description='relative error that 90% of times should not exceed')
    days: float | None
    gpu_hours: float | None
    price: float | None = Field(description='price of a GPU-hour, as given')
    cost: float | None = Field(description='cost of all tokens in the currency of the price')
    fewest_gpus: int | None = Field(
        description='the fewest GPUs that a layout fits on: a power of two, that many full hosts, '
        'or `gpus`'
    )
    longest_sequence: int | None = Field(
        description='the most tokens of a sequence that fit on `gpus` GPUs: train.seq_len times a '
        'power of two'
    )


class Comparison(Result):
    """A config on GPUs of several types; the cheapest first if all have a price."""

    gpus: int
    tokens: float
    machines: list[Machine]

    def __str__(self) -> str:
        from megajax.base.render.console import as_text

        return as_text(comparison_table(self), width=150)


def compare(
    config: Config,
    prices: dict[str, float | None],
    *,
    gpus: int | None = None,
    gpus_per_host: int | None = None,
    tokens: float = 1e9,
    target_batch: int | None = None,
    program: ProgramName = 'megajax',
    imbalance: float = 1.0,
) -> Comparison:
    """Return the fastest layout of a config on each type of GPU, for a number of tokens.

    `prices` has the price of a GPU-hour by the name of the GPU, or None. `gpus` defaults to the
    size of the config's mesh, and `gpus_per_host` to the hosts that each GPU is sold in.
    `target_batch` replaces `train.batch_size`. `imbalance` is the ratio of the tokens of the
    busiest device in a group of experts to the mean. Machines are sorted by cost if each has a
    price, else by time.

    A GPU that does not compute in the config's dtype has no layout, nor has one of whose hosts the
    GPUs fill a part. Raises ConfigError if no GPU has layouts, and for an unknown GPU.
    """
    count = gpus or config.mesh.num_devices
    software = dataclasses.replace(BY_NAME[program], imbalance=imbalance)
    if target_batch:
        config = changed(config, train__batch_size=target_batch)
    config = software.without_order(config)
    found = {gpu: hardware(gpu) for gpu in prices}
    dtype = config.train.dtype
    if not any(dtype in each.peak_flops for each in found.values()):
        check_dtype(dtype, next(iter(found.values())))
    clusters = {gpu: _cluster(record, count, gpus_per_host) for gpu, record in found.items()}
    problems = [reason for reason in clusters.values() if isinstance(reason, str)]
    if len(problems) == len(clusters):
        raise ConfigError(*dict.fromkeys(problems))
    machines = [
        _machine(config, clusters[gpu], software, gpu, price, tokens)
        for gpu, price in prices.items()
    ]
    has_prices = all(machine.price is not None for machine in machines)

    def order(machine: Machine) -> float:
        value = machine.cost if has_prices else machine.days
        return float('inf') if value is None else value

    return Comparison(gpus=count, tokens=tokens, machines=sorted(machines, key=order))


def _cluster(gpu: Hardware, count: int, per_host: int | None) -> Cluster | str:
    """Return a cluster of the GPUs, or why there is none."""
    try:
        cluster = Cluster.of(gpu, count, per_host)
        if cluster.devices_per_host > 1:
            gpu.link('inside_host')
        if cluster.num_hosts > 1:
            gpu.link('across_hosts')
    except ConfigError as error:
        return str(error)
    return cluster


def _machine(
    config: Config,
    cluster: Cluster | str,
    program: Software,
    gpu: str,
    price: float | None,
    tokens: float,
) -> Machine:
    names = 'layout', 'tokens_per_second', 'band', 'days', 'gpu_hours', 'cost', *LIMITS
    empty = {'gpu': gpu, 'price': price, **dict.fromkeys(names)}
    if isinstance(cluster, str):
        return Machine.model_validate({**empty, 'reason': cluster})
    if config.train.dtype not in cluster.hardware.peak_flops:
        reason = f'does not compute in {config.train.dtype}'
        return Machine.model_validate({**empty, 'reason': reason})
    limits = {
        'fewest_gpus': fewest_gpus(config, cluster, program),
        'longest_sequence': _longest(config, cluster, program),
    }
    try:
        best = search(config, cluster, program).best
    except ConfigError:
        reason = 'none fits or divides the batch'
        return Machine.model_validate({**empty, **limits, 'reason': reason})
    time = best.timed
    found, days = band(best.config, time, cluster, program), time.days(tokens)
    hours = 24 * days * cluster.num_devices
    return Machine(
        gpu=gpu,
        layout=describe(best.config),
        reason='',
        tokens_per_second=time.tokens_per_second,
        band=found and found.error,
        days=days,
        gpu_hours=hours,
        price=price,
        cost=None if price is None else price * hours,
        **limits,
    )


def _longest(config: Config, cluster: Cluster, program: Software) -> int | None:
    """Return the most tokens of a sequence that a layout of the same number of sequences fits."""
    length, longest = config.train.seq_len, None
    while length <= LONGEST:
        longer = changed(
            config,
            train__seq_len=length,
            model__max_seq_len=max(length, config.model.max_seq_len),
        )
        if that_fits(longer, cluster.num_devices, cluster, program):
            longest = length
        elif longest:
            break
        # With few sequences, only longer ones may be divisible among the GPUs.
        length *= 2
    return longest


def comparison_table(comparison: Comparison) -> RenderableType:
    """Return a comparison for a rich console."""
    has_prices = any(machine.price is not None for machine in comparison.machines)
    columns = ['tokens/s', 'days', 'GPU-hours', *(['cost'] if has_prices else [])]
    table = open_table(
        *text_columns('GPU'),
        *number_columns(*columns, 'fewest GPUs', 'longest sequence'),
        'fastest layout',
        title=f'{comparison.tokens:,.0f} tokens on {comparison.gpus} GPUs',
    )
    for machine in comparison.machines:
        _add(table, machine, has_prices=has_prices)
    return Group(
        Folded(table),
        Text(
            'fewest GPUs: the smallest power of two, or that many full hosts, on which the batch '
            'fits, or all GPUs'
        ),
        Text(
            'longest sequence: train.seq_len times the largest power of two that fits, up to '
            f'{LONGEST:,} tokens'
        ),
    )


def _add(table: Table, machine: Machine, *, has_prices: bool) -> None:
    around = '' if machine.band is None else f' \u00b1 {machine.band:.0%}'
    numbers = [
        '-' if value is None else f'{value:{form}}{after}'
        for value, form, after in (
            (machine.tokens_per_second, ',.0f', around),
            (machine.days, ',.1f', ''),
            (machine.gpu_hours, ',.0f', ''),
            *([(machine.cost, ',.0f', '')] if has_prices else []),
            (machine.fewest_gpus, ',', ''),
            (machine.longest_sequence, ',', ''),
        )
    ]
    table.add_row(machine.gpu, *numbers, machine.layout or machine.reason)


def read_prices(text: str) -> dict[str, float | None]:
    """Return the names of GPUs and their prices from `h100=2.5,h200`, None without a price.

    Raises ConfigError for a GPU that is listed twice, and for a price that is not positive.
    """
    found = dict[str, float | None]()
    for part in text.split(','):
        given, price = _with_price(part)
        if (name := record_name(given)) in found:
            raise ConfigError(f'--compare {text}: {name} is listed twice; list each GPU once')
        found[name] = price
    return found


def _with_price(text: str) -> tuple[str, float | None]:
    name, sign, price = text.partition('=')
    if not name:
        raise ConfigError(
            f'--compare: {text!r} has no name of a GPU; use for example h100=2.5,h200=3.2'
        )
    if not sign:
        return name, None
    try:
        value = float(price)
    except ValueError:
        value = 0.0
    if not 0 < value < float('inf'):
        raise ConfigError(
            f'--compare {text}: {price!r} is not a price of a GPU-hour; use for example {name}=2.5'
        )
    return name, value
