"""Whether relevance spends a picture's tokens on what is asked:
`python benchmarks/relevance.py OUT.md`.

Trains `tiny_arr_coc` from several seeds, on 1x1 and on 2x2: with relevance; with levels that are
drawn at random, in training and in evaluation; and with all lines at the finest level. Each run
takes up to 15 minutes on two idle cores. Runs that OUT.md has already are not done again.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ALLOCATIONS: dict[str, list[str]] = {
    'relevance': [],
    'random': [],
    'all fine': ['relevance.total_tokens=1600'],
}
MESHES = {'1x1': ['mesh.data=1', 'mesh.model=1'], '2x2': ['mesh.data=2', 'mesh.model=2']}
HEAD = (
    '| allocation | mesh | seed | read exactly | right line at 300 tokens | tokens | minutes |\n'
    '|---|---|---|---|---|---|---|\n'
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path)
    parser.add_argument('--allocations', nargs='+', choices=ALLOCATIONS, default=list(ALLOCATIONS))
    parser.add_argument('--meshes', nargs='+', choices=MESHES, default=list(MESHES))
    parser.add_argument('--seeds', nargs='+', type=int, default=[1, 2, 3])
    arguments = parser.parse_args()
    if not arguments.out.exists():
        arguments.out.write_text(HEAD)
    settings = arguments.seeds, arguments.meshes, arguments.allocations
    for seed, mesh, allocation in itertools.product(*settings):
        begin = f'| {allocation} | {mesh} | {seed} |'
        if begin in arguments.out.read_text():
            continue
        line = f'{begin} {measure(allocation, mesh, seed)}\n'
        with arguments.out.open('a') as file:
            file.write(line)
        print(line, end='', flush=True)


def measure(allocation: str, mesh: str, seed: int) -> str:
    """Train, and return the numbers of the last evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*ALLOCATIONS[allocation], *MESHES[mesh], f'train.seed={seed}']
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, __file__, 'worker', allocation, *overrides, f'run.dir={folder}/run'],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        minutes = (time.perf_counter() - start) / 60
        lines = Path(folder, 'run/metrics.jsonl').read_text().splitlines()
    found = [values for line in lines if 'validation_read' in (values := json.loads(line))][-1]
    return (
        f'{found["validation_read"]:.1%} | {found["budget_right_line"]:.1%} | '
        f'{found["budget_used"]:.0f} | {minutes:.1f} |'
    )


def work(allocation: str, *overrides: str) -> None:
    """Train as `megajax train tiny_arr_coc` does."""
    import megajax

    if allocation == 'random':
        draw_levels()
    megajax.train(megajax.load('tiny_arr_coc', overrides))


def draw_levels() -> None:
    """Replace what is relevant by one region of each row, whatever is in it."""
    import jax

    from megajax.core.model.arr_coc import relevance

    assess = relevance.assess

    def drawn(*arguments: jax.Array, **options: object) -> relevance.Relevance:
        found = assess(*arguments, **options)
        rows = jax.random.uniform(jax.random.key(0), found.relevance.shape)
        return found._replace(relevance=(rows == rows.max(1, keepdims=True)).astype(rows.dtype))

    relevance.assess = drawn


if __name__ == '__main__':
    if sys.argv[1:2] == ['worker']:
        work(*sys.argv[2:])
    else:
        main()
