"""Bytes that context shards send with and without windows: `python benchmarks/context_windows.py`.

Steps of Llama 3 8B on sequences of 131,072 tokens, on 8 context shards of 8 tensor-parallel H100s
each, compiled and not timed. No GPU is needed (`pip install 'megajax[gpu-compile]'`). Prints one
line of a table for each of STEPS, which takes about half a minute on an idle core.
"""

import jax
from compiled_rows import num_findings
from stages import load

from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_for
from megajax.analysis.plan.communication import in_passes
from megajax.core.config import Config
from megajax.core.counts.products import products
from megajax.core.hardware.targets import num_hosts

RING = 'mesh.context_exchange=ring'
STEPS = {
    'no window, all-gather': [],
    'no window, ring': [RING],
    'window of 1,024': [RING, 'model.window=1024'],
    'window of 1,024 in 5 of 6 layers, ring': [
        RING,
        'model.layers=[{"repeat":5,"window":1024},{}]',
    ],
}
HEADS = 'layers', 'jax', 'sent GB', 'formula GB', 'ring GB / sent GB'
HEADS += 'attention TFLOP', 'temporaries GiB', 'findings'


def main() -> None:
    print(f'| {" | ".join(HEADS)} |\n{"|---" * len(HEADS)}|')
    of_ring = formula(load(['llama3_8b_128k', '32', 'C8', RING]))
    for name, overrides in STEPS.items():
        config = load(['llama3_8b_128k', '32', 'C8', *overrides])
        step = compile_for(config, 'h100', num_hosts(config.mesh.num_devices), {})
        told = audit(config, step, 'h100')
        sent = sum(
            row.wire_bytes for row in told.rows if (row.site, row.axis) == ('attention', 'context')
        )
        cells = [
            *(name, jax.__version__, f'{sent / 1e9:.2f}', f'{formula(config) / 1e9:.2f}'),
            f'{of_ring / sent:.1f}',
            f'{attention(config) / 1e12:.1f}',
            f'{step.temporaries / 2**30:.2f}',
            str(num_findings(told)),
        ]
        print(f'| {" | ".join(cells)} |', flush=True)


def formula(config: Config) -> float:
    """Return the bytes of keys, values and their gradients that a GPU sends in a step."""
    return sum(
        each.times * each.wire_bytes
        for each in in_passes(config)
        if (each.site.name, each.site.axis) == ('attention', 'context')
    )


def attention(config: Config) -> float:
    """Return the FLOPs of attention on a GPU in a step, without the masked half."""
    return sum(
        each.times * each.flops / (2 if each.is_causal else 1)
        for each in products(config, flash=True)
        if each.where == 'attention'
    )


if __name__ == '__main__':
    main()
