"""Hand-written programs for a GPU, executed on simulated CPU devices."""

from collections.abc import Sequence

import jax
import numpy as np

from megajax.xla.emulate.execute import compile_on_cpu
from megajax.xla.emulate.translate import for_cpu


def executed(text: str, *inputs: np.ndarray, exact: bool = False) -> list[np.ndarray]:
    """The results on all devices, stacked; so are the inputs, a row for each device."""
    count = len(inputs[0])
    devices = jax.devices()[:count]
    program = compile_on_cpu(for_cpu(text, count, exact=exact), devices)
    mesh = jax.sharding.Mesh(np.array(devices), ('device',))
    on = jax.sharding.NamedSharding(mesh, jax.P('device'))
    arrays = [jax.device_put(x.reshape(-1, *x.shape[2:]), on) for x in inputs]
    made = program.execute_sharded(arrays).disassemble_into_single_device_arrays()
    return [np.stack([np.asarray(piece) for piece in pieces]) for pieces in made]


def module(lines: Sequence[str], *others: str) -> str:
    """A module with an entry of these lines, the last of which is its result."""
    body = '\n'.join(f'  {"ROOT " if line is lines[-1] else ""}{line}' for line in lines)
    parts = '\n\n'.join([*others, f'ENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}'])
    return f'HloModule jit_f, is_scheduled=true, num_partitions=8\n\n{parts}\n'


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}"""
