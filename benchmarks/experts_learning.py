"""Compare what `tiny` and `tiny_moe` learn in the same number of steps:
`python benchmarks/experts_learning.py OUT.md [OVERRIDES]`.

A token uses as many parameters of one as of the other, except for the router's. Each preset trains
with three seeds; a run takes up to two minutes on two idle cores. Runs that OUT.md has already are
not done again, and the last line has the means.
"""

from learning import SEEDS, finish, mean, measured, table

import megajax
from megajax.core.counts.parameters import num_parameters

PRESETS = 'tiny', 'tiny_moe'
HEAD = '| preset | parameters | used by a token | seed | bits per byte |\n|---|---|---|---|---|\n'
MESH = 'mesh.data=1', 'mesh.model=1', 'mesh.experts=1'


def main() -> None:
    """Train all runs that the file does not have, and write the means."""
    (out, overrides), means = table(__doc__, HEAD), []
    for preset in PRESETS:
        model = megajax.load(preset).model
        counts = f'{num_parameters(model):,} | {num_parameters(model, active=True):,}'
        begins = {seed: f'| {preset} | {counts} | {seed} | ' for seed in SEEDS}
        runs = [
            measured(out, begin, preset, [*MESH, f'train.seed={seed}', *overrides])
            for seed, begin in begins.items()
        ]
        means.append(mean(preset, runs))
    finish(out, means)


if __name__ == '__main__':
    main()
