"""One rank of a large job on one card, for `benchmarks/gpu.py`.

JAX can pretend that the machine has more GPUs (`jax_mock_gpu_topology`): it compiles the program of
the whole job and runs one rank of it with its real kernels, and its collectives do nothing. Time,
memory and kernels of everything but communication are then those of the job, compared with
`megajax plan` and the roofline of `megajax inspect`. Numbers that the step computes mean nothing,
so `never_launched` lists kernels of the program that did not run in a traced step: a guard that
skipped work would show there.

On a CPU the same mesh is simulated in full, at a tiny size.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from gpu_step import SMALL, STEP, TINY, Sensors, prepared, timed

# By the name of a job: its preset, the hosts of eight GPUs, and what differs from the preset.
JOBS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    '8b-tp8': (
        'llama3_8b',
        1,
        (
            *('mesh.data=1', 'mesh.model=8', 'mesh.sequence_parallel=true', 'optim.shard=none'),
            *('train.batch_size=2', 'train.microbatches=1', 'train.seq_len=8192'),
            'train.recompute=none',
        ),
    ),
    '8.3b-512': (
        'megatron_8.3b',
        64,
        (*('mesh.data=64', 'mesh.model=8', 'train.batch_size=512'), 'train.recompute=full'),
    ),
    '70b-128': (
        'llama3_70b',
        16,
        (
            *('mesh.data=4', 'mesh.stages=4', 'mesh.model=8', 'mesh.sequence_parallel=true'),
            *('train.batch_size=64', 'train.microbatches=16', 'train.seq_len=8192'),
            *('optim.shard=optimizer', 'train.recompute=full'),
        ),
    ),
}
# On simulated CPU devices: as many axes, of two devices each.
SMALL_MESH = {
    '8b-tp8': ('mesh.data=1', 'mesh.model=2', 'mesh.sequence_parallel=true'),
    '8.3b-512': ('mesh.data=2', 'mesh.model=2'),
    '70b-128': ('mesh.data=2', 'mesh.stages=2', 'mesh.model=2', 'train.microbatches=4'),
}


def config_of(job: str) -> Any:
    """Return the config of a job and the hosts that it takes."""
    import megajax

    preset, hosts, more = JOBS[job]
    if SMALL:
        preset, more = 'tiny', (*TINY, *SMALL_MESH[job], 'train.batch_size=8', 'train.seq_len=64')
    return megajax.load(preset, [*STEP, *more]), hosts


def rank(job: str) -> dict[str, Any]:
    """Milliseconds, bytes and kernels of one rank, with what `plan` says of them."""
    config, hosts = config_of(job)
    import jax

    if SMALL:
        jax.config.update('jax_num_cpu_devices', config.mesh.num_devices)
    else:  # as many hosts, each of eight processes with one GPU
        jax.config.update('jax_mock_gpu_topology', f'{hosts}x8x1')
    from megajax.core.hardware.records import hardware
    from megajax.core.parallel.mesh import axis_sizes, mesh_of

    # `make_mesh` would ask the other processes for their hosts, and there are none.
    devices = jax.devices()[: config.mesh.num_devices]
    compiled, state, batch, seconds = prepared(
        config, mesh_of(devices, axis_sizes(**config.mesh.sizes))
    )
    held: list[Any] = [state, None]
    del state

    def run() -> None:
        held[0], held[1] = compiled(held[0], batch)
        jax.block_until_ready(held[1])

    with Sensors() as sensors:
        times = timed(run, steps=3 if SMALL else 10)
    stats = compiled.memory_analysis()
    gpu = compared_with(devices[0].device_kind)
    return {
        'device': devices[0].device_kind,
        'compared_with': gpu,
        'devices': len(devices),
        'jax': jax.__version__,
        'compile_s': round(seconds, 1),
        **times,
        **sensors.result(),
        'peak_bytes': (jax.local_devices()[0].memory_stats() or {}).get('peak_bytes_in_use'),
        'compiled_peak_bytes': getattr(stats, 'peak_memory_in_bytes', None),
        **planned(config, gpu),
        **traced(config, compiled, run, hardware(gpu)),
    }


def compared_with(device_kind: str) -> str:
    """The GPU whose record is used: an H100 if this one has none, or none of its network."""
    from megajax.core.hardware.records import hardware_of

    known = hardware_of(device_kind)
    return device_kind if known and known.inside_host and known.across_hosts else 'h100'


def planned(config: Any, gpu: str) -> dict[str, Any]:
    """What `megajax plan` says of the step on such GPUs, without communication."""
    import megajax

    plan = megajax.plan(config, gpu=gpu, gpus=config.mesh.num_devices)
    return {
        'planned_compute_ms': 1e3 * (plan.matmul + plan.memory_bound + plan.launches),
        'planned_bytes': plan.layout.bytes,
        'planned_step_ms': 1e3 * plan.seconds,
    }


def traced(config: Any, compiled: Any, run: Any, record: Any) -> dict[str, Any]:
    """Kernels that a step launches, by a trace of two, and those of the program that never ran."""
    from megajax.analysis.profile.measure import measure
    from megajax.analysis.profile.predict import predictions
    from megajax.analysis.profile.trace import read_trace
    from megajax.analysis.profile.work import ProgramWork
    from megajax.core.config.overlap_rules import resolved
    from megajax.xla.hlo.kernels import kernels
    from megajax.xla.hlo.program import Program
    from megajax.xla.hlo.text import program_text

    with tempfile.TemporaryDirectory() as folder:
        import jax

        with jax.profiler.trace(folder):
            for number in (1, 2):
                with jax.profiler.StepTraceAnnotation('train', step_num=number):
                    run()
        (file,) = Path(folder).glob('plugins/profile/*/*.xplane.pb')
        trace = read_trace(file)
    text = program_text(compiled)
    program = Program(text)
    module = text.split(None, 2)[1].rstrip(',')
    config = resolved(config, on_gpu=trace.gpu is not None)
    per_host = min(8, program.num_devices)
    work = ProgramWork(program, config, config.mesh.sizes, record, per_host)
    (mine, *_) = measure([trace], sorted(trace.steps), module, work)
    compared = predictions(config, work, record, mine, program.num_devices, per_host)
    wanted = {kernel.instruction.name for kernel in kernels(program)}
    return {
        'launches': sum(map(mine.launches, mine.runs)),
        'kernels_of_the_program': sum(kernel.times for kernel in kernels(program)),
        'never_launched': sorted(wanted - set(mine.runs))[:20],
        'parts_ms': {
            line.part: [round(1e3 * s, 2) for s in (line.measured, line.roofline, line.plan)]
            for line in compared
        },
    }


if __name__ == '__main__':
    import sys

    print(json.dumps(rank(sys.argv[1])))
