"""What of the communication over `model` overlaps: `python benchmarks/overlap.py OUT.csv`.

The share of the bytes, and of the seconds on the wire those that products hide, of three presets'
training steps compiled for 2x4 H100s: with and without sequence parallelism, recompute none and
full, train.xla default and overlap, in bf16, one microbatch of 4 rows on each data shard, without
dropout. No GPU is needed (`pip install 'megajax[gpu-compile]'`). Lines that OUT.csv has already
are not done again, so that the run, some ten minutes on two cores, can be interrupted.
"""

import argparse
import csv
import itertools
import os
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import megajax
from megajax.inspect.audit import audit
from megajax.inspect.compile import compile_for

PRESETS = 'gpt2_345m', 'megatron_8.3b', 'llama3_8b'
KEYS = ['preset', 'sequence_parallel', 'recompute', 'xla']
SETTINGS = [*itertools.product(PRESETS, (False, True), ('none', 'full'), ('default', 'overlap'))]
MEASURED = ['share', 'hidden', 'wire_ms', 'hidden_ms', 'temporaries', 'products', 'errors', 'jax']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('out', type=Path)
    arguments = parser.parse_args()
    rows = read(arguments.out) if arguments.out.exists() else []
    done = {tuple(row[key] for key in KEYS) for row in rows}
    with arguments.out.open('a', newline='') as file:
        writer = csv.DictWriter(file, KEYS + MEASURED)
        if not done:
            writer.writeheader()
        for setting in SETTINGS:
            line = dict(zip(KEYS, map(str, setting), strict=True))
            if tuple(line.values()) not in done:
                line |= measure(**line)
                writer.writerow(line)
                file.flush()
                print(*line.values(), flush=True)
    print(table(read(arguments.out)))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


def measure(*, preset: str, sequence_parallel: str, recompute: str, xla: str) -> dict[str, str]:
    overrides = {
        'mesh.data': 2,
        'mesh.model': 4,
        'mesh.sequence_parallel': sequence_parallel.lower(),
        'train.recompute': recompute,
        'train.overlap': {'default': 'none', 'overlap': 'batch_split'}[xla],
        'train.batch_size': 8,
        'train.microbatches': 1,
        'train.dtype': 'bfloat16',
        'model.dropout': 0.0,
    }
    config = megajax.load(preset, [f'{key}={value}' for key, value in overrides.items()])
    found = audit(config, compile_for(config, 'h100', 1), 'h100')
    on_wire, hidden = found.wire_seconds['model'], found.hidden_seconds['model']
    return {
        'share': f'{found.overlapped_share["model"]:.4f}',
        'hidden': f'{hidden / on_wire:.4f}',
        'wire_ms': f'{1e3 * on_wire:.3f}',
        'hidden_ms': f'{1e3 * hidden:.3f}',
        'temporaries': str(found.memory.temporaries),
        'products': f'{found.products.ratio:.6f}',
        'errors': '; '.join(one.rule for one in found.findings if one.level == 'error'),
        'jax': found.jax_version,
    }


def table(rows: list[dict[str, str]]) -> str:
    """As the README has it: share of bytes, share of seconds hidden, temporaries."""
    lines = ['| preset | layout | recompute | default | overlap |', '|---|---|---|---|---|']
    for _, pair in itertools.groupby(rows, key=lambda row: [row[key] for key in KEYS[:-1]]):
        default, overlap = pair
        layout = 'TP + SP' if default['sequence_parallel'] == 'True' else 'TP'
        names = default['preset'], layout, default['recompute']
        lines.append(f'| {" | ".join([*names, cell(default), cell(overlap)])} |')
    return '\n'.join(lines)


def cell(row: dict[str, str]) -> str:
    size = int(row['temporaries']) / 1e9
    return f'{float(row["share"]):.0%}, {float(row["hidden"]):.0%} ({size:.1f} GB)'


if __name__ == '__main__':
    main()
