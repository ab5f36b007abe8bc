"""A run of two GPUs whose trace is written by hand."""

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path

from jax.profiler import ProfileData

from megajax.core.config import dump, load

PROGRAM = """HloModule jit_train_step, is_scheduled=true, num_partitions=2

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[8,16], a: f32[16,64], b: f32[64,32]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %a = f32[16,64]{1,0} parameter(1)
  %b = f32[64,32]{1,0} parameter(2)
  %reduce = f32[8,16]{1,0} all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add
  %dot = f32[16,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %reduced = f32[8,16]{1,0} all-reduce-done(%reduce)
  ROOT %result = f32[8,16]{1,0} negate(%reduced)
}
"""
Ran = tuple[str, int, int]  # an instruction, and the microseconds at which it begins and ends
# The second device is late: it multiplies for longer, and the first waits for it.
FIRST: list[Ran] = [('dot', 10, 30), ('reduce', 20, 50), ('result', 60, 70)]
SECOND: list[Ran] = [('dot', 10, 40), ('reduce', 40, 50), ('result', 60, 70)]


def event(metadata: int, start: int, end: int, stats: str) -> str:
    times = f'offset_ps: {start}000000 duration_ps: {end - start}000000'
    return f'events {{ metadata_id: {metadata} {times} {stats} }}'


def gpu_plane(number: int, ran: Iterable[Ran]) -> str:
    """A device whose transfers are on a stream of their own."""
    ran = [*ran]
    fixed = ['hlo_op', 'hlo_module', 'gpu_device_name', 'jit_train_step']
    names = [*fixed, *dict.fromkeys(name for name, _, _ in ran)]
    metadata = ''.join(
        f'stat_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
        for key, name in enumerate(names)
    )
    lines = ''.join(
        f'lines {{ id: {stream} name: "Stream #{stream}(Compute)" {events} }}'
        for stream in (13, 20)
        for events in [
            ''.join(
                event(1, start, end, f'stats {{ metadata_id: 0 ref_value: {names.index(name)} }} '
                      'stats { metadata_id: 1 ref_value: 3 }')
                for name, start, end in ran
                if (name == 'reduce') == (stream == 20)
            )
        ]
    )  # fmt: skip
    return f"""planes {{ name: "/device:GPU:{number}" {metadata} {lines}
      stats {{ metadata_id: 2 str_value: "NVIDIA H100 80GB HBM3" }}
      event_metadata {{ key: 1 value {{ id: 1 name: "a_kernel" }} }} }}"""


def host_plane(steps: Sequence[int]) -> str:
    """The steps, one after the other, of 100 microseconds each."""
    events = ' '.join(
        event(1, 100 * place, 100 * place + 100, f'stats {{ metadata_id: 1 int64_value: {step} }}')
        for place, step in enumerate(steps)
    )
    return f"""planes {{ name: "/host:CPU"
      event_metadata {{ key: 1 value {{ id: 1 name: "train" }} }}
      stat_metadata {{ key: 1 value {{ id: 1 name: "step_num" }} }}
      lines {{ id: 1 name: "python" {events} }} }}"""


def write_gpu_run(
    folder: Path,
    processes: list[list[list[Ran]]],
    *overrides: str,
    program: str = PROGRAM,
    steps: Sequence[int] = (11,),
    hosts: Sequence[str] = ('node-0', 'node-1', 'node-2'),
) -> Path:
    """A run with a trace of each process, which has the events of its devices."""
    config = load('tiny', ['mesh.data=1', 'mesh.model=2', *overrides])
    folder.joinpath('profile').mkdir(parents=True)
    for path in (folder / 'config.yaml', folder / 'profile/config.yaml'):
        path.write_text(dump(config))
    (folder / 'profile/step.hlo.gz').write_bytes(gzip.compress(program.encode()))
    for process, devices in enumerate(processes):
        inside = f'profile/process_{process}' if len(processes) > 1 else 'profile'
        traces = folder / inside / 'plugins/profile/2026_01_01_00_00_00'
        traces.mkdir(parents=True)
        planes = [gpu_plane(number, ran) for number, ran in enumerate(devices)]
        content = ProfileData.text_proto_to_serialized_xspace(host_plane(steps) + ''.join(planes))
        (traces / f'{hosts[process]}.xplane.pb').write_bytes(content)
    return folder
