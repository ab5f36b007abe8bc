"""Compilation of the training step with abstract arguments, for devices that need not exist."""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax import P
from jax.sharding import Mesh

from megajax.config import Config
from megajax.hardware.targets import compile_without_gpu, gpu_devices
from megajax.hlo.text import program_text
from megajax.inspect.child import call_in_child, telling_parent
from megajax.parallel.mesh import concrete, mesh_for, mesh_of
from megajax.parallel.placements import Placement, placements
from megajax.train.feed import abstract_batch
from megajax.train.step import init_state, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A compiled step: its text, its memory plan and the placements of its state.

    The plan has `arguments`, `temporaries` and `outputs`, in bytes per device.
    """

    text: str  # compiled HLO
    mesh: dict[str, int]  # size of each axis
    devices_per_host: int
    arguments: int
    temporaries: int
    outputs: int  # without those that reuse the memory of arguments
    parameters: list[Placement]
    optimizer: list[Placement]
    jax_version: str
    seconds: float  # compile time


def compile_step(
    config: Config,
    mesh: Mesh,
    devices_per_host: int,
    compiler_options: Mapping[str, str | bool] | None = None,
) -> CompiledStep:
    """Compile the training step in this process, for the devices of `mesh`."""
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        state = concrete(jax.eval_shape(lambda: init_state(config)))
        on_cpu = mesh.devices.flat[0].platform == 'cpu'
        options = dict(compiler_options or {})
        lowered = make_train_step(config).lower(state, abstract_batch(config))
        compiled = (
            lowered.compile(options) if on_cpu else compile_without_gpu(lowered.compile, options)
        )
        memory = compiled.memory_analysis()
        assert memory is not None
        return CompiledStep(
            text=program_text(compiled),
            mesh=dict(mesh.shape),
            devices_per_host=devices_per_host,
            arguments=memory.argument_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            parameters=placements(state.params),
            optimizer=placements(state.opt_state),
            jax_version=jax.__version__,
            seconds=time.perf_counter() - start,
        )


def compile_for(
    config: Config,
    target: str,
    hosts: int,
    compiler_options: Mapping[str, str | bool] | None = None,
) -> CompiledStep:
    """Compile in this process, for the mesh of `config` over `hosts` of the target's devices.

    The devices are simulated where the target is a CPU.
    """
    per_host = config.mesh.num_devices // hosts
    if target == 'cpu':
        mesh = mesh_for(config)
    else:
        devices = gpu_devices(target, hosts=hosts, per_host=per_host)
        mesh = mesh_of(devices, config.mesh.sizes)
    return compile_step(config, mesh, per_host, compiler_options)


def compile_in_child(config: Config, target: str, hosts: int) -> CompiledStep:
    """Compile in a child process, so that the caller's backend and devices stay unchanged."""
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder, 'task'), Path(folder, 'result')
        task.write_text(config.model_dump_json())
        call_in_child(__name__, task, result, target, hosts, target=target)
        return _from_json(result.read_text())


def _from_json(text: str) -> CompiledStep:
    fields = json.loads(text)
    for name in ('parameters', 'optimizer'):
        fields[name] = [_placement(**placement) for placement in fields[name]]
    return CompiledStep(**fields)


def _placement(*, shape: list[int], spec: list[Any], **others: Any) -> Placement:
    return Placement(
        shape=tuple(shape),
        spec=P(*(tuple(axis) if isinstance(axis, list) else axis for axis in spec)),
        **others,
    )


def _main(task: str, result: str, target: str, hosts: str) -> None:
    compiled = compile_for(Config.model_validate_json(Path(task).read_bytes()), target, int(hosts))
    # `default=tuple` because a PartitionSpec is not a tuple.
    Path(result).write_text(json.dumps(dataclasses.asdict(compiled), default=tuple))


if __name__ == '__main__':
    with telling_parent():
        _main(*sys.argv[1:])
