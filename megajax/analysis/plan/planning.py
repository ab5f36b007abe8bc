"""Plan a config on a number of GPUs: memory, time and alternative layouts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from megajax.analysis.plan.accepted import rejection
from megajax.analysis.plan.band import band
from megajax.analysis.plan.describe import describe, mesh_name, needs, why_slower
from megajax.analysis.plan.goodput import GPU_HOURS_TO_FAILURE, Faults, faults
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.memory import largest_microbatch
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import BY_NAME, MEGAJAX, ProgramName, Software
from megajax.analysis.plan.result import (
    Candidate,
    CostLine,
    FaultsLine,
    MemoryLine,
    Plan,
    TransferLine,
)
from megajax.analysis.plan.search import Choice, Ranking, memory_on, search, usable_memory
from megajax.analysis.plan.time import StepTime, step_time
from megajax.analysis.plan.verdicts import (
    bubble,
    on_contexts,
    on_experts,
    on_grids,
    on_pipelines,
    on_sharding,
    on_tensor_parallelism,
    on_windows,
)
from megajax.analysis.plan.what_if import what_if
from megajax.base.render.units import count
from megajax.core.config import Config, ConfigError, dump
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.flops import is_gpt, narayanan_flops
from megajax.core.counts.run_memory import sample_error
from megajax.core.hardware.dies import Fit
from megajax.core.hardware.records import Hardware, LinkName, hardware

TOKENS = 1e9  # default number of tokens for the cost


def plan(
    config: Config,
    *,
    gpu: str | Path,
    gpus: int | None = None,
    gpus_per_host: int | None = None,
    link: LinkName | None = None,
    tokens: float | None = None,
    target_batch: int | None = None,
    program: ProgramName = 'megajax',
    price: float | None = None,
    storage: float | None = None,
    gpu_hours_to_failure: float = GPU_HOURS_TO_FAILURE,
    imbalance: float = 1.0,
    savings: bool = False,
) -> Plan:
    """Predict the memory and time of `config` on some GPUs, and compare every layout.

    Without `gpus`, the plan is for the layout of `config`. With `gpus`, it is for the fastest
    layout, unless the mesh of `config` has as many GPUs and does not conflict with other settings.
    `link` defaults to the link that the GPUs are sold with. `target_batch` replaces
    `train.batch_size`. `tokens` is the number to train on. `program` is the software whose step is
    timed. `price` is the price of a GPU-hour. `storage` is the bytes per second that all hosts
    write in total. `imbalance` is the ratio of the tokens of the busiest device in a group of
    expert parallelism to the mean. `savings` adds what `--what-if` prints.

    Raises ConfigError if no layout fits or divides the model; the error says what would work.
    """
    software = dataclasses.replace(BY_NAME[program], imbalance=_checked(imbalance, config))
    if target_batch:
        config = changed(config, train__batch_size=target_batch)
    own = config.mesh.num_devices
    cluster = Cluster.of(hardware(gpu, link), gpus or own, gpus_per_host)
    is_own = cluster.num_devices == own and _is_possible(config, software, searches=bool(gpus))
    config = software.without_order(config)
    ranking = search(config, cluster, software)
    planned = resolved(config, on_gpu=cluster.hardware.is_gpu) if is_own else ranking.best.config
    time = step_time(planned, cluster, software)
    lost = faults(
        planned, time, cluster, storage=storage, gpu_hours_to_failure=gpu_hours_to_failure
    )
    return _report(
        planned,
        software.evened(planned),
        cluster,
        ranking,
        time,
        program=program,
        **_band(planned, time, cluster, software),
        is_from_search=not is_own,
        train_error=_train_error(planned, cluster) if software.is_own else None,
        tokens=tokens,
        days=time.days(tokens) if tokens else None,
        cost=_cost(time, cluster, tokens or TOKENS, price),
        faults=_faults(planned, time, lost),
        windows=on_windows(planned, time, cluster, software),
        experts=on_experts(ranking),
        imbalance=None if config.model.experts is None else imbalance,
        what_if=what_if(planned, cluster, software, time) if savings else [],
    )


def _is_possible(config: Config, program: Software, *, searches: bool) -> bool:
    """Return whether the layout of a config is possible, for example with a new batch size.

    Raises ConfigError if it is not and nothing `searches` for a different one.
    """
    problems = program.problems(config)
    if problems and not searches:
        raise ConfigError(*problems)
    return not problems


def _band(config: Config, time: StepTime, cluster: Cluster, program: Software) -> dict[str, Any]:
    found = band(config, time, cluster, program)
    return {
        'band': found and found.error,
        'band_reasons': list(found.reasons) if found else [],
    }


def _checked(imbalance: float, config: Config) -> float:
    if imbalance < 1:
        raise ConfigError(
            f'--imbalance {imbalance:g}: the busiest device gets at least the mean; use 1 or more'
        )
    if imbalance > 1 and config.model.experts is None:
        raise ConfigError(
            f'--imbalance {imbalance:g} needs model.experts, which is null; leave it out'
        )
    return imbalance


def _train_error(config: Config, cluster: Cluster) -> str | None:
    if error := sample_error(config, usable_memory(cluster)):
        error = f'train.sample_prompts: {error}'
    return rejection(config, cluster) or error or None


def _report(
    config: Config,
    held: Config,
    cluster: Cluster,
    ranking: Ranking,
    time: StepTime,
    **known: Any,
) -> Plan:
    """Return the plan of a config, with the memory of `held`, the config with evened layers."""
    available = usable_memory(cluster)
    needed = memory_on(held, cluster)
    chosen = Choice(config=config, bytes=needed.total, time=time)
    fits = needed.total <= available
    return Plan(
        config=dump(config),
        hardware=cluster.hardware.name,
        efficiencies=_efficiencies(cluster.hardware, config.train.dtype),
        gpus=cluster.num_devices,
        gpus_per_host=cluster.devices_per_host,
        layout=_layout(chosen, ranking, available).model_copy(
            update={} if fits else {'reason': _too_large(config, needed.total, cluster)}
        ),
        memory=[
            MemoryLine(name=name, bytes=size)
            for name, size in dataclasses.asdict(needed).items()
            if isinstance(size, int)
        ],
        memory_moment=needed.moment,
        memory_available=available,
        largest_microbatch=largest_microbatch(held, available, cluster.hardware.compute_capability),
        matmul=time.products,
        idle=time.idle,
        memory_bound=time.memory_bound,
        launches=time.launches,
        transfers=[
            TransferLine(**dataclasses.asdict(transfer), exposed=transfer.exposed)
            for transfer in time.transfers
        ],
        seconds=time.total,
        tokens_per_second=time.tokens_per_second,
        tflops_per_gpu=time.flops_per_gpu / 1e12,
        paper_tflops_per_gpu=_paper_tflops(config, time),
        mfu=time.mfu,
        hfu=time.hfu,
        communication_share={axis: time.share(axis) for axis in (*config.mesh.sizes, *time.axes)},
        verdict=on_tensor_parallelism(ranking, available),
        sharding=on_sharding(ranking),
        grids=on_grids(ranking),
        pipelines=on_pipelines(ranking, cluster),
        contexts=on_contexts(ranking, available),
        layouts=[_layout(choice, ranking, available) for choice in ranking.all],
        best_config=dump(ranking.best.config),
        impossible={mesh_name(mesh): reason for mesh, reason in ranking.impossible.items()},
        **known,
    )


def _too_large(config: Config, needed: int, cluster: Cluster) -> str:
    """Say how much memory a config needs, and how much without attention dropout if it has any."""
    reason = needs(needed, usable_memory(cluster))
    if not config.model.attention_dropout:
        return reason
    without = changed(config, model__attention_dropout=0.0)
    least = memory_on(without, cluster).total
    return f'{reason}; {least / 1e9:.1f} GB with model.attention_dropout=0'


def _cost(time: StepTime, cluster: Cluster, tokens: float, price: float | None) -> CostLine:
    hours, power = time.total * time.devices / 3600 * tokens / time.tokens, cluster.hardware.power
    cost = None if price is None else price * hours
    return CostLine(
        tokens=tokens,
        gpu_hours=hours,
        kilowatt_hours=power and hours * power / 1000,
        price=price,
        cost=cost,
        tokens_per_unit=tokens / cost if cost else None,
    )


def _faults(config: Config, time: StepTime, lost: Faults) -> FaultsLine:
    every = max(1, round(lost.best_interval / time.total))
    minutes, least = config.checkpoint.minutes, math.ceil(every * time.total / 60)
    return FaultsLine(
        checkpoint_bytes=lost.checkpoint_bytes,
        hold_up=lost.hold_up,
        write=lost.write,
        between_failures=lost.between_failures,
        interval=lost.interval,
        goodput=lost.goodput(lost.interval),
        best_every=every,
        best_minutes=least if minutes is not None and minutes < least else None,
        best_goodput=lost.goodput(every * time.total),
    )


def _efficiencies(gpu: Hardware, dtype: str) -> str:
    reached, alone, fit = gpu.efficiency, gpu.reference, gpu.fit
    parts = [f'matmul {reached.matmul:.0%} in training ({alone.matmul:.0%} standalone)']
    if reached.flash and alone.flash:
        parts.append(f'attention {reached.flash:.0%} ({alone.flash:.0%})')
    if dtype == 'fp8':
        dtypes = {name for seen in (fit.programs.values() if fit else ()) for name in seen.dtypes}
        basis = 'fitted' if 'fp8' in dtypes else 'an assumption'
        parts.append(f'FP8 matmul {reached.matmul * reached.fp8:.0%} ({basis})')
    return f'efficiency vs. peak: {", ".join(parts)}; {_fitted_to(fit)}'


def _fitted_to(fit: Fit | None) -> str:
    if fit is None:
        return 'unverified: no published throughput'
    # The only fitted step of a calibration is megajax's.
    rows = 'measured step' if fit.programs.keys() <= {MEGAJAX.name} else 'published throughput'
    return f'fitted to {count(fit.rows, rows)}, mean error {fit.mean:.1%}'


def _layout(choice: Choice, ranking: Ranking, available: int) -> Candidate:
    config, time = choice.config, choice.time
    return Candidate(
        name=describe(config),
        data=config.mesh.data,
        replicas=config.mesh.replicas,
        stages=config.mesh.stages,
        virtual_stages=config.mesh.virtual_stages,
        experts=config.mesh.experts,
        context=config.mesh.context,
        context_exchange=config.mesh.context_exchange,
        bubble=bubble(config),
        model_rows=config.mesh.model_rows,
        model=config.mesh.model,
        sequence_parallel=config.mesh.sequence_parallel,
        recompute=config.train.recompute,
        microbatches=config.train.microbatches,
        microbatch_sequences=config.microbatch_rows,
        shard=config.optim.shard,
        overlap=config.train.overlap,
        unroll=config.train.unroll is True,
        bytes=choice.bytes,
        fits=choice.bytes <= available,
        seconds=time.total if time else None,
        mfu=time.mfu if time else None,
        reason=_reason(choice, ranking, available),
    )


def _reason(choice: Choice, ranking: Ranking, available: int) -> str:
    """Say why a layout is slower than the fastest; empty for the fastest."""
    if choice.bytes > available:
        return needs(choice.bytes, available)
    if choice.time is None:
        excess = (choice.at_least or 0.0) / ranking.best.timed.total - 1
        return f'at least {excess:+.1%}; slower than another layout of its mesh'
    if choice.config == ranking.best.config:
        return ''
    return why_slower(choice.time, ranking.best.timed)


def _paper_tflops(config: Config, time: StepTime) -> float | None:
    if not is_gpt(config.model):
        return None
    recompute = config.train.recompute == 'full'
    flops = narayanan_flops(
        config.model,
        batch_size=config.train.batch_size,
        seq_len=config.train.seq_len,
        recompute=recompute,
    )
    return flops / time.total / time.devices / 1e12
