"""Reduce known miscompiles, and a training step with one of them, to a few instructions of HLO.

    python benchmarks/reduce_hlo.py FILE

writes FILE.json and FILE.md. Needs XLA's GPU compiler, but no GPU.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from megajax.analysis.inspect import emulated_step
from megajax.core.config import Config
from megajax.core.hardware.targets import WITHOUT_GPU, gpu_devices
from megajax.core.model import linear
from megajax.core.train import step
from megajax.xla.emulate.bisect import dump_options
from megajax.xla.hlo.dump import without_cache
from megajax.xla.hlo.program import Program
from megajax.xla.miscompiles import REGISTER, Miscompile, ask
from megajax.xla.miscompiles.entry import find
from megajax.xla.miscompiles.scaled_bias import SCALED_BIAS
from megajax.xla.reduce.execute import FAILURES, Compiler
from megajax.xla.reduce.folder import reduce_dumps

TARGET = 'h100'
CUBLAS = {'xla_gpu_enable_triton_gemm': False}
STEP = {
    'model': {
        'vocab_size': 128, 'hidden_size': 64, 'num_layers': 2, 'num_heads': 8, 'head_dim': 64,
        'max_seq_len': 32, 'dropout': 0.1,
    },
    'mesh': {'data': 2},
    'train': {'batch_size': 8, 'seq_len': 32, 'dtype': 'float32', 'recompute': 'full'},
}  # fmt: skip


def main() -> None:
    """Write the table and the reduced modules."""
    jax.config.update('jax_num_cpu_devices', 8)
    rows = [_entry(entry) for entry in REGISTER]
    rows.append(_step())
    file = Path(sys.argv[1])
    file.with_suffix('.json').write_text(json.dumps(rows, indent=1) + '\n')
    file.with_suffix('.md').write_text(_table(rows))


def _entry(entry: Miscompile) -> dict[str, Any]:
    row = {'fault': entry.name, 'jax': jax.__version__}
    if entry.platform != 'gpu':
        return row | {'why': 'the fault is in the compiler for CPUs'}
    if not ask(entry, TARGET).is_faulty:
        return row | {'why': 'this XLA does not have the fault'}
    repro = entry.repro

    def is_detected(text: str) -> bool:
        try:
            return bool(find(entry, Program(compiler.optimized(text))))
        except FAILURES:
            return False

    with tempfile.TemporaryDirectory() as name, without_cache():
        dumps = Path(name, 'dumps')
        devices = gpu_devices(TARGET, hosts=1, per_host=repro.num_devices)
        repro.lower(devices).compile({**WITHOUT_GPU, **dump_options(dumps), **repro.options})
        compiler = Compiler(TARGET, repro.num_devices, repro.options)
        found = _reduced(dumps, compiler, None) or _reduced(dumps, compiler, is_detected)
    if found and entry.effect == 'wrong' and found['error'] == 0:
        return row | {'why': 'only parts that are correct match the detector'}
    return row | (found or {'why': 'no part that StableHLO can express shows the fault'})


def _step() -> dict[str, Any]:
    """Return the row of a step with a planted factor after each bias, which cuBLASLt scales."""
    linear.add_bias = lambda y, bias: 1.5 * (y + bias)
    for module in (step, emulated_step):
        setattr(module, 'step_options', lambda config: CUBLAS)  # noqa: B010
    row = {'fault': 'training step, scaled matmul whose bias is not scaled', 'jax': jax.__version__}
    if not ask(SCALED_BIAS, TARGET).is_faulty:
        return row | {'why': 'this XLA does not have the fault'}
    with tempfile.TemporaryDirectory() as name:
        dumps = Path(name, 'dumps')
        emulated_step.EmulatedStep(Config.model_validate(STEP), TARGET, dump_options(dumps))
        found = _reduced(dumps, Compiler(TARGET, 2, CUBLAS), None)
    return row | (found or {'why': 'no part shows the fault'})


def _reduced(dumps: Path, compiler: Compiler, is_faulty: Any) -> dict[str, Any] | None:
    start, cpu = time.perf_counter(), time.process_time()
    folder = dumps.parent / 'hlo'
    summary = reduce_dumps(dumps, folder, compiler, is_faulty=is_faulty)
    if summary is None:
        return None
    return summary | {
        'check': 'results differ' if is_faulty is None else 'detector',
        'seconds': round(time.perf_counter() - start, 1),
        'cpu_seconds': round(time.process_time() - cpu, 1),
        'module': (folder / 'reduced.hlo').read_text(),
    }


def _table(rows: list[Mapping[str, Any]]) -> str:
    lines = [
        f'jax {jax.__version__}, {TARGET}, {os.cpu_count()} CPU cores that other work shared',
        '',
        '| fault | instructions before | after | error | check | pass | CPU s |',
        '|---|---|---|---|---|---|---|',
    ]
    for row in rows:
        if 'why' in row:
            lines.append(f'| {row["fault"]} | | | | {row["why"]} | | |')
            continue
        error = '' if row['error'] is None else f'{row["error"]:.1e}'
        culprit = (row['pass'] or '').split(' ')[0]
        sizes = f'{row["original_instructions"]:,} | {row["instructions"]}'
        tail = f'{row["check"]} | {culprit} | {row["cpu_seconds"]}'
        lines.append(f'| {row["fault"]} | {sizes} | {error} | {tail} |')
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    main()
