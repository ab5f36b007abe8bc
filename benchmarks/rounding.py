"""How near right steps in 16 and 8 bits are to their limits: `python benchmarks/rounding.py`.

Executes the H100 program of small steps on simulated CPU devices, as `inspect --run` does, and
prints for each the result that is nearest to its limit.
"""

import os
import warnings

os.environ |= {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}

import jax

import megajax
from megajax.analysis.inspect.emulated_step import EmulatedStep

SIZES = (
    'model.hidden_size=128 model.num_heads=8 model.head_dim=16 model.ffn_size=256 '
    'model.vocab_size=2048 model.num_layers=4 model.max_seq_len=128 model.dropout=0.0 '
    'train.seq_len=128 train.batch_size=16'
)
SP = 'mesh.sequence_parallel=true'
RING = 'mesh.context=2 mesh.context_exchange=ring'
STEPS = [
    f'mesh.data=2 mesh.model=2 {SP}',
    f'mesh.data=2 mesh.model=2 {SP} train.dtype=float16',
    f'mesh.data=2 mesh.model=2 {SP} train.dtype=fp8',
    f'mesh.data=2 mesh.model=2 {SP} train.overlap=batch_split train.recompute=full',
    'mesh.data=4 mesh.model=1 optim.shard=weights optim.reduce_dtype=bfloat16',
    'mesh.data=2 mesh.model=2 model.norm=rmsnorm model.qk_norm=true model.norm_position=after',
    f'mesh.data=1 mesh.model=2 mesh.model_rows=2 {SP}',
    'mesh.data=1 mesh.model=2 mesh.stages=2 train.microbatches=4',
    (
        f'mesh.data=2 mesh.model=1 mesh.stages=2 mesh.virtual_stages=2 {RING} '
        'train.microbatches=4 train.recompute=selective model.qk_norm=true '
        'model.norm_position=after'
    ),
]


def main() -> None:
    warnings.filterwarnings('ignore')
    jax.config.update('jax_num_cpu_devices', 8)
    print('| step | nearest to its limit | error | limit | error / limit |')
    print('|---|---|---|---|---|')
    for keys in STEPS:
        dtype = '' if 'train.dtype' in keys else 'train.dtype=bfloat16'
        config = megajax.load('tiny', [*SIZES.split(), *keys.split(), *dtype.split()])
        worst = EmulatedStep(config, 'h100').results()[0]
        numbers = f'{worst.error:.1e} | {worst.limit:.1e} | {worst.error / worst.limit:.2f}'
        print(f'| `{keys}` | {worst.name} | {numbers} |', flush=True)


if __name__ == '__main__':
    main()
