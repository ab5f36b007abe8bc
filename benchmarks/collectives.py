"""Bytes on the wire of presets' training steps on H100s, to those of Megatron:
`python benchmarks/collectives.py OUT.csv`.

Meshes 1x2, 2x4, 8x8 and 64x8, sequence parallelism off and on, 1 and 4 microbatches, every
recompute, in bf16, 4 rows for each data shard, in a loop over layers. `--presets` replaces the
fifteen of PRESETS. No GPU is needed (`pip install 'megajax[gpu-compile]'`). Lines that OUT.csv has
already are not done again, so that the run, about an hour on one core, can be interrupted.
"""

import argparse
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import jax
from compiled_rows import extend, read

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_for
from megajax.core.hardware.targets import num_hosts

PRESETS = [
    *('bert_1.3b', 'bert_3.9b', 'bert_336m', 'gpt2_124m', 'gpt2_345m', 'gpt3_175b'),
    *('llama3_70b', 'llama3_8b', 'megatron_1.2b', 'megatron_2.5b', 'megatron_4.2b'),
    *('megatron_8.3b', 'qwen3_8b', 'tiny', 'tiny_bert'),
]
MESHES = (1, 2), (2, 4), (8, 8), (64, 8)
SETTINGS = [*itertools.product((False, True), (1, 4), ('none', 'selective', 'full'))]
# The other axes of a preset's mesh have one device.
ONE = 'mesh.experts=1', 'mesh.context=1', 'mesh.context_exchange=gather'
SEED = 17  # of the lines that are compiled again
KEYS = ['preset', 'data', 'model', 'sequence_parallel', 'microbatches', 'recompute']
COLUMNS = [*KEYS, 'model_ratio', 'data_ratio', 'more', 'errors', 'model_overlap', 'data_overlap']


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    parser.add_argument('--presets', nargs='*', default=PRESETS)
    parser.add_argument('--again', action='store_true', help='compile 40 lines of OUT.csv again')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        share_kernels(Path(folder, 'kernels'))
        if arguments.again:
            sys.exit(compile_again(read(arguments.out)))
        compile_all(arguments.out, arguments.presets)
    table(read(arguments.out))


def compile_again(rows: list[dict[str, str]]) -> int:
    """Print each of 40 lines, six of BERT, that a new compilation differs from; how many do."""
    draw = random.Random(SEED)
    berts = [row for row in rows if row['preset'].startswith('bert')]
    others = [row for row in rows if not row['preset'].startswith('bert')]
    different = 0
    for row in draw.sample(berts, 6) + draw.sample(others, 34):
        keys = {key: row[key] for key in KEYS}
        config = load(**keys)
        assert config is not None
        new = {name: str(value) for name, value in measure(config).items()}
        changed = {name: (row[name], new[name]) for name in new if row[name] != new[name]}
        different += bool(changed)
        print(*keys.values(), changed or 'the same', flush=True)
    print(f'{different} of 40 differ')
    return min(different, 1)


def share_kernels(file: Path) -> None:
    """Have XLA compile a kernel once that several steps have; half of the time goes there."""
    flags = f'--xla_gpu_kernel_cache_file={file}'
    if jax.__version_info__ < (0, 11):  # later ones have no such flag and need none
        flags += ' --xla_gpu_enable_llvm_module_compilation_parallelism=true'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flags}'


def compile_all(out: Path, wanted: list[str]) -> None:
    """Add a line to the table for each step that it lacks."""
    extend(out, COLUMNS, lines(wanted, {tuple(row[key] for key in KEYS) for row in read(out)}))


def lines(wanted: list[str], done: set[tuple[str, ...]]) -> Iterator[dict[str, str]]:
    """Compile each step of the presets that is not done."""
    for preset, mesh, setting in itertools.product(wanted, MESHES, SETTINGS):
        line = dict(zip(KEYS, map(str, (preset, *mesh, *setting)), strict=True))
        if tuple(line.values()) not in done and (config := load(**line)):
            line |= measure(config)
            print(*line.values(), flush=True)
            yield line


def load(
    *, preset: str, data: str, model: str, sequence_parallel: str, microbatches: str, recompute: str
) -> megajax.Config | None:
    """None where the heads do not divide."""
    if megajax.load(preset).model.num_heads % int(model):
        return None
    overrides = [
        f'mesh.data={data}',
        f'mesh.model={model}',
        f'mesh.sequence_parallel={sequence_parallel.lower()}',
        *ONE,
    ]
    overrides += [
        f'train.microbatches={microbatches}',
        f'train.recompute={recompute}',
        f'train.batch_size={4 * int(data)}',
    ]
    overrides += ['train.overlap=none', 'train.unroll=false', 'optim.shard=none']
    return megajax.load(preset, [*overrides, 'train.dtype=bfloat16', 'model.dropout=0.0'])


def measure(config: megajax.Config) -> dict[str, str]:
    hosts = num_hosts(config.mesh.num_devices)
    found = audit(config, compile_for(config, 'h100', hosts), 'h100')
    more = [f'{row.site} {row.phase} {row.axis}' for row in found.rows if row.verdict == 'MORE']
    errors = [one.rule for one in found.findings if one.level == 'error']
    ratios = {
        f'{axis}_ratio': '' if ratio is None else f'{ratio:.6f}'
        for axis, ratio in found.ratios.items()
    }
    overlaps = {f'{axis}_overlap': f'{share:.4f}' for axis, share in found.overlapped_share.items()}
    return ratios | {'more': '; '.join(more), 'errors': '; '.join(errors)} | overlaps


def table(rows: list[dict[str, str]]) -> None:
    """The largest ratio of each preset."""
    print(
        '\n| preset | compiled steps | TP: model | TP + SP: model | data | rows with MORE, '
        'lint errors |\n|---|---|---|---|---|---|'
    )
    for preset, group in itertools.groupby(
        sorted(rows, key=lambda row: row['preset']), key=lambda row: row['preset']
    ):
        lines = [*group]
        tp, sp = (
            [line['model_ratio'] for line in lines if line['sequence_parallel'] == on]
            for on in ('False', 'True')
        )
        data = [line['data_ratio'] for line in lines if line['data_ratio']]
        largest = [max(map(float, ratios)) for ratios in (tp, sp, data)]
        bad = sum(bool(line['more'] or line['errors']) for line in lines)
        print(
            f'| {preset} | {len(lines)} | {" | ".join(f"{ratio:.3f}" for ratio in largest)} | '
            f'{bad} |'
        )


if __name__ == '__main__':
    main()
