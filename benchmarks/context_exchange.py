"""Bytes of the three exchanges of context shards: `python benchmarks/context_exchange.py`.

Steps of Llama 3 8B on one sequence of 131,072 tokens, on 8 context shards of one H100 each, with 8
key/value heads and with as many as query heads. They are compiled and not timed. No GPU is needed
(`pip install 'megajax[gpu-compile]'`). Prints one line of a table for each step, which takes about
half a minute on an idle core.
"""

import jax
from compiled_rows import num_findings
from context_windows import attention, formula

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.compile import compile_for
from megajax.core.hardware.targets import num_hosts

CONTEXT = (
    *('mesh.data=1', 'mesh.context=8', 'mesh.model=1', 'mesh.sequence_parallel=false'),
    *('train.batch_size=1', 'train.microbatches=1', 'train.recompute=none', 'optim.shard=weights'),
)
HEADS = 'key/value heads', 'exchange', 'jax', 'sent GB', 'formula GB', 'TransformerEngine GB'
HEADS += 'attention TFLOP', 'temporaries GiB', 'findings'


def main() -> None:
    print(f'| {" | ".join(HEADS)} |\n{"|---" * len(HEADS)}|')
    for heads in (8, 32):
        for exchange in ('gather', 'ring', 'all_to_all'):
            of_step = f'model.num_kv_heads={heads}', f'mesh.context_exchange={exchange}'
            config = megajax.load('llama3_8b_128k', [*CONTEXT, *of_step])
            step = compile_for(config, 'h100', num_hosts(config.mesh.num_devices), {})
            told = audit(config, step, 'h100')
            rows = [row for row in told.rows if (row.site, row.axis) == ('attention', 'context')]
            cells = [
                *(str(heads), exchange, jax.__version__),
                f'{sum(row.wire_bytes for row in rows) / 1e9:.2f}',
                f'{formula(config) / 1e9:.2f}',
                f'{sum(row.megatron_wire_bytes for row in rows) / 1e9:.2f}',
                f'{attention(config) / 1e12:.1f}',
                f'{step.temporaries / 2**30:.2f}',
                str(num_findings(told)),
            ]
            print(f'| {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
    main()
