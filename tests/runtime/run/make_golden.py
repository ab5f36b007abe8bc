"""Write the checkpoint that every later megajax must restore: python
tests/runtime/run/make_golden.py FOLDER

It was run once for each release whose format is kept (`data/first_release`); a new one is another
folder.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

STEPS = 3

CONFIG = f"""
model: {{num_layers: 1, hidden_size: 4, num_heads: 2, vocab_size: 300, max_seq_len: 16}}
mesh: {{data: 2, model: 2}}
train: {{steps: {STEPS}, batch_size: 4, seq_len: 16, dtype: float32, eval_every: 100, log_every: 1}}
optim: {{lr: 1e-2, schedule: constant}}
data: {{corpus: corpus.txt, tokenizer: bytes, split: '1,0,0'}}
run: {{dir: run}}
"""


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    os.chdir(folder)
    Path('corpus.txt').write_text(''.join(f'{i} times {i} is {i * i}\n' for i in range(60)))
    Path('golden.yaml').write_text(CONFIG)

    import numpy as np
    from flax import nnx

    from megajax.core.config import load
    from megajax.runtime.run import run as loop
    from megajax.runtime.run.trainer import Trainer

    parameters = {}
    train = Trainer.train

    def record(self: Trainer) -> None:
        train(self)
        for path, leaf in nnx.to_flat_state(self.state.params):
            parameters['.'.join(map(str, path))] = hashlib.sha256(
                np.asarray(leaf.get_value()).tobytes()
            ).hexdigest()

    Trainer.train = record  # type: ignore[method-assign]
    loop.run(load('golden.yaml'), name='golden')
    Trainer.train = train  # type: ignore[method-assign]
    shutil.copytree('run', 'further')
    loop.run(load('golden.yaml', [f'train.steps={STEPS + 1}', 'run.dir=further']), name='golden')
    *_, last = (json.loads(line) for line in Path('further/metrics.jsonl').read_text().splitlines())
    Path('expected.json').write_text(
        json.dumps({'step': STEPS, 'params': parameters, 'next_loss': last['loss']}, indent=2)
        + '\n'
    )
    shutil.rmtree('further')
    for path in Path('run').iterdir():
        if path.name != 'checkpoints':
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == '__main__':
    main()
