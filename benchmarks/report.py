"""The cost of keeping a run's compiled step, and of a report: `python benchmarks/report.py`.

Steps are compiled for simulated CPU devices, or for GPUs that are not there. Prints Markdown: the
size of a step's text, the CPU seconds of this process to keep it and to read and audit it, and the
CPU seconds and the size of a report on a run with many steps.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.report import write_report
from megajax.core.config import Config, dump
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.targets import compile_without_gpu, gpu_devices
from megajax.core.parallel.mesh import concrete, mesh_for, mesh_of
from megajax.core.train.compiled_step import CompiledStep
from megajax.core.train.feed import abstract_batch
from megajax.runtime.run.saved_step import PROGRAM, keep_step, read_step

STEPS = [
    ('tiny', 'cpu', []),
    ('gpt2_124m', 'h100', ['mesh.data=4', 'mesh.model=2']),
    ('megatron_1.2b', 'h100', ['mesh.data=8', 'mesh.model=1']),
]
LENGTHS = 1_000, 10_000, 100_000


def main() -> None:
    jax.config.update('jax_platforms', 'cpu')
    print('| step | target | text MB | step.hlo.gz MB | s to keep | s to read and audit |')
    print('|---|---|---|---|---|---|')
    for name, target, overrides in STEPS:
        print(
            f'| `{name}` | {target} | {" | ".join(of_step(name, target, overrides))} |', flush=True
        )
    print('\n| steps of the run | metrics.jsonl MB | s of a report | report.html kB |')
    print('|---|---|---|---|')
    for length in LENGTHS:
        print(f'| {length:,} | {" | ".join(of_run(length))} |', flush=True)


def of_step(name: str, target: str, overrides: list[str]) -> list[str]:
    """The sizes and seconds of a preset's step."""
    config = resolved(megajax.load(name, overrides), on_gpu=target != 'cpu')
    with tempfile.TemporaryDirectory() as place, jax.set_mesh(mesh_on(target, config)):
        folder, state = Path(place), concrete(jax.eval_shape(lambda: megajax.init_state(config)))
        lowered = megajax.make_train_step(config).lower(state, abstract_batch(config))
        compiled = (
            lowered.compile() if target == 'cpu' else compile_without_gpu(lowered.compile, {})
        )
        keep = seconds(lambda: keep_step(folder, config, compiled, state, seconds=0.0))
        kept = kept_in(folder)
        read = seconds(lambda: audit(config, kept_in(folder), target))
        sizes = len(kept.text), (folder / PROGRAM).stat().st_size
        return [*(f'{size / 1e6:.2f}' for size in sizes), f'{keep:.2f}', f'{read:.2f}']


def kept_in(folder: Path) -> CompiledStep:
    kept = read_step(folder)
    assert kept is not None
    return kept.compiled


def mesh_on(target: str, config: Config) -> jax.sharding.Mesh:
    if target == 'cpu':
        return mesh_for(config)
    return mesh_of(gpu_devices(target, hosts=1, per_host=8), config.mesh.sizes)


def of_run(length: int) -> list[str]:
    """The sizes and seconds of a report on a run of so many steps, with an evaluation every 500."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / 'config.yaml').write_text(dump(megajax.load('tiny', [f'train.steps={length}'])))
        with (folder / 'metrics.jsonl').open('w') as file:
            for step in range(1, length + 1):
                file.write(f'{json.dumps(line(step))}\n')
                if step % 500 == 0:
                    file.write(f'{json.dumps({"step": step, "validation_loss": 3.0})}\n')
        spent = seconds(lambda: write_report([folder]))
        page, metrics = folder / 'report.html', folder / 'metrics.jsonl'
        return [
            f'{metrics.stat().st_size / 1e6:.1f}',
            f'{spent:.1f}',
            f'{page.stat().st_size / 1e3:.0f}',
        ]


def line(step: int) -> dict[str, float]:
    """Metrics as a GPU's step has them."""
    names = 'finite', 'taken', 'grad_norm', 'lr', 'tflops_per_device', 'mfu', 'memory_bytes'
    loss = 11 * step**-0.12 + 0.01 * (step % 7)
    times = {'tokens_per_s': 1e6 + step % 11, 'step_ms': 900.1 + step % 5, 'data_wait_ms': 1.123}
    flags = dict.fromkeys(('overflow', 'spike', 'skipped_in_a_row', 'skipped_steps'), 0.0)
    return {'step': step, 'loss': loss, 'nll': loss, **dict.fromkeys(names, 1.0), **flags, **times}


def seconds(action: Callable[[], Any]) -> float:
    """The CPU seconds of all threads of this process."""
    start = time.process_time()
    action()
    return time.process_time() - start


if __name__ == '__main__':
    main()
