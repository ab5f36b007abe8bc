"""Compile reduced.hlo with XLA's GPU compiler, without a GPU: `python compile.py`.

The folder `dumps` then contains the module after each pass. Needs jax with its CUDA plugin.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import _jax, hlo, xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax.experimental import topologies

HERE = Path(__file__).parent


def main() -> None:
    """Compile the module, and print the last one that the compiler makes of it."""
    summary = json.loads((HERE / 'reduced.json').read_text())
    count = summary['devices']
    topology = topologies.get_topology_desc(
        platform='cuda',
        topology=f'1x1x{count}',
        target_config=(HERE / 'target.txtpb').read_text(),
    )
    devices = topology.devices
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, count
    ids = np.arange(count, dtype=np.int32)[None]
    options.device_assignment = xla_client.DeviceAssignment.create(ids)
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    dumps = {'xla_dump_to': str(HERE / 'dumps'), 'xla_dump_hlo_pass_re': '.*'}
    options.env_option_overrides = [*{**summary['options'], **dumps}.items()]
    module = hlo.hlo_module_from_text((HERE / 'reduced.hlo').read_text())
    stablehlo = _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        on = xla_client.DeviceList(tuple(devices))
        client: Any = devices[0].client  # type: ignore[attr-defined]
        compiled = client.compile(ir.Module.parse(stablehlo), on, options)
    print(compiled.hlo_modules()[0].to_string())


if __name__ == '__main__':
    main()
