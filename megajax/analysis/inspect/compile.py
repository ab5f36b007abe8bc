"""Compile the training step with abstract arguments, for devices that you do not have.

`megajax.analysis.inspect.child.compile_in_child` runs this module in a child process.
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from megajax.analysis.inspect.child import telling_parent
from megajax.core.config import Config
from megajax.core.hardware.targets import compile_without_gpu, gpu_devices
from megajax.core.hardware.tpus import TPUS, compile_without_tpu, tpu_devices
from megajax.core.parallel.mesh import concrete, mesh_for, mesh_of
from megajax.core.train.compiled_step import CompiledStep, record_step
from megajax.core.train.feed import abstract_batch
from megajax.core.train.step import init_state, make_train_step
from megajax.xla.hlo.dump import compile_with_buffers


def compile_step(
    config: Config,
    mesh: Mesh,
    devices_per_host: int,
    compiler_options: Mapping[str, str | bool] | None = None,
    *,
    buffers: bool = False,
) -> CompiledStep:
    """Compile the training step in this process, for the devices of `mesh`.

    With `buffers`, jax's compilation cache is not used.
    """
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        state = concrete(jax.eval_shape(lambda: init_state(config)))
        options = dict(compiler_options or {})
        lowered = make_train_step(config).lower(state, abstract_batch(config))
        compile_with = _compiler(mesh.devices.flat[0].platform, lowered)
        compiled, at_peak = (
            compile_with_buffers(compile_with, options) if buffers else (compile_with(options), ())
        )
        return record_step(
            compiled,
            state,
            mesh,
            devices_per_host=devices_per_host,
            seconds=time.perf_counter() - start,
            buffers=at_peak,
        )


def compile_for(
    config: Config,
    target: str,
    hosts: int,
    compiler_options: Mapping[str, str | bool] | None = None,
    *,
    buffers: bool = False,
) -> CompiledStep:
    """Compile in this process, for the mesh of `config` over `hosts` of the target's devices.

    The devices are simulated if the target is a CPU.
    """
    per_host = config.mesh.num_devices // hosts
    if target == 'cpu':
        mesh = mesh_for(config)
    elif target in TPUS:
        mesh = mesh_of(tpu_devices(target, config.mesh.num_devices), config.mesh.sizes)
    else:
        devices = gpu_devices(target, hosts=hosts, per_host=per_host)
        mesh = mesh_of(devices, config.mesh.sizes)
    return compile_step(config, mesh, per_host, compiler_options, buffers=buffers)


def _compiler(platform: str, lowered: Lowered) -> Callable[[dict[str, Any]], Compiled]:
    """Return the function that compiles a lowered step with options for an absent device."""
    if platform == 'cpu':
        return lowered.compile
    without = compile_without_tpu if platform == 'tpu' else compile_without_gpu
    return functools.partial(without, lowered.compile)


def _main(task: str, result: str, target: str, hosts: str) -> None:
    config = Config.model_validate_json(Path(task).read_bytes())
    compiled = compile_for(config, target, int(hosts), buffers=target not in TPUS)
    Path(result).write_text(compiled.to_json())


if __name__ == '__main__':
    with telling_parent():
        _main(*sys.argv[1:])
