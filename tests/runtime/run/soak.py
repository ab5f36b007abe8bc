"""Train one run for many tiny steps, and compare the memory, the descriptors and the threads of
its process in the last tenth with the least of any tenth before.

PYTHONPATH=tests python tests/runtime/run/soak.py [--steps 20000] [--out FILE.json]

It does all that a run does: checkpoints, evaluations, samples, metrics, TensorBoard and a log. In
the first tenth caches fill, so that it is printed and not compared. The allocator may return
memory in any later one, which would hide a leak from a comparison with the second.
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from proofs import circumstances, write_record
from runs import losses, start
from support import write_run

# Of each thousandth of the run. Evaluations, samples and checkpoints come in each hundredth.
CONFIG = """
model: {{num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}}
train: {{steps: {steps}, batch_size: 4, seq_len: 32, dtype: float32, eval_every: {hundredth}, \
eval_batches: 2, log_every: {thousandth}, sample_prompts: ['def ']}}
checkpoint: {{every: {hundredth}}}
optim: {{lr: 1e-2}}
"""


class Use(NamedTuple):
    """What the process of a run holds, or how much more it holds than before."""

    mib: float
    descriptors: float
    threads: float

    def __str__(self) -> str:
        return f'{self.mib:.1f} MiB, {self.descriptors:g} descriptors, {self.threads:g} threads'


# Of the growth. A save that is under way has some; one that leaks has them a hundred times.
LIMITS = Use(mib=16, descriptors=4, threads=4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--steps', type=int, default=20_000)
    parser.add_argument('--out', type=Path)
    arguments = parser.parse_args()
    about = circumstances(['tests/runtime/run/soak.py', *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as name:
        tenths = soak(Path(name), arguments.steps)
    for number, use in enumerate(tenths, start=1):
        print(f'tenth {number:2}: {use}')
    grown = growth(tenths)
    flat = is_flat(grown)
    print(f'growth from the least of tenths 2 to 9 to the last: {grown}')
    print(f'limits: {LIMITS}: ' + ('flat' if flat else 'NOT flat'))
    if arguments.out:
        result: dict[str, Any] = {'growth': grown._asdict(), 'limits': LIMITS._asdict()}
        rows = [use._asdict() for use in tenths]
        write_record(arguments.out, about, steps=arguments.steps, flat=flat, **result, tenths=rows)
    sys.exit(not flat)


def soak(folder: Path, steps: int, fault: str = '') -> list[Use]:
    """Train for that many steps, and return the medians of each tenth."""
    settings = CONFIG.format(
        steps=steps, hundredth=max(1, steps // 100), thousandth=max(1, steps // 1000)
    )
    process = start(write_run(folder, settings), fault=fault, JAX_PLATFORMS='cpu')
    uses: list[list[Use]] = [[] for _ in range(10)]
    assert process.stdout is not None
    said = ''
    for line in process.stdout:
        said = (said + line)[-10_000:]
        if found := re.match(rf'step (\d+)/{steps} ', line):
            uses[min(9, int(found[1]) * 10 // steps)].append(use_of(process.pid))
    assert process.wait() == 0, said
    assert sorted(losses(folder / 'run')) == list(range(1, steps + 1))
    return [Use(*map(median, zip(*tenth, strict=True))) for tenth in uses]


def use_of(pid: int) -> Use:
    process = Path(f'/proc/{pid}')
    status = dict(line.split(':', 1) for line in (process / 'status').read_text().splitlines())
    resident = int(status['VmRSS'].split()[0]) / 1024
    return Use(resident, len(os.listdir(process / 'fd')), int(status['Threads']))


def growth(tenths: list[Use]) -> Use:
    """From the least of the tenths between the first and the last, to the last."""
    least = map(min, zip(*tenths[1:-1], strict=True))
    return Use(*(last - before for before, last in zip(least, tenths[-1], strict=True)))


def is_flat(grown: Use) -> bool:
    return all(more <= limit for more, limit in zip(grown, LIMITS, strict=True))


if __name__ == '__main__':
    main()
