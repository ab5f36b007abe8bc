"""What is read from traces: of a run on CPUs, and of a GPU as XLA's collector writes them."""

from pathlib import Path

import pytest
from jax.profiler import ProfileData

from megajax.analysis.profile.trace import Event, Window, read_trace
from megajax.core.config import ConfigError

# As xla/backends/profiler/gpu/cupti_collector.cc writes it: a line for each stream, whose events
# refer to their texts, beside a line of the host's launches and one that repeats the kernels.
GPU = """
planes {
  name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "train" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } }
  lines { id: 1 name: "python"
    events { metadata_id: 1 duration_ps: 9000000 stats { metadata_id: 1 int64_value: 11 } } }
}
planes {
  name: "/device:GPU:1"
  stats { metadata_id: 9 str_value: "NVIDIA H100 80GB HBM3" }
  event_metadata { key: 1 value { id: 1 name: "nvjet_hsh_128x256" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllReduce" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyH2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  stat_metadata { key: 3 value { id: 3 name: "gemm_fusion.1" } }
  stat_metadata { key: 4 value { id: 4 name: "all-reduce-start" } }
  stat_metadata { key: 5 value { id: 5 name: "jit_train_step" } }
  stat_metadata { key: 9 value { id: 9 name: "gpu_device_name" } }
  lines { id: 13 name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 2000000
      stats { metadata_id: 1 ref_value: 3 } stats { metadata_id: 2 ref_value: 5 } } }
  lines { id: 20 name: "Stream #20(Compute)"
    events { metadata_id: 2 offset_ps: 2000000 duration_ps: 3000000
      stats { metadata_id: 1 ref_value: 4 } stats { metadata_id: 2 ref_value: 5 } }
    events { metadata_id: 3 offset_ps: 7000000 duration_ps: 1000000 } }
  lines { id: 30 name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 2000000
      stats { metadata_id: 1 ref_value: 3 } stats { metadata_id: 2 ref_value: 5 } } }
}
"""


def write_gpu_trace(path: Path, text: str = GPU) -> Path:
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


def test_the_streams_of_a_gpu_are_read_once_and_its_name(tmp_path):
    trace = read_trace(write_gpu_trace(tmp_path / 'node-3.xplane.pb'))
    assert (trace.host, trace.gpu) == ('node-3', 'NVIDIA H100 80GB HBM3')
    (step, window), (device, events) = *trace.steps.items(), *trace.devices.items()
    assert (step, device) == (11, 1)
    assert window == pytest.approx(Window(0, 9e-6))
    expected = [
        Event('gemm_fusion.1', 'jit_train_step', 1e-6, 3e-6, 'nvjet_hsh_128x256'),
        Event('all-reduce-start', 'jit_train_step', 2e-6, 5e-6, 'ncclDevKernel_AllReduce'),
        Event('MemcpyH2D', '', 7e-6, 8e-6, 'MemcpyH2D'),
    ]
    assert [event[:2] for event in events] == [event[:2] for event in expected]
    for event, wanted in zip(events, expected, strict=True):
        assert event[2:4] == pytest.approx(wanted[2:4])
        assert event.kernel == wanted.kernel


def test_equal_names_are_one_object_and_events_outside_the_steps_are_left_out(tmp_path):
    stats = 'stats { metadata_id: 1 ref_value: 3 } stats { metadata_id: 2 ref_value: 5 }'
    more = ''.join(
        f'events {{ metadata_id: 1 offset_ps: {start}000000 duration_ps: 1000000 {stats} }}'
        for start in (5, 20)  # the step ends after 9
    )
    line = 'name: "Stream #13(Compute)"'
    text = GPU.replace(line, f'{line} {more}')
    (events,) = read_trace(write_gpu_trace(tmp_path / 'a.xplane.pb', text)).devices.values()
    same = [event for event in events if event.name == 'gemm_fusion.1']
    assert sorted(event.start for event in same) == pytest.approx([1e-6, 5e-6])
    for names in zip(*((event.name, event.module, event.kernel) for event in same), strict=True):
        assert len({id(name) for name in names}) == 1


def test_each_simulated_device_of_a_process_has_its_own_events_within_the_steps(traced_run):
    (path,) = (traced_run / 'profile').rglob('*.xplane.pb')
    trace = read_trace(path)
    assert trace.gpu is None
    assert [*trace.steps] == [2, 3]
    assert [*trace.devices] == [0, 1, 2, 3]
    names = [sorted(event.name for event in events) for events in trace.devices.values()]
    assert names[0] == names[1] == names[2] == names[3]
    for event in (event for events in trace.devices.values() for event in events):
        assert event.module == 'jit_train_step'
        assert any(
            step.start < event.start <= event.end <= step.end for step in trace.steps.values()
        )


@pytest.mark.parametrize(('written', 'end'), [(6, 6e-6), (12, 9e-6)])
def test_work_that_goes_on_in_other_threads_lasts_to_its_end_within_the_step(
    tmp_path, written, end
):
    text = """planes { name: "/host:CPU"
      event_metadata { key: 1 value { id: 1 name: "train" } }
      event_metadata { key: 2 value { id: 2 name: "dot.1" } }
      event_metadata { key: 3 value { id: 3 name: "end: dot.1" } }
      stat_metadata { key: 1 value { id: 1 name: "step_num" } }
      stat_metadata { key: 2 value { id: 2 name: "hlo_op" } }
      stat_metadata { key: 3 value { id: 3 name: "hlo_module" } }
      stat_metadata { key: 4 value { id: 4 name: "device_ordinal" } }
      stat_metadata { key: 5 value { id: 5 name: "_p" } }
      stat_metadata { key: 6 value { id: 6 name: "_c" } }
      lines { id: 1 name: "python"
        events { metadata_id: 1 duration_ps: 9000000 stats { metadata_id: 1 int64_value: 1 } } }
      lines { id: 2 name: "tf_XLAEigen/1"
        events { metadata_id: 2 offset_ps: 1000000 duration_ps: 1000000
          stats { metadata_id: 2 str_value: "dot.1" } stats { metadata_id: 3 str_value: "step" }
          stats { metadata_id: 4 int64_value: 0 } stats { metadata_id: 5 uint64_value: 77 } } }
      lines { id: 3 name: "tf_XLAEigen/2"
        events { metadata_id: 3 offset_ps: 6000000 duration_ps: 0
          stats { metadata_id: 6 uint64_value: 77 } } } }"""
    trace = read_trace(
        write_gpu_trace(tmp_path / 'host.xplane.pb', text.replace('6000000', f'{written}000000'))
    )
    (event,) = trace.devices[0]
    assert (event.start, event.end) == pytest.approx((1e-6, end))


@pytest.mark.parametrize('content', [b'', b'no trace', 'half'])
def test_a_file_that_is_no_complete_trace_is_named(content, traced_run, tmp_path):
    (path,) = (traced_run / 'profile').rglob('*.xplane.pb')
    whole = path.read_bytes()
    broken = tmp_path / 'broken.xplane.pb'
    broken.write_bytes(whole[: len(whole) // 2] if content == 'half' else content)
    with pytest.raises(ConfigError, match=r'broken.xplane.pb .*trace some steps again'):
        read_trace(broken)
