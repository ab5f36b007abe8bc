"""What rounding to 8 bits does to a step: `python benchmarks/fp8.py OUT.md`.

The gradients of the first step of tiny on one device, in bf16 and in fp8, beside those in fp32, by
parameter and layer; and the losses of a run of 200 steps on 2x2 devices in bf16 and in fp8. On CPUs
fp8 is emulated: operands are rounded to 8 bits and multiplied in fp32. Takes some five minutes on
two idle cores.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np

import megajax
from megajax.core.parallel.mesh import mesh_for
from megajax.core.parallel.placements import parameter_name
from megajax.core.train.feed import place_batch
from megajax.core.train.first_step import with_scales
from megajax.core.train.gradients import make_gradients
from megajax.core.train.scaling import scales_of
from megajax.core.train.step import init_state
from megajax.runtime.data import load_data

STEPS = 200
DTYPES = 'bfloat16', 'fp8'
Gradients = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    out = parser.parse_args().out
    jax.config.update('jax_num_cpu_devices', 4)  # for the runs, which have four
    exact, *rounded = (gradients(dtype) for dtype in ('float32', *DTYPES))
    lines = [
        f'jax {jax.__version__}',
        '',
        '| gradient | bf16 | fp8 |',
        '|---|---|---|',
        *(
            f'| {name} | {error(x, rounded[0][name]):.1e} | {error(x, rounded[1][name]):.1e} |'
            for name, x in exact.items()
        ),
        '',
        f'| after {STEPS} steps | last ten losses | validation, nats per token |',
        '|---|---|---|',
        *map(trained, DTYPES),
    ]
    out.write_text('\n'.join([*lines, '']))
    print('\n'.join(lines))


def gradients(dtype: str) -> Gradients:
    """The gradients of the first step, those of each layer by themselves."""
    config = megajax.load('tiny', [f'train.dtype={dtype}', 'mesh.data=1', 'mesh.model=1'])
    with jax.set_mesh(mesh_for(config)):
        batch = place_batch(load_data(config).train[0])
        state = with_scales(config, init_state(config), batch)
        scales = None if state.recent is None else scales_of(state.recent)
        step = jax.jit(make_gradients(config))
        _, result, _ = step(state.params, batch, jax.random.key(0), None, scales)
        return dict(by_layer(result))


def by_layer(tree: object) -> Iterator[tuple[str, np.ndarray]]:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = parameter_name(path)
        if not name.startswith('layers.'):
            yield name, np.asarray(x)
            continue
        for index, of_layer in enumerate(np.asarray(x)):
            yield f'{name.replace("layers.", f"layer {index}, ")}', of_layer


def error(exact: np.ndarray, x: np.ndarray) -> float:
    """The norm of the difference, relative to that of the exact gradient."""
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def trained(dtype: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        keys = f'train.dtype={dtype}', f'train.steps={STEPS}', f'train.eval_every={STEPS}'
        run = megajax.train(megajax.load('tiny', [*keys, f'run.dir={folder}/run']))
        losses = [line['loss'] for line in run.metrics if 'loss' in line]
        (validation,) = (x for x in [line.get('validation_loss') for line in run.metrics][-1:])
    return f'| {dtype} | {np.mean(losses[-10:]):.4f} | {validation:.4f} |'


if __name__ == '__main__':
    main()
