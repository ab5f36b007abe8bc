"""One process of two computes a wrong bit: both end, and what it spoiled is on no disk."""

import re
from pathlib import Path

import pytest
from runs import finish, losses, start, steps, train_here
from support import write_run

pytestmark = pytest.mark.faults

CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {data: 2, model: 2}
train: {steps: 12, batch_size: 4, seq_len: 32, dtype: float32, log_every: 1, deterministic: true, \
replay_every: 4}
checkpoint: {every: 3}
optim: {lr: 1e-2}
"""
# Process 1 computes a gradient norm with its lowest bit flipped, on its last device, in step 8.
WRONG = """
if os.environ['MEGAJAX_PROCESS'] == '1':
    import jax, numpy as np
    from megajax.runtime.run import trainer

    class Corrupting:
        def __init__(self, compiled):
            self.compiled, self.count = compiled, 0

        def __getattr__(self, name):
            return getattr(self.compiled, name)

        def __call__(self, state, batch):
            state, metrics = self.compiled(state, batch)
            self.count += 1
            if self.count == 8:
                metrics['grad_norm'] = flip(metrics['grad_norm'])
            return state, metrics

    def flip(x):
        shards = [np.array(shard.data) for shard in x.addressable_shards]
        shards[-1].reshape(-1).view(np.uint8)[0] ^= 1
        devices = [shard.device for shard in x.addressable_shards]
        shards = [jax.device_put(*pair) for pair in zip(shards, devices)]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    def compile_step(*arguments, compile_step=trainer.compile_step):
        return Corrupting(compile_step(*arguments))

    trainer.compile_step = compile_step
"""


def test_a_wrong_bit_in_one_process_ends_both_and_the_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path, CONFIG, split='1,0,0')
    train_here(folder, 'train.replay_every=0', name='straight')
    code, said = finish(start(folder, processes=2, fault=WRONG))
    assert code == 5, said
    told = (
        r'silent data corruption at step 8: grad_norm on device \d+ \(process 1, host \S+\) does '
        r'not match its replay on device \d+ '
        r'\(1 of 1 elements; 1 of 4 devices differ, in process 1\)\.'
    )
    # Process 0, which writes the report of the run first, may hear of it from the other.
    assert re.search(rf'^\[0\] error: (process 1 on \S+ failed \(\w+: )?{told}', said, re.M), said
    assert re.search(rf'^\[1\] error: {told}', said, re.MULTILINE), said
    assert '[0] step 4  replayed bit for bit' in said
    assert max(steps(folder / 'run')) == 6
    train_here(folder, 'run.resume=must')
    assert losses(folder / 'run') == losses(folder / 'straight')
