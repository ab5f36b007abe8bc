"""Compile the two programs that `test_stored.py` executes: `python
tests/xla/emulate/make_stored.py`, with jax 0.10.2 and the GPU compiler.

The broken one is the step as it was when its gradients over the sequence went through a gather.
Today's step has it no more, so both texts are of that time, with their arguments and results in the
order of today's names.
"""

import lzma
import os
import re
import sys
from pathlib import Path

os.environ |= {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
from support import Config, make_config

from megajax.analysis.inspect.emulated_step import EmulatedStep
from megajax.core.model import product

FOLDER = Path(__file__).parent / 'stored'
MODEL = {
    'num_layers': 2,
    'hidden_size': 32,
    'num_heads': 2,
    'num_kv_heads': 2,
    'head_dim': 64,
    'ffn_size': 64,
    'vocab_size': 1000,
}
PLAIN = {
    'norm': 'rmsnorm',
    'activation': 'swiglu',
    'position': 'rope',
    'bias': False,
    'qk_norm': False,
    'max_seq_len': 16,
}


def config() -> Config:
    train = {'batch_size': 4, 'seq_len': 16}
    return make_config(
        'llama',
        2,
        2,
        sequence_parallel=True,
        model=MODEL | PLAIN,
        train=train,
        loss={'label_smoothing': 0.0, 'z_loss': 0.0},
    )


def store(name: str) -> None:
    text = EmulatedStep(config(), 'h100', {'xla_disable_hlo_passes': ''}).program.text
    text = re.sub(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', '', text)
    (FOLDER / f'{name}.txt.xz').write_bytes(lzma.compress(text.encode(), preset=9))
    print(name, text.count('source_target_pairs={}'), 'permutes without pairs')


def main() -> None:
    jax.config.update('jax_num_cpu_devices', 8)
    FOLDER.mkdir(exist_ok=True)
    store('right')
    unbarred = {
        '__getattr__': lambda _, name: getattr(jax.lax, name),
        'optimization_barrier': staticmethod(lambda x: x),
    }
    product.lax = type('', (), unbarred)()
    store('broken')


if __name__ == '__main__':
    main()
