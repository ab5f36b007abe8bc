"""Everything worth measuring on a GPU, in 45 minutes: `benchmarks/gpu.py --out FOLDER`.

Each measurement is a process of its own with a limit of its own, what matters most first, and ends
as one JSON line on standard output and in FOLDER/results.jsonl, whatever befalls the others.
`--list` shows them, `--only` takes some. For most steps an archive of at most 16 MiB lies beside,
which `megajax profile` reads once it is unpacked: a trace of two steps, with the compiled one and
the autotuner's choices. `--small` runs tiny sizes, on a CPU too. `--wheels` is a folder of wheels
that this machine lacks; they are installed for these processes alone. For all but `repeated` and
`newcomer`, which run megajax's commands, a machine with jax, flax and optax needs those of

    pip download --no-deps --dest WHEELS \\
        pydantic pydantic-core annotated-types typing-inspection ruamel.yaml
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LEAST = 15.0  # seconds for which a measurement is still begun
MOST_BYTES = 16 << 20  # of a file that is kept


class Measurement(NamedTuple):
    """What `gpu_measurements.py` calls so, how many seconds it may take, and what memory the GPU
    must have.
    """

    name: str
    seconds: int
    what: str
    gigabytes: int = 0


MEASUREMENTS = (
    Measurement('machine', 30, 'versions, driver, clocks'),
    # Is it right?
    Measurement('numerics', 70, "cuDNN's attention and its gradients, compared with fp32"),
    Measurement('losses', 90, 'five losses of a small model, compared with the CPU'),
    Measurement(
        'deterministic', 120, 'two starts and a resume of a step: equal bits, and the cost'
    ),
    Measurement(
        'repeated',
        280,
        'runs in bf16, fp8, with LoRA and packed: two, a resume, each step replayed',
    ),
    # A rank of a large job on one card, without communication
    Measurement('rank-8b-tp8', 150, 'llama3_8b, TP=8: one of 8 GPUs', 70),
    Measurement('rank-8.3b-512', 200, 'megatron_8.3b, TP=8 x DP=64: one of 512 GPUs', 70),
    Measurement('rank-70b-128', 240, 'llama3_70b, TP=8 x PP=4 x DP=4: one of 128 GPUs', 70),
    # Compared with others
    Measurement('step-8b-lora', 330, 'llama3_8b with LoRA: 32 rows of 4096, microbatches of 2', 70),
    Measurement('torch-llama', 200, "PyTorch's Llama of the size of step-llama", 130),
    Measurement('torch-1.2b-8', 150, "PyTorch's GPT-2 of the size of megatron_1.2b, 8 rows", 70),
    # How fast
    Measurement('products', 40, 'twelve products of the models in bf16, and the rate of a copy'),
    Measurement('step-1.2b-8', 90, 'megatron_1.2b, 8 rows', 70),
    Measurement('step-1.2b-8-fp8', 180, 'the same in fp8', 70),
    Measurement('step-1.2b-4x8', 90, 'megatron_1.2b, 32 rows as four microbatches', 70),
    Measurement('step-1.2b-32', 90, 'megatron_1.2b, 32 rows at once', 130),
    Measurement('attention', 30, "cuDNN's attention, forward and backward, at two sizes"),
    Measurement(
        'mosaic', 90, "JAX's Mosaic attention compared with cuDNN's, by the size of a head"
    ),
    Measurement(
        'newcomer', 240, 'doctor, train gpt2_124m, profile, report: seconds and warnings', 30
    ),
    Measurement('overlap', 90, 'halves, quarters and slots for collectives, on several GPUs', 70),
    Measurement('step-345m', 50, 'gpt2_345m, 32 rows', 30),
    Measurement('step-124m', 40, 'gpt2_124m, 32 rows', 30),
    Measurement('step-4.2b', 100, 'megatron_4.2b, 8 rows', 130),
    Measurement('step-llama', 90, 'llama3_8b of 16 layers, 2 rows of 8192', 130),
)


def main() -> None:
    arguments = parse()
    chosen = [
        one
        for one in MEASUREMENTS
        if one.name in (arguments.only or [each.name for each in MEASUREMENTS])
    ]
    if arguments.list:
        for one in chosen:
            memory = f', from {one.gigabytes} GB' if one.gigabytes else ''
            print(f'{one.name:16} {one.seconds:4d} s  {one.what}{memory}')
        return
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, (out / 'results.jsonl').open('a') as results:
        environment = prepared(arguments.wheels, Path(folder), small=arguments.small)
        for line in run_all(chosen, out, environment, arguments.seconds):
            text = json.dumps(line)
            print(text, flush=True)
            results.write(text + '\n')
            results.flush()
    bound(out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--out', type=Path, default=Path('gpu'), metavar='FOLDER')
    parser.add_argument(
        '--only', nargs='+', metavar='NAME', choices=[one.name for one in MEASUREMENTS]
    )
    parser.add_argument('--seconds', type=float, default=2700, help='for all of them together')
    parser.add_argument(
        '--small', action='store_true', help='tiny sizes, to see that everything runs'
    )
    parser.add_argument('--wheels', type=Path, metavar='DIR')
    parser.add_argument('--list', action='store_true')
    return parser.parse_args()


def prepared(wheels: Path | None, folder: Path, *, small: bool) -> dict[str, str]:
    """The environment of the measurements."""
    paths = [str(ROOT)]
    if wheels:
        names = sorted(str(path) for path in wheels.glob('*.whl'))
        command = [
            sys.executable,
            '-m',
            'pip',
            'install',
            '--quiet',
            '--no-index',
            '--no-deps',
            '--target',
            str(folder),
            *names,
        ]
        subprocess.run(command, check=True)
        paths.append(str(folder))
    if before := os.environ.get('PYTHONPATH'):
        paths.append(before)
    memory = {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.92', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    return {
        **memory,
        **os.environ,
        'PYTHONPATH': os.pathsep.join(paths),
        'MEGAJAX_SMALL': '1' if small else '',
    }


def run_all(
    chosen: list[Measurement], out: Path, environment: dict[str, str], seconds: float
) -> Iterator[dict[str, Any]]:
    """A line for each measurement: what it found, or why there is nothing."""
    deadline, gigabytes = time.monotonic() + seconds, None
    patience = 3 if environment.get('MEGAJAX_SMALL') else 1  # the limits are those of a GPU's host
    for one in chosen:
        left = deadline - time.monotonic()
        if left < LEAST:
            yield {'name': one.name, 'skipped': 'no time was left'}
        elif gigabytes is not None and gigabytes < one.gigabytes:
            yield {
                'name': one.name,
                'skipped': f'the GPU has {gigabytes:.0f} GB of {one.gigabytes}',
            }
        else:
            line = run_one(one, out, environment, min(left, patience * one.seconds))
            gigabytes = line.get('gigabytes', gigabytes)
            yield line


def run_one(
    one: Measurement, out: Path, environment: dict[str, str], seconds: float
) -> dict[str, Any]:
    start = time.monotonic()
    command = [sys.executable, str(ROOT / 'benchmarks/gpu_measurements.py'), one.name, str(out)]
    with tempfile.TemporaryFile('w+') as said, tempfile.TemporaryFile('w+') as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=said, stderr=errors, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return {
                'name': one.name,
                **found(read(said)),
                'failed': f'was not done in {seconds:.0f} s',
            }
        lines, reasons = (read(file) for file in (said, errors))
    taken = {'process_s': round(time.monotonic() - start, 1)}
    if process.returncode:
        reason = next((line for line in reversed(reasons) if line.strip()), '')
        taken = {'failed': f'exit {process.returncode}: {reason[:300]}', **taken}
    return {'name': one.name, **found(lines), **taken}


def found(lines: list[str]) -> dict[str, Any]:
    """What the last complete line tells."""
    ends = [line for line in lines if line.startswith('{') and line.endswith('}')]
    result: dict[str, Any] = json.loads(ends[-1]) if ends else {}
    return result


def read(file: Any) -> list[str]:
    file.seek(0)
    return str(file.read()).splitlines()


def bound(out: Path) -> None:
    """Leave no file that is larger than what can be brought home."""
    for path in out.iterdir():
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            print(
                f'{path.name} had {path.stat().st_size / 1e6:.0f} MB and is not kept',
                file=sys.stderr,
            )
            path.unlink()


if __name__ == '__main__':
    main()
