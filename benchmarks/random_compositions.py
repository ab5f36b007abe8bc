"""Check that random compositions of features train as one device does, and resume bit for bit.

python benchmarks/random_compositions.py --seed 50 compositions.jsonl 0 9 18
python benchmarks/random_compositions.py compositions.jsonl

Each number is a step that `megajax inspect fuzz` draws from this seed. Its loss and gradients in
fp32, on simulated CPU devices, are compared with those of one device. Then four steps are trained
with the config's own dtype, and a second run resumes from a copy of the checkpoint after two. The
results are appended to the file; numbers that it has are not run again. Then all are printed as a
table. With `--target h100`, the step is instead compiled for this GPU, executed and compared with
one device, and the bytes of its collectives are compared with Megatron's count. Exits with code 1
if a composition is wrong. No GPU is needed.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import megajax
from megajax.analysis.fuzz.draw import described, draw
from megajax.analysis.inspect.audit import rows_of
from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.analysis.inspect.one_device import on_one_device, updated
from megajax.analysis.inspect.random_batch import make_batch
from megajax.analysis.inspect.tolerances import has_16_bits
from megajax.core.config import Config, ConfigError
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.expert_rows import LATER_ROUNDS
from megajax.core.counts.megatron import expected
from megajax.core.parallel.mesh import mesh_for
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.runtime.checkpoint.compare import parameter_differences
from megajax.runtime.checkpoint.digests import find_step
from megajax.xla.emulate.execute import quick
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program

LIMIT = 1e-5
# As a share of the largest gradient. The exact gradient of some arrays is zero, such as of a bias
# that is added to all keys: only rounding is computed.
NOISE = 1e-6
STEPS, SAVED = 4, 2
# Of the corpus `words`: the token of an image, and a length that an image, question and answer fit.
IMAGE_TOKEN, IMAGE_LENGTH = 257, 32
OF_RUN: dict[str, dict[str, Any]] = {
    'train': {'steps': STEPS, 'eval_every': STEPS, 'eval_batches': 1, 'log_every': 1},
    'checkpoint': {'every': SAVED, 'keep': STEPS},
    'optim': {'warmup_steps': 0},
}
# How the bytes of a row of `megajax inspect` can differ from Megatron's.
OTHER = {'less': 'less', 'expected': 'as documented', 'MORE': 'MORE'}
Row = dict[str, Any]


def prepare() -> None:
    """Simulate eight devices, compile quickly, and let this script import from the tests."""
    sys.path.append(str(Path(__file__).parents[1] / 'tests'))
    flags = {
        'xla_force_host_platform_device_count': '8',
        'xla_cpu_parallel_codegen_split_count': '1',
        # A simulated device may be late on a busy machine.
        'xla_cpu_collective_call_terminate_timeout_seconds': '600',
    }
    if jax.__version__.startswith('0.10.'):  # later versions have no such flag
        flags['xla_cpu_use_fusion_emitters'] = 'false'
    os.environ['XLA_FLAGS'] = ' '.join(f'--{name}={value}' for name, value in flags.items())
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_disable_most_optimizations', True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('file', type=Path)
    parser.add_argument('numbers', type=int, nargs='*')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--target', default='cpu', help='cpu, or a GPU such as h100')
    arguments = parser.parse_args()
    prepare()
    file, seed, target = arguments.file, arguments.seed, arguments.target
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row['seed'], row['number'], row['target'], row['jax']) for row in rows}
    for number in arguments.numbers:
        if (seed, number, target, jax.__version__) in done:
            continue
        rows.append(measured(seed, number, target))
        with file.open('a') as lines:
            lines.write(json.dumps(rows[-1]) + '\n')
        print(*rows[-1].values(), flush=True)
        jax.clear_caches()
    print(table(rows))
    sys.exit(not all(map(is_right, rows)))


def measured(seed: int, number: int, target: str) -> Row:
    """Return the results of a step's checks, after what the table says of its config."""
    start, config = time.process_time(), draw(seed, number)
    row = {'seed': seed, 'number': number, 'target': target, 'jax': jax.__version__}
    row |= {'config': described(config)} | cells(config)
    checks = {'gradients': compared, 'resume': resumed}
    if target != 'cpu':
        checks = {'executed': functools.partial(executed, target=target)}
    for name, check in checks.items():
        row |= told(name, functools.partial(check, config))
    return row | {'cpu_seconds': round(time.process_time() - start, 1)}


def told(name: str, check: Callable[[], Row]) -> Row:
    """Return the result of a check, or its error."""
    try:
        return check()
    except ConfigError as error:
        return {name: f'rejected: {error}'}
    except Exception:
        return {name: f'failed: {traceback.format_exc()[-2000:]}'}


def compared(config: Config) -> Row:
    """Return the largest error of the loss and the gradients in fp32."""
    in_fp32 = updated(
        config,
        train={'dtype': 'float32', 'fp8_scaling': 'delayed', 'loss_scale': 'auto'},
        optim={'reduce_dtype': 'float32'},
    )
    wanted, found = map(loss_and_gradients, (on_one_device(config, exact=True), in_fp32))
    from support import relative_error

    noise = NOISE * max(np.abs(x).max() for name, x in wanted.items() if name != 'loss')
    is_noise = lambda x: np.abs(x).max() <= noise  # noqa: E731
    errors = {
        name: relative_error(x, wanted[name])
        for name, x in found.items()
        if name == 'loss' or not (is_noise(x) and is_noise(wanted[name]))
    }
    worst = max(errors, key=lambda name: errors[name])
    same = 'right' if errors[worst] <= LIMIT and found.keys() == wanted.keys() else 'wrong'
    count = {'arrays': len(found), 'zero_gradients': len(found) - len(errors)}
    return {'gradients': same, 'error': errors[worst], 'worst': worst, **count}


def loss_and_gradients(config: Config) -> dict[str, np.ndarray]:
    """Return the loss and the gradients, from the same parameters on every mesh."""
    from support import gather, in_layer_order, on_mesh, random_params

    with on_mesh(config):
        given = random_params(config, std=0.05), place_batch(make_batch(config)), jax.random.key(0)
        function = jax.jit(make_loss_and_gradients(config)).lower(*given).compile(quick())
        (loss, _), gradients = function(*given)
        return {'loss': np.asarray(loss)} | in_layer_order(gather(gradients), config)


def executed(config: Config, target: str) -> Row:
    """Return the results of the step as compiled for a GPU, and the bytes of its collectives."""
    step = EmulatedStep(config, target)
    worst = [step.results()[0]]
    if has_16_bits(config):
        worst.append(step.results(exact=True)[0])
    config = resolved(step.config, on_gpu=True)
    program = Program(step.program.text, skipped=LATER_ROUNDS)
    placed = [each for each in collectives(program, mesh_for(config).shape) if each.times]
    rows = rows_of(config, placed, expected(config))
    named = defaultdict[str, list[str]](list)
    for row in rows:
        named[row.verdict].append(f'{row.site} {row.phase} over {row.axis}')
    return {
        'executed': 'right' if all(each.ok for each in worst) else 'wrong',
        'worst': [each.model_dump() for each in worst],
        'rows': len(rows),
        **{verdict: named[verdict] for verdict in OTHER},
        'bytes': sum(row.wire_bytes for row in rows),
        'megatron_bytes': sum(row.megatron_wire_bytes for row in rows),
    }


def resumed(config: Config) -> Row:
    """Return how many parameters and losses of a resumed run differ from those of one run."""
    with tempfile.TemporaryDirectory() as folder:
        corpus, of_steps = (
            {'corpus': str(text(Path(folder, 'text.txt'))), 'tokenizer': 'bytes'},
            OF_RUN,
        )
        if config.vision is not None:
            corpus, of_steps = {'corpus': 'words'}, with_images(config)
        whole, half = Path(folder, 'whole'), Path(folder, 'half')
        of_run = {'compile_cache': 'none'}
        run = lambda **keys: updated(  # noqa: E731
            config, **of_steps, data=corpus, run=of_run | keys
        )
        wanted = trained(run(dir=str(whole)))
        saved = Path('checkpoints', str(SAVED))
        shutil.copytree(whole / saved, half / saved)
        for path in (*whole.glob('*.yaml'), *whole.glob('*.json')):
            shutil.copy(path, half)
        found = trained(run(dir=str(half), resume='must'))
        steps = (find_step(each / 'checkpoints' / str(STEPS)) for each in (whole, half))
        differences = dict(parameter_differences(*steps))
    changed = [name for name, difference in differences.items() if difference != 0]
    changed += [f'loss {step}' for step, loss in found.items() if loss != wanted[step]]
    assert [*found] == [*wanted][SAVED:]
    return {'resume': 'differs' if changed else 'equal', 'changed': changed} | {
        'parameters': len(differences),
        'last_loss': wanted[STEPS],
    }


def with_images(config: Config) -> dict[str, dict[str, Any]]:
    """Return the keys of a run on the corpus `words`, whose sequences may be longer."""
    length = max(config.train.seq_len, IMAGE_LENGTH)
    return OF_RUN | {
        'model': {'max_seq_len': length},
        'train': OF_RUN['train'] | {'seq_len': length},
        'vision': {'image_token': IMAGE_TOKEN},
    }


def text(file: Path) -> Path:
    """Write documents of random words."""
    random = np.random.default_rng(0)
    words = ['a', 'document', 'of', 'some', 'random', 'words', 'that', 'have', 'no', 'meaning.']
    documents = (' '.join(random.choice(words, 50)) for _ in range(500))
    file.write_text('\n\n'.join(documents))
    return file


def trained(config: Config) -> Mapping[int, float]:
    """Train, and return the loss of each step of this run."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = megajax.train(config)
    return {line['step']: line['loss'] for line in run.metrics if 'loss' in line}


def is_right(row: Row) -> bool:
    """Return whether a row has no fault."""
    if row['target'] != 'cpu':
        return row['executed'] == 'right' and not row['MORE']
    return row['gradients'] == 'right' and row['resume'] == 'equal'


def cells(config: Config) -> Row:
    """Return what the table says of a config."""
    model, axes = config.model, config.mesh.model_dump(exclude_unset=True)
    parts = {'experts': model.experts, 'LoRA': config.lora, 'images': config.vision}
    having = ' and '.join(name for name, part in parts.items() if part is not None)
    train = config.train
    other = [f'{train.microbatches} microbatches'] * (train.microbatches > 1)
    other += [f'recompute {train.recompute}'] * (train.recompute != 'none')
    other += [f'overlap {train.overlap}'] * (train.overlap in ('batch_split', 'sequence_split'))
    return {
        'model': ('BERT' if model.is_bert else 'decoder') + (having and f' with {having}'),
        'mesh': ' '.join(f'{name} {size}' for name, size in axes.items() if type(size) is int),
        'dtype': train.dtype,
        'optim': f'{config.optim.kind}, {config.optim.shard}',
        'other': ', '.join(other) or '-',
    }


def table(rows: Sequence[Row]) -> str:
    """Return tables in Markdown, one for each target and version of jax."""
    key = lambda row: (row['target'], row['jax'], row['seed'], row['number'])  # noqa: E731
    of_table = lambda row: key(row)[:2]  # noqa: E731
    parts = []
    for (target, version), group in itertools.groupby(sorted(rows, key=key), of_table):
        last = ('largest error', 'resume') if target == 'cpu' else ('error', 'in fp32', 'bytes')
        header = 'step', 'model', 'mesh', 'dtype', 'optimizer, ZeRO', 'other', *last
        parts.append(f'\n{target}, jax {version}\n\n| {" | ".join(header)} |')
        parts.append('|---' * len(header) + '|')
        for row in group:
            texts = [row[key] for key in ('number', 'model', 'mesh', 'dtype', 'optim', 'other')]
            texts += on_cpu(row) if target == 'cpu' else on_gpu(row)
            parts.append(f'| {" | ".join(map(str, texts))} |')
    return '\n'.join(parts)


def on_cpu(row: Row) -> list[str]:
    """Return the cells of the gradients and of the resumed run."""
    error = f'{row["error"]:.1e}' if 'error' in row else row['gradients'].split(':')[0]
    return [error, row['resume'].split(':')[0]]


def on_gpu(row: Row) -> list[str]:
    """Return the cells of the executed program and of its bytes."""
    if 'worst' not in row:
        return [row['executed'].split(':')[0], '-', '-']
    errors = [f'{each["error"]:.1e} of {each["limit"]:.1e}' for each in row['worst']]
    count = [f'{text} in {len(row[verdict])}' for verdict, text in OTHER.items() if row[verdict]]
    same = row['rows'] - sum(len(row[verdict]) for verdict in OTHER)
    return [errors[0], errors[-1], ', '.join([f'equal in {same}', *count])]


if __name__ == '__main__':
    main()
