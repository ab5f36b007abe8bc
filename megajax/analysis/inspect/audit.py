"""Audit a compiled step: compare it with Megatron, and report schedule, memory and lint."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megajax.analysis.inspect.expert_lint import of_experts
from megajax.analysis.inspect.kernels import records
from megajax.analysis.inspect.lint import known_miscompiles, lint, replicated_over_model
from megajax.analysis.inspect.memory_result import Memory
from megajax.analysis.inspect.overlap import rates_of, timeline_of, transfer_seconds
from megajax.analysis.inspect.peak import at_peak
from megajax.analysis.inspect.pipeline_lint import (
    gathered_at_edges,
    kept_gradients,
    undeclared_permutes,
)
from megajax.analysis.inspect.products import count_products, products_run_twice
from megajax.analysis.inspect.result import (
    CollectiveInstruction,
    Inspection,
    Overlap,
    Pipeline,
    Row,
    Transfer,
    Verdict,
)
from megajax.analysis.inspect.sites import ORDER, site_of
from megajax.analysis.inspect.zero3_lint import kept_weights
from megajax.core.config import Config, dump
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.collective import Expected, Site
from megajax.core.counts.expert_rows import LATER_ROUNDS
from megajax.core.counts.megatron import expected, stated
from megajax.core.counts.runs import ticks
from megajax.core.hardware.records import Hardware, hardware
from megajax.core.hardware.targets import GPUS
from megajax.core.hardware.tpus import TPUS, Tpu
from megajax.core.train.compiled_step import CompiledStep
from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.cycles import estimated_cycles
from megajax.xla.hlo.groups import crosses_hosts, groups_text
from megajax.xla.hlo.kernels import kernels
from megajax.xla.hlo.program import Program

NUM_REPLICATED = 5


def audit(
    config: Config, compiled: CompiledStep, target: str, gpu: Hardware | None = None
) -> Inspection:
    """Return the complete inspection of a compiled step.

    `gpu` is the GPU whose rates and memory count, by default the target's.
    """
    on_gpu = target in GPUS
    gpu = (gpu or hardware(target)) if on_gpu else None
    config = resolved(config, on_gpu=on_gpu)
    program = Program(compiled.text, skipped=LATER_ROUNDS)  # assumes a balanced load of experts
    every = collectives(program, compiled.mesh)
    placed = [collective for collective in every if collective.times]
    wanted = expected(config)
    rows = rows_of(config, placed, wanted)
    schedule = _schedule(config, program, placed, gpu, compiled.devices_per_host)
    products = count_products(config, program, target, gpu)
    twice = products_run_twice(config, program, products) if on_gpu else ()
    return Inspection(
        config=dump(config),
        target=target,
        mesh=compiled.mesh,
        devices_per_host=compiled.devices_per_host,
        overlap=config.train.overlap,
        unrolled=config.train.unroll is True,
        jax_version=compiled.jax_version,
        compile_seconds=compiled.seconds,
        rows=rows,
        pipeline=_pipeline(config),
        collectives=_instructions(config, program, every),
        ratios=_ratios(rows, compiled.mesh),
        schedule=schedule,
        overlapped_share=_overlapped_share(placed, compiled.mesh) if on_gpu else {},
        **_estimates(config, program, placed, gpu, compiled.devices_per_host),
        wire_seconds=_by_axis(compiled.mesh, schedule, lambda overlap: overlap.seconds),
        hidden_seconds=_by_axis(compiled.mesh, schedule, lambda overlap: overlap.hidden_seconds),
        estimated_cycles=estimated_cycles(program) if target in TPUS else None,
        products=products,
        memory=_memory(config, program, compiled, TPUS.get(target) or gpu),
        findings=lint(
            config,
            compiled,
            placed,
            wanted,
            [
                *known_miscompiles(program, target),
                *twice,
                *kept_weights(config, program, placed),
                *of_experts(config, placed),
                *undeclared_permutes(compiled.mesh, placed),
                *gathered_at_edges(
                    placed, few_kv_heads=config.model.num_kv_heads < config.mesh.model
                ),
                *kept_gradients(config, program),
            ],
        ),
    )


def rows_of(config: Config, placed: Sequence[Collective], wanted: Sequence[Expected]) -> list[Row]:
    """Return a row for each site, phase and axis: what was placed there, and what is expected."""
    at = defaultdict[Site, list[Collective]](list)
    for collective in placed:
        at[site_of(collective, config)].append(collective)
    allowed = stated(config)
    sites = {*at, *(other.site for other in wanted)}
    return [
        _row(site, at[site], *([x for x in each if x.site == site] for each in (wanted, allowed)))
        for site in sorted(sites, key=_place)
    ]


def _estimates(
    config: Config,
    program: Program,
    placed: Sequence[Collective],
    gpu: Hardware | None,
    devices_per_host: int,
) -> dict[str, Any]:
    """Return the fields of an inspection that describe kernels and their seconds on a GPU."""
    if gpu is None:
        return {'rates': None, 'compute_seconds': None, 'exposed_seconds': None, 'kernels': []}
    launched = [*kernels(program)]
    times = timeline_of(program, placed, launched, gpu, devices_per_host)
    return {
        'rates': rates_of(config, gpu),
        'compute_seconds': times.compute,
        'exposed_seconds': times.exposed,
        'kernels': records(program, launched, gpu),
    }


def _pipeline(config: Config) -> Pipeline | None:
    mesh = config.mesh
    if mesh.stages == 1:
        return None
    used, count = config.train.microbatches * mesh.virtual_stages, ticks(config)
    return Pipeline(ticks=count, idle_ticks=count - used, bubble=count / used - 1)


def _place(site: Site) -> tuple[int, int, str]:
    phases = 'forward', 'recompute', 'backward', 'step'
    return (
        ORDER.index(site.name) if site.name in ORDER else len(ORDER),
        phases.index(site.phase),
        site.axis,
    )


def _instructions(
    config: Config, program: Program, every: Sequence[Collective]
) -> list[CollectiveInstruction]:
    """Return a record for each collective instruction of the text."""
    by_name = defaultdict[tuple[str, str], list[Collective]](list)
    for collective in every:
        by_name[collective.computation, collective.instruction].append(collective)
    return [
        CollectiveInstruction(
            instruction=name,
            computation=computation,
            kind=' and '.join(dict.fromkeys(collective.kind for collective in arrays)),
            axis=arrays[0].axis,
            groups=groups_text(program.computations[computation].by_name[name]),
            arrays=[str(collective.whole) for collective in arrays],
            times=arrays[0].times,
            at_most=arrays[0].at_most,
            wire_bytes=sum(collective.times * collective.wire_bytes for collective in arrays),
            op_name=' and '.join(dict.fromkeys(collective.op_name for collective in arrays)),
            source=arrays[0].source,
            site=' and '.join(
                dict.fromkeys(site_of(collective, config).name for collective in arrays)
            ),
        )
        for (computation, name), arrays in by_name.items()
    ]


def _row(
    site: Site,
    placed: Sequence[Collective],
    wanted: Sequence[Expected],
    allowed: Sequence[Expected] = (),
) -> Row:
    ours = sum(collective.wire_bytes * collective.times for collective in placed)
    theirs, most = (
        sum(transfer.wire_bytes * transfer.times for transfer in transfers)
        for transfers in (wanted, allowed)
    )
    allowed, most = (allowed, most) if most > theirs else ([], 0.0)
    # Scalars are not compared with Megatron: each costs only a latency, and XLA joins them.
    scalars = all(collective.is_scalar for collective in placed)
    verdict: Verdict = (
        'equal'
        if (scalars and not wanted) or abs(ours - theirs) <= 1e-6 * theirs
        else 'less'
        if ours < theirs
        else 'expected'
        if ours <= (1 + 1e-6) * most
        else 'MORE'
    )
    return Row(
        site=site.name,
        phase=site.phase,
        axis=site.axis,
        placed=_transfers(
            (
                collective.kind,
                collective.whole,
                collective.times,
                collective.wire_bytes,
                collective.at_most,
            )
            for collective in placed
        ),
        megatron=_expected_transfers(wanted),
        sources=_sources(wanted),
        expected=_expected_transfers(allowed),
        expected_sources=_sources(allowed),
        wire_bytes=ours,
        megatron_wire_bytes=theirs,
        expected_wire_bytes=most,
        verdict=verdict,
    )


def _expected_transfers(transfers: Iterable[Expected]) -> list[Transfer]:
    return _transfers((x.kind, x.array, x.times, x.wire_bytes, False) for x in transfers)


def _sources(transfers: Iterable[Expected]) -> list[str]:
    return list(dict.fromkeys(transfer.source for transfer in transfers if transfer.source))


def _transfers(parts: Iterable[tuple[str, object, int, float, bool]]) -> list[Transfer]:
    times, wire = defaultdict[tuple[str, str], int](int), defaultdict[tuple[str, str], float](float)
    at_most = set[tuple[str, str]]()
    for kind, array, count, bytes_each, is_limit in parts:
        times[kind, str(array)] += count
        wire[kind, str(array)] += count * bytes_each
        if is_limit:
            at_most.add((kind, str(array)))
    return [
        Transfer(
            kind=kind,
            array=array,
            times=times[kind, array],
            wire_bytes=wire[kind, array],
            at_most=(kind, array) in at_most,
        )
        for kind, array in times
    ]


def _ratios(rows: list[Row], mesh: dict[str, int]) -> dict[str, float | None]:
    ratios: dict[str, float | None] = {}
    for axis in mesh:
        on_axis = [row for row in rows if axis in row.axis.split('+') and row.site != 'metrics']
        ours, theirs = (
            sum(row.wire_bytes for row in on_axis),
            sum(row.megatron_wire_bytes for row in on_axis),
        )
        ratios[axis] = ours / theirs if theirs else None
    return ratios


def _schedule(
    config: Config,
    program: Program,
    placed: list[Collective],
    gpu: Hardware | None,
    devices_per_host: int,
) -> list[Overlap]:
    if gpu is None:
        return []
    seconds = transfer_seconds(program, placed, gpu, devices_per_host)
    return [
        Overlap(
            site=site_of(collective, config).name,
            phase=site_of(collective, config).phase,
            axis=collective.axis,
            transfer=Transfer(
                kind=collective.kind,
                array=str(collective.whole),
                times=collective.times,
                wire_bytes=collective.times * collective.wire_bytes,
            ),
            synchronous=collective.synchronous,
            overlapped_gflops=collective.overlapped_flops / 1e9,
            seconds=collective.times * on_wire,
            hidden_seconds=collective.times * hidden,
            crosses_hosts=crosses_hosts(collective.groups, devices_per_host),
            source=collective.source,
        )
        for collective, (on_wire, hidden) in zip(placed, seconds, strict=True)
        if not collective.is_scalar
    ]


def _by_axis(
    mesh: dict[str, int],
    schedule: list[Overlap],
    seconds: Callable[[Overlap], float],
) -> dict[str, float]:
    on_axis = {
        axis: [overlap for overlap in schedule if axis in overlap.axis.split('+')] for axis in mesh
    }
    return {axis: sum(map(seconds, over)) for axis, over in on_axis.items() if over}


def _overlapped_share(placed: list[Collective], mesh: dict[str, int]) -> dict[str, float]:
    shares = {}
    for axis in mesh:
        on_axis = [collective for collective in placed if axis in collective.axes]
        total = sum(collective.wire_bytes * collective.times for collective in on_axis)
        overlapped = sum(
            collective.wire_bytes * collective.times
            for collective in on_axis
            if collective.overlapped_flops
        )
        if total:
            shares[axis] = overlapped / total
    return shares


def _memory(
    config: Config, program: Program, compiled: CompiledStep, device: Hardware | Tpu | None
) -> Memory:
    replicated = sorted(
        replicated_over_model(compiled), key=lambda placement: -placement.bytes_per_device
    )
    return Memory(
        arguments=compiled.arguments,
        temporaries=compiled.temporaries,
        outputs=compiled.outputs,
        device=device.memory if device else None,
        at_peak=at_peak(config, program, compiled) if compiled.buffers else [],
        largest_replicated=[
            (placement.name, placement.bytes_per_device)
            for placement in replicated[:NUM_REPLICATED]
        ],
    )
